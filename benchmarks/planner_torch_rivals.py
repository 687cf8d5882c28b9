"""Planned torch models compared with torch's own tools: peaks and op seconds at many budgets.

    python -m benchmarks planner_torch_rivals [--json FILE] [--models NAME ...] [--quick]
                                              [--picture FILE]

Rivals are `activation_memory_budget` with the solvers dp and ilp under aot_eager, and
torch.utils.checkpoint per block and per group of sqrt(n) blocks. Ours is planned with each rival's
measured peak as its budget, with `backend="graph"`; all of them run calls eagerly.

Peaks are counted by StorageTracker. Op seconds are CPU seconds of the calls that reach the kernels:
each call at the least that any call of its signature took in any run, so a busy machine hardly
moves them. The networks are narrow versions, small enough for two cores.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import origin
from pictures import pyplot
from planner_torch import QUICK
from rows_file import flags, load, save
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.torch.model.step import restore_step, run_step

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
MODELS = ("resnet50/8", "gpt2/12", "llama/32")
Run = tuple[int, list[str]]


class OpSeconds(TorchDispatchMode):
    """Notes the calls of a step, and the least CPU seconds of each signature over all steps."""

    def __init__(self, least: dict[str, float]) -> None:
        super().__init__()
        self.least, self.calls = least, []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under it as any other."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        forms = [
            f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        ]
        key = f"{func}{forms}"
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        took = time.thread_time() - began
        self.least[key] = min(took, self.least.get(key, took))
        self.calls.append(key)
        return result


def measured(
    forward: Callable[..., Any], model: nn.Module, sample: torch.Tensor, least: dict[str, float]
) -> Run:
    """Peak and calls of one step; one before it compiles and warms up."""
    arguments = ((sample,), {})
    for count in (False, True):
        torch.manual_seed(0)
        with restore_step(model, sample):
            seconds = OpSeconds(least)
            with seconds:
                step = run_step(forward, model, arguments, count=count)
    return step.peak_bytes, seconds.calls


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest row of blocks: what a user would checkpoint one by one."""
    rows = [
        list(container)
        for container in model.modules()
        if isinstance(container, nn.Sequential | nn.ModuleList)
    ]
    wide = [block for row in rows for block in row if next(block.children(), None)]
    return [
        block
        for block in wide
        if not any(block in set(other.modules()) - {other} for other in wide)
    ]


@contextmanager
def checkpointed(groups: list[list[nn.Module]]) -> Iterator[None]:
    """Run each group of consecutive blocks under one checkpoint."""

    def around(group: list[nn.Module]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            def all_of_them(x: Any, *rest: Any) -> Any:
                for block in group:
                    x = type(block).forward(block, x, *rest)
                return x

            return checkpoint(all_of_them, *args, use_reentrant=False)

        return run

    with ExitStack() as undo:
        for group in groups:
            for at, block in enumerate(group):
                first = at == 0
                block.__dict__["forward"] = around(group) if first else lambda x, *rest: x
                undo.callback(block.__dict__.pop, "forward")
        yield


def rivals(
    model: nn.Module, sample: torch.Tensor, least: dict[str, float], shares: tuple[float, ...]
) -> Iterator[tuple[str, str, float | None, Run]]:
    """Yield way of running, method, its setting and what it did."""
    yield "eager", "none", None, measured(model, model, sample, least)
    for solver in ("dp", "ilp"):
        for share in shares:
            torch._dynamo.reset()
            with torch._functorch.config.patch(
                activation_memory_budget=share, activation_memory_budget_solver=solver
            ):
                compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
                yield "aot", f"torch {solver}", share, measured(compiled, model, sample, least)
    blocks = blocks_of(model)
    size = max(1, round(len(blocks) ** 0.5))
    cuts = {
        "checkpoint per block": [[block] for block in blocks],
        "checkpoint sqrt(n)": [blocks[at : at + size] for at in range(0, len(blocks), size)],
    }
    for name, groups in cuts.items():

        def run(x: torch.Tensor, groups: list[list[nn.Module]] = groups) -> Any:
            with checkpointed(groups):
                return model(x)

        yield "eager", name, None, measured(run, model, sample, least)


def ours(
    model: nn.Module, sample: torch.Tensor, least: dict[str, float], budget: int
) -> Run | None:
    """Peak and calls of a plan that keeps a budget; None if none is found."""
    try:
        planned = sn_memory.torch.plan(model, sample, budget, backend="graph", time_limit_s=5)
    except BudgetError:
        return None
    return measured(planned, planned, sample, least)


def rows_of(name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """All rows of one network."""
    torch.manual_seed(0)
    model, sample = QUICK[name][0](), QUICK[name][1]()
    least: dict[str, float] = {}
    runs = list(rivals(model, sample, least, shares))
    for peak in sorted({run[0] for _, method, _, run in runs if method != "none"}):
        own = ours(copy.deepcopy(model), sample, least, peak)
        if own is not None:
            runs.append(("eager", "sn_memory", peak, own))
        print(f"{name} {peak} {own and own[0]}", flush=True)
    return [
        {
            "model": name,
            "engine": engine,
            "method": method,
            "setting": setting,
            "peak_bytes": peak,
            "op_s": sum(least[call] for call in calls),
            "calls": len(calls),
            **origin(),
        }
        for engine, method, setting, (peak, calls) in runs
    ]


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Peak over what was asked for, and op seconds over peak, per network."""
    plt = pyplot()

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        2, len(names), figsize=(4.2 * len(names), 7), layout="constrained", squeeze=False
    )
    colours = {
        ("aot", "torch dp"): "#d95f02", ("aot", "torch ilp"): "#e6ab02",
        ("eager", "sn_memory"): "#6a51a3",
    }  # fmt: skip
    for column, name in enumerate(names):
        mine = [row for row in rows if row["model"] == name]
        asked_of = {row["peak_bytes"] for row in mine if row["engine"] == "aot"}
        plain = next(
            row["op_s"] for row in rows if row["model"] == name and row["method"] == "none"
        )
        for (engine, method), colour in colours.items():
            points = sorted(
                (row for row in mine if (row["engine"], row["method"]) == (engine, method)),
                key=lambda row: row["setting"],
            )
            ours = method == "sn_memory"
            peaks = [row["peak_bytes"] / 2**20 for row in points]
            costs = [100 * (row["op_s"] / plain - 1) for row in points]
            axes[1][column].plot(peaks, costs, "o", color=colour, label=method, alpha=0.8)
            most = max(asked_of) if ours else 1.0
            asked = [row["setting"] / most for row in points]
            axes[0][column].plot(asked, peaks, "o-", color=colour, label=method)
        axes[0][column].set(title=name, xlabel="share asked for", ylabel="measured peak, MiB")
        axes[1][column].set(xlabel="measured peak, MiB", ylabel="op seconds over plain eager, %")
    lines, names = axes[1][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="one network, two budgets")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = load(args.json)
    for name in args.models[:1] if args.quick else args.models:
        if any(row["model"] == name for row in rows):
            continue
        rows += rows_of(name, (0.1, 0.5) if args.quick else SHARES)
        save(args.json, rows)
    for row in rows:
        print(
            f"{row['model']:12} {row['engine']:6} {row['method']:20} {row['setting'] or '':>10} "
            f"{row['peak_bytes'] / 2**20:8.3f} MiB {row['op_s']:.4f} s"
        )
    if args.picture:
        picture(rows, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
