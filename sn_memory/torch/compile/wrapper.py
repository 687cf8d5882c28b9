"""Inductor's wrapper of a graph, run on tensors without values: its kernels and its memory.

The wrapper is straight-line Python that allocates buffers, calls kernels and deletes names. Run on
fake tensors, with kernels that do nothing, Python itself frees each storage when the real run
would. So aliases, reuse of buffers and early releases are those of the compiled step, not a model
of them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from ..trace.record import Call, form_of, is_view, written
from .torch_inductor import async_compile

_ASSIGNED = re.compile(r"^(\s+)(\w+) = (.*?)(; del \w+)?(\s+# reuse)?$")
_SIGNATURE = re.compile(r"void\s+\w+\((.*?)\)", re.DOTALL)
# What a kernel calls per element beside arithmetic, in its C++ text.
_FUNCTIONS = re.compile(
    r"\.(exp|exp_u20|erf|erfc|tanh|log|log1p|pow|sin|cos|sqrt|rsqrt|expm1|sigmoid|igamma)\("
    r"|(randn_cpu|normalized_rand_cpu|randint64_cpu)\("
)


@dataclass(frozen=True)
class Kernel:
    """A fused kernel as the wrapper calls it.

    Parameters
    ----------
    name
        As `cpp_fused_gelu_1`.
    roles
        Per argument `in`, `out` or `in_out`; empty for what is no pointer.
    functions
        Functions that it calls per element, each as often as it stands in its text.
    """

    name: str
    roles: tuple[str, ...]
    functions: tuple[str, ...]


@dataclass
class Value:
    """What a storage holds from one write to the next reuse.

    Parameters
    ----------
    storage
        The number of the storage.
    names
        Buffers of the wrapper that hold it.
    """

    storage: int
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One call of a kernel.

    Parameters
    ----------
    name
        Of the kernel or the op.
    reads, makes, writes
        Numbers of values: read; new with this call; there before and changed.
    traffic_bytes
        Bytes of all tensors it is given.
    call
        For an op of torch, the call; None for a fused kernel.
    kernel
        For a fused kernel, what it is.
    elements
        Of the largest tensor it is given.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    traffic_bytes: int
    call: Call | None
    kernel: Kernel | None
    elements: int


class Watch(TorchDispatchMode):
    """Runs wrappers on fake tensors and keeps what they do.

    Attributes
    ----------
    values
        All that storages held, in order.
    nbytes
        Per storage its bytes.
    steps
        Calls of kernels, in order.
    events
        In order: ("new", storage), ("gone", storage), ("step", number of the step).
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self.steps: list[Step] = []
        self.events: list[tuple[str, int]] = []
        self._number: dict[int, int] = {}
        self._held: dict[int, Any] = {}
        # Per storage the value it holds, and, where it was reused and not yet written, the one
        # before.
        self.now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._silent = False

    def meet(self, tensor: torch.Tensor, *, fresh: bool = False) -> int:
        """Return the number of a tensor's storage; `fresh`: nothing was written to it yet."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._number:
            number = self._number[key] = len(self.nbytes)
            self.nbytes.append(memory.nbytes())
            self.events.append(("new", number))
            self._value(number)
            if fresh:
                self._fresh.add(number)

            def gone(_: Any) -> None:
                del self._held[key], self._number[key]
                self.events.append(("gone", number))

            self._held[key] = weakref.ref(memory, gone)
        return self._number[key]

    def value(self, tensor: torch.Tensor) -> int:
        """Return the number of the value that a tensor holds."""
        return self.now[self.meet(tensor)]

    def _value(self, storage: int) -> None:
        self.now[storage] = len(self.values)
        self.values.append(Value(storage))

    def named(self, name: str, made: Any, *, reused: bool) -> None:
        """Note that a name of the wrapper stands for a tensor."""
        if not isinstance(made, torch.Tensor):
            return
        storage = self.meet(made)
        if reused and storage not in self._fresh:
            self._before[storage] = self.now[storage]
            self._value(storage)
            self._fresh.add(storage)
        self.values[self.now[storage]].names.append(name)

    def fused(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Note a call of a fused kernel."""
        reads: dict[int, None] = {}
        makes: dict[int, None] = {}
        writes: dict[int, None] = {}
        tensors = []
        for arg, role in zip(args, kernel.roles, strict=False):
            if not isinstance(arg, torch.Tensor):
                continue
            tensors.append(arg)
            storage = self.meet(arg)
            if "in" in role.split("_"):
                if storage not in self._fresh:
                    reads[self.now[storage]] = None
                elif storage in self._before:
                    reads[self._before[storage]] = None
            if "out" in role:
                (makes if storage in self._fresh else writes)[self.now[storage]] = None
        for value in makes:
            storage = self.values[value].storage
            self._fresh.discard(storage)
            self._before.pop(storage, None)
        self._step(kernel.name, reads, makes, writes, tensors, kernel=kernel)

    # Of these it meets ops that run with a generator's state kept or set back.
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is run_and_save_rng_state:
            op, *rest = args
            shape = torch.get_rng_state().shape
            sized = torch.ops.aten.empty.memory_format
            state = self._called(sized, (shape,), {"dtype": torch.uint8, "device": "cpu"})
            return state, self._called(op, tuple(rest), kwargs)
        if func is run_with_rng_state:
            state, op, *rest = args
            return self._called(op, tuple(rest), kwargs, [state])
        if self._silent or func.namespace == "prim":
            return func(*args, **kwargs)
        return self._called(func, args, kwargs)

    def _called(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        beside: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Run a call on fake tensors and note it; it reads tensors `beside` its arguments, too."""
        known = len(self.values)
        flat, spec = tree_flatten((args, kwargs))
        given = [*(it for it in flat if isinstance(it, torch.Tensor)), *beside]
        before = {self.meet(it): self.value(it) for it in given}
        views = tuple(
            form_of(it, self.meet(it)) if isinstance(it, torch.Tensor) else it for it in flat
        )
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        made = [it for it in leaves if isinstance(it, torch.Tensor)]
        # A gradient that is not wanted has its place as well.
        outputs = tuple(
            form_of(it, self.meet(it)) if isinstance(it, torch.Tensor) else None for it in leaves
        )
        changed = written(func, views, spec)
        new = range(known, len(self.values))
        if not new and not changed and is_view(views, outputs):
            return result
        makes = dict.fromkeys(new)
        writes: dict[int, None] = {}
        for storage in changed:
            if storage in self._fresh:
                self._fresh.discard(storage)
                self._before.pop(storage, None)
                makes[self.now[storage]] = None
            else:
                writes[self.now[storage]] = None
        reads = dict.fromkeys(it for it in before.values() if it not in makes)
        storages = tuple(dict.fromkeys(self.values[it].storage for it in makes))
        random = torch.Tag.nondeterministic_seeded in func.tags
        call = Call(func, views, spec, outputs, storages, changed, "forward", random)
        self._step(call.name, reads, makes, writes, [*given, *made], call=call)
        return result

    def _step(
        self,
        name: str,
        reads: dict[int, None],
        makes: dict[int, None],
        writes: dict[int, None],
        tensors: list[torch.Tensor],
        *,
        call: Call | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self.events.append(("step", len(self.steps)))
        sizes = [min(it.nbytes, it.untyped_storage().nbytes()) for it in tensors]
        elements = max((it.numel() for it in tensors), default=0)
        self.steps.append(
            Step(
                name, tuple(reads), tuple(makes), tuple(writes), sum(sizes), call, kernel, elements
            )
        )

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Note nothing inside: for tensors that are there, and those that are allocated."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def run(self, text: str, inputs: list[Any]) -> Any:
        """Run a wrapper's text on fake tensors; the list of inputs is emptied, as by the real one.

        To be called with this mode, and the fake tensors' own, switched on.
        """
        space: dict[str, Any] = {"__name__": "dry"}
        with _kernels_that_do_nothing(self):
            exec(compile(_followed(text), "<wrapper>", "exec"), space)
        for name, made in space.items():
            if isinstance(made, _Fused):
                made.kernel = replace(made.kernel, name=name)
        space["_named"] = self.named
        space["assert_size_stride"] = space["assert_alignment"] = lambda *_: None
        space["reinterpret_tensor"] = torch.as_strided
        space["empty_strided_cpu"] = self._allocator("cpu")
        space["empty_strided_cuda"] = self._allocator("cuda")
        return space["call"](inputs)

    def _allocator(self, device: str) -> Callable[..., torch.Tensor]:
        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            with self.silent():
                made = torch.empty_strided(size, stride, dtype=dtype, device=device)
            self.meet(made, fresh=True)
            return made

        return allocate


class _Fused:
    """Stands for a compiled kernel and does nothing but say that it was called."""

    def __init__(self, watch: Watch, kernel: Kernel) -> None:
        self.watch, self.kernel = watch, kernel

    def __call__(self, *args: Any) -> None:
        self.watch.fused(self.kernel, args)


def _followed(text: str) -> str:
    """Return a wrapper that says which name stands for which tensor."""
    lines, inside = [], False
    for line in text.splitlines():
        # Only the function that runs: the rest defines kernels.
        if line.lstrip().startswith("def "):
            inside = line.lstrip().startswith(("def call(", "def partition_"))
        found = _ASSIGNED.match(line) if inside else None
        if found is None:
            lines.append(line)
            continue
        indent, name, made, deleted, reused = found.groups()
        lines.append(f"{indent}{name} = {made}")
        lines.append(f"{indent}_named({name!r}, {name}, reused={bool(reused)})")
        if deleted:
            lines.append(f"{indent}{deleted[2:]}")
    return "\n".join(lines)


@contextmanager
def _kernels_that_do_nothing(watch: Watch) -> Iterator[None]:
    def kernel(self: Any, types: Sequence[str], source: str) -> _Fused:
        signature = _SIGNATURE.search(source)
        assert signature is not None
        names = [it.split()[-1] for it in signature[1].split(",")]
        roles = tuple(re.sub(r"_ptr\d+$", "", it) if "_ptr" in it else "" for it in names)
        functions = tuple(a or b for a, b in _FUNCTIONS.findall(source))
        return _Fused(watch, Kernel("", roles, functions))

    owner: Any = async_compile.AsyncCompile
    before = owner.cpp_pybinding
    owner.cpp_pybinding = kernel
    try:
        yield
    finally:
        owner.cpp_pybinding = before
