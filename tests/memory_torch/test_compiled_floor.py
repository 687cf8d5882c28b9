"""What no plan of a compiled step goes below: reckoned by hand, and against steps lowered."""

import pytest
import torch
from late_imports import Late
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sn_memory.torch import plan

inductor, floors = (Late(f"sn_memory.torch.compile.{name}") for name in ("inductor", "floor"))
FLOAT = 4


class _Seen(Exception):  # noqa: N818 - ends the planning
    pass


def seen_of(model, sample, look):
    """Return what `look` makes of the planner that torch.compile's graph is handed to."""
    seen = []

    def note(self, *_):
        seen.append(look(self))
        raise _Seen

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor.FusedPlanner, "plans", note)
        with pytest.raises(Exception, match="_Seen"):
            plan(model, sample, 1, backend="compile", profile=False)
    return seen[0]


def floor_and_peak(planner):
    return (*planner.floor(), planner.plain.plan.peak_bytes)


def test_a_product_holds_its_operands_and_its_result():
    """Two layers: while the second one's weight has its gradient made, all these are there."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x).relu()).exp().sum()

    batch, weight = 256 * 32 * FLOAT, 32 * 32 * FLOAT
    floor, working, peak = seen_of(Two(), torch.randn(256, 32), floor_and_peak)
    # Two weights and the input; the loss and its gradient; the gradient of the result, what the
    # layer was given, or what that has for a gradient, and one weight's gradient.
    resident, scalars = 2 * weight + batch, 2 * FLOAT
    assert floor == resident + scalars + 2 * batch + weight
    assert working.startswith("mm")
    assert floor <= peak


def test_results_are_all_there_at_the_end():
    """Ten layers whose weights are larger than all that is computed with them."""
    layers = [nn.Linear(128, 128, bias=False) for _ in range(10)]
    model, sample = nn.Sequential(*layers), torch.randn(2, 128)
    floor, _, peak = seen_of(model, sample, floor_and_peak)
    weights, row = 10 * 128 * 128 * FLOAT, 2 * 128 * FLOAT
    # Weights, input, gradients; the output and its gradient, which are the caller's.
    assert floor <= peak
    assert 2 * weights + 3 * row <= floor <= 2 * weights + 5 * row


class Attention(nn.Module):
    """Query, key and value are parts of one product's result."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        q, k, v = (it.unflatten(-1, (4, -1)).transpose(1, 2) for it in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.conv(mixed.transpose(1, 2)).transpose(1, 2).tanh()


def test_no_partition_of_torchs_goes_below():
    """Whatever its budget, the lowered step holds no less; and the floor is of the step, not of it.

    Read from each partition of the step it is the same.
    """

    def look(planner):
        grounds = [planner.with_budget(share, "dp") for share in (0.9, 0.5, 0.2, 0.0)]
        found = []
        for ground in (planner.ground, *grounds):
            given, base = ground.compilation, planner.plain.graph.base_bytes
            called = ground.fused.called()
            floor, _ = floors.floor_bytes(
                given.forward, given.backward, given.outputs, base, called
            )
            found.append((base, floor, ground.own.plan.peak_bytes))
        return found, planner.floor()[0]

    model, sample = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(16, 16, 32)
    found, floor = seen_of(model, sample, look)
    assert len({peak for _, _, peak in found}) > 2
    assert {it for _, it, _ in found} == {floor}
    assert all(base < floor <= peak for base, _, peak in found)
