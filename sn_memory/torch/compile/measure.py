"""Compiled steps: what no partition holds less than, and what each computes, holds, and takes.

A step is run as training runs it, on tensors that share the memory of parameters but are none, so
that no gradient and no hook of the model is met. What the step writes to is handed over as a copy.

The floor: when a step ends, its results are all there. And matrix products, convolutions and
attention are kernels of their own in every partition: while one runs, its operands and its result
are in buffers, beside what is resident and the results that it is computed from, which nothing
makes twice. The largest of these sums is what no partition holds less than.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..model.step import restore_rng_state
from ..model.tracker import AllocationTracker
from ..target.accelerator import synchronize
from ..trace.op_seconds import clock_of
from .partitioner import Partition, Run, results_of

# The tensors among an op's first arguments that it reads from memory, and that Inductor fuses with
# nothing. What is added to a product may be the buffer of its result, so it is not counted.
_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3, 4),
}
# Inductor takes out those of these that change no number: the result is then the operand's buffer.
_MAY_BE_NOTHING = frozenset(
    ("_to_copy", "_unsafe_view", "add", "cat", "ceil", "clone", "constant_pad_nd", "copy", "div")
    + ("convert_element_type", "device_put", "floor", "lift_fresh", "mul", "pow", "repeat", "round")
    + ("slice_scatter", "sub", "trunc")
)


class _Held:
    """Buffers that are there at one moment; several tensors in one buffer count as the largest."""

    def __init__(self, passed: dict[fx.Node, fx.Node]) -> None:
        self.passed = passed
        self.sizes: dict[fx.Node, int] = {}

    def copy(self) -> _Held:
        twin = _Held(self.passed)
        twin.sizes = dict(self.sizes)
        return twin

    def add(self, node: Any) -> None:
        """Add what a node returns, a tensor or several."""
        if not isinstance(node, fx.Node):
            return
        val = node.meta.get("val")
        if isinstance(val, (tuple, list)):
            for user in node.users:
                if user.target is operator.getitem:
                    self.add(user)
        elif isinstance(val, torch.Tensor):
            root = _root(node, self.passed)
            self.sizes[root] = max(self.sizes.get(root, 0), _own_bytes(val))

    def bytes(self, resident: set[fx.Node]) -> int:
        return sum(size for node, size in self.sizes.items() if node not in resident)


def floor_bytes(partition: Partition, base_bytes: int) -> tuple[int, str]:
    """Return bytes that every partition of a step holds at some moment, and when that is.

    partition : one of them. What its forward graph returns to the caller, and the gradients that
        the caller gives for that, are held until the step ends.
    base_bytes : what is resident: parameters, buffers, inputs.

    Returns
    -------
    The bytes, and the name of the node that runs then; empty: the step ends.
    """
    forward, backward = partition.forward, partition.backward
    handed = results_of(forward)[partition.outputs :]
    placeholders = list(backward.graph.find_nodes(op="placeholder"))
    passed = dict(zip(placeholders, handed, strict=False))
    resident = set(forward.graph.find_nodes(op="placeholder"))
    best, what = 0, ""
    always = _Held(passed)
    for module, results in ((forward, partition.results()), (backward, results_of(backward))):
        # Of the backward graph what needs a gradient: the rest may run in the forward pass, where
        # another partition is torch's.
        late = set(placeholders[len(handed) :]) if module is backward else None
        for late_input in late or ():
            always.add(late_input)
        for node, needed in _needed_results(module, results):
            if late is not None and late.intersection(node.all_input_nodes):
                late.add(node)
            if not _is_own_kernel(node) or (late is not None and node not in late):
                continue
            held = always.copy()
            for operand in (*needed, *(node.args[at] for at in _OPERANDS[_name(node)]), node):
                held.add(operand)
            if held.bytes(resident) > best:
                best, what = held.bytes(resident), node.name
        for operand in results:
            always.add(operand)
        if always.bytes(resident) > best:
            best, what = always.bytes(resident), ""
    return base_bytes + best, what


def _is_own_kernel(node: fx.Node) -> bool:
    """Whether a node runs as a kernel that Inductor fuses with nothing."""
    places = _OPERANDS.get(_name(node))
    if places is None:
        return False
    # A product with a row or a column of one element may be a sum inside a fused kernel.
    operands = [node.args[at] for at in places]
    return not _name(node).endswith("mm") or all(
        1 not in operand.meta["val"].shape[-2:]
        for operand in operands
        if isinstance(operand, fx.Node)
    )


def _needed_results(
    module: fx.GraphModule, results: Sequence[Any]
) -> Iterable[tuple[fx.Node, list[fx.Node]]]:
    """Yield each node with those results that it is computed from."""
    wanted = {result for result in results if isinstance(result, fx.Node)}
    below: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in module.graph.nodes:
        needed: set[fx.Node] = set()
        for source in node.all_input_nodes:
            needed |= below[source]
            if source in wanted:
                needed.add(source)
        below[node] = frozenset(needed)
        yield node, list(needed)


def _root(node: fx.Node, passed: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node whose buffer a node's tensor may lie in."""
    while True:
        if node in passed and isinstance(passed[node], fx.Node):
            node = passed[node]
        elif _is_other_look(node):
            node = node.all_input_nodes[0]
        else:
            return node


def _is_other_look(node: fx.Node) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return _is_other_look(node.all_input_nodes[0])
    if _name(node) in _MAY_BE_NOTHING:
        result, source = (tensor.meta["val"] for tensor in (node, node.all_input_nodes[0]))
        return result.numel() == source.numel() and result.dtype == source.dtype
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(output.alias_info is not None for output in schema.returns)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _own_bytes(val: torch.Tensor) -> int:
    """Bytes of a tensor's elements, each place once."""
    count = 1
    for size, stride in zip(val.size(), val.stride(), strict=True):
        count *= int(size) if stride else 1
    return min(count * val.element_size(), val.untyped_storage().nbytes()) if val.numel() else 0


# Rounds that are timed; fewer once so many seconds are spent. With seven, of two steps of 27 ms on
# a busy machine the one that takes 2 % longer was taken.
ROUNDS = 30
_MOST_S = 10.0


@dataclass(frozen=True)
class MeasuredStep:
    """Results of a step by name, its peak, and what was running then."""

    results: dict[str, torch.Tensor | None]
    peak_bytes: int
    peak_op: str


def measured_step(run: Run, inputs: Sequence[Any]) -> MeasuredStep:
    """Run a step once, always with the same random numbers, and count what it holds.

    run : a compiled forward pass
    inputs : parameters, buffers and inputs, as a back end is given them: real ones. They count.
    """
    with _apart():
        torch.manual_seed(0)
        inputs_now = _given(inputs)
        known = [tensor for tensor in inputs_now if isinstance(tensor, torch.Tensor)]
        tracker = AllocationTracker(known, kernels=True, device=device_of(inputs))
        with tracker:
            outputs = _step(run, inputs_now)
        results = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
        for place, tensor in enumerate(inputs_now):
            if isinstance(tensor, torch.Tensor):
                name = f"gradient of {place}" if tensor.requires_grad else f"buffer {place}"
                results[name] = tensor.grad if tensor.requires_grad else tensor
    return MeasuredStep(results, tracker.peak_bytes, tracker.peak_op)


def step_seconds(runs: Sequence[Run], inputs: Sequence[Any], *, rounds: int) -> list[float]:
    """Return the least seconds that a step of each took, of rounds in which they alternate.

    runs, inputs : as in `measured_step`
    rounds : how many count, behind one that does not
    """
    device = device_of(inputs)
    clock = clock_of(device)
    least = [float("inf")] * len(runs)
    began = time.perf_counter()
    with _apart():
        for number in range(rounds + 1):
            for at, run in enumerate(runs):
                inputs_now = _given(inputs)
                synchronize(device)
                start = clock()
                _step(run, inputs_now)
                synchronize(device)
                if number:
                    least[at] = min(least[at], clock() - start)
            if number and time.perf_counter() - began > _MOST_S:
                break
    return least


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return where a step runs: where its first tensor is."""
    return next(value.device for value in inputs if isinstance(value, torch.Tensor))


@contextmanager
def _apart() -> Iterator[None]:
    # torch.compile calls a back end under fake tensors.
    with _disable_current_modes(), restore_rng_state(), torch.enable_grad():
        yield


def _given(inputs: Sequence[Any]) -> list[Any]:
    # Statistics of batch norms are written to; what needs a gradient is not.
    return [
        value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.requires_grad
        else value.detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    ]


def _step(run: Run, inputs: Sequence[Any]) -> list[torch.Tensor]:
    outputs = [tensor for tensor in run(*inputs) if isinstance(tensor, torch.Tensor)]
    ends = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return outputs
