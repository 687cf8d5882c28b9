"""A torch model shrinks: nothing it puts out changes for duplicates, and its optimizer follows."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from shrinking import (  # noqa: E402
    IMAGES,
    ROUNDING,
    Gated,
    Residual,
    apoptosis,
    chain,
    check_duplicates,
    check_it_stays,
    convolutions,
    depthwise,
    duplicate,
    train,
    trained,
)
from torch import nn  # noqa: E402 - without torch there is nothing to import

from sn_memory.apoptosis.torch import Apoptosis, rebuild  # noqa: E402
from sn_memory.torch import compress_activations, estimate, plan  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet")
ROOT = Path(__file__).resolve().parents[2]

ACTIVATIONS = [
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Tanh, nn.Softplus, nn.Sigmoid, nn.GELU, nn.SiLU,
]  # fmt: skip
# A model, what is duplicated in it, and the shape of its inputs.
CASES = {
    # Linear layers in a row are of low rank as a whole: enough inputs to tell neurons apart.
    **{kind.__name__: (lambda it=kind: chain(it()), ["0"], (64, 5)) for kind in ACTIVATIONS},
    "conv and batch norm": (convolutions, ["0", "1"], IMAGES),
    "conv before flatten": (convolutions, ["4"], IMAGES),
    "conv with bias": (lambda: convolutions(True, False), ["0"], IMAGES),
    "depthwise": (depthwise, ["0", "2"], IMAGES),
    "residual": (Residual, ["stem", "norm", "first", "second"], IMAGES),
    "gated": (Gated, ["gate", "up"], (16, 4)),
    "a transformer's layer, whose heads stay": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        ["linear1"],
        (16, 6, 8),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_duplicates_change_nothing_in(case):
    build, names, shape = CASES[case]
    model = build()
    duplicate(model, names)
    event = check_duplicates(model, torch.randn(shape))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.BatchNorm2d):
            assert module.num_features == len(module.running_mean) == len(module.weight)
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            assert module.groups == module.in_channels == len(module.weight)
    if shape == (64, 5):
        assert (model[0].out_features, model[2].in_features) == (7, 7)
    if shape == (16, 6, 8):
        assert event.merged[0].group == "linear1.weight"
        assert (model.linear2.in_features, model.self_attn.out_proj.out_features) == (11, 8)


READERS = {
    "linear": ((16, 5), lambda: [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)]),
    "tokens": ((16, 4, 5), lambda: [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)]),
    "strided": (IMAGES, lambda: [nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 3, 3, 2, 1)]),
    "same": (IMAGES, lambda: [nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 3, 3, padding="same")]),
    "dilated": (IMAGES, lambda: [nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 3, 3, dilation=2)]),
    "one axis": ((16, 2, 9), lambda: [nn.Conv1d(2, 8, 1), nn.Tanh(), nn.Conv1d(8, 3, 3)]),
    "flattened": (
        IMAGES,
        lambda: [nn.Conv2d(2, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)],
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_what_is_said_to_change_changes_on_rows_that_were_not_fitted(kind):
    shape, layers = READERS[kind]
    model, inputs = nn.Sequential(*layers()), torch.randn(shape)
    shrink = apoptosis(model, tolerance=0.6)
    before = model(inputs).detach()
    (merged,) = shrink.step().merged
    after = model(inputs).detach()
    change = ((after - before)[1::2].norm() / before[1::2].norm()).item()
    # Sums in float32 of some thousand products; the model sums in another order.
    assert change == pytest.approx(*merged.changes.values(), rel=1e-4)
    assert 0 < change <= 0.6


def chain_of_duplicates():
    model = chain()
    duplicate(model, ["0"])
    return model, torch.randn(64, 5)


def test_the_tolerance_falls_as_the_learning_rate_does():
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shrink = apoptosis(model, optimizer, tolerance=0.9)
    model(inputs)
    optimizer.param_groups[0]["lr"] = 0.0
    resumed = apoptosis(model, optimizer, tolerance=0.9)
    resumed.load_state_dict({**shrink.state_dict(), "largest_rate": 0.1})
    model(inputs)
    assert not resumed.step().refused, "nothing may change: it does not look"
    optimizer.param_groups[0]["lr"] = 1e-5
    (merged,) = resumed.step().merged
    assert merged.before - merged.after == 1
    assert max(merged.changes.values()) <= 0.9 * 1e-4


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.left = nn.Linear(5, 8), nn.Linear(8, 5), nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.right.weight = self.left.weight

    def forward(self, x):
        return self.left(self.right(self.two(torch.relu(self.one(x)))))


def test_what_is_shared_stays_shared():
    model = Shared()
    duplicate(model, ["one"])
    event = check_duplicates(model, torch.randn(64, 5))
    assert event.merged[0].group == "one.weight"
    assert model.left.weight is model.right.weight
    assert any("shared" in reason for reason in event.refused.values())


def test_a_residual_stream_shrinks_only_if_all_its_makers_agree():
    model = Residual()
    duplicate(model, ["stem", "norm", "first"])
    shrink = apoptosis(model)
    model(torch.randn(IMAGES))
    assert not shrink.step(), "second makes the channels differ"
    assert model.stem.out_channels == 6


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-4),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_is_that_of_the_small_net(kind):
    model, inputs = convolutions(), torch.randn(IMAGES)
    duplicate(model, ["0", "1"])
    optimizer = OPTIMIZERS[kind](model.parameters())
    shrink = apoptosis(model, optimizer, tolerance=0.05, every=4)
    train(model, optimizer, inputs, 4)
    for _ in range(4):
        event = shrink.step()
    assert event
    # A net made small from the start, with the state that was left.
    small = copy.deepcopy(model)
    fresh = OPTIMIZERS[kind](small.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer.state) == len(list(model.parameters()))
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.shape == parameter.shape
    train(model, optimizer, inputs)
    train(small, fresh, inputs)
    for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_memory_of_duplicates_is_what_the_small_net_has(kind):
    # The small net with a_1 + a_3 has, by the chain rule, the gradient g_1 + g_3 for its neuron.
    big, small = (nn.Sequential(nn.Linear(5, n), nn.Tanh(), nn.Linear(n, 3)) for n in (4, 3))
    duplicate(big, ["0"])
    with torch.no_grad():
        big[2].weight[:, 3] = 0.5 * big[2].weight[:, 1]  # then squares add up exactly, too
        for ours, theirs in zip(small.parameters(), big.parameters(), strict=True):
            ours.copy_(theirs[tuple(slice(size) for size in ours.shape)])
        small[2].weight[:, 1] += big[2].weight[:, 3]
    inputs = torch.randn(32, 5)
    second, _ = trained(small, kind, inputs, 1)
    train(small, second, inputs)
    first, event = trained(big, kind, inputs, 2)
    (merged,) = event.merged
    # Where 3 survived, it stands for 1.
    order = torch.tensor([1 if i == 3 else i for i in range(4) if i != merged.pairs[0][0]])
    for dim, ours, theirs in zip((0, 0, 1, None), big.parameters(), small.parameters(),
                                 strict=True):  # fmt: skip
        for key, value in first.state[ours].items():
            expected = second.state[theirs][key]
            if dim is not None and value.dim():
                expected = expected.index_select(dim, order)
            torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-7)


def test_a_loss_still_held_does_not_break_the_next_backward():
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shrink = apoptosis(model, optimizer)
    held = model(inputs).sum()
    held.backward()
    assert shrink.step()
    model(inputs).sum().backward()
    assert held.grad_fn is not None
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


class Literal(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)).view(-1, 8))


class Normed(Literal):
    def forward(self, x):
        return self.two(nn.functional.layer_norm(self.one(x), (8,)))


class Tied(Literal):
    def forward(self, x):
        return self.two(torch.relu(self.one(x)) + torch.relu(self.one(x)))


class Branching(Literal):
    def forward(self, x):
        return self.two(self.one(x)) if x.sum() > 0 else self.two(-self.one(x))


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Literal, "cannot run"), (Normed, "layer_norm is not understood"), (Tied, "shared"),
     (Branching, "")],
)  # fmt: skip
def test_what_is_not_understood_is_left_with_a_reason(kind, says):
    model = kind()
    duplicate(model, ["one"])
    shrink = apoptosis(model, torch.optim.Adam(model.parameters()))
    check_it_stays(model, torch.randn(32, 5), shrink, says)
    assert model.one.out_features == 8


def test_activations_that_are_not_finite_merge_nothing():
    model, inputs = chain_of_duplicates()
    inputs[3, 2] = torch.nan
    event = check_it_stays(model, inputs, apoptosis(model))
    assert "not finite" in event.refused["0.weight"]


def test_state_of_another_shape_is_a_reason():
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-4)
    shrink = apoptosis(model, optimizer)
    train(model, optimizer, inputs)
    event = check_it_stays(model, inputs, shrink)
    assert "not shaped like it" in event.refused["0.weight"]


def test_training_shrinks_and_says_by_how_much():
    inputs = torch.randn(128, 6)
    wanted = inputs[:, :1] * inputs[:, 1:2]
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shrink = apoptosis(model, optimizer, tolerance=0.05, every=25, min_width=8, round_to=4)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if event := shrink.step():
            (merged,) = event.merged
            assert merged.after % 4 == 0
            assert max(merged.changes.values()) <= 0.05
    assert model[0].out_features < 64
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_an_export_is_rebuilt_in_a_fresh_process(tmp_path):
    model, inputs = convolutions(), torch.randn(IMAGES)
    duplicate(model, ["0", "1"])
    shrink = apoptosis(model)
    model(inputs)
    assert shrink.step()
    shrink.export(tmp_path / "small.pt")
    torch.save((inputs, model.eval()(inputs).detach()), tmp_path / "expected.pt")
    code = f"""
import sys, torch; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
torch.set_num_threads(1)
from shrinking import convolutions
from sn_memory.apoptosis.torch import rebuild
model = rebuild(convolutions(), {str(tmp_path / "small.pt")!r}).eval()
inputs, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert model[0].out_channels == 5 and torch.equal(model(inputs), expected)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_goes_on_where_it_was(tmp_path):
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    shrink = apoptosis(model, optimizer, schedule="adaptive", every=2)
    for _ in range(7):
        train(model, optimizer, inputs)
        shrink.step()
    shrink.export(tmp_path / "model.pt")
    again = rebuild(chain(), tmp_path / "model.pt")
    resumed = apoptosis(again, torch.optim.Adam(again.parameters()), schedule="adaptive", every=2)
    resumed.load_state_dict(shrink.state_dict())
    assert (resumed.steps, resumed.schedule) == (shrink.steps, shrink.schedule)
    with pytest.raises(ValueError, match="only in one of the model"):
        rebuild(Residual(), tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"tolerance": 0.0}, "above 0"), ({"min_width": 0}, "1 or more"), ({"every": 0}, "1 or more"),
     ({"schedule": "slow"}, "adaptive")],
)  # fmt: skip
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=says):
        apoptosis(chain(), **settings)


def test_wrapped_models_and_optimizers_are_refused():
    model = chain()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer._allreduce_delay = {}  # by which Horovod's is known
    for says, *wrapped in (
        ("wrap it again", torch.compile(model, backend="eager")),
        ("wrapped by Horovod", model, optimizer),
        ("all parameters together", model, torch.optim.LBFGS(model.parameters())),
        ("given to plan", plan(model, torch.randn(4, 5), "100%", profile=False)),
    ):
        with pytest.raises(ValueError, match=says):
            apoptosis(*wrapped)


def test_compiled_code_follows():
    model, inputs = chain_of_duplicates()
    shrink = apoptosis(model)
    compiled = torch.compile(model, backend="eager")
    before = compiled(inputs).detach()
    assert "no batch was seen" in shrink.step().refused["the model"]
    shrink.observe(inputs)
    assert shrink.step()
    after = compiled(inputs)
    assert (after - before).abs().max() <= ROUNDING * before.abs().max()
    after.sum().backward()
    assert model[0].weight.grad.shape == (7, 5)


def test_beside_compressed_activations():
    """Before, the model could not be traced there, so that nothing ever merged."""
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shrink = apoptosis(model, optimizer)
    with compress_activations(model, bits=8, optimizer=optimizer):
        train(model, optimizer, inputs)
        event = shrink.step()
        assert event, event.refused
        train(model, optimizer, inputs)
    assert model[0].out_features == 7


def test_watching_ends_and_copies_and_estimates_are_not_watched():
    model, inputs = chain_of_duplicates()
    shrink = apoptosis(model)
    copy.deepcopy(model)(inputs)
    model.eval()(inputs)
    # Tensors without values: a sum of them over the ranks ended the processes.
    estimate(model.train(), inputs)
    assert "no batch was seen" in shrink.step().refused["the model"]
    shrink.close()
    model(inputs)
    assert "no batch was seen" in shrink.step().refused["the model"]
    shrink.observe(inputs)
    estimate(model, inputs)
    assert shrink.step()


def test_a_ragged_last_batch_does_not_decide():
    model, inputs = chain_of_duplicates()
    shrink = apoptosis(model)
    model(inputs)
    model(inputs[:1])  # on one row, all neurons are multiples of each other
    (merged,) = shrink.step().merged
    assert merged.before - merged.after == 1


@pytest.mark.parametrize("carried", [True, False])
def test_gradients_are_cut_as_momentum_is(carried):
    """Those that are carried, and those of micro-batches that were there at an event."""
    model, inputs = chain_of_duplicates()
    shrink = apoptosis(model)
    if carried:
        model(inputs)
        before = {name: torch.randn_like(value) for name, value in model.named_parameters()}
        del before["4.bias"]
        shrink.carry = lambda: before
    else:
        model(inputs).square().mean().backward()
        before = {name: value.grad.clone() for name, value in model.named_parameters()}
    (merged,) = shrink.step().merged
    ((gone, survivor),) = merged.pairs
    kept = [i for i in range(8) if i != gone]
    expected = before["0.weight"].clone()
    expected[survivor] += expected[gone]
    after = {name: held.grad for name, held in model.named_parameters() if held.grad is not None}
    assert after.keys() == before.keys()
    torch.testing.assert_close(after["0.weight"], expected[kept])
    assert torch.equal(after["2.weight"], before["2.weight"][:, kept])
    assert torch.equal(after["4.weight"], before["4.weight"])
    assert not shrink.optimizer.state


def test_what_another_optimizer_trains_stays():
    """Before, it went on with the old parameters, and nothing trained the new ones."""
    model, inputs = chain_of_duplicates()
    weights, biases = (
        torch.optim.SGD([it for it in model.parameters() if (it.dim() > 1) == of], lr=0.0)
        for of in (True, False)
    )
    event = check_it_stays(model, inputs, apoptosis(model, weights))
    assert "0.bias requires gradients, and is not in the opt" in event.refused["0.weight"]
    # Where nothing else can shrink by an event of the other's, its parameters are the same ones.
    more = nn.Sequential(model, nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    duplicate(more, ["1"])
    mine = torch.optim.SGD([*more[1].parameters(), *more[3].parameters()], lr=0.0)
    shrink = apoptosis(more, mine)
    more(inputs)
    (merged,) = shrink.step().merged
    assert merged.group == "1.weight"
    held = [it for optimizer in (weights, biases) for it in optimizer.param_groups[0]["params"]]
    assert {id(it) for it in held} == {id(it) for it in model.parameters()}


class OfTasks(nn.Module):
    """A body, and a head for each of two tasks, of which one call uses one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])

    def forward(self, x, task=0):
        return self.heads[task](torch.relu(self.body(x)))


def test_what_an_unused_layer_may_read_stays():
    """Before, the next call with the other head raised, and the body could not grow back."""
    model = OfTasks()
    duplicate(model, ["body"])
    inputs = torch.randn(64, 5)
    event = check_it_stays(model, inputs, apoptosis(model))
    assert "heads.1.weight, which this call did not use" in event.refused["body.weight"]
    del model.heads[1]
    shrink = apoptosis(model)
    model(inputs)
    assert shrink.step()


@pytest.mark.parametrize("first", ["optimizer", "shapes"])
def test_a_checkpoint_may_be_loaded_with_the_optimizer_first(first):
    """Before, moments that were loaded before the shapes were dropped without a word."""
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    shrink = apoptosis(model, optimizer)
    train(model, optimizer, inputs)
    assert shrink.step()
    wide = chain()
    other = torch.optim.Adam(wide.parameters(), lr=1e-9)
    parts = [(apoptosis(wide, other), shrink), (wide, model), (other, optimizer)]
    for part, saved in parts if first == "shapes" else [parts[2], *parts[:2]]:
        part.load_state_dict(copy.deepcopy(saved.state_dict()))
    for one, same in zip(model.parameters(), wide.parameters(), strict=True):
        for name, held in optimizer.state[one].items():
            assert torch.equal(held, other.state[same][name])


def test_a_checkpoint_gives_a_model_its_shapes_back():
    model, inputs = chain_of_duplicates()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    shrink = apoptosis(model, optimizer)
    train(model, optimizer, inputs)
    parts = shrink, model, optimizer
    early = copy.deepcopy([part.state_dict() for part in parts])
    expected = model(inputs).detach()
    assert shrink.step()
    late = copy.deepcopy([part.state_dict() for part in parts])
    for states, width in ((early, 8), (late, 7), (early, 8)):
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        assert model[0].out_features == model[2].in_features == width
        assert (model(inputs) - expected).abs().max() <= ROUNDING * expected.abs().max()
        train(model, optimizer, inputs)
        assert optimizer.state[model[0].weight]["exp_avg"].shape == (width, 5)


def test_torchs_default_device_counts_for_nothing():
    def shrunk(default):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        layers += [nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        layers += [nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)]
        model, images = nn.Sequential(*layers), torch.randn(64, 3, 8, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        merged = 0
        with torch.device(default):
            shrinks = Apoptosis(model, optimizer, tolerance=0.05, every=10, overhead=None)
            for _ in range(20):
                optimizer.zero_grad()
                model(images).square().mean().backward()
                optimizer.step()
                merged += bool(shrinks.step())
        return merged, list(model.parameters())

    (merged, here), (_, there) = shrunk("cpu"), shrunk("meta")
    assert merged
    assert all(map(torch.equal, here, there))


@pytest.fixture
def _one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_wrapper_of_old_parameters_is_an_error_at_its_next_step():
    """It exchanged nothing, without a word until the next look."""
    wrap = nn.parallel.DistributedDataParallel
    model = chain()
    duplicate(model, ["0"])
    ddp, x = wrap(model), torch.randn(64, 5)
    shrink = apoptosis(model)
    while True:
        ddp(x).square().mean().backward()
        if shrink.step():
            break
    with torch.no_grad():
        ddp(x)  # exchanges nothing anyway
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Wrap the model again"):
            ddp(x)
    ddp = wrap(ddp.module)
    ddp(x).square().mean().backward()
    assert all(it.grad is not None for it in model.parameters())
    saved = shrink.state_dict()
    shrink.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Wrap the model again"):
        ddp(x)
    model(x).square().mean().backward()
