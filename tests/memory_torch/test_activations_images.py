"""Layers that take some images at a time: gradients are torch's, the peak is that of a few."""

import copy
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
from _peaks import activation_bytes
from small_models import module_of
from steps import gradients, off, same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sn_memory import settings
from sn_memory.torch import ReplayError, compress_activations

pytestmark = pytest.mark.usefixtures("modules_take_no_time")
SIDE = 96  # of an image, 16 channels of which are more than half of what is taken at once
LAYERS = ["0", "1", "2", "3", "4"]
SUMS = 1e-5  # the rounding of sums, which are taken image by image


def images(count=6, **kind):
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).to(**kind)


def net(*between, first=()):
    """Two large convolutions and a pooling, and a small rest that is kept compressed."""
    torch.manual_seed(0)
    return nn.Sequential(
        *first,
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        *between,
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, 32),
        nn.Tanh(),
        nn.Linear(32, 8),
    )


@contextmanager
def compressed_after_a_step(model, x, layers=LAYERS, bits=8):
    """Activations of a model compressed, when it was seen which layers take some images."""
    with compress_activations(model, bits=bits) as compressed:
        gradients(model, x)
        assert compressed.by_images == layers
        yield compressed


def layers_run_again(compressed):
    ways = {way: count for way, count, _ in compressed.saved.ways}
    return ways["layers run again, some images at a time"]


def test_gradients_are_those_of_the_whole_batch_and_the_peak_is_of_one_image():
    model, x = net(), images(8)
    weights = list(model.parameters())
    expected = gradients(model, x)
    plain = activation_bytes(lambda: model(x).square().sum(), weights)
    with compressed_after_a_step(model, x, bits=4) as compressed:
        first = compressed.saved
        held = activation_bytes(lambda: model(x).square().sum(), weights)
        found = gradients(model, x)
        text, saved = compressed.report(), compressed.saved
        assert compressed.controller.total_bytes == saved.compressed_bytes
    assert off(found[:4], expected[:4]) <= SUMS  # of the run: its input is the user's, and exact
    image = 16 * SIDE**2 * 4
    # At least two tensors are there of the whole batch without, and some more of one image with.
    assert plain[1] > 2 * 8 * image
    assert plain[1] > 3 * held[1]
    assert saved.compressed_bytes < first.compressed_bytes
    assert saved.plain_bytes == first.plain_bytes == sum(size for *_, size in saved.ways)
    assert "run again, some images at a time: 0, 1, 2, 3, 4" in text
    assert "5 layers run again, some images at a time, " in text
    assert same(gradients(model, x), expected)


def test_an_input_that_others_made_is_kept_exactly_where_that_is_less():
    """A ReLU, or a pooling, decides otherwise where it is given rounded values."""
    model, x = net(first=(nn.Tanh(),)), images().requires_grad_()
    wanted = [*model.parameters()][:4] + [x]
    expected = gradients(model, x, wanted=wanted)
    for bits, layers in ((2, []), (8, [str(int(it) + 1) for it in LAYERS])):
        with compressed_after_a_step(model, x, layers, bits) as compressed:
            found = gradients(model, x, wanted=wanted)
            assert compressed.controller.total_bytes == compressed.saved.compressed_bytes
    assert off(found[:4], expected[:4]) <= SUMS
    assert off(found[4:], expected[4:]) <= 0.03  # what the tanh reads has eight bits


@pytest.mark.parametrize(("channels_last", "dtype", "cast", "most"), [
    (True, torch.float32, None, SUMS),
    # Each element of what flows back is rounded in both; sums are rounded once, not six times.
    (False, torch.bfloat16, None, 0.01), (True, torch.bfloat16, None, 0.01),
    (True, torch.float32, torch.bfloat16, 0.01),
])  # fmt: skip
def test_layouts_types_and_casts(channels_last, dtype, cast, most):
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = net(nn.GroupNorm(4, 16)).to(dtype, memory_format=form)
    x = images(dtype=dtype).contiguous(memory_format=form).requires_grad_()
    shared = nn.Sequential(model, nn.Identity())
    shared.own = model[0].weight  # read once more within the same casts

    def casting():
        return torch.autocast("cpu", cast) if cast else nullcontext()

    def loss(shared, x):
        with casting():
            y = shared(x)
            again = functional.conv2d(x[:1], shared.own, padding=1)
            return y.float().square().sum() + again.float().square().sum()

    wanted, seen = [x, *model.parameters()], []
    expected = gradients(shared, x, wanted=wanted, loss=loss)
    with compress_activations(shared, bits=8) as compressed:
        gradients(shared, x, wanted=wanted, loss=loss)
        assert compressed.by_images == [f"0.{it}" for it in range(6)]
        handle = model[6].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        found = gradients(shared, x, wanted=wanted, loss=loss)
        handle.remove()
    with casting():
        y = model[:6](x)
    assert (seen[0].stride(), seen[0].dtype) == (y.stride(), y.dtype)
    assert found[0].stride() == expected[0].stride()
    assert [it.dtype for it in found] == [it.dtype for it in expected]
    assert off(found[:7], expected[:7]) <= most


def sum_of_squares(model, x):
    return model(x).square().sum()


def test_batches_of_other_sizes():
    model = net()
    plain = copy.deepcopy(model)
    with compressed_after_a_step(model, images()) as compressed:
        for count in (1, 2, 9, 0):
            x = images(count)
            found, expected = (gradients(it, x, loss=sum_of_squares) for it in (model, plain))
            assert off(found[:2], expected[:2]) <= 0.03
            # One image, and none, have nothing to be taken apart.
            assert (layers_run_again(compressed) == 5) == (count > 1)


def test_accumulated_retained_and_in_evaluation():
    model, x = net(), images()
    once = gradients(copy.deepcopy(model), x)
    with compressed_after_a_step(model, x):
        model.eval()
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert off([p.grad / 4 for p in model.parameters()][:4], once[:4]) <= SUMS
        with torch.no_grad():
            assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_what_needs_no_gradient_has_none():
    model, x = net(), images()
    for weight in (model[0].weight, model[2].bias):
        weight.requires_grad_(False)
    expected = gradients(copy.deepcopy(model), x)
    with compressed_after_a_step(model, x) as compressed:
        assert off(gradients(model, x)[:2], expected[:2]) <= SUMS
        model[:5].requires_grad_(False)
        gradients(model, x)
        assert layers_run_again(compressed) == 0


def test_hooks_of_weights_are_called_once():
    model, x, calls = net(), images(), []
    expected = gradients(model, x)
    model[0].weight.register_hook(lambda gradient: calls.append("weight") or 2 * gradient)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    with compressed_after_a_step(model, x):
        calls.clear()
        model(x).square().mean().backward()
    assert calls == ["weight", "accumulated"]
    assert off([model[0].weight.grad / 2, model[2].weight.grad], expected[0:3:2]) <= SUMS


def test_gradients_of_gradients_and_of_many_losses():
    model, x = net(nn.Tanh()), images(3).requires_grad_()
    weights = list(model.parameters())[:4]

    def twice():
        first = torch.autograd.grad(model(x).square().sum(), [x, *weights], create_graph=True)
        return torch.autograd.grad(sum(it.square().sum() for it in first), weights)

    def many():
        y = model(x)
        return torch.autograd.grad(y, weights, torch.stack([y, 2 * y]), is_grads_batched=True)

    expected = twice(), many()
    with compress_activations(model, bits=8) as compressed:
        gradients(model, x)
        assert compressed.by_images[0] == "0"
        assert off(twice(), expected[0]) <= 0.03
        assert off(many(), expected[1]) <= 0.03


def test_layers_run_again_as_they_were():
    model, x = net(nn.LeakyReLU(0.5)), images()
    others = {name: 1.5 * it.detach() for name, it in model.named_parameters()}
    wanted = [it.requires_grad_() for it in others.values()]

    def change():
        model[2].negative_slope = 7.0
        model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))

    def by_others(model, x):
        return torch.func.functional_call(model, others, (x,)).square().sum()

    expected = gradients(copy.deepcopy(model), x)
    other = gradients(model, x, wanted=wanted, loss=by_others)
    with compress_activations(model, bits=8):
        gradients(model, x)
        found = gradients(model, x, wanted=wanted, loss=by_others)
        assert off(found[:4], other[:4]) <= SUMS
        own = list(model.parameters())
        found = gradients(model, x, wanted=own, between=change)
        assert model[2].negative_slope == 7.0
        assert off(found[:4], expected[:4]) <= SUMS
        model[0].weight, model[2].negative_slope = own[0], 0.5
        loss = model(x).sum()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(ReplayError, match="parameter weight of '0', which runs"):
            loss.backward()
        loss = model(x).sum()
        x.mul_(2)
        with pytest.raises(ReplayError, match="changed in place"):
            loss.backward()


def test_hooks_of_layers_see_the_whole_batch():
    model, x, sizes = net(), images(), []
    with compressed_after_a_step(model, x) as compressed:
        for register in (
            model[2].register_forward_pre_hook,
            model[2].register_forward_hook,
            nn.modules.module.register_module_forward_hook,
        ):
            handle = register(lambda _, args, *rest: sizes.append(len(args[0])))
            gradients(model, x)
            handle.remove()
            assert set(sizes) == {6}
            assert layers_run_again(compressed) == 0
            sizes.clear()
        gradients(model, x)
        assert layers_run_again(compressed) == 5


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + super().forward(x)


def hooked():
    model = net()
    model[2].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(("model", "layers"), [
    (net(nn.BatchNorm2d(16)), ["0", "1"]), (net(nn.Dropout(0.1)), ["0", "1"]),
    (net(nn.LocalResponseNorm(3)), [*LAYERS, "5"]),
    (net(type("OfTheUsers", (nn.Conv2d,), {})(16, 16, 1)), ["0", "1"]),
    # What writes on its input does not come first, as its input is kept.
    (net(first=(nn.ReLU(inplace=True), nn.Identity())), [str(int(it) + 2) for it in LAYERS]),
    (nn.Sequential(Twice(*net()[:5]), nn.Flatten(), nn.Linear(16 * 24**2, 8)), []),
    (nn.Sequential(net()[:5], net()[5:]), [f"0.{it}" for it in LAYERS]), (hooked(), ["0", "1"]),
])  # fmt: skip
def test_which_layers_take_some_images_at_a_time(model, layers):
    x = images()
    expected = gradients(copy.deepcopy(model), x)
    with compressed_after_a_step(model, x, layers) as compressed:
        before = compressed.saved.plain_bytes
        assert off(gradients(model, x), expected) <= 0.05
        assert compressed.by_images == layers
        assert not set(layers) & set(compressed.rerun)
        assert compressed.saved.plain_bytes <= before


def test_small_gradients_stay_whole_and_so_does_what_a_budget_has_room_for(monkeypatch):
    model, x = net(), images()
    for budget, layers in (("1 GiB", []), ("1 MiB", LAYERS)):
        with compress_activations(model, budget=budget) as compressed:
            for _ in range(3):
                gradients(model, x)
            assert compressed.by_images == layers
    monkeypatch.setattr(settings, "deterministic", True)
    with compressed_after_a_step(model, x):
        pass
    deep = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(24)))
    # All that is kept is more than two of twenty tensors.
    with compressed_after_a_step(deep, images(24), []):
        pass


def test_a_checkpoint_around_and_a_sequential_that_was_changed():
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.inside else self.inner(x)

    inner, x = nn.Sequential(net()[:5], net()[5:]), images()
    outer = module_of(forward, inner=inner, inside=False)
    expected = gradients(copy.deepcopy(outer), x)
    with compressed_after_a_step(outer, x, [f"inner.0.{it}" for it in LAYERS]) as compressed:
        outer.inside = True
        assert off(gradients(outer, x), expected) <= SUMS
        outer.inside = False
        inner[0][3] = nn.Tanh()
        plain = nn.Sequential(nn.Sequential(*inner[0]), inner[1])
        expected = gradients(copy.deepcopy(plain), x)
        assert off(gradients(outer, x)[:2], expected[:2]) <= 0.03
        assert layers_run_again(compressed) == 0
    assert "forward" not in vars(inner[0])


def test_errors_are_measured_copies_are_whole_and_two_may_look_at_one_model():
    model, x = net(), images()
    expected = gradients(model, x)
    with compress_activations(model, bits=2, every=1) as compressed:
        for _ in range(2):
            gradients(model, x)
        errors = compressed.measure(lambda: model(x).square().mean(), repeats=2)
        assert float(errors["0.weight"].norm()) <= 1e-4 * float(expected[0].norm())
        assert float(errors["6.weight"].norm()) > 0.01 * float(expected[4].norm())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert off(gradients(copied, x)[:4], expected[:4]) <= SUMS
        compressed.active = False
        with compressed_after_a_step(model, x, bits=4) as other:
            assert off(gradients(model, x)[:4], expected[:4]) <= SUMS
            assert layers_run_again(other) == 5
