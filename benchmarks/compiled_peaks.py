"""Compiled steps within a budget: measured peaks against the budget, and seconds.

    python -m benchmarks compiled_peaks [--json FILE] [--models NAME ...] [--shares SHARE ...]
                                        [--rivals SHARE ...] [--rounds N]

Everything is compiled by Inductor and runs in one process and one thread. Peaks are what torch's
CPU allocator had given out (AllocationTracker). Budgets are shares of the plain compiled step's
activation peak: of what its peak has beside parameters, inputs and the gradients of parameters.
Rivals are torch's `activation_memory_budget` with its solvers dp and ilp; ours is planned with each
rival's measured peak as its budget as well. Seconds are CPU seconds of a step, of runs that
alternate in changing orders and at changing addresses, the median. A model that is in the file is
left out, so the script goes on where it was stopped.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from machine import origin
from planner_torch import QUICK
from rows_file import flags, load, save
from torch import nn

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.torch.model.step import restore_step, run_step

SHARES = (1.0, 0.8, 0.6, 0.4)
RIVALS = (0.7, 0.4, 0.1)
SOLVERS = ("dp", "ilp")
# Rounds after which models move.
MOVES_EACH = 3
# For planning one budget; compilers come on top.
LIMIT_S = 120


class ViT(nn.Module):
    """A vision transformer of blocks as torch has them."""

    def __init__(self, *, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, 100] of images [batch, 3, size, size]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet50/8": QUICK["resnet50/8"],
    "gpt2/12": QUICK["gpt2/12"],
    "llama/32": QUICK["llama/32"],
    "vit/3": (
        lambda: ViT(size=64, patch=8, width=64, layers=4, heads=4),
        lambda: torch.randn(16, 3, 64, 64),
    ),
    "unet/8": QUICK["unet/8"],
}


class Step:
    """A compiled model with the seconds of its steps.

    Parameters
    ----------
    run, model, sample
        What is called; the model whose parameters it uses; its input.
    """

    def __init__(self, run: Callable[..., Any], model: nn.Module, sample: torch.Tensor) -> None:
        self.run, self.model, self.sample = run, model, sample
        self.seconds: list[float] = []
        self.step()
        # What compiling left behind is not to be freed while it is counted.
        gc.collect()
        with restore_step(model, sample):
            self.peak_bytes = self.step(count=True)

    def once(self) -> None:
        """Run a step as training does, the parameters as they are, and note its seconds."""
        self.model.zero_grad(set_to_none=True)
        began = time.process_time()
        self.step()
        self.seconds.append(time.process_time() - began)

    def step(self, *, count: bool = False) -> int:
        """Run a step; return its peak where it is counted."""
        torch.manual_seed(0)
        measured = run_step(
            self.run, self.model, ((self.sample,), {}), count=count, by_allocator=True
        )
        return measured.peak_bytes


def by_inductor(model: nn.Module) -> Callable[..., Any]:
    """torch.compile with a back end of its own, or it would take what another copy compiled."""
    # Not before it is asked for: it takes seconds to import, and warns of torch's own doings.
    from torch._inductor.compile_fx import compile_fx

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs)

    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def plain(model: nn.Module, sample: torch.Tensor) -> Step:
    """The model under torch.compile."""
    return Step(by_inductor(model), model, sample)


def rival(model: nn.Module, sample: torch.Tensor, share: float, solver: str) -> Step:
    """The model under torch.compile with torch's own budget."""
    # What is cached is not told apart by the solver: the second would run as the first.
    with torch._functorch.config.patch(
        activation_memory_budget=share,
        activation_memory_budget_solver=solver,
        enable_autograd_cache=False,
    ):
        return Step(by_inductor(model), model, sample)


def ours(
    model: nn.Module, sample: torch.Tensor, budget: int, *, profile: bool = True
) -> tuple[Step, Any]:
    """The model planned and compiled, and its plan. Raises BudgetError."""
    planned = sn_memory.torch.plan(
        model, sample, budget, backend="compile", profile=profile, time_limit_s=LIMIT_S
    )
    return Step(planned, planned, sample), planned.sn_memory.plan


def in_turn(steps: Sequence[Step], rounds: int) -> None:
    """Time steps in rounds, each in another order, and their models at new addresses now and then.

    The same compiled code took up to 2 % longer or shorter with another step before it, and with
    its parameters elsewhere; of fixed orders and addresses that is no noise, but a bias.
    """
    chance = random.Random(0)
    for step in steps:
        step.seconds.clear()
    for number in range(rounds):
        order = chance.sample(steps, len(steps))
        if number % MOVES_EACH == 0:
            moved(order, chance)
            for step in order:
                step.step()
        for step in order:
            step.once()


def moved(steps: Sequence[Step], chance: random.Random) -> None:
    """Let the parameters and buffers of the models lie elsewhere."""
    between = []
    with torch.no_grad():
        for step in steps:
            for tensor in (*step.model.parameters(), *step.model.buffers()):
                between.append(torch.empty(chance.randrange(1, 1 << 14)))
                tensor.data = tensor.clone()


def fixed_bytes(model: nn.Module, sample: torch.Tensor) -> int:
    """Bytes of parameters, buffers, the input and the gradients of parameters."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), sample))
    return held + sum(
        parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
    )


def rows_of(
    name: str, shares: Sequence[float], rivals: Sequence[float], rounds: int
) -> list[dict[str, Any]]:
    """All rows of one model."""
    torch.manual_seed(0)
    make, make_sample = MODELS[name]
    model, sample = make(), make_sample()
    fixed = fixed_bytes(model, sample)
    steps: list[tuple[dict[str, Any], Step | None]] = []

    def note(row: dict[str, Any], step: Step | None) -> None:
        steps.append((row, step))
        peak = "none" if step is None else f"{step.peak_bytes / 2**20:.3f} MiB"
        print(f"{name} {row} {peak}", flush=True)

    ground = plain(copy.deepcopy(model), sample)
    note({"method": "plain compile"}, ground)
    budgets = {fixed + int(share * (ground.peak_bytes - fixed)): share for share in shares}
    for solver in SOLVERS:
        for share in rivals:
            result = rival(copy.deepcopy(model), sample, share, solver)
            note({"method": f"torch {solver}", "setting": share}, result)
            budgets.setdefault(result.peak_bytes, 0.0)
    for budget in sorted(budgets, reverse=True):
        row = {"method": "sn_memory", "setting": budgets[budget] or None, "budget_bytes": budget}
        began = time.process_time()
        try:
            step, plan = ours(copy.deepcopy(model), sample, budget)
        except BudgetError as refusal:
            note({**row, "smallest_bytes": refusal.peak_bytes}, None)
            continue
        took = time.process_time() - began
        note({**row, "predicted_bytes": plan.peak_bytes, "plan_cpu_s": took}, step)
    in_turn([step for _, step in steps if step is not None], rounds)
    return [
        {
            "model": name,
            **row,
            "fixed_bytes": fixed,
            "peak_bytes": step and step.peak_bytes,
            "step_s": step and statistics.median(step.seconds),
            **origin(),
        }
        for row, step in steps
    ]


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--rivals", nargs="*", type=float, default=RIVALS)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    # Each way is one more compilation of the same forward.
    torch._dynamo.config.recompile_limit = 1000
    rows = load(args.json)
    for name in args.models:
        if any(row["model"] == name for row in rows):
            continue
        rows += rows_of(name, args.shares, args.rivals, args.rounds)
        save(args.json, rows)
    for row in rows:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:9.3f} MiB"
        seconds = "" if row["step_s"] is None else f"{row['step_s']:.4f} s"
        asked = row.get("budget_bytes")
        asked = "" if asked is None else f"{asked / 2**20:9.3f} asked"
        name = f"{row['model']:12} {row['method']:16} {row.get('setting') or '':>5}"
        print(f"{name} {asked} {peak} {seconds}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
