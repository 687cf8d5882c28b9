"""A call's arguments and their signature: all that a planned step depends on except tensor values.

A plan is valid for the calls that were traced, and another input shape, mode or rate changes these.
How a call is written does not matter: arguments by position or by name, in any order, or a default
spelled out. Of the modules, only what the trace read counts; see `guards.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..errors import TraceError
from .snapshot import StateSnapshot, ended

# Most elements of a tensor whose values are computed.
MOST_KNOWN = 1 << 20
# torch's other integer types are for storage only and cannot even be compared.
INTEGERS = {
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# A mask that is computed from integers, or from nothing, may pass through floats.
COMPUTED = {*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}


def may_be_known(tensor: torch.Tensor, dtypes: Container[torch.dtype] = INTEGERS) -> bool:
    """Whether a model may look at a tensor's values: they exist and are few.

    dtypes : integers for an input, as float ones are often used as a dummy input
    """
    return (
        tensor.dtype in dtypes
        and tensor.layout == torch.strided
        and not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_meta
        and tensor.numel() <= MOST_KNOWN
    )


def is_ones(value: object) -> bool:
    """Whether a value is a tensor whose values may be known, and all are 1.

    On a GPU this synchronizes, as a model that looks at the values does.
    """
    return isinstance(value, torch.Tensor) and may_be_known(value) and bool((value == 1).all())


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# How a call is written: how many arguments by position, and the names of the rest.
CallLayout = tuple[int, tuple[str, ...]]
# An attribute, by the index of its module and its name; or a whole argument, at index OF_CALL.
Name = tuple[int, str]
OF_CALL = -1
# Everything about one module that counts, by name.
Settings = frozenset[tuple[str, Hashable]]
_NUMBERS = (bool, int, float, str, type(None))


class TensorForm(NamedTuple):
    """The properties of a tensor argument that are part of the signature.

    offset : bytes from the start of the first input in the same memory, as batches are slices of
        one tensor, and the position of a slice does not count
    same, shared : the first input that is the same tensor, and the first that shares its memory
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wanted: bool
    same: int
    shared: int


@dataclass(frozen=True)
class InputSignature:
    """The signature of an input; inputs share a plan if the settings of one hold for the other.

    arguments : name of each argument that is not at its default, and its form: how it is nested,
        and its leaves, with a TensorForm for each tensor.
    casts : device type and dtype, where autocast is on
    wanted : per parameter, whether it requires a gradient
    tensors : per parameter and buffer, its size, strides and type
    sharded : whether a parameter is split over several ranks, e.g. by FSDP2
    settings : per module, its class, its hooks, and the attributes that a trace read, with their
        contents
    ones : indices, among the leaves of the arguments, of inputs that are all ones, where the step
        was planned for that (a mask that masks nothing); see `GuardCache` in guards.py.
    free : attributes and arguments whose values are left out, as they change from step to step.
        Such a signature may only be planned for steps that run the model's own forward.
    """

    arguments: tuple[tuple[str, Any], ...]
    casts: tuple[Hashable, ...]
    wanted: tuple[bool, ...]
    tensors: tuple[Hashable, ...]
    sharded: bool
    settings: tuple[Settings, ...]
    ones: tuple[int, ...] = ()
    free: tuple[Name, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # The signature is looked up in each step and has an item for each module.
        held = (self.arguments, self.casts, self.wanted, self.tensors, self.sharded, self.settings)
        return hash((*held, self.ones, self.free))

    @property
    def wants_gradients(self) -> bool:
        """Whether a parameter or an input requires a gradient."""
        return any(self.wanted) or any(tensor.wanted for tensor in self._tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors among the arguments."""
        return sum(prod(tensor.size) * tensor.dtype.itemsize for tensor in self._tensors())

    def _tensors(self) -> Iterator[TensorForm]:
        leaves = (leaf for _, (_, leaves) in self.arguments for leaf in leaves)
        return (leaf for leaf in leaves if _is_tensor(leaf))

    def shapes(self) -> str:
        """Describe the tensors' shapes, e.g. "input_ids (4, 128), labels (4, 128)"."""
        shown, ones = [], self._names_of_ones()
        for name, (_, leaves) in self.arguments:
            sizes = [str(leaf.size) for leaf in leaves if _is_tensor(leaf)]
            more = " and more" if len(sizes) > 3 else ""
            if sizes:
                held = " of ones" if name in ones else ""
                shown.append(f"{name} {' and '.join(sizes[:3])}{more}{held}")
        return ", ".join(shown) or "no tensor"

    def leaf_names(self) -> list[tuple[str, int]]:
        """Return, for each leaf of the arguments, the argument's name and the index in it."""
        return [(name, at) for name, (_, leaves) in self.arguments for at in range(len(leaves))]

    def _names_of_ones(self) -> set[str]:
        names = self.leaf_names()
        return {names[at][0] for at in self.ones}

    def without(self, free: Iterable[Name]) -> InputSignature:
        """Return the signature without the values of some attributes and arguments.

        Tensors among the arguments still count, as recorded ops depend on their sizes.
        """
        free = tuple(sorted({*free, *self.free}))
        if free == self.free:
            return self
        names = set(free)
        arguments = tuple(
            (name, (spec, tuple(leaf if _is_tensor(leaf) else (object, "any") for leaf in leaves)))
            if (OF_CALL, name) in names
            else (name, (spec, leaves))
            for name, (spec, leaves) in self.arguments
            # A free argument without tensors may as well be at its default.
            if (OF_CALL, name) not in names or any(map(_is_tensor, leaves))
        )
        settings = list(self.settings)
        for place in {place for place, _ in free if 0 <= place < len(settings)}:
            settings[place] = frozenset(
                setting for setting in settings[place] if (place, setting[0]) not in names
            )
        return replace(self, arguments=arguments, settings=tuple(settings), free=free)

    def changed_since(self, other: InputSignature) -> set[Name]:
        """Return the attributes and arguments whose values differ, ignoring tensor forms."""
        mine, theirs = dict(self.arguments), dict(other.arguments)
        changed = {
            (OF_CALL, name)
            for name in mine.keys() | theirs.keys()
            if _differ(mine.get(name), theirs.get(name))
        }
        for place, (now, then) in enumerate(zip(self.settings, other.settings, strict=False)):
            changed |= {(place, name) for name in _changed_settings(now, then)}
        return changed

    def settings_hold_for(self, other: InputSignature) -> bool:
        """Whether another signature has all settings of this one, or more, if more was read."""
        return len(self.settings) == len(other.settings) and all(
            mine is theirs or mine <= theirs
            for mine, theirs in zip(self.settings, other.settings, strict=True)
        )

    def accepts(self, other: InputSignature) -> bool:
        """Whether a step planned for this signature is valid for an input with another."""
        same = (self.arguments, self.ones, self.free) == (other.arguments, other.ones, other.free)
        return same and self._same_modes(other) and self.settings_hold_for(other)

    def _same_modes(self, other: InputSignature) -> bool:
        mine = (self.casts, self.wanted, self.tensors, self.sharded)
        return mine == (other.casts, other.wanted, other.tensors, other.sharded)

    def covers(self, other: InputSignature) -> bool:
        """Whether another signature has the same modes and arguments, and no larger tensor."""
        return (
            set(self.ones) <= set(other.ones)
            and self.free == other.free
            and len(self.arguments) == len(other.arguments)
            and self._same_modes(other)
            and self.settings_hold_for(other)
            and all(
                name == its and spec == their_spec and all(map(_holds, leaves, theirs))
                for (name, (spec, leaves)), (its, (their_spec, theirs)) in zip(
                    self.arguments, other.arguments, strict=True
                )
            )
        )

    def unlike(self, planned: InputSignature, paths: list[str]) -> list[str]:
        """Describe how this differs from a planned signature; `paths` names the modules."""
        mine, theirs = dict(self.arguments), dict(planned.arguments)
        unlike = [f"{name} was not given then" for name in mine.keys() - theirs.keys()]
        unlike += [f"{name} is missing" for name in theirs.keys() - mine.keys()]
        unlike += [
            f"{name} is {_shown(form, theirs[name])}, and was {_shown(theirs[name], form)}"
            for name, form in self.arguments
            if name in theirs and theirs[name] != form
        ]
        if self.arguments != planned.arguments and not unlike:
            unlike.append("the inputs come in another order or share memory otherwise")
        mine_of, theirs_of = self._names_of_ones(), planned._names_of_ones()
        # For an input of another shape it may not be known yet.
        alike = {name for name, form in self.arguments if theirs.get(name) == form}
        unlike += [f"{name} is all ones" for name in sorted(alike & mine_of - theirs_of)]
        unlike += [f"{name} is not all ones" for name in sorted(alike & theirs_of - mine_of)]
        if self.casts != planned.casts:
            unlike.append("autocast is otherwise")
        if self.wanted != planned.wanted:
            unlike.append("other parameters require gradients")
        if self.tensors != planned.tensors:
            unlike.append("parameters or buffers have other shapes, strides or types")
        if len(self.settings) != len(planned.settings):
            unlike.append(f"it has {len(self.settings)} modules, and had {len(planned.settings)}")
        elif not planned.settings_hold_for(self):
            names = {
                f"{path}.{name}" if path else name
                for path, now, then in zip(paths, self.settings, planned.settings, strict=False)
                for name in _changed_settings(now, then)
            }
            modules = ", ".join(sorted(names)[:4]) or "other modules"
            unlike.append(f"modes and numbers in its modules are otherwise ({modules})")
        return unlike


def _changed_settings(now: Settings, then: Settings) -> set[str]:
    """Return the names that both have, with different values."""
    return set() if now is then else dict(now - then).keys() & dict(then - now).keys()


def _is_tensor(leaf: Any) -> TypeGuard[TensorForm]:
    return isinstance(leaf, TensorForm)


def _differ(form: Any, other: Any) -> bool:
    """Whether two forms of an argument differ in more than tensors; None stands for its default."""
    if form is None or other is None:
        return form is not other and not any(map(_is_tensor, (form or other)[1]))
    if form[0] != other[0]:
        return False
    pairs = zip(form[1], other[1], strict=True)
    return any(mine != its and not (_is_tensor(mine) and _is_tensor(its)) for mine, its in pairs)


def _holds(leaf: Any, other: Any) -> bool:
    """Whether a leaf equals another; of two tensors, the first may be larger."""
    if not (_is_tensor(leaf) and _is_tensor(other)):
        return bool(leaf == other)
    # Strides and offset may differ: a step for a covered input runs the model's own forward.
    same = len(leaf.size) == len(other.size) and leaf[3:] == other[3:]
    return same and all(mine >= its for mine, its in zip(leaf.size, other.size, strict=True))


def _shown(form: Any, other: Any) -> str:
    """Show an argument's form: shapes and types of tensors, values of the rest.

    If that looks the same for the other form, show strides, gradients and sharing as well.
    """
    leaves = [_leaf(leaf) for leaf in form[1]]
    if leaves == [_leaf(leaf) for leaf in other[1]]:
        leaves = [_leaf(leaf, with_values=True) for leaf in form[1]]
    return " and ".join(leaves[:3]) + (" and more" if len(leaves) > 3 else "")


def _leaf(leaf: Any, *, with_values: bool = False) -> str:
    if not _is_tensor(leaf):
        return leaf.__name__ if isinstance(leaf, type) else str(leaf[1])
    size, stride, distance, dtype, wanted, same, shared = leaf
    text = f"{str(dtype).removeprefix('torch.')} of shape {size}"
    if with_values:
        text += f" (strides {stride}, requires_grad {wanted}, the tensor of input {same}, memory of"
        text += f" input {shared}, {distance} bytes after it)"
    return text


def plain(value: Any) -> Hashable:
    """Return a plain value with its type, as Python has True == 1 == 1.0 and 0.0 == -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


def form_of_leaf(leaf: Any, first: dict[int, tuple[int, int]], place: int) -> Hashable:
    """Return what a leaf of the arguments contributes to the signature.

    first : for each tensor and each memory, the index where it was first seen, and the byte of the
        memory at which that tensor begins; updated here
    """
    if not isinstance(leaf, torch.Tensor):
        return plain(leaf)
    check_layout(leaf)
    # Which inputs are the same tensor, or share memory, is part of the trace.
    begin = leaf.storage_offset() * leaf.itemsize
    same, _ = first.setdefault(id(leaf), (place, begin))
    shared, first_begin = first.setdefault(_memory(leaf), (place, begin))
    size, stride, offset = tuple(leaf.size()), leaf.stride(), begin - first_begin
    return TensorForm(size, stride, offset, leaf.dtype, leaf.requires_grad, same, shared)


def check_layout(tensor: torch.Tensor) -> None:
    """Raise TraceError for a sparse or a nested tensor."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = f"{'nested ' if tensor.is_nested else ''}tensor of layout {tensor.layout}"
        raise TraceError(
            f"an argument is a {kind}; a plan is for plain tensors. Pass those that it is made of "
            "(indices and values of a sparse tensor, values and offsets of a nested one), and make "
            "it in the forward pass; or pass it dense, padded."
        )


def _memory(tensor: torch.Tensor) -> int:
    # Negative to differ from any id(); tensors without memory (meta) share nothing.
    return -(tensor.untyped_storage()._cdata) if tensor.device.type != "meta" else -id(tensor)


def forms_of(
    model: torch.nn.Module, arguments: Arguments, *, loosely: bool = False
) -> tuple[tuple[str, Any], ...]:
    """Return the forms of the arguments, by name.

    loosely : use the type of a value that cannot be compared; enough to size a step's memory
    """
    first: dict[int, tuple[int, int]] = {}
    forms, count = [], 0
    for name, value in _named(type(model).forward, *arguments):
        flat, spec = tree_flatten(value)
        leaves = []
        for leaf in flat:
            form = form_of_leaf(leaf, first, count)
            leaves.append(type(leaf) if loosely and not is_hashable(form) else form)
            count += 1
        forms.append((name, (str(spec), tuple(leaves))))
    return tuple(forms)


def leaves_of(model: torch.nn.Module, arguments: Arguments) -> list[Any]:
    """Return the leaves of the arguments, in the order of the signature."""
    named = _named(type(model).forward, *arguments)
    return [leaf for _, value in named for leaf in tree_leaves(value)]


def is_hashable(value: Any) -> bool:
    """Whether a value can be used as a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def changeable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the types of argument objects that could change while the signature stays the same.

    They are compared by identity, but their contents are constants in the recorded step.
    """
    return [
        type(leaf).__name__
        for leaf in tree_leaves((args, kwargs))
        if not isinstance(leaf, torch.Tensor)
        # An object hashed by identity keeps its hash however it changes.
        and (object.__hash__ is type(leaf).__hash__ or StateSnapshot([("", leaf)]).tensors())  # type: ignore[comparison-overlap]
        and StateSnapshot([("", leaf)])
    ]


def call_layout(arguments: Arguments) -> CallLayout:
    """Return the layout of a call with these arguments."""
    return len(arguments[0]), tuple(arguments[1])


def as_sampled(model: torch.nn.Module, sample: CallLayout, arguments: Arguments) -> Arguments:
    """Return arguments in the sample's layout: the same by position, the same by name.

    Both have the same signature, so an argument that either omits is at its default.
    """
    places, names = sample
    if call_layout(arguments) == sample:
        return arguments
    signature = _signature(type(model).forward)
    if signature is None:
        return arguments
    # None stands for `self`.
    bound = signature.bind(None, *arguments[0], **arguments[1])
    bound.apply_defaults()
    by_place: list[Any] = []
    by_name: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        form = signature.parameters[name].kind
        if form is inspect.Parameter.VAR_POSITIONAL:
            by_place += value
        elif form is inspect.Parameter.VAR_KEYWORD:
            by_name |= value
        else:
            by_name[name] = value
            if form is not inspect.Parameter.KEYWORD_ONLY:
                by_place.append(value)
    return tuple(by_place[:places]), {name: by_name[name] for name in names}


def _named(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument that is not at its default, in the forward's order.

    Entries of `**kwargs` keep their order, as a forward may depend on it.
    """
    signature = _signature(forward)
    bound = None
    if signature is not None:
        # If the arguments do not fit, the forward itself raises the right error.
        with suppress(TypeError):
            bound = signature.bind(None, *args, **kwargs)
    if signature is None or bound is None:
        yield from ((f"argument {place}", value) for place, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in list(bound.arguments.items())[1:]:
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif not _is(value, parameter.default):
            yield name, value


# Called in each step, and inspect takes ten to twenty microseconds.
@lru_cache(maxsize=256)
def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _is(value: Any, default: Any) -> bool:
    # Only plain values are compared by value: comparing tensors or arrays yields no single bool.
    return value is default or (isinstance(default, _NUMBERS) and plain(value) == plain(default))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and mappings."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_sizes(held: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address; shared storages count once."""
    storages = (tensor.untyped_storage() for tensor in held)
    return {int(storage._cdata): storage.nbytes() for storage in storages}


def objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that are not tensors themselves."""
    return tuple(arg for arg in (*args, *kwargs.values()) if not isinstance(arg, torch.Tensor))


def detached(arguments: Any) -> Any:
    """Return arguments whose tensors are leaves, so that a backward pass ends at them.

    A tensor that is passed twice stays one tensor.
    """
    leaves: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in leaves:
            leaves[id(tensor)] = ended(tensor)
        return leaves[id(tensor)]

    return tree_map_only(torch.Tensor, leaf, arguments)


def cut_out(arguments: Any) -> Any:
    """Return the arguments with rows of larger tensors replaced by copies.

    A batch is often a slice of a tensor with the whole data set, which is not part of a step: it
    exists before and after. So the plan sees such a batch as a tensor of its own, a copy. Tensors
    that share memory still do. A window of columns is not copied: a copy with the same strides
    would take most of the data set's memory.
    """
    parts: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors(arguments):
        if (
            type(tensor) is torch.Tensor
            and not (tensor.is_meta or tensor.is_nested or tensor.is_inference())
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.layout is torch.strided
            and tensor.numel()
        ):
            parts.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    copies: dict[int, torch.Tensor] = {}
    for sharing in parts.values():
        spans = [_span(tensor) for tensor in sharing]
        begin, end = min(spans)[0], max(end for _, end in spans)
        memory, nbytes = sharing[0].untyped_storage(), sum(tensor.nbytes for tensor in sharing)
        starts = zip(spans, sharing, strict=True)
        aligned = not any((start - begin) % tensor.itemsize for (start, _), tensor in starts)
        if end - begin == memory.nbytes() or end - begin > 2 * nbytes or not aligned:
            continue
        whole = torch.empty(0, dtype=torch.uint8, device=sharing[0].device)
        piece = whole.set_(memory, begin, (end - begin,)).clone().untyped_storage()
        for (start, _), tensor in zip(spans, sharing, strict=True):
            at = (start - begin) // tensor.itemsize
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies[id(tensor)] = copy.set_(
                piece, at, tensor.size(), tensor.stride()
            ).requires_grad_(tensor.requires_grad)
    if not copies:
        return arguments
    return tree_map_only(torch.Tensor, lambda leaf: copies.get(id(leaf), leaf), arguments)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its memory at which a tensor begins and ends."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in pairs)
    begin = tensor.storage_offset() * tensor.itemsize
    return begin, begin + elements * tensor.itemsize


def alike(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return a check for whether other tensors have the same sizes, strides, types and devices.

    It also checks that the same ones require a gradient. It may report a mismatch by mistake when
    another mode of torch is on, but never a match. No tensor is kept alive. Hundreds of tensors
    take a few microseconds.
    """
    # torch.compile's own guards, which it checks before it runs compiled code.
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return lambda others: bool(guards.check(*others))
