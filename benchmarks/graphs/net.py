"""A tape: records forward ops, derives backward ops, and makes a `sn_memory.Graph`.

A training graph needs more than a layer table: what each layer keeps for its backward pass, which
gradients are summed where a tensor was read twice, and which buffers are views of each other. The
layer functions (layers.py, sequence.py) say the first; this file does the rest the way an eager
framework does: gradients in reverse order, summed in place when nobody else holds the buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sn_memory import Device, Graph, Op, Storage, Workspace

from .device import V100_LIKE


@dataclass(frozen=True, eq=False)
class Tensor:
    """A shaped view of a storage. Two tensors of one storage: a view, or an in-place result."""

    net: Net
    storage: str
    shape: tuple[int, ...]
    itemsize: int = 4
    needs_grad: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass
class Net:
    """A training step under construction.

    Parameters
    ----------
    name : str
        Of the model; goes into the graph.
    batch : int
        Samples per step.
    inplace_relu : bool
        ReLU overwrites its input, as torchvision's models do.
    granularity : "op" or "call"
        "op": one op for each op of a framework, one backward op for it. "call": one for each call
        that a framework makes to its libraries: the gradients of weight and input are two calls,
        batch norm is statistics and then normalisation, ReLU's backward works on the gradient in
        place where nobody else holds it.
    gradients : "fresh" or "buffers"
        Gradients of parameters are made by the backward pass and live until the update, or are
        buffers that are always there (`zero_grad(set_to_none=False)`, the flat buckets of data
        parallel training), and backward ops write into them, as library calls with beta = 1 do.
    workspaces : bool
        Convolutions offer several algorithms with their workspaces; else one without.
    early_update : bool
        Each layer is updated as soon as its gradient is complete; else all at the end.
    device : Device
        Prices the ops by its roofline.
    """

    name: str
    batch: int
    inplace_relu: bool = False
    granularity: str = "op"
    gradients: str = "fresh"
    workspaces: bool = False
    early_update: bool = False
    device: Device = V100_LIKE
    storages: dict[str, Storage] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    parameters: dict[str, list[Tensor]] = field(default_factory=dict)
    _tape: list[tuple[Tensor, Callable[[str], None]]] = field(default_factory=list)
    _grads: dict[Tensor, str] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _phase: str = "forward"

    def __post_init__(self) -> None:
        for name, known in (("granularity", ("op", "call")), ("gradients", ("fresh", "buffers"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {known}")

    @property
    def by_call(self) -> bool:
        return self.granularity == "call"

    def layer(self, kind: str) -> str:
        """Return a fresh name for a layer of this kind."""
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind]}"

    def input(self, *shape: int, itemsize: int = 4, name: str = "input") -> Tensor:
        """Return a tensor that the step is given, e.g. the batch; it has no gradient."""
        storage = self._store(name, math.prod(shape) * itemsize, "input")
        return Tensor(self, storage, shape, itemsize, needs_grad=False)

    def parameter(self, layer: str, name: str, *shape: int) -> Tensor:
        """Return a trained tensor of a layer."""
        storage = self._store(f"{layer}.{name}", 4 * math.prod(shape), "parameter")
        tensor = Tensor(self, storage, shape)
        self.parameters.setdefault(layer, []).append(tensor)
        return tensor

    @property
    def parameter_count(self) -> int:
        return sum(p.size for group in self.parameters.values() for p in group)

    @property
    def forward_flops(self) -> float:
        """Arithmetic of the forward pass; a multiply-add counts two."""
        return sum(op.flops for op in self.ops if op.phase == "forward")

    def new(self, name: str, *shape: int, itemsize: int = 4, needs_grad: bool = True) -> Tensor:
        """Return a tensor that an op is about to create."""
        storage = self._store(name, math.prod(shape) * itemsize, "activation")
        return Tensor(self, storage, shape, itemsize, needs_grad)

    def view(self, x: Tensor, *shape: int) -> Tensor:
        """Return the same storage under another shape; no op runs, in either direction."""
        if math.prod(shape) != x.size:
            raise ValueError(f"cannot view {x.shape} as {shape}: the sizes differ")
        out = Tensor(self, x.storage, shape, x.itemsize, x.needs_grad)
        self.record(out, lambda grad: self.send(x, grad))
        return out

    def run(
        self,
        name: str,
        kind: str,
        reads: Sequence[Tensor | str],
        makes: Sequence[Tensor | str] = (),
        changes: Sequence[Tensor | str] = (),
        *,
        flops: float = 0.0,
        traffic: float | None = None,
        random: bool = False,
        workspaces: tuple[Workspace, ...] = (),
    ) -> None:
        """Append an op. Without `traffic` every operand crosses the memory bus once."""
        read, created, changed = (
            tuple(dict.fromkeys(x.storage if isinstance(x, Tensor) else x for x in group))
            for group in (reads, makes, changes)
        )
        if traffic is None:
            # What is changed in place is both read and written.
            moved = (*read, *created, *changed, *(set(changed) - set(read)))
            traffic = sum(self.storages[storage].bytes for storage in moved)
        self.ops.append(
            Op(
                name,
                read,
                created,
                changed,
                kind=kind,
                phase=self._phase,
                flops=float(flops),
                traffic_bytes=int(traffic),
                random=random,
                workspaces=workspaces if self.workspaces else (),
            )
        )

    def record(self, out: Tensor, backward: Callable[[str], None]) -> None:
        """Say what to do with the gradient of `out`, once it is known."""
        if out.needs_grad:
            self._tape.append((out, backward))

    def grad(self, x: Tensor, layer: str) -> str:
        """Return a storage for a gradient of `x` that an op is about to create."""
        return self._store(f"{layer}.d({x.storage})", x.size * 4, "gradient")

    def back(
        self,
        layer: str,
        kind: str,
        reads: Sequence[Tensor | str],
        wanted: Sequence[Tensor],
        *,
        flops: float,
        traffic: float,
        workspaces: tuple[Workspace, ...] = (),
    ) -> None:
        """Append a backward op that makes the gradients of `wanted`, and send them."""
        # Only parameters have buffers; what is summed from several readers has none.
        known = {p for group in self.parameters.values() for p in group}
        created, changed = [], []
        for x in wanted:
            if self.gradients == "buffers" and x in known:
                changed.append((x, self._store(f"{x.storage}.grad", x.nbytes, "state")))
            else:
                created.append((x, self.grad(x, layer)))
        self.run(
            layer, kind, reads, [g for _, g in created], [g for _, g in changed],
            flops=flops, traffic=traffic, workspaces=workspaces,
        )  # fmt: skip
        for x, grad in (*changed, *created):
            self.send(x, grad)

    def owned(self, grad: str) -> bool:
        """Whether nobody else waits for a gradient, so that it may be overwritten."""
        return grad not in self._grads.values()

    def send(self, x: Tensor, grad: str) -> None:
        """Add a gradient to what `x` has received so far."""
        if not x.needs_grad:
            return
        held = self._grads.get(x)
        if held is None:
            self._grads[x] = grad
            return
        name = self.layer("sum")
        if sum(other == held for other in self._grads.values()) == 1:
            self.run(name, "add", [held, grad], changes=[held], flops=x.size)
        else:
            # A join handed one gradient to both of its inputs; the other still needs it.
            total = self._grads[x] = self.grad(x, name)
            self.run(name, "add", [held, grad], [total], flops=x.size)

    def finish(self, loss: Tensor, optimizer: str = "sgd") -> Net:
        """Append the backward pass of `loss` and the update: "sgd", "momentum", "adam" or "none".

        Gradients live until the update at the end, as they do under a framework's optimizer, or
        are used up as soon as they are complete (`early_update`).
        """
        self._keep(loss.storage)
        self._phase = "backward"
        seed = self.grad(loss, "seed")
        self.run("seed", "fill", [], [seed])
        self.send(loss, seed)
        waiting = dict(self.parameters)
        for out, backward in reversed(self._tape):
            grad = self._grads.pop(out, None)
            if grad is None:
                continue
            start = len(self.ops)
            backward(grad)
            for layer in [op.name.partition(".back")[0] for op in self.ops[start:]]:
                if self.early_update and layer in waiting:
                    self._update(layer, waiting.pop(layer), optimizer)
        self._tape.clear()
        for layer, group in waiting.items():
            self._update(layer, group, optimizer)
        return self

    def _update(self, layer: str, group: list[Tensor], optimizer: str) -> None:
        grads = [self._grads.pop(p) for p in group]
        if optimizer == "none":
            for grad in grads:
                if not self.storages[grad].resident:
                    self._keep(grad)
            return
        moments = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
        nbytes = sum(p.nbytes for p in group)
        states = [self._store(f"{layer}.m{i}", nbytes, "state") for i in range(moments)]
        before, self._phase = self._phase, "update"
        traffic = (3 + 2 * moments) * nbytes
        self.run(f"{layer}.step", "update", grads, (), [*group, *states], traffic=traffic)
        self._phase = before

    def graph(self) -> Graph:
        """Return the finished step for planning."""
        return Graph(list(self.storages.values()), self.ops, name=self.name, device=self.device)

    def _keep(self, storage: str) -> None:
        self.storages[storage] = replace(self.storages[storage], keep=True)

    def _store(self, name: str, nbytes: int, role: str) -> str:
        if name in self.storages:
            raise ValueError(f"there is a storage named {name!r} already; give another name")
        self.storages[name] = Storage(name, nbytes, role)
        return name
