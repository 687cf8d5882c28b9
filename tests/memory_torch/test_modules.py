"""Models that cannot be traced are planned by modules: measured, bit-equal, within the budget."""

import logging
import random
from contextlib import nullcontext

import pytest
import torch
from small_models import mlp, same_gradients
from torch import nn

from sn_memory import PlanError
from sn_memory.torch import (
    PlanWarning,
    TraceError,
    checkpoint_policy,
    plan,
    verify,
)


class Block(nn.Module):
    """Everything that a second run could do wrong: statistics, masks, a changing buffer."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        # The second run must see the scale of the first, and must not change it again.
        self.scale.data.mul_(1.5)
        return self.drop(torch.relu(self.norm(self.conv(x)))) * self.scale


class Early(nn.Module):
    """Stops when a value says so; uses its first block twice."""

    def __init__(self, width=8, blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.mean().item() > 100:
                break
        return self.head(self.blocks[0](x).mean((2, 3)))


SAMPLE = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def early():
    torch.manual_seed(0)
    return Early()


def test_auto_falls_back_and_says_why(early, caplog):
    with (
        pytest.warns(PlanWarning, match=r"by regions.*test_modules\.py:\d+"),
        caplog.at_level(logging.INFO, "sn_memory.torch"),
    ):
        planned = plan(early, SAMPLE, "60%")
    assert planned.sn_memory.backend == "regions"
    assert "planned by regions" in caplog.text
    with pytest.raises(TraceError, match="values"):
        plan(early, SAMPLE, "60%", backend="graph")
    with pytest.raises(PlanError, match="cannot be traced"):
        planned.sn_memory.report("nowhere.html")


@pytest.mark.parametrize("budget", ["100%", "75%", "55%"])
def test_bits_and_bytes(early, budget):
    planned = plan(early, SAMPLE, budget, backend="modules")
    made = planned.sn_memory.plan
    assert made.peak_bytes <= made.budget_bytes
    assert bool(made.decided("recompute")) == (budget != "100%")
    for _ in range(2):
        found = verify(planned, SAMPLE)
        # Statistics, the scale and all gradients are among what is compared.
        assert found.equal, found.different
        assert found.measured_peak_bytes == made.peak_bytes


def test_more_budget_recomputes_no_more(early):
    seconds = []
    for budget in ("55%", "70%", "85%", "100%"):
        made = plan(early, SAMPLE, budget, backend="modules").sn_memory.plan
        seconds.append(len(made.decided("recompute")))
    assert seconds == sorted(seconds, reverse=True)


class Moody(nn.Module):
    """Draws from Python's chance and counts: neither would be the same when run again."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.inner(x) * (1 + random.random())


def test_what_cannot_run_again_is_not_run_again():
    model = nn.Sequential(Moody(), mlp(4))
    sample = torch.randn(256, 32)
    made = plan(model, sample, "80%", backend="modules").sn_memory.plan
    again = made.decided("recompute")
    assert again
    assert not {"", "0"} & {choice.name for choice in made.choices}
    assert model[0].steps == 0


class Overwriting(nn.Module):
    """Changes the input of its first part after that has run; autograd does not mind."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(32, 32)
        # Each saves its result, none its input.
        self.first = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
        self.second = mlp(3)

    def forward(self, x):
        h = self.before(x)
        y = self.first(h)
        h.add_(1.0)
        return self.second(y) + h


def test_an_input_changed_in_place_is_no_unit():
    sample = torch.randn(256, 32)
    planned = plan(Overwriting(), sample, "90%", backend="modules")
    made = planned.sn_memory.plan
    assert made.decided("recompute")
    assert "first" not in {choice.name for choice in made.choices}
    assert verify(planned, sample).equal


def test_a_model_that_changes_its_input_is_tried_on_the_sample_as_it_was():
    """The step without the plan was run on what the one with it had left, and found to differ."""

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, images):
            images.div_(2).sub_(1)
            return self.net(images)

    torch.manual_seed(0)
    model, sample = Scales(), torch.randn(8, 32)
    before = sample.clone()
    with pytest.warns(PlanWarning, match="changes an input in place"):
        planned = plan(model, sample, "100%", profile=False)
    assert planned.sn_memory.backend == "regions"
    assert torch.equal(sample, before)
    found = verify(planned, sample)
    assert found.equal
    assert torch.equal(sample, before)
    # Of another size choices are measured on the batch itself, before it is trained on.
    mine, theirs = (torch.linspace(0, 1, 32 * 12).view(12, 32) for _ in range(2))
    with pytest.warns(PlanWarning, match=r"\(12, 32\)"):
        planned(mine).sum().backward()
    got = [it.grad.clone() for it in model.parameters()]
    model.zero_grad()
    model(theirs).sum().backward()
    assert torch.equal(mine, theirs)
    assert all(map(torch.equal, got, (it.grad for it in model.parameters())))


class Forces(nn.Module):
    """As models of molecules do: the result is a gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4)

    def forward(self, places):
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            energy = self.net(places).square().sum()
            (forces,) = torch.autograd.grad(energy, places, create_graph=True)
        return forces if energy.item() > 0 else -forces


class Rows(nn.Module):
    """Modules inside of vmap get tensors that have no memory of their own."""

    def __init__(self):
        super().__init__()
        self.net, self.after = mlp(3), mlp(3)

    def forward(self, x):
        return self.after(torch.vmap(lambda row: self.net(row[None])[0])(x))


@pytest.mark.parametrize(("kind", "budget"), [(Forces, "100%"), (Rows, "90%")])
def test_what_runs_otherwise_inside_is_watched(kind, budget):
    """Planning raised an AssertionError, and a NotImplementedError of torch's."""
    torch.manual_seed(0)
    model, sample = kind(), torch.randn(64, 32)
    planned = plan(model, sample, budget, backend="modules", profile=False)
    same_gradients(planned, model, torch.randn(64, 32))
    assert verify(planned, sample).equal
    if kind is Rows:
        again = {it.name for it in planned.sn_memory.plan.choices}
        assert again
        assert not any(name.startswith("net") for name in again)


@pytest.mark.parametrize("backend", ["regions", "modules"])
def test_sparse_gradients(backend):
    """Every back end refused them: `Cannot access storage of SparseTensorImpl`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32, sparse=True), mlp(6))
    sample = torch.randint(0, 50, (256,))
    said = pytest.warns(PlanWarning, match="sparse") if backend == "regions" else nullcontext()
    with said:
        asked = "auto" if backend == "regions" else backend
        planned = plan(model, sample, "80%", profile=False, backend=asked)
    assert planned.sn_memory.backend == backend
    assert planned.sn_memory.plan.decided("recompute")
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes == planned.sn_memory.plan.peak_bytes
    planned(sample).sum().backward()
    assert model[0].weight.grad.is_sparse
    # A second step finds gradients, whose bytes are counted; regions have plans for that.
    found_some = pytest.warns(PlanWarning, match=r"finds gradients of [\d.]+ KiB")
    with found_some if backend == "modules" else nullcontext():
        planned(sample).sum().backward()
    assert model[0].weight.grad.is_sparse


class Taught(nn.Module):
    """Is given, and makes, tensors of inference mode, which have no version."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = mlp(2), mlp(2)

    def forward(self, x, hint):
        with torch.inference_mode():
            scale = self.teacher(x.detach()).mean()
        return self.net(x) + hint + scale


class TaughtOften(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.teacher = nn.ModuleList(Taught() for _ in range(5)), mlp(2)

    def forward(self, x):
        with torch.inference_mode():
            hint = self.teacher(x)
        for block in self.blocks:
            x = block(x, hint)
        return x


def test_inference_mode_inside_a_forward():
    torch.manual_seed(0)
    sample = torch.randn(256, 32)
    planned = plan(TaughtOften(), sample, "80%", backend="modules", profile=False)
    assert planned.sn_memory.plan.decided("recompute")
    assert verify(planned, sample).equal
    with pytest.raises(TraceError, match="made in inference mode"):
        checkpoint_policy(TaughtOften(), sample, "80%", profile=False, blocks=[Taught])
