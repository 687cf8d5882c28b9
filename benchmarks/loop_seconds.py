"""Microseconds per call in a training step of tiny ops: the model's own, and planned.

    OMP_NUM_THREADS=1 python -m benchmarks loop_seconds [--json FILE] [--layers 100] [--steps 200]

Kernels on 32 columns take a microsecond or two, so what is left is the way to them: Python, modules
and autograd in the model's own step, the replay of recorded calls in a planned one. `linear` has a
weight, a bias and a tanh in each layer, and two gradients to hand over; `elementwise` has products,
sums and a tanh, and one parameter in all. A step is a forward and a backward pass with gradients
dropped before. The steps take turns in one process; seconds are CPU seconds, the median of them.

A call is one that reaches a kernel: `calls` of the recorded step, and in the plan those that it
makes again, too (`made`). Each is `us` per call made. `before_us` is what a planned step takes
before its first call: to find the plan for its input and to bind the arguments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine import origin
from rows_file import flags, save
from timing import interleave, timed
from torch import nn

import sn_memory.torch
from sn_memory.torch.eager.replay import Replay
from sn_memory.torch.model.results import differences

WIDTH, ROWS = 32, 64
# Of the activations: all, and so few that many are made again.
SHARES = (1.0, 0.5)


class Elementwise(nn.Module):
    """Products, sums and a tanh, and one row of parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(WIDTH))
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the layers make of x."""
        x = x * self.row
        for _ in range(self.layers):
            x = (x * 0.9 + 0.1).tanh() * x
        return x.mean()


class Linear(nn.Module):
    """Layers of a weight, a bias and a tanh."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the layers make of x."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.mean()


NETS: dict[str, Callable[[int], nn.Module]] = {"linear": Linear, "elementwise": Elementwise}


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Train one step; return the loss and the gradients."""
    loss = model(x)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def medians_in_turn(models: list[nn.Module], x: torch.Tensor, steps: int) -> list[float]:
    """CPU seconds of a training step of each model, the median of steps that take turns."""

    def step(model: nn.Module) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        return timed(lambda: model(x).backward())

    runs = {number: partial(step, model) for number, model in enumerate(models)}
    return [statistics.median(taken) for taken in interleave(runs, steps).values()]


class Arrival:
    """Stands before the calls of a forward pass and notes when they begin."""

    def __init__(self, row: Any) -> None:
        self.row, self.at = row, 0.0

    def run(self, memory: Any) -> None:
        """Run them."""
        self.at = time.process_time()
        self.row.run(memory)


def seconds_before(model: nn.Module, x: torch.Tensor, steps: int) -> float:
    """CPU seconds from the call of a planned model to its first recorded call."""
    program: Any = model.sn_memory.latest.program
    program.forward = arrival = Arrival(program.forward)
    taken = []
    for _ in range(steps):
        began = time.process_time()
        model(x)
        taken.append(arrival.at - began)
    program.forward = arrival.row
    return statistics.median(taken)


def rows_of(
    name: str, layers: int, steps: int, *, time_limit_s: float = 5.0
) -> list[dict[str, Any]]:
    """Plan a net for each share and time its steps; return a row for each."""
    torch.manual_seed(0)
    sn_memory.settings.deterministic = True
    model = NETS[name](layers).train()
    x = torch.randn(ROWS, WIDTH)
    fixed = 2 * sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    expected = {
        key: gradient if gradient is None else gradient.clone()
        for key, gradient in step(model, x).items()
    }
    plans: list[nn.Module] = []
    for share in SHARES:
        budget: Any = "100%"
        if share < 1:
            peak = plans[0].sn_memory.plan.peak_bytes
            budget = fixed + int(share * (peak - fixed))
        plans.append(
            sn_memory.torch.plan(model, x, budget, profile=False, time_limit_s=time_limit_s)
        )
    own, *planned = medians_in_turn([model, *plans], x, steps)
    rows = []
    for share, plan, took in zip(SHARES, plans, planned, strict=True):
        assert isinstance(plan.sn_memory.latest, Replay)
        for parameter in model.parameters():
            parameter.grad = None
        calls = len(plan.sn_memory.trace.graph.ops)
        runs = sum(action.kind == "run" for action in plan.sn_memory.plan.actions)
        rows.append(
            {
                "net": name,
                "layers": layers,
                "share": share,
                "calls": calls,
                "made": runs,
                "own_us": round(own / calls * 1e6, 2),
                "planned_us": round(took / runs * 1e6, 2),
                "before_us": round(seconds_before(plan, x, steps) * 1e6, 1),
                "peak_bytes": plan.sn_memory.plan.peak_bytes,
                "equal": not differences(expected, step(plan, x)),
            }
        )
    return rows


def main() -> None:
    """Print a line for each net and share, and write them to a file if asked."""
    parser = flags(__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    about = origin() | {"torch": torch.__version__}
    rows = []
    for name in NETS:
        for row in rows_of(name, wanted.layers, wanted.steps):
            rows.append(row | about)
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    save(wanted.json, rows)


if __name__ == "__main__":
    main()
