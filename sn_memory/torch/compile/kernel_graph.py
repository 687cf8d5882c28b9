"""The kernels of a compiled step as a graph: what fusion left, with the buffers it left.

Values inside a fused region are in no buffer, so they are in no graph. A value of the forward pass
is a storage of its own even where its buffer is used again, for it may be made a second time where
the buffer is not free. In the backward pass, where nothing runs twice, a buffer is one storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graph.graph import Graph
from ...graph.records import Device, Op, Storage, Workspace
from ...run.loss import loss_op
from .dry_step import DryStep
from .wrapper import Step


@dataclass(frozen=True)
class KernelGraph:
    """The graph, and what its names stand for.

    Parameters
    ----------
    graph
        Ops are the kernels in order, with the op `loss` between the passes.
    step_of
        Name of an op to the number of its step; `loss` has none.
    values_of
        Name of a storage to the numbers of the values it holds.
    """

    graph: Graph
    step_of: dict[str, int]
    values_of: dict[str, list[int]]


@dataclass(frozen=True)
class KernelCost:
    """Seconds of a kernel where they are known, else its arithmetic; bytes of its scratch."""

    seconds: float | None
    flops: float
    scratch_bytes: int


def kernel_graph(
    step: DryStep,
    *,
    name: str,
    inputs: Sequence[str],
    roles: Sequence[str],
    device: Device,
    costs: Sequence[KernelCost],
    once: frozenset[int] = frozenset(),
    extra: Sequence[Storage] = (),
    allocator: str = "none",
    by_value: bool = True,
    names: Mapping[int, str] | None = None,
) -> KernelGraph:
    """Return the graph of a step.

    Parameters
    ----------
    inputs, roles
        Per placeholder of the forward graph, its name, and `parameter` or `input`.
    device, costs
        Speeds for the roofline, and what each kernel costs.
    once
        Kernels of the forward pass that may not run twice.
    extra
        Resident storages that are no part of the step.
    by_value
        Whether values of the forward pass are storages of their own; else buffers are, so that the
        peak is that of the step as it stands.
    """
    watch, boundary = step.watch, step.boundary
    resident = {watch.values[it].storage for it in step.inputs if it is not None}
    maker: dict[int, int] = {}
    for at, each in enumerate(watch.steps):
        for value in each.makes:
            maker.setdefault(value, at)
    apart = {
        value
        for value, it in enumerate(watch.values)
        if by_value and it.storage not in resident and maker.get(value, boundary) < boundary
    }
    text: dict[int, str] = {}
    held: dict[str, list[int]] = {}
    by_storage: dict[int, str] = {}
    given = {
        watch.values[value].storage: (inputs[at], roles[at])
        for at, value in reversed(list(enumerate(step.inputs)))
        if value is not None
    }
    taken: set[str] = {it.name for it in extra}

    def unique(word: str) -> str:
        chosen, count = word, 1
        while chosen in taken:
            count += 1
            chosen = f"{word} ({count})"
        taken.add(chosen)
        return chosen

    for value, it in enumerate(watch.values):
        if value not in maker and it.storage not in resident and value not in step.output_gradients:
            continue  # a name for a buffer that is not written
        if value not in apart and it.storage in by_storage:
            text[value] = by_storage[it.storage]
        else:
            if it.storage in given:
                word = given[it.storage][0]
            elif value in step.output_gradients:
                word = f"gradient of output {step.output_gradients.index(value)}"
            else:
                phase = "forward" if maker[value] < boundary else "backward"
                word = f"{phase}/{it.names[0] if it.names else value}"
            text[value] = unique(word)
            if value not in apart:
                by_storage[it.storage] = text[value]
        held.setdefault(text[value], []).append(value)
    returned = {text[it] for it in step.returned if it is not None and it in text}
    ends = {text[it] for it in step.gradients if it is not None and it in text}
    tangents = [text[it] for it in step.output_gradients]
    storages = []
    for word, values in held.items():
        storage = watch.values[values[0]].storage
        size = watch.nbytes[storage]
        if storage in given:
            storages.append(Storage(word, size, given[storage][1]))
            continue
        late = maker.get(values[0], boundary) >= boundary
        keep = word in returned or word in ends or word in tangents
        storages.append(Storage(word, size, "gradient" if late else "activation", keep))
    ops: list[Op] = []
    step_of: dict[str, int] = {}
    made: set[str] = {it.name for it in storages if it.resident} | set(tangents)
    for at, each in enumerate(watch.steps):
        if at == boundary:
            ops.append(loss_op(sorted(returned), tangents))
        word = f"{'forward' if at < boundary else 'backward'}/{each.name}#{at}"
        step_of[word] = at
        ops.append(_op(each, at, word, text, made, step, costs[at], at in once))
    if len(watch.steps) == boundary:
        ops.append(loss_op(sorted(returned), tangents))
    graph = Graph([*storages, *extra], ops, name=name, device=device, allocator=allocator)
    return KernelGraph(graph, step_of, held)


def _op(
    each: Step,
    at: int,
    word: str,
    text: Mapping[int, str],
    made: set[str],
    step: DryStep,
    cost: KernelCost,
    once: bool,
) -> Op:
    forward = at < step.boundary
    touched = dict.fromkeys(text[it] for it in (*each.makes, *each.writes) if it in text)
    outputs = [it for it in touched if it not in made]
    # What a model's own buffers are set to has no place in a plan: a kernel that runs again is
    # written without it.
    residents = {text[it] for it in step.inputs if it is not None and it in text}
    writes = [it for it in touched if it in made and it not in residents]
    made.update(outputs)
    reads = dict.fromkeys(text[it] for it in each.reads if it in text)
    random = each.call is not None and each.call.random
    return Op(
        word,
        tuple(it for it in reads if it not in outputs),
        tuple(outputs),
        tuple(writes),
        kind=each.name,
        phase="forward" if forward else "backward",
        seconds=cost.seconds,
        flops=cost.flops if cost.seconds is None else 0.0,
        traffic_bytes=each.traffic_bytes,
        workspaces=(Workspace(cost.scratch_bytes),) if cost.scratch_bytes else (),
        random=random,
        effect=not outputs and not writes,
        once=once or random,
    )
