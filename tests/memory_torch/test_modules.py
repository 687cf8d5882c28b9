"""Models that cannot be traced are planned by modules: measured, bit-equal, within the budget."""

import logging
import random
from contextlib import nullcontext

import pytest
import torch
from small_models import mlp, module_of, same_gradients
from steps import gradients, rows, same
from torch import nn

from sn_memory.torch import PlanWarning, TraceError, checkpoint_policy, plan, verify


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


def early():
    """Stops when a value says so; uses its first block twice."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.mean().item() > 100:
                break
        return self.head(self.blocks[0](x).mean((2, 3)))

    blocks = nn.ModuleList(Block(8) for _ in range(4))
    return module_of(
        forward, stem=nn.Conv2d(3, 8, 3, padding=1), blocks=blocks, head=nn.Linear(8, 10)
    )


SAMPLE = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def by_modules(model, sample, budget):
    planned = plan(model, sample, budget, backend="modules", profile=False)
    return planned, planned.sn_memory.plan.decided("recompute")


def test_auto_falls_back_and_says_why(caplog):
    model = early()
    with (
        pytest.warns(PlanWarning, match=r"by regions.*test_modules\.py:\d+"),
        caplog.at_level(logging.INFO, "sn_memory.torch"),
    ):
        planned = plan(model, SAMPLE, "60%")
    assert planned.sn_memory.backend == "regions"
    assert "planned by regions" in caplog.text
    with pytest.raises(TraceError, match="values"):
        plan(model, SAMPLE, "60%", backend="graph")


def test_bits_and_bytes_and_more_budget_recomputes_no_more():
    model, again = early(), []
    for budget in ("55%", "75%", "100%"):
        planned, chosen_again = by_modules(model, SAMPLE, budget)
        chosen = planned.sn_memory.plan
        assert chosen.peak_bytes <= chosen.budget_bytes
        again.append(len(chosen_again))
        for _ in range(2):
            found = verify(planned, SAMPLE)
            # Statistics, the scale and all gradients are among what is compared.
            assert found.equal, found.different
            assert found.measured_peak_bytes == chosen.peak_bytes
    assert again == sorted(again, reverse=True)
    assert again[-2] > again[-1] == 0


def test_what_cannot_run_again_is_not_run_again():
    """What draws from Python's chance and counts: neither would be the same when run again."""

    def forward(self, x):
        self.steps += 1
        return self.inner(x) * (1 + random.random())

    model = nn.Sequential(module_of(forward, inner=mlp(4), steps=0), mlp(4))
    planned, again = by_modules(model, rows(256), "80%")
    assert again
    assert not {"", "0"} & {it.name for it in planned.sn_memory.plan.choices}
    assert model[0].steps == 0


def test_an_input_changed_in_place_is_no_unit():
    """The input of the first part changes after that has run; autograd does not mind."""

    def forward(self, x):
        h = self.before(x)
        y = self.first(h)  # saves its results, not its input
        h.add_(1.0)
        return self.second(y) + h

    first = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
    model = module_of(forward, before=nn.Linear(32, 32), first=first, second=mlp(3))
    planned, again = by_modules(model, rows(256), "90%")
    assert again
    assert "first" not in {it.name for it in planned.sn_memory.plan.choices}
    assert verify(planned, rows(256)).equal


def test_a_model_that_changes_its_input_is_tried_on_the_sample_as_it_was():
    """The step without the plan was run on what the one with it had left, and found to differ."""
    model = module_of(lambda self, images: self.net(images.div_(2).sub_(1)), net=mlp())
    sample = rows(8)
    before = sample.clone()
    with pytest.warns(PlanWarning, match="changes an input in place"):
        planned = plan(model, sample, "100%", profile=False)
    assert planned.sn_memory.backend == "regions"
    assert torch.equal(sample, before)
    assert verify(planned, sample).equal
    assert torch.equal(sample, before)
    # Of another size choices are measured on the batch itself, before it is trained on.
    mine, theirs = rows(12), rows(12)
    with pytest.warns(PlanWarning, match=r"\(12, 32\)"):
        found = gradients(planned, mine)
    assert same(found, gradients(model, theirs))
    assert torch.equal(mine, theirs)


def forces(self, places):
    """As models of molecules do: the result is a gradient of an energy."""
    with torch.enable_grad():
        places = places.detach().requires_grad_()
        energy = self.net(places).square().sum()
        (forces,) = torch.autograd.grad(energy, places, create_graph=True)
    return forces if energy.item() > 0 else -forces


def by_rows(self, x):
    """Modules inside of vmap get tensors that have no memory of their own."""
    return self.after(torch.vmap(lambda row: self.net(row[None])[0])(x))


@pytest.mark.parametrize(
    ("forward", "parts", "budget"),
    [(forces, {"net": mlp(4)}, "100%"), (by_rows, {"net": mlp(3), "after": mlp(3)}, "90%")],
)
def test_what_runs_otherwise_inside_is_watched(forward, parts, budget):
    """Planning raised an AssertionError, and a NotImplementedError of torch's."""
    model = module_of(forward, **parts)
    planned, again = by_modules(model, rows(), budget)
    same_gradients(planned, model, rows(seed=1))
    assert verify(planned, rows()).equal
    if forward is by_rows:
        assert again
        assert not any(it.name.startswith("net") for it in planned.sn_memory.plan.choices)


@pytest.mark.parametrize("backend", ["regions", "modules"])
def test_sparse_gradients(backend):
    """Every back end refused them: `Cannot access storage of SparseTensorImpl`."""
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


def test_inference_mode_inside_a_forward():
    """Blocks are handed, and make, tensors of inference mode, which have no version."""

    def taught(self, x, hint):
        with torch.inference_mode():
            scale = self.teacher(x.detach()).mean()
        return self.net(x) + hint + scale

    def forward(self, x):
        with torch.inference_mode():
            hint = self.teacher(x)
        for block in self.blocks:
            x = block(x, hint)
        return x

    blocks = nn.ModuleList(module_of(taught, net=mlp(2), teacher=mlp(2)) for _ in range(5))
    model = module_of(forward, blocks=blocks, teacher=mlp(2))
    planned, again = by_modules(model, rows(256), "80%")
    assert again
    assert verify(planned, rows(256)).equal
    with pytest.raises(TraceError, match="made in inference mode"):
        checkpoint_policy(model, rows(256), "80%", profile=False, blocks=["blocks.0", "blocks.1"])
