"""Predicted against measured: planned torch models at several budgets, run on this machine.

    python -m benchmarks planner_torch [--quick] [--json FILE] [--models NAME ...]
                                       [--time-limit SECONDS] [--planner NAME]

For each network and budget the model is planned, then run with the plan and without: peaks of live
storages counted by StorageTracker; outputs, gradients and buffers compared bit by bit. A share is
one of the activation memory: the peak of torch's own step, measured, less parameters, buffers,
input and the gradients of parameters. A share that is refused gives a row that was not run, with
the floor and the smallest peak found; share 0 runs the smallest plan that any of those refusals
carries. For networks in OP_TIMED the seconds of all calls are measured too, at a half and a third,
planned and unplanned steps in turn. Rows already in FILE are kept, so a run that
was cut off goes on. `--quick` takes narrow networks. `estimate` rows tell how long a definition on
the meta device takes; DEEP is planned there for 12 GiB. All on one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from machine import origin
from models import Bert, Gpt2, InceptionV3, Llama, UNet, densenet121, resnet, vgg16
from rows_file import flags, load, save
from timing import interleave
from torch.utils._python_dispatch import TorchDispatchMode

import sn_memory.torch
from sn_memory import BudgetError, Graph, Plan, plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.torch.model.step import Measured, restore_step, run_step


class CallSeconds(TorchDispatchMode):
    """Notes the seconds of each call, in order: of the thread's own time where it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        began = self.clock()
        result = func(*args, **(kwargs or {}))
        self.calls.append(self.clock() - began)
        return result


def op_seconds(
    forwards: list[Callable[..., Any]], model: torch.nn.Module, sample: torch.Tensor, times: int
) -> list[float]:
    """Op seconds of a training step by each of several forward passes, run in turn.

    The sum of a step is that of the medians of its calls, so that what else the machine does, and
    what Python does between calls, hardly counts. With one thread, its CPU seconds are taken.
    """

    def calls(forward: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        with restore_step(model, sample), CallSeconds() as noted:
            run_step(forward, model, ((sample,), {}), count=False)
        return noted.calls

    steps = {number: partial(calls, forward) for number, forward in enumerate(forwards)}
    return [
        sum(statistics.median(call) for call in zip(*runs, strict=True))
        for runs in interleave(steps, times).values()
    ]


SHARES = (1.0, 0.6, 0.3, 0.0)
MORE_SHARES = (1.0, 0.6, 0.5, 1 / 3, 0.3, 0.0)
OP_TIMED = ("resnet50", "vgg16", "unet")
OP_TIMES = 5
TIMED_SHARES = (0.5, 1 / 3)
TECHNIQUES = ("keep", "recompute")


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token numbers [batch, length] int64."""
    return torch.randint(0, 1000, (batch, length))


Make = tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]
FULL: dict[str, Make] = {
    "resnet50": (lambda: resnet(50), lambda: torch.randn(8, 3, 224, 224)),
    "vgg16": (vgg16, lambda: torch.randn(4, 3, 224, 224)),
    "densenet121": (densenet121, lambda: torch.randn(4, 3, 224, 224)),
    "unet": (UNet, lambda: torch.randn(2, 1, 256, 256)),
    "inception_v3": (InceptionV3, lambda: torch.randn(4, 3, 299, 299)),
    "gpt2": (Gpt2, lambda: tokens(2, 256)),
    "bert": (Bert, lambda: tokens(2, 256)),
    "llama32": (
        lambda: Llama(vocabulary=8000, width=256, layers=32, heads=8, groups=4, hidden=704),
        lambda: tokens(4, 256),
    ),
}
QUICK: dict[str, Make] = {
    "resnet50/8": (lambda: resnet(50, width=8), lambda: torch.randn(4, 3, 64, 64)),
    "vgg16/8": (
        lambda: vgg16(size=64, shrink=8, hidden=64, classes=10),
        lambda: torch.randn(16, 3, 64, 64),
    ),
    "densenet121/4": (lambda: densenet121(growth=8), lambda: torch.randn(4, 3, 64, 64)),
    "unet/8": (lambda: UNet(width=8), lambda: torch.randn(4, 1, 64, 64)),
    "gpt2/12": (
        lambda: Gpt2(vocabulary=1000, length=128, width=64, layers=4, heads=4),
        lambda: tokens(4, 128),
    ),
    "bert/12": (
        lambda: Bert(vocabulary=1000, length=128, width=64, layers=4, heads=4),
        lambda: tokens(4, 128),
    ),
    "llama/32": (
        lambda: Llama(vocabulary=1000, width=64, layers=8, heads=4, groups=2, hidden=176),
        lambda: tokens(4, 128),
    ),
}
META: dict[str, Make] = {
    "llama2_70b": (
        lambda: Llama(width=8192, layers=80, heads=64, groups=8, hidden=28672),
        lambda: torch.zeros(1, 4096, dtype=torch.long),
    ),
    "resnet2501": (lambda: resnet(2500), lambda: torch.empty(1, 3, 224, 224)),
}

# On the meta device, planned for DEEP_BYTES and not run.
DEEP: dict[str, Make] = {
    "resnet2501, batch 16": (lambda: resnet(2500), lambda: torch.empty(16, 3, 224, 224)),
}
DEEP_BYTES = 12 << 30


@dataclass(frozen=True)
class Bench:
    """A network on this machine: traced, and what its own step holds and computes."""

    name: str
    model: torch.nn.Module
    sample: torch.Tensor
    graph: Graph
    trace_s: float
    unplanned: Measured

    @classmethod
    def of(cls, name: str, make: Make) -> Bench:
        """Trace it (op seconds included, where they are not known) and run its own step once."""
        torch.manual_seed(0)
        model, sample = make[0](), make[1]()
        began = time.perf_counter()
        graph = sn_memory.torch.trace(model, sample).graph
        spent = time.perf_counter() - began
        torch.manual_seed(0)
        with restore_step(model, sample):
            step = run_step(model, model, ((sample,), {}), count=True)
        return cls(name, model, sample, graph, spent, step)

    @property
    def unplanned_bytes(self) -> int:
        """Peak of torch's own step."""
        return self.unplanned.peak_bytes

    @property
    def gradients_bytes(self) -> int:
        """Gradients of the parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def budget(self, share: float) -> int:
        """Bytes of a share of the activation memory, and all that is not activations."""
        fixed = self.graph.base_bytes + self.gradients_bytes
        return fixed + int(share * (self.unplanned_bytes - fixed))

    def columns(self, share: float, planner: str) -> dict[str, Any]:
        """What all rows of it have."""
        return {
            "model": self.name,
            "framework": "torch",
            "planner": planner,
            "share": share,
            "batch": int(self.sample.shape[0]),
            "ops": len(self.graph.ops),
            "budget_bytes": self.budget(share),
            "base_bytes": self.graph.base_bytes,
            "gradients_bytes": self.gradients_bytes,
            "baseline_peak_bytes": peak(self.graph).bytes,
            "baseline_measured_peak_bytes": self.unplanned_bytes,
            "trace_s": self.trace_s,
        }

    def _most_scratch(self) -> int:
        return max((way.bytes for op in self.graph.ops for way in op.workspaces), default=0)

    def run(self, plan: Plan, *, timed: bool) -> dict[str, Any]:
        """Run a plan and compare."""
        planned = sn_memory.torch.plan(self.model, self.sample, plan.peak_bytes, planner=plan)
        step = planned.sn_memory.latest
        torch.manual_seed(0)
        with restore_step(planned, self.sample):
            # The allocator does not tell copies on the host from tensors.
            measured = run_step(
                planned,
                planned,
                ((self.sample,), {}),
                known=step.known,
                ignored=step.ignored,
                kernels=not plan.decided("offload"),
            )
        expected, results = self.unplanned.results, measured.results
        equal = expected.keys() == results.keys() and all(
            same(tensor, results[name]) for name, tensor in expected.items()
        )
        error = measured.peak_bytes / plan.peak_bytes - 1
        print(
            f"    peak {measured.peak_bytes / 2**20:.1f} MiB at {measured.peak_op}, "
            f"{error:+.3%} of what was predicted, {'equal' if equal else 'DIFFERENT'}",
            flush=True,
        )
        columns = {
            "predicted_peak_bytes": plan.peak_bytes,
            "measured_peak_bytes": measured.peak_bytes,
            "scratch_bytes": self._most_scratch(),
            "predicted_s": plan.seconds,
            "baseline_predicted_s": plan.baseline_seconds,
            "gap": plan.gap,
            "equal": equal,
        }
        if timed:
            ops = op_seconds([self.model, planned], self.model, self.sample, OP_TIMES)
            columns |= {"baseline_op_s": ops[0], "op_s": ops[1]}
            print(f"    op seconds {ops[0]:.3f} -> {ops[1]:.3f}, {ops[1] / ops[0] - 1:+.1%}")
        return columns


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether two results have the same bits."""
    if left is None or right is None:
        return left is right
    bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and torch.equal(*bits)


def rows_of(
    bench: Bench, shares: list[float], planner: str, time_limit_s: float
) -> Iterator[dict[str, Any]]:
    """Rows of one network, from large budgets to the smallest."""
    refusals: list[BudgetError] = []
    for share in sorted(shares, reverse=True):
        columns = bench.columns(share, planner)
        budget = bench.budget(share) if share else bench.graph.base_bytes
        print(f"{bench.name:14} {share:4.0%} {budget / 2**20:.1f} MiB", flush=True)
        began = time.perf_counter()
        try:
            plan = plan_graph(
                bench.graph,
                budget,
                planner=planner,
                techniques=TECHNIQUES,
                time_limit_s=time_limit_s,
            )
        except BudgetError as refusal:
            print(f"    {refusal}", flush=True)
            refusals.append(refusal)
            columns |= {"floor_bytes": refusal.floor_bytes, "smallest_bytes": refusal.peak_bytes}
            spent = time.perf_counter() - began
            if share:
                yield {**columns, "kept": False, "plan_s": spent}
                continue
            plans = [refusal.plan for refusal in refusals if refusal.plan is not None]
            plan = min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds))
            columns["smallest_bytes"] = plan.peak_bytes
        spent = time.perf_counter() - began
        yield {
            **columns,
            "made_by": plan.planner,
            "kept": plan.peak_bytes <= bench.budget(share),
            "plan_s": spent,
            "solve_s": plan.solve_s,
            **bench.run(plan, timed=bench.name in OP_TIMED and share in TIMED_SHARES),
        }


def estimated(name: str, make: Make) -> dict[str, Any]:
    """How long an estimate of a definition takes."""
    with torch.device("meta"):
        model, sample = make[0](), make[1]()
    began, cpu = time.perf_counter(), time.process_time()
    estimate = sn_memory.torch.estimate(model, sample, optimizer=torch.optim.AdamW)
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name:14} estimated in {spent:.1f} s, {cpu:.1f} s of a core\n{estimate}", flush=True)
    return {
        "model": name,
        "framework": "torch",
        "planner": "estimate",
        "share": None,
        "parameters_bytes": estimate.parameters_bytes,
        "activations_bytes": estimate.activations_bytes,
        "peak_bytes": estimate.peak_bytes,
        "wall_s": spent,
        "cpu_s": cpu,
    }


def deep(name: str, make: Make, planner: str, time_limit_s: float) -> dict[str, Any]:
    """How long a very deep definition takes to trace and to plan."""
    with torch.device("meta"):
        model, sample = make[0](), make[1]()
    began, cpu = time.perf_counter(), time.process_time()
    graph = sn_memory.torch.trace(model, sample, profile=False).graph
    trace_s, trace_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name} traced in {trace_s:.0f} s, {trace_cpu_s:.0f} s of a core", flush=True)
    began, cpu = time.perf_counter(), time.process_time()
    plan = plan_graph(
        graph, DEEP_BYTES, planner=planner, techniques=TECHNIQUES, time_limit_s=time_limit_s
    )
    plan_s, plan_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    extra = plan.seconds / plan.baseline_seconds - 1
    print(
        f"    {plan.baseline_peak_bytes / 2**30:.2f} -> {plan.peak_bytes / 2**30:.2f} GiB, "
        f"{extra:+.1%}, planned in {plan_s:.0f} s, {plan_cpu_s:.0f} s of a core",
        flush=True,
    )
    return {
        "model": name,
        "framework": "torch",
        "planner": planner,
        "made_by": plan.planner,
        "share": None,
        "batch": int(sample.shape[0]),
        "ops": len(graph.ops),
        "layers": sum(1 for module in model.modules() if not next(module.children(), None)),
        "kept": True,
        "budget_bytes": DEEP_BYTES,
        "base_bytes": graph.base_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "predicted_s": plan.seconds,
        "baseline_predicted_s": plan.baseline_seconds,
        "gap": plan.gap,
        "trace_s": trace_s,
        "trace_cpu_s": trace_cpu_s,
        "plan_s": plan_s,
        "plan_cpu_s": plan_cpu_s,
    }


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=[*FULL, *QUICK, *META, *DEEP])
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--time-limit", type=float, default=20.0)
    args = parser.parse_args(argv)
    # Threads that wait for each other would make every figure one of the machine's other work.
    torch.set_num_threads(1)
    networks = {**FULL, **QUICK, **META, **DEEP}
    chosen = args.models or (QUICK if args.quick else [*FULL, *META, *DEEP])
    rows = load(args.json)
    done = {(row["model"], row["planner"], row["share"]) for row in rows}

    def note(row: dict[str, Any]) -> None:
        rows.append(row | origin())
        save(args.json, rows)

    for name in chosen:
        if name in META:
            if (name, "estimate", None) not in done:
                note(estimated(name, networks[name]))
            continue
        if name in DEEP:
            if (name, args.planner, None) not in done:
                note(deep(name, networks[name], args.planner, args.time_limit))
            continue
        shares = [
            share
            for share in (MORE_SHARES if name in OP_TIMED else SHARES)
            if (name, args.planner, share) not in done
        ]
        if shares:
            bench = Bench.of(name, networks[name])
            for row in rows_of(bench, shares, args.planner, args.time_limit):
                note(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
