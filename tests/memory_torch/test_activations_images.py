"""Layers that take some images at a time: gradients are torch's, the peak is that of a few."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from _peaks import activation_bytes
from torch import nn
from torch.distributed import FileStore, destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sn_memory import settings
from sn_memory.torch import ReplayError, compress_activations
from sn_memory.torch.activations import compress

SIDE = 96  # of an image, 16 channels of which are more than half of what is taken at once


@pytest.fixture(autouse=True)
def modules_take_no_time(monkeypatch):
    """What else runs again is chosen by seconds, which are not the same twice: here by bytes."""
    monkeypatch.setattr(compress, "now", lambda device: 0.0)


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


LAYERS = ["0", "1", "2", "3", "4"]


def step(model, x, between=lambda: None, wanted=None):
    wanted = [p for p in model.parameters() if p.requires_grad] if wanted is None else wanted
    loss = model(x).float().square().sum()
    between()
    return [it.clone() for it in torch.autograd.grad(loss, wanted)]


def assert_close(found, expected, least=1e-5):
    """Within the rounding of sums, which are taken image by image."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).float().norm()) <= least * float(b.float().norm()) + 1e-12


def test_gradients_are_those_of_the_whole_batch_and_the_peak_is_of_one_image():
    model, x = net(), images(8)
    weights = list(model.parameters())
    expected = step(model, x)
    plain = activation_bytes(lambda: model(x).square().sum(), weights)
    with compress_activations(model, bits=4) as compressed:
        step(model, x)
        first = compressed.saved
        assert compressed.by_images == LAYERS
        held = activation_bytes(lambda: model(x).square().sum(), weights)
        found = step(model, x)
        text, saved = compressed.report(), compressed.saved
        assert compressed.controller.total_bytes == saved.compressed_bytes
    assert_close(found[:4], expected[:4])  # of the run: its input is the user's, and exact
    image = 16 * SIDE**2 * 4
    # At least two tensors are there of the whole batch without, and some more of one image with.
    assert plain[1] > 2 * 8 * image
    assert plain[1] > 3 * held[1]
    assert saved.compressed_bytes < first.compressed_bytes
    assert saved.plain_bytes == first.plain_bytes == sum(size for *_, size in saved.ways)
    assert "run again, some images at a time: 0, 1, 2, 3, 4" in text
    assert "5 layers run again, some images at a time, " in text
    assert all(map(torch.equal, step(model, x), expected))


def test_an_input_that_others_made_is_kept_exactly_where_that_is_less():
    """A ReLU, or a pooling, decides otherwise where it is given rounded values."""
    model, x = net(first=(nn.Tanh(),)), images().requires_grad_()
    weights = list(model.parameters())[:4]
    expected = step(model, x, wanted=[*weights, x])
    for bits, layers in ((2, []), (8, [str(int(it) + 1) for it in LAYERS])):
        with compress_activations(model, bits=bits) as compressed:
            for _ in range(2):
                found = step(model, x, wanted=[*weights, x])
            assert compressed.by_images == layers
            assert compressed.controller.total_bytes == compressed.saved.compressed_bytes
    assert_close(found[:4], expected[:4])
    assert_close(found[4:], expected[4:], 0.03)  # what the tanh reads has eight bits


def test_response_norms_take_some_images_and_do_not_run_again_by_themselves():
    model, x = net(nn.LocalResponseNorm(3)), images()
    expected = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8) as compressed:
        for _ in range(2):
            found = step(model, x)
        assert compressed.by_images == [*LAYERS, "5"]
        assert "2" not in compressed.rerun
    assert_close(found[:4], expected[:4])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cast", "least"),
    [
        (torch.float32, None, 1e-5),
        # Each element of what flows back is rounded in both; sums are rounded once, not six times.
        (torch.bfloat16, None, 0.01),
        (torch.float32, torch.bfloat16, 0.01),
    ],
)
def test_layouts_types_and_casts(channels_last, dtype, cast, least):
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = net(nn.GroupNorm(4, 16)).to(dtype, memory_format=form)
    x = images(dtype=dtype).contiguous(memory_format=form).requires_grad_()
    shared = nn.Sequential(model, nn.Identity())
    shared.own = model[0].weight  # read once more within the same casts

    def gradients():
        with torch.autocast("cpu", cast) if cast else nullcontext():
            y = shared(x)
            again = functional.conv2d(x[:1], shared.own, padding=1)
            loss = y.float().square().sum() + again.float().square().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    expected = gradients()
    seen = []
    with compress_activations(shared, bits=8) as compressed:
        gradients()
        assert compressed.by_images == [f"0.{it}" for it in range(6)]
        handle = model[6].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        found = gradients()
        handle.remove()
    with torch.autocast("cpu", cast) if cast else nullcontext():
        y = model[:6](x)
    assert seen[0].stride() == y.stride()
    assert seen[0].dtype == y.dtype
    assert found[0].stride() == expected[0].stride()
    assert_close(found[:7], expected[:7], least)


def test_batches_of_other_sizes():
    model = net()
    with compress_activations(model, bits=8) as compressed:
        step(model, images())
        assert compressed.by_images == LAYERS
        for count in (1, 2, 9, 0):
            x = images(count)
            plain = step(copy.deepcopy(nn.Sequential(*model)), x)
            assert_close(step(model, x)[:2], plain[:2], 0.03)
            ways = {way: n for way, n, _ in compressed.saved.ways}
            # One image, and none, have nothing to be taken apart.
            assert (ways["layers run again, some images at a time"] == 5) == (count > 1)


def test_accumulated_retained_and_in_evaluation():
    model, x = net(), images()
    once = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8):
        step(model, x)
        model.eval()
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_close([p.grad / 4 for p in model.parameters()][:4], once[:4])
        with torch.no_grad():
            assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_what_needs_no_gradient_has_none():
    model, x = net(), images()
    for weight in (model[0].weight, model[2].bias):
        weight.requires_grad_(False)
    expected = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        assert compressed.by_images == LAYERS
        assert_close(step(model, x)[:2], expected[:2])
        model[:5].requires_grad_(False)
        step(model, x)
        assert compressed.saved.ways[1][1] == 0


def test_hooks_of_weights_are_called_once_and_gradients_of_ranks_are_averaged(tmp_path):
    model, x = net(), images()
    expected = step(copy.deepcopy(model), x)
    calls = []
    model[0].weight.register_hook(lambda gradient: calls.append("weight") or 2 * gradient)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    with compress_activations(model, bits=8):
        for _ in range(2):
            model.zero_grad()
            calls.clear()
            model(x).square().sum().backward()
            assert calls == ["weight", "accumulated"]
        assert_close([model[0].weight.grad / 2, model[2].weight.grad], expected[0:3:2])
    model = net()
    init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        calls = []

        def sent(_, bucket):
            calls.append(bucket.buffer().clone())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        parallel.register_comm_hook(None, sent)
        with compress_activations(model, bits=8) as compressed:
            for _ in range(2):
                calls.clear()
                model.zero_grad()
                parallel(x).square().sum().backward()
        assert compressed.by_images == LAYERS
        assert sum(it.numel() for it in calls) == sum(p.numel() for p in model.parameters())
        assert_close([p.grad for p in model.parameters()][:4], expected[:4])
    finally:
        destroy_process_group()


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
        step(model, x)
        assert compressed.by_images[0] == "0"
        assert_close(twice(), expected[0], 0.03)
        assert_close(many(), expected[1], 0.03)


def test_layers_run_again_as_they_were():
    model, x = net(nn.LeakyReLU(0.5)), images()
    others = {name: 1.5 * it.detach() for name, it in model.named_parameters()}
    for it in others.values():
        it.requires_grad_()

    def change():
        model[2].negative_slope = 7.0
        model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))

    def by_others():
        loss = torch.func.functional_call(model, others, (x,)).square().sum()
        return torch.autograd.grad(loss, list(others.values()))

    plain = copy.deepcopy(model)
    expected = step(plain, x)
    other = by_others()
    with compress_activations(model, bits=8):
        step(model, x)
        assert_close(by_others()[:4], other[:4])
        own = model[0].weight
        found = step(model, x, change)
        assert model[2].negative_slope == 7.0
        assert_close(found[:4], expected[:4])
        model[0].weight, model[2].negative_slope = own, 0.5
        loss = model(x).sum()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(ReplayError, match="parameter or buffer of Conv2d"):
            loss.backward()
        loss = model(x).sum()
        x.mul_(2)
        with pytest.raises(ReplayError, match="changed in place"):
            loss.backward()


def test_hooks_of_layers_see_the_whole_batch():
    model, x, sizes = net(), images(), []
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        assert compressed.by_images == LAYERS
        for register in (
            model[2].register_forward_pre_hook,
            model[2].register_forward_hook,
            nn.modules.module.register_module_forward_hook,
        ):
            handle = register(lambda _, args, *rest: sizes.append(len(args[0])))
            step(model, x)
            handle.remove()
            assert set(sizes) == {6}
            assert compressed.saved.ways[1][1] == 0
            sizes.clear()
        step(model, x)
        assert compressed.saved.ways[1][1] == 5


class OfTheUsers(nn.Conv2d):
    pass


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + super().forward(x)


def hooked():
    model = net()
    model[2].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (net(nn.BatchNorm2d(16)), ["0", "1"]),
        (net(nn.Dropout(0.1)), ["0", "1"]),
        (net(OfTheUsers(16, 16, 1)), ["0", "1"]),
        # What writes on its input does not come first, as its input is kept.
        (net(first=(nn.ReLU(inplace=True), nn.Identity())), [str(int(it) + 2) for it in LAYERS]),
        (nn.Sequential(Twice(*net()[:5]), nn.Flatten(), nn.Linear(16 * 24**2, 8)), []),
        (nn.Sequential(net()[:5], net()[5:]), [f"0.{it}" for it in LAYERS]),
        (hooked(), ["0", "1"]),
    ],
)
def test_which_layers_take_some_images_at_a_time(model, layers):
    x = images()
    torch.manual_seed(5)
    expected = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8) as compressed:
        plain_bytes = []
        for _ in range(2):
            torch.manual_seed(5)
            found = step(model, x)
            plain_bytes.append(compressed.saved.plain_bytes)
            assert compressed.by_images == layers
        assert plain_bytes[1] <= plain_bytes[0]
        assert_close(found, expected, 0.05)


def test_small_gradients_stay_whole_and_so_does_what_a_budget_has_room_for(monkeypatch):
    model, x = net(), images()
    for budget, layers in (("1 GiB", []), ("1 MiB", LAYERS)):
        with compress_activations(model, budget=budget) as compressed:
            for _ in range(3):
                step(model, x)
            assert compressed.by_images == layers
    monkeypatch.setattr(settings, "deterministic", True)
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        assert compressed.by_images == LAYERS
    deep = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(24)))
    with compress_activations(deep, bits=8) as compressed:
        step(deep, images(24))
        assert compressed.by_images == []  # all that is kept is more than two of twenty tensors


def test_a_checkpoint_around_and_a_sequential_that_was_changed():
    model, x = nn.Sequential(net()[:5], net()[5:]), images()
    expected = step(copy.deepcopy(model), x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.inside = model, False

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.inside else self.inner(x)

    outer = Checkpointed()
    with compress_activations(outer, bits=8) as compressed:
        step(outer, x)
        assert compressed.by_images == [f"inner.0.{it}" for it in LAYERS]
        outer.inside = True
        assert_close(step(outer, x), expected)
        outer.inside = False
        model[0][3] = nn.Tanh()
        plain = step(copy.deepcopy(nn.Sequential(nn.Sequential(*model[0]), model[1])), x)
        assert_close(step(outer, x)[:2], plain[:2], 0.03)
        assert compressed.saved.ways[1][1] == 0
    assert "forward" not in vars(model[0])


def test_errors_are_measured_copies_are_whole_and_two_may_look_at_one_model():
    model, x = net(), images()
    expected = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=2, every=1) as compressed:
        for _ in range(2):
            step(model, x)
        errors = compressed.measure(lambda: model(x).square().sum(), repeats=2)
        assert float(errors["0.weight"].norm()) <= 1e-4 * float(expected[0].norm())
        assert float(errors["6.weight"].norm()) > 0.01 * float(expected[4].norm())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_close(step(copied, x)[:4], expected[:4])
        compressed.active = False
        with compress_activations(model, bits=4) as other:
            for _ in range(2):
                found = step(model, x)
            assert other.by_images == LAYERS
            assert other.saved.ways[1][1] == 5
            assert_close(found[:4], expected[:4])
