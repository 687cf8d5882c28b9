"""Several backward passes through one forward pass, as `retain_graph=True` allows."""

import copy
import gc
import weakref

import pytest
import torch
from small_models import Everything, images, mlp
from torch.autograd import grad

from sn_memory.base.errors import PlanWarning
from sn_memory.torch import ReplayError, StorageTracker, plan

SETTINGS = {"profile": False, "time_limit_s": 2.0}


def passes(model, sample):
    """Two backward passes by some parameters each, then one by all, and one more of the rest."""
    torch.manual_seed(2)
    out = model(sample)
    parameters = list(model.parameters())
    first = grad(out.square().sum(), parameters[-2:], retain_graph=True)
    second = grad(out.sum(), parameters[:2], retain_graph=True)
    out.cos().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    found = [*first, *second, *(it.grad for it in parameters), *model.buffers()]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("budget", "techniques"),
    [("100%", ("keep",)), ("60%", ("keep", "recompute")), ("60%", ("keep", "offload"))],
)
@pytest.mark.filterwarnings("ignore:a backward pass through:sn_memory.base.errors.PlanWarning")
def test_every_pass_is_torchs(budget, techniques):
    """Recomputed or moved to the host, in place, with dropout and statistics."""
    model, sample = Everything(), images()
    planned = plan(
        copy.deepcopy(model), sample, budget, backend="graph", techniques=techniques, **SETTINGS
    )
    for _ in range(2):
        expected = passes(model, sample)
        assert all(map(torch.equal, passes(planned, sample), expected))


def test_a_second_pass_without_it_says_what_to_do():
    planned = plan(mlp(), torch.randn(16, 32), "100%", backend="graph", **SETTINGS)
    out = planned(torch.randn(16, 32)).sum()
    out.backward()
    with pytest.raises(ReplayError, match="retain_graph=True"):
        out.backward()


def test_rows_of_a_jacobian_hold_no_more_each():
    """Passes that reach some parameters only leave nothing behind."""
    model, sample = mlp(), torch.randn(16, 32)
    planned = plan(model, sample, "100%", backend="graph", **SETTINGS)
    first, last = next(planned.parameters()), list(planned.parameters())[-1]
    planned.sn_memory.inputs.warned.add("retained")
    known = [*planned.parameters(), sample]
    out = planned(sample)
    held = []
    for row in range(6):
        with StorageTracker(known, device=sample.device) as tracker:
            grad(out[0, row], last, retain_graph=True)
        held.append(tracker.live_bytes)
    assert len(set(held)) == 1
    expected = grad(model(sample).sum(), first)
    assert torch.equal(grad(out.sum(), first)[0], expected[0])


def test_what_is_kept_goes_with_the_graph():
    planned = plan(mlp(), torch.randn(16, 32), "100%", backend="graph", **SETTINGS)
    planned.sn_memory.inputs.warned.add("retained")
    sample = torch.randn(16, 32)
    out = planned(sample)
    out.sum().backward(retain_graph=True)
    (memory,) = planned.sn_memory.latest.program._memories
    gone = [weakref.ref(it.untyped_storage()) for it in memory.held if it is not None]
    assert len(gone) > 8
    there = {it.untyped_storage()._cdata for it in (*planned.parameters(), sample)}
    del memory, out
    gc.collect()
    assert all(it() is None or it()._cdata in there for it in gone)


def test_a_warning_says_what_is_kept():
    sample = torch.randn(256, 32)
    planned = plan(mlp(), sample, "70%", backend="graph", **SETTINGS)

    def run():
        planned(sample).sum().backward(retain_graph=True)
        planned.zero_grad()

    with pytest.warns(PlanWarning, match=r"keeps its graph \(retain_graph=True\)") as warned:
        run()
    assert warned[0].filename == __file__
    run()


def test_in_the_middle_an_exception_leaves_the_rest_for_another_pass():
    model, sample = mlp(), torch.randn(16, 32)
    planned = plan(copy.deepcopy(model), sample, "100%", backend="graph", **SETTINGS)
    planned.sn_memory.inputs.warned.add("retained")
    out = planned(sample).sum()

    def fail(gradient):
        raise ValueError("no")

    handle = list(planned.parameters())[4].register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        out.backward(retain_graph=True)
    handle.remove()
    planned.zero_grad()
    out.backward()
    model(sample).sum().backward()
    pairs = zip(planned.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mine.grad, its.grad) for mine, its in pairs)
