"""Recording of what torch runs below autograd, as calls on storages.

FX graphs name tensors, and make_fx or AOTAutograd functionalize in-place ops; then neither the
memory nor the bits are those of the eager run. Here a dispatch mode records each call as it reaches
the kernels, in forward and backward pass, and each tensor as a *view*: a storage with size, stride
and offset. View ops cost nothing and are not calls; views are recreated where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import SEEDS, TraceError
from ..model.results import Form
from ..model.snapshot import named_arguments, written_arguments, written_to
from ..target.accelerator import asked_for_device

# torch conjugates and negates lazily: by a bit of the tensor, resolved by the kernel that reads it.
# A View has no such bit, so the result is computed immediately.
_MADE_AT_ONCE = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
# These read no values of their first argument; recorded with it, they would keep it alive.
_FORM_ONLY = {
    getattr(torch.ops.aten, name)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
}
# Tagged as random, but they draw nothing: they take the seed and offset that the forward call
# returned, so they are not random ops of the backward pass, which would be refused.
_SEED_GIVEN = {
    getattr(torch.ops.aten, name)
    for kind in ("cudnn", "flash", "efficient")
    if hasattr(torch.ops.aten, name := f"_scaled_dot_product_{kind}_attention_backward")
}
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
MASK = 10  # index of `output_mask`: the requested gradients, of input, weight and bias


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a storage: the arguments of `as_strided`."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Size, stride and dtype, by which kernels are selected; without the offset."""
        return self.size, self.stride, self.dtype

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is this view of its storage, whichever that is."""
        return (
            tensor.size() == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.dtype == self.dtype
        )


def form_of(tensor: torch.Tensor, storage: int) -> View:
    """Return the View of a tensor, given the number of its storage."""
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    return View(storage, size, stride, int(tensor.storage_offset()), tensor.dtype)


@lru_cache(maxsize=1 << 12)
def _one_of(spec: Any) -> Any:
    return spec


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Like `tree_flatten`, but equal specifications are the same object: a deep net has few."""
    flat, spec = tree_flatten(tree)
    return flat, _one_of(spec)


# Observed layouts of kernels: the forms of the results, by the forms of the arguments.
Layouts = dict[Hashable, tuple[View | None, ...]]


def layout_key(func: Any, flat: Sequence[Any]) -> Hashable:
    """Key for the layout of a kernel's results: the forms of its arguments, not their values."""
    return str(func), *(arg.form if isinstance(arg, View) else repr(arg) for arg in flat)


def convolution_parts(flat: Sequence[Any], spec: Any) -> list[tuple[list[bool], list[Any], Any]]:
    """Return the two calls into which a replay splits `convolution_backward`: mask, flat, spec.

    Weight and bias first, then the input; empty if only one of them is requested.
    """
    args, kwargs = tree_unflatten(list(flat), spec)
    wanted = list(args[MASK])
    if not wanted[0] or not any(wanted[1:]):
        return []
    masks = [False, *wanted[1:]], [True, False, False]
    trees = [((*args[:MASK], mask, *args[MASK + 1 :]), kwargs) for mask in masks]
    return [(mask, *flattened(tree)) for mask, tree in zip(masks, trees, strict=True)]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel.

    target : the overload, e.g. `torch.ops.aten.mul.Tensor`
    flat, spec : arguments, flattened; tensors as View
    outputs : per flat output: its View, or None if it is not a tensor
    makes, writes : storages that this call creates; storages that it changes
    phase : `forward` or `backward`
    random : whether it draws from torch's random number generator
    scope : path of the module that ran it, e.g. `layer1.0.conv1`; empty in the backward pass
    """

    target: Any
    flat: tuple[Any, ...]
    spec: Any
    outputs: tuple[View | None, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    phase: str
    random: bool
    scope: str = ""

    @property
    def name(self) -> str:
        """Name of the op without its overload, e.g. `convolution_backward`."""
        return str(self.target.overloadpacket.__name__)

    @property
    def views(self) -> list[View]:
        """Its arguments that are tensors, in order."""
        return [arg for arg in self.flat if isinstance(arg, View)]

    @property
    def reads(self) -> tuple[int, ...]:
        """Storages among its arguments, each once."""
        return tuple(dict.fromkeys(view.storage for view in self.views))

    def arguments(self, tensor_of: Callable[[View], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with each view replaced by `tensor_of` of it."""
        flat = [tensor_of(arg) if isinstance(arg, View) else arg for arg in self.flat]
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs


@dataclass
class Recording:
    """Calls in order, and the storages they work on.

    nbytes, device : per storage
    roles : role of each storage that existed before the first call
    constants : those of these storages that only the recording holds, with their tensors
    """

    calls: list[Call] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    device: list[torch.device] = field(default_factory=list)
    roles: dict[int, str] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """The calls of a training step, and the roles of storages.

    boundary : number of calls that belong to the forward pass; the loss comes after those.
    parameters, buffers : path and View of each; of several paths to the same tensor the first.
    inputs : View per flat input, None if it is not a tensor
    outputs : per flat output: its View, or the value itself if it is not a tensor.
    output_form : structure that the model returns, filled with the flat outputs
    differentiable : per flat output, whether it may receive a gradient
    output_gradients : view of the gradient of each output at which the backward pass begins, in the
        layout that this pass expects
    gradients : name and View of the gradient for each parameter that requires one and then for each
        flat input that does (`input 0`); None if these outputs do not depend on it.
    only_outside : the forward pass runs under autocast, and the backward pass, recorded outside of
        it as torch advises, would make other calls inside
    numbers : per call, its index before any was deferred; empty if none was. Ops are named by it,
        so that they have the same names at another batch size, where others are deferred.
    earlier : name and gradient storage of each parameter that has a gradient when the step begins,
        e.g. after an earlier micro-batch. A call accumulates the new one into it; in a replay,
        autograd does.
    updated : name and storage of each parameter that is updated as soon as its gradient is
        complete, which is then freed. The update is a call; in a replay, a hook does it.
    ones : indices of flat inputs that are all ones: the model read them, and would otherwise make
        other calls.
    looked : these, and indices of other inputs for which it would make other calls if all were ones
    ends : per differentiable output, whether the backward pass begins at it: only at the loss if
        the model returns one.
    of_others : indices in `gradients` that are None, as only the other outputs depend on them
    reads : per module, the attributes that were read
    """

    recording: Recording
    boundary: int
    parameters: tuple[tuple[str, View], ...]
    buffers: tuple[tuple[str, View], ...]
    inputs: tuple[View | None, ...]
    outputs: tuple[Any, ...]
    output_form: Form | None
    differentiable: tuple[bool, ...]
    output_gradients: tuple[View, ...]
    gradients: tuple[tuple[str, View | None], ...]
    only_outside: bool = False
    numbers: tuple[int, ...] = ()
    earlier: tuple[tuple[str, int], ...] = ()
    updated: tuple[tuple[str, int], ...] = ()
    ones: frozenset[int] = frozenset()
    looked: frozenset[int] = frozenset()
    ends: tuple[bool, ...] = ()
    of_others: tuple[int, ...] = ()
    reads: tuple[frozenset[str], ...] = ()

    @property
    def returned(self) -> set[int]:
        """Storages of the model's outputs."""
        return {output.storage for output in self.outputs if isinstance(output, View)}

    @property
    def summed(self) -> dict[int, int]:
        """Index of the accumulating call, by the storage that gradients are accumulated into.

        That is an earlier gradient, or a parameter that is updated immediately.
        """
        accumulated = {storage for _, storage in (*self.earlier, *self.updated)}
        return {
            storage: at
            for at, call in enumerate(self.recording.calls)
            for storage in call.writes
            if storage in accumulated
        }


def _generator_state() -> bytes:
    # Under the modes of a trace the state would be a fake tensor.
    with _disable_current_modes():
        return torch.default_generator.get_state().numpy().tobytes()


class Recorder(TorchDispatchMode):
    """Records what runs inside `with`. Entered after FakeTensorMode, so it sees fake tensors.

    Raises TraceError for what cannot be replayed: tensors without strides, random numbers drawn in
    the backward pass or from a user's own generator.

    layouts : observed layouts of kernels' results; they override the rules for fake tensors.
    is_look : tells whether a call only reads known values, which is not a call of the step
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(
        self,
        layouts: Layouts | None = None,
        is_look: Callable[[Any, Any], bool] = lambda func, arguments: False,
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self.layouts = layouts or {}
        self._is_look = is_look
        self.phase = "forward"
        self.scope = ""
        self._number: dict[int, int] = {}
        # Weak references keep addresses of freed storages from being reused, without their memory.
        self._addresses: list[StorageWeakRef] = []
        # Storages without values, by number: to tell whether something still holds them.
        self._fakes: dict[int, StorageWeakRef] = {}
        # Per storage of a tensor made from Python data: the number of calls before it, and scope.
        self._lifted: dict[int, tuple[int, str]] = {}
        # Storages that should be conjugate views of each other.
        self._separate: set[int] = set()
        # Storages of real parameters: in the modules they are replaced by fake ones.
        self.weights: set[int] = set()
        self._silent = False
        # Fake tensors draw nothing, so it is constant unless the forward sets it.
        self._generator = _generator_state()
        # Interned sizes, strides and views.
        self._met: dict[Any, Any] = {}

    def give(self, tensor: torch.Tensor, what: str) -> View:
        """Register a tensor that exists before the first call."""
        view = self.meet(tensor)
        self.recording.roles.setdefault(view.storage, what)
        return view

    def alias(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Let a tensor with values count as a fake one of the same layout."""
        memory = tensor.untyped_storage()
        self._number[memory._cdata] = self._storage(fake)
        self._addresses.append(StorageWeakRef(memory))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing inside: for tensors that the tracer itself makes."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def still_held(self) -> dict[int, Call]:
        """Return the storages that something still holds, with the calls that made them."""
        held = {at: fake.cdata for at, fake in self._fakes.items() if not fake.expired()}
        calls = self.recording.calls
        return {held[number]: call for call in calls for number in call.makes if number in held}

    def view(self, tensor: torch.Tensor) -> View:
        """Return the View of a tensor whose storage is known."""
        if tensor.untyped_storage()._cdata not in self._number:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} comes from nowhere: no recorded call "
                "made it. Compute it from the inputs, or make it a buffer of the model."
            )
        return self.meet(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = asked_for_device(func, args)
        if device is not None:
            return device
        if isinstance(func, HigherOrderOperator):
            raise TraceError(
                f"it calls the higher-order op {func.name()}, whose functions are no ops to record."
            )
        kwargs = kwargs or {}
        # Ops of `prim` query a tensor's device or layout: no kernel runs.
        if self._silent or func.namespace == "prim" or self._is_look(func, (args, kwargs)):
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._lift(func, args[0])
        if func.overloadpacket in _FORM_ONLY:
            return self._of_form(func, args, kwargs)
        if func in _MADE_AT_ONCE:
            return self._made_at_once(_MADE_AT_ONCE[func], args[0])
        # By storage: the modules have fake parameters, so a real one comes from elsewhere.
        for tensor in written_to(func, args, kwargs) if self.weights else ():
            if tensor.untyped_storage()._cdata in self.weights:
                raise TraceError(
                    f"{func} writes into a parameter of shape {tuple(tensor.shape)} that the model "
                    "keeps outside of its modules. Take it from its module in the forward pass."
                )
        flat, spec = flattened((args, kwargs))
        views = tuple(self._argument(arg, func) for arg in flat)
        result = func(*args, **kwargs)
        if self.layouts:
            result = self._as_seen(func, views, spec, result)
        self._note(func, views, spec, result)
        return result

    def _as_seen(self, func: Any, views: Sequence[Any], spec: Any, result: Any) -> Any:
        """Return a result in the observed layout of the kernel."""
        calls = [views]
        if func is CONVOLUTION_BACKWARD:
            # A trial observed the two calls into which a replay splits it.
            calls += [flat for _, flat, _ in convolution_parts(views, spec)]
        seen = [forms for call in calls if (forms := self.layouts.get(layout_key(func, call)))]
        if not seen:
            return result
        flat, results = tree_flatten(result)
        for forms in seen:
            for place, (out, form) in enumerate(zip(flat, forms, strict=True)):
                if isinstance(out, torch.Tensor) and form is not None and not form.shows(out):
                    flat[place] = torch.empty_strided(
                        form.size, form.stride, dtype=form.dtype, device=out.device
                    )
        return tree_unflatten(flat, results)

    def _note(self, func: Any, flat: Sequence[Any], spec: Any, result: Any) -> None:
        views = tuple(flat)
        writes = written(func, views, spec)
        for storage in self._lifted.keys() & set(writes):
            self._lift_anew(storage)
        # Numbers are assigned in order: from here on, those of storages that this call allocated.
        known = len(self.recording.nbytes)
        outputs = tuple(
            self.meet(out) if isinstance(out, torch.Tensor) else None
            for out in tree_flatten(result)[0]
        )
        if self._separate.intersection(writes):
            raise TraceError(
                f"{func} writes into a tensor while the model still uses its conjugate, or the "
                "imaginary part of that, which would change with it. Write into a clone."
            )
        random = (
            torch.Tag.nondeterministic_seeded in func.tags
            and func.overloadpacket not in _SEED_GIVEN
            and not _no_dropout(func, views, spec)
        )
        # E.g. inside `fork_rng`, which restores the state before the forward ends.
        if random and _generator_state() != self._generator:
            raise TraceError(SEEDS)
        makes = tuple(range(known, len(self.recording.nbytes)))
        # A view is not a call: it is recreated from its storage, with `as_strided`.
        if not makes and not writes and not random and is_view(views, outputs):
            return
        if random and self.phase == "backward":
            raise TraceError(
                f"{func} draws random numbers in the backward pass, as inside "
                "torch.utils.checkpoint; they cannot be drawn again as they were. Plan the model "
                "without its own checkpointing, or move the dropout out of it."
            )
        self.recording.calls.append(
            Call(func, views, spec, outputs, makes, writes, self.phase, random, self.scope)
        )

    def _lift(self, func: Any, tensor: torch.Tensor) -> Any:
        """Register a tensor of Python data, e.g. torch.tensor([1, 2]): the same in each step."""
        result = func(tensor)
        storage = self._storage(result)
        self.recording.roles.setdefault(storage, "constant")
        self.recording.constants.setdefault(storage, tensor)
        self._lifted.setdefault(storage, (len(self.recording.calls), self.scope))
        return result

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register the model's outputs: the caller may write to tensors made from Python data."""
        for storage in self._lifted.keys() & {self._storage(tensor) for tensor in tensors}:
            self._lift_anew(storage)

    def _lift_anew(self, storage: int) -> None:
        """Clone a tensor made from Python data in each step, as it is written to."""
        if self.phase == "backward":
            raise TraceError(
                "the backward pass writes into a tensor that the forward pass made of Python's "
                "numbers. Write into a clone."
            )
        place, scope = self._lifted.pop(storage)
        constant = self.recording.constants.pop(storage)
        del self.recording.roles[storage]
        # The constant keeps its values under a new number. The old number, used by earlier calls,
        # becomes the result of a clone, inserted where the tensor was made.
        view = self.give(constant, "constant")
        self.recording.constants[view.storage] = constant
        _, spec = flattened(((constant,), {}))
        views = (replace(view, storage=storage),)
        clone = torch.ops.aten.clone.default
        call = Call(clone, (view,), spec, views, (storage,), (), "forward", False, scope)
        self.recording.calls.insert(place, call)
        self._lifted = {
            key: (at + (at >= place), where) for key, (at, where) in self._lifted.items()
        }

    def _of_form(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call that reads only the form of its first argument, without that argument."""
        like = args[0]
        with unset_fake_temporarily():
            form = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        # By default the result is on the device of the first argument, which is `meta` in a replay.
        asked = {**kwargs, "device": kwargs.get("device") or like.device}
        result = func(*args, **kwargs)
        flat, spec = flattened(((form, *args[1:]), asked))
        self._note(func, flat, spec, result)
        return result

    def _made_at_once(self, func: Any, tensor: torch.Tensor) -> Any:
        """Compute a conjugate or negation that torch would make a view.

        A write to one would not show in the other, so from now on such a call is refused.
        """
        result = func(tensor)
        _, spec = flattened(((tensor,), {}))
        self._note(func, [self.meet(tensor)], spec, result)
        self._separate |= {self._storage(tensor), self._storage(result)}
        return result

    def _argument(self, arg: Any, func: Any) -> Any:
        if isinstance(arg, torch.Generator):
            raise TraceError(
                f"{func} draws from a generator of the model's own; only the default generator can "
                "be set back. Draw from the default one."
            )
        if not isinstance(arg, torch.Tensor):
            return arg
        if arg.untyped_storage()._cdata not in self._number:
            if arg.requires_grad:
                raise TraceError(
                    f"{func} reads a tensor of shape {tuple(arg.shape)} that requires a gradient "
                    "and is not a parameter of the model. Pass it as an argument, or register "
                    "it as a parameter."
                )
            # Kept by the model outside of its parameters and buffers: the same in each step.
            self.recording.constants[self.give(arg, "constant").storage] = arg
        return self.meet(arg)

    def _storage(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} is sparse, or a lazy conjugate or "
                "negation; only plain strided tensors can be planned. Make it plain (to_dense, "
                "resolve_conj, resolve_neg)."
            )
        memory = tensor.untyped_storage()
        number = self._number.get(memory._cdata)
        if number is None:
            number = self._number[memory._cdata] = len(self.recording.nbytes)
            self._addresses.append(StorageWeakRef(memory))
            if isinstance(tensor, FakeTensor):
                self._fakes[number] = self._addresses[-1]
            self.recording.nbytes.append(memory.nbytes())
            self.recording.device.append(tensor.device)
        return number

    def meet(self, tensor: torch.Tensor) -> View:
        """Return the View of a tensor, whose storage gets a number if it has none yet."""
        view = form_of(tensor, self._storage(tensor))
        if view not in self._met:
            size, stride = (self._met.setdefault(part, part) for part in (view.size, view.stride))
            self._met[view] = replace(view, size=size, stride=stride)
        known: View = self._met[view]
        return known


def is_view(views: tuple[Any, ...], outputs: tuple[View | None, ...]) -> bool:
    """Whether a call only returns views of its arguments."""
    read = {arg.storage for arg in views if isinstance(arg, View)}
    # A call without results (an effect, e.g. an assertion) is not a view.
    return bool(outputs) and all(out is not None and out.storage in read for out in outputs)


def written(func: Any, views: tuple[Any, ...], spec: Any) -> tuple[int, ...]:
    """Storages that a call changes according to its schema."""
    leaves = tree_leaves(written_arguments(func, *tree_unflatten(list(views), spec)))
    return tuple(dict.fromkeys(view.storage for view in leaves if isinstance(view, View)))


def _no_dropout(func: Any, views: tuple[Any, ...], spec: Any) -> bool:
    """Whether a call that takes a dropout probability is called with 0."""
    named = named_arguments(func, *tree_unflatten(list(views), spec))
    return named.get("dropout_p", named.get("dropout", 1)) == 0
