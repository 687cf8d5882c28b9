"""Inductor's side of the back end: what is planned once, kept in a file, and compiled from it.

First the step is lowered and planned, with no kernel compiled (fused.py). Then it is compiled with
torch's own caches on: the partition function is plain data, and its hash is that of the plan. A
later process finds the plan by the hash of the traced model, and torch finds what it compiled.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ...base.clock import counts_work
from ...base.progress import say
from ...base.sizes import parse_bytes, show_bytes
from ...cost.devices import NOMINAL
from ...graph.graph import Graph
from ...graph.records import Device, Storage
from ...plan.plan import BudgetError, Plan
from ..trace.op_seconds import Cost, measured_costs, measured_device, scratch_of
from ..trace.record import Recording
from ..trace.to_graph import flops
from .dry_step import DryStep
from .fused import Compilation, Costs, Found, FusedPlanner, Partition
from .kernel_graph import KernelCost
from .lowering import copied, lowered
from .program import Program, end_of, rebuilt, results_of
from .step_seconds import ROUNDS, step_peaks, step_seconds
from .torch_inductor import (
    CustomPartitionerFn,
    cache_dir,
    compile_fx,
    get_hash_for_files,
    inductor_config,
)
from .wrapper import Step

log = logging.getLogger(__name__)

# Arithmetic of what a fused kernel calls per element, in multiply-adds of a matrix product: the
# ratios of their seconds to those of `exp` on AVX2, and of `exp` to a product's.
_FLOPS = {"normalized_rand_cpu": 1500.0, "randn_cpu": 2000.0, "randint64_cpu": 1500.0}
_FLOPS |= {"erf": 60.0, "erfc": 60.0, "tanh": 40.0, "pow": 60.0, "sin": 30.0, "cos": 30.0}
_FUNCTION_FLOPS = 20.0


# The solvers of torch's own budgets, whose partitions plans start from as well. The first is better
# as a rule; dp is torch's default, and was quicker for a U-Net (benchmarks/compiled_peaks.py).
_SOLVERS = ("ilp", "dp")


@dataclass(frozen=True)
class Asked:
    """What a step is planned with.

    Parameters
    ----------
    make
        Plans a graph for so many bytes.
    budget
        The most live bytes, or a share of those of torch's own partition.
    profile, device
        As in `trace`.
    extra
        Resident storages that are no part of the step.
    words
        All that the plan depends on beside the model and this, as text; None: it is not kept.
    name
        Of the model.
    """

    make: Callable[[Graph, int], Plan]
    budget: float | str
    profile: bool
    device: Device | None
    extra: tuple[Storage, ...]
    words: str | None
    name: str


@dataclass(frozen=True)
class Kept:
    """A plan as it is kept.

    Parameters
    ----------
    graph, plan
        Its graph, and itself.
    program
        Its partition; None is torch's own.
    checked
        Its compiled step ran on real inputs, with all that Inductor asserts of results.
    """

    graph: Graph
    plan: Plan
    program: Program | None
    checked: bool = False


class PlannedPartition(CustomPartitionerFn):
    """Cuts a joint graph as a program says. Plain data, so that torch's caches can hash it."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **told: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph."""
        program = Program.of(self.data)
        first, second = _partitioned(gm, joint_inputs, told, program.setting)
        return rebuilt(first, second, told["num_fwd_outputs"], program)

    def uuid(self) -> str:
        """Return the hash of the program and of what carries it out."""
        text = json.dumps(self.data, sort_keys=True)
        return hashlib.sha256(f"{text} {_version()}".encode()).hexdigest()


class _Recorder(CustomPartitionerFn):
    """Cuts a joint graph as torch would, and keeps it."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **told: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.joint, self.inputs, self.told = copied(gm), joint_inputs, told
        return _partitioned(gm, joint_inputs, told, None)

    def __deepcopy__(self, _: Any) -> _Recorder:
        # Inductor copies its configuration, this among it.
        return self

    def uuid(self) -> None:
        """None: nothing that is compiled with it is kept."""

    def other(self, share: float, solver: str) -> Partition:
        """Return torch's partition with a budget of its own."""
        setting = (share, solver)
        return setting, *_partitioned(copied(self.joint), self.inputs, self.told, setting)


def _partitioned(
    joint: fx.GraphModule, inputs: Any, told: dict[str, Any], setting: tuple[float, str] | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's partition, with a budget and a solver of its own where they are given."""
    if setting is None:
        return min_cut_rematerialization_partition(joint, inputs, **told)
    share, solver = setting
    with functorch_config.patch(
        activation_memory_budget=share, activation_memory_budget_solver=solver
    ):
        return min_cut_rematerialization_partition(joint, inputs, **told)


class _Planned(Exception):  # noqa: N818 - says that the plan is there, and ends the compilation
    """Planned; raised where the backward graph would be compiled."""

    def __init__(self, found: list[Found]) -> None:
        super().__init__()
        self.found = found


def compiled(module: fx.GraphModule, inputs: list[Any], asked: Asked) -> tuple[Kept | None, Any]:
    """Plan a traced model and compile it.

    Parameters
    ----------
    module, inputs
        As torch.compile hands them to a back end.

    Returns
    -------
    The plan, None where there is nothing to differentiate; and what runs the model.

    Raises
    ------
    BudgetError
        If no plan keeps the budget.
    """
    path = None if asked.words is None else _path(module, inputs, asked)
    kept = _read(path)
    if kept is None:
        found = planned(module, inputs, asked)
        if found:
            best, checked = found[0], False
            if best.program is not None and asked.profile and not counts_work():
                best, checked = _fastest(found, module, inputs, asked)
            kept = Kept(best.graph, best.plan, best.program, checked)
            _write(path, kept)
    if kept is None:
        return None, _compiled(module, inputs, None)
    return kept, _compiled(module, inputs, kept.program, checked=kept.checked)


def _compiled(
    module: fx.GraphModule, inputs: list[Any], program: Program | None, *, checked: bool = False
) -> Any:
    """Compile a traced model with a partition; None is torch's own, and left as it is."""
    patches: dict[str, Any] = {}
    if program is not None:
        # Each result of an op that is no kernel is asserted to be laid out as was told, in each
        # step anew: 190 calls of Python in a U-Net's. Once is enough, as inputs are of the kind
        # that was planned.
        if checked:
            patches |= {"size_asserts": False, "alignment_asserts": False}
        data = json.loads(json.dumps(program.data()))
        patches["custom_partitioner_fn"] = PlannedPartition(data)
    # The backward graph is compiled now as well: what fails is told when planning.
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(module, inputs, config_patches=patches)  # type: ignore[arg-type]


def _fastest(
    found: Sequence[Found], module: fx.GraphModule, inputs: list[Any], asked: Asked
) -> tuple[Found, bool]:
    """Return the plan whose compiled step took the fewest seconds, and whether they ran.

    Those whose step holds more than the budget when it runs are left out; BudgetError if all do.
    """
    runs = []
    for number, each in enumerate(found):
        say("compile", number, len(found))
        with torch._guards.tracing(copy.copy(torch._guards.TracingContext.get())):
            runs.append(_compiled(copied(module), inputs, each.program))
    try:
        peaks = step_peaks(runs, inputs)
        # One alone is run to be checked.
        seconds = step_seconds(runs, inputs, rounds=ROUNDS if len(found) > 1 else 1)
    except RuntimeError as error:
        # No memory for it, as a rule: the model's own step may be all that fits.
        log.warning("steps could not be timed (%s); the plan reckoned fastest is taken", error)
        return found[0], False
    log.info("seconds of steps: %s; reckoned: %s", seconds, [it.plan.seconds for it in found])
    return found[min(_within(found, peaks, asked), key=seconds.__getitem__)], True


def _within(found: Sequence[Found], peaks: Sequence[int], asked: Asked) -> list[int]:
    """Return the places of the plans whose step kept the budget when it ran, by what it held."""
    first = found[0].plan
    budget = parse_bytes(asked.budget, whole=first.baseline_peak_bytes)
    held = [it + sum(storage.bytes for storage in asked.extra) for it in peaks]
    log.info("peaks of steps: %s; promised: %s", held, [it.plan.peak_bytes for it in found])
    within = [at for at, measured in enumerate(held) if measured <= budget]
    if not within:
        raise BudgetError(
            f"the plan promises {show_bytes(first.peak_bytes)}, but its compiled step held "
            f"{show_bytes(min(held))} when it ran. The budget is {show_bytes(budget)}. Raise the "
            "budget, or plan with backend='graph'.",
            peak_bytes=min(held),
            budget_bytes=budget,
            op="the compiled step",
        )
    return within


def planned(module: fx.GraphModule, inputs: list[Any], asked: Asked) -> list[Found]:
    """Plan a traced model; nothing is compiled, and the module stays as it is.

    Returns plans that keep the budget, the one reckoned fastest first; none where there is nothing
    to differentiate.
    """
    seen: dict[str, Any] = {}
    recorder = _Recorder()

    def inner(graph: fx.GraphModule, given: Sequence[Any], **told: Any) -> Any:
        context = torch._guards.TracingContext.get()
        if not told.get("is_backward"):
            first = lowered(graph, given, told)
            seen["graph"], seen["given"], seen["told"] = graph, list(given), told
            seen["lowered"] = first
            if context.output_strides is not None:
                context.output_strides.extend(first.strides)
            return lambda *_: None
        meta = context.fw_metadata
        assert meta is not None
        handed_over = len(results_of(seen["graph"])) - meta.num_forward
        compilation = Compilation(
            seen["graph"],
            graph,
            (seen["given"], list(given)[handed_over:]),
            (seen["told"], told),
            meta.num_forward,
            frozenset(meta.static_input_indices or ()),
            seen["lowered"],
        )
        planner = FusedPlanner(
            compilation,
            costs_of(seen["given"], asked),
            asked.extra,
            name=asked.name,
            other=lambda share, solver: marked(recorder.other(share, solver), compilation),
            solvers=_SOLVERS,
        )
        raise _Planned(planner.plans(asked.budget, asked.make))

    # A copy: what is found on the way is not for the compilation that follows.
    context = copy.copy(torch._guards.TracingContext.get())
    with (
        torch._guards.tracing(context),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        own = copied(module)
        try:
            compile_fx(
                own,
                inputs,
                inner_compile=inner,
                config_patches={
                    "force_disable_caches": True,
                    "custom_partitioner_fn": recorder,
                },
            )
        except _Planned as made:
            return made.found
    return []


def marked(other: Partition, like: Compilation) -> Partition:
    """Return a partition with what Inductor notes of the results of each graph."""
    key = "user_visible_output_idxs"
    _, forward, backward = other
    for module, own in ((forward, like.forward), (backward, like.backward)):
        end_of(module).meta[key] = end_of(own).meta.get(key, [])
    return other


def costs_of(inputs: Sequence[Any], asked: Asked) -> Costs:
    """Return what kernels cost where the inputs are."""
    place = next(it.device for it in inputs if isinstance(it, torch.Tensor))
    device = asked.device
    if device is None:
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            room = max(it.nbytes for it in inputs if isinstance(it, torch.Tensor))
            device = measured_device(place, room) if asked.profile else NOMINAL

    def of(step: DryStep) -> list[KernelCost]:
        steps, sizes = step.watch.steps, step.watch.nbytes
        calls = [it.call for it in steps if it.call is not None]
        recording = Recording(calls, list(sizes), [place] * len(sizes))
        costs: list[Cost] = [None] * len(calls)
        if asked.profile:
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                costs = measured_costs(recording, place)
        left = iter(costs)
        found = []
        for each in steps:
            # What Inductor writes itself has its buffers counted one by one.
            cost = None if each.call is None else next(left)
            scratch = 0 if each.call is None else scratch_of(each.call, recording, place, cost)
            found.append(KernelCost(cost and cost[0], _flops(each), scratch))
        return found

    return Costs(device, of)


def _flops(step: Step) -> float:
    if step.call is not None:
        return flops(step.call)
    assert step.kernel is not None
    each = sum(_FLOPS.get(it, _FUNCTION_FLOPS) for it in step.kernel.functions)
    # A kernel's text has its loop twice where the length is no multiple of a vector's; functions
    # are then counted twice as well.
    return each * step.elements


def _version() -> str:
    """Return a hash of this package's part in what is compiled."""
    here = Path(__file__).parent
    files = sorted(str(it) for it in here.glob("*.py"))
    return get_hash_for_files(tuple(files)).hex()


def _named(target: Any) -> str:
    """Return what a node calls, without the address that some functions have in their text."""
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _path(module: fx.GraphModule, inputs: list[Any], asked: Asked) -> Path:
    """Return where the plan of a traced model is kept: beside what Inductor keeps."""
    text = hashlib.sha256()
    # Bodies of checkpoints and the like are graphs of their own.
    graphs = [it.graph for it in module.modules() if isinstance(it, fx.GraphModule)]
    for node in (it for graph in graphs for it in graph.nodes):
        what = f"{node.op} {node.name} {_named(node.target)} {node.args} {node.kwargs}\n"
        text.update(what.encode())
    for it in (*inputs, *module.parameters(), *module.buffers()):
        if isinstance(it, torch.Tensor):
            form = it.shape, it.stride(), it.dtype, it.device, it.requires_grad
            text.update(f"{form}\n".encode())
        else:
            text.update(f"{it}\n".encode())
    for value in (
        *(inductor_config.get_hash(), functorch_config.get_hash(), torch.__version__, _version()),
        *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        *(asked.budget, asked.profile, asked.device, asked.extra, asked.words),
    ):
        text.update(f"{value!r}\n".encode())
    return Path(cache_dir()) / "sn_memory" / f"{text.hexdigest()}.json"


def _read(path: Path | None) -> Kept | None:
    """Return what was kept; None where nothing was, or it cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        program = data["program"] and Program.of(data["program"])
        graph, plan = Graph.from_json(data["graph"]), Plan.from_json(data["plan"])
        checked = bool(data["checked"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        log.info("the plan kept in %s is not read (%s); it is made anew", path, error)
        return None
    return Kept(graph, plan, program, checked)


def _write(path: Path | None, kept: Kept) -> None:
    if path is None:
        return
    program = kept.program.data() if kept.program else None
    data = {
        "graph": kept.graph.to_json(),
        "plan": kept.plan.to_json(),
        "program": program,
        "checked": kept.checked,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: other processes may read it now.
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        Path(name).replace(path)
    except OSError as error:
        log.info("the plan is not kept: %s", error)
        with suppress(OSError, UnboundLocalError):
            Path(name).unlink()
