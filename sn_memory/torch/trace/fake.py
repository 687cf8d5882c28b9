"""Execution without values: fake tensors, with torch's wrong rules corrected and some values kept.

Some of torch's rules for fake tensors disagree with the CPU kernels. Batch norm, some activations
and losses give their results another layout if their input is transposed; later ops then copy, or
do not. Norms of bfloat16 with float32 parameters keep statistics in float32; the rules say
bfloat16. A backward kernel returns None for gradients that its `output_mask` does not request; the
rules for batch norm always return a tensor for the gradient of the input. Recurrent layers and
grouped products have their own files (`quirks/`).

Under fake tensors a model cannot read values. But models read masks, which they skip if they mask
nothing, and positions. `ValueMode` computes with real numbers whatever depends only on a few small
tensors, or on none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import TraceError
from ..model.modes import replaced_tensors
from ..model.signature import COMPUTED, MOST_KNOWN, may_be_known, tensors
from ..model.snapshot import written_to
from ..quirks import grouped, recurrent
from ..target.accelerator import working_device
from ..target.gpu import Walk

_ATEN = torch.ops.aten
_LOOK = _ATEN._local_scalar_dense.default
# Corrects a fake result, given the arguments of the call.
_Correction = Callable[[tuple[Any, ...], Any], Any]
_Strides = Callable[[torch.Tensor, tuple[Any, ...]], tuple[int, ...]]


def _contiguous(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
    return make_contiguous_strides_for(out.size())


def _in_format_of(place: int) -> _Strides:
    """Channels last if an argument is, else contiguous."""

    def stride(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
        if suggest_memory_format(args[place]) == torch.contiguous_format:
            return make_contiguous_strides_for(out.size())
        return make_channels_last_strides_for(out.size())

    return stride


def _as_arguments(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the strides of an elementwise op on the arguments: the gradient comes first."""
    alike = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.size() == out.size()]
    return tuple(compute_elementwise_output_strides(*alike)) if alike else out.stride()


# Per op, the layout of its CPU kernel's results, where torch's rule differs: that follows a
# decomposition, or preserves a layout that the kernel does not.
_STRIDES: dict[Any, _Strides] = {
    _ATEN.native_batch_norm.default: _in_format_of(0),
    _ATEN.native_batch_norm_backward.default: _in_format_of(1),
    _ATEN.roll.default: _in_format_of(0),
    _ATEN.log_sigmoid_forward.default: _contiguous,
    _ATEN.rrelu_with_noise.default: _contiguous,
    _ATEN.glu_backward.default: _contiguous,
    _ATEN.elu_backward.default: _as_arguments,
    _ATEN.hardsigmoid_backward.default: _as_arguments,
    _ATEN.hardswish_backward.default: _as_arguments,
    _ATEN.hardtanh_backward.default: _as_arguments,
    _ATEN.softplus_backward.default: _as_arguments,
    _ATEN.huber_loss_backward.default: _contiguous,
    _ATEN.mse_loss_backward.default: _contiguous,
    _ATEN.smooth_l1_loss_backward.default: _contiguous,
}
# Per norm, the arguments that may be parameters.
_PARAMETERS = {
    _ATEN.native_batch_norm.default: slice(1, 5),
    _ATEN.native_group_norm.default: slice(1, 3),
    _ATEN.native_layer_norm.default: slice(2, 4),
}


def _laid_out(strides: _Strides, args: tuple[Any, ...], result: Any) -> Any:
    """Return results with the strides of the CPU kernel."""
    flat, spec = tree_flatten(result)
    for at, out in enumerate(flat):
        # Statistics, which follow the first result, are vectors.
        if not isinstance(out, torch.Tensor) or out.dim() < 2 or out.device.type != "cpu":
            continue
        stride = strides(out, args)
        if stride != out.stride():
            flat[at] = torch.empty_strided(out.size(), stride, dtype=out.dtype, device=out.device)
    return tree_unflatten(flat, spec)


def _with_types(dtypes: dict[int, torch.dtype], result: Any) -> Any:
    results = list(result)
    for at, dtype in dtypes.items():
        if results[at] is not None and results[at].device.type == "cpu":
            results[at] = torch.empty_like(results[at], dtype=dtype)
    return tuple(results)


def _statistics_in_float32(parameters: slice, args: tuple[Any, ...], result: Any) -> Any:
    """Return results of a norm, with statistics in float32 if a parameter has another dtype."""
    held = [arg for arg in args[parameters] if isinstance(arg, torch.Tensor)]
    mixed = any(value.dtype != args[0].dtype for value in held)
    return _with_types(dict.fromkeys((1, 2), torch.float32) if mixed else {}, result)


_CORRECTIONS: dict[Any, list[_Correction]] = {
    func: [correction] for func, correction in recurrent.CORRECTIONS.items()
}
for _func, _strides in _STRIDES.items():
    _CORRECTIONS.setdefault(_func, []).append(partial(_laid_out, _strides))
for _func, _places in _PARAMETERS.items():
    _CORRECTIONS.setdefault(_func, []).append(partial(_statistics_in_float32, _places))
# The gradient of the input of a group norm has the input's dtype.
_CORRECTIONS[_ATEN.native_group_norm_backward.default] = [
    lambda args, result: _with_types({0: args[1].dtype}, result)
]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging, with a stack trace, an error of a rule that it raises anyway.

    Such errors occur for samples of the wrong shape. Anomaly detection is off as well, as gradients
    without values cannot be checked for NaN.
    """

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addFilter(keep)
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        torchs.removeFilter(keep)


class FakeMode(FakeTensorMode):
    """Runs ops on fake tensors, with torch's rules corrected.

    walk : of the named GPU that tensors are on. None: they are on devices of this machine, where an
        op without a rule runs on synthetic real tensors.
    looks : how many reads of a value return a substitute, e.g. Adafactor's of a parameter's norm:
        sizes do not depend on the value. More reads, e.g. in a loop that waits for another value,
        raise an error.
    """

    def __init__(self, walk: Walk | None = None, *, looks: int = 0) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=walk is None)
        self._walk = walk
        self._looks = self._looks_left = looks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is recurrent.CUDNN_BACKWARD:
            with self:
                return recurrent.cudnn_gradients(args)
        if func is grouped.PRODUCT:
            with self:
                return grouped.fake_product(*args, **(kwargs or {}))
        # See `Walk`: outside of torch's engine a cuDNN node copies its reserve space (uint8).
        copies_reserve = self._walk is not None and self._walk.copies_reserve
        if copies_reserve and func is _ATEN.clone.default and args[0].dtype == torch.uint8:
            return args[0]
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException:
            if not self._looks or func is not _LOOK:
                raise
            return self._some_number(args[0].dtype)
        if func in _CORRECTIONS:
            # The mode is off within its own dispatch, but corrections must make fake tensors, too.
            with self:
                for correct in _CORRECTIONS[func]:
                    result = correct(args, result)
        elif func is _ATEN.view.default and 1 in result.shape:
            result = self._viewed(args[0], result)
        place = _mask_place(func)
        if place is not None and place < len(args) and isinstance(result, tuple):
            pairs = zip(result, args[place], strict=True)
            return tuple(gradient if wanted else None for gradient, wanted in pairs)
        return result

    def is_look(self, func: Any, arguments: Any) -> bool:
        """Whether a call only reads known values: here there are none."""
        return False

    def _some_number(self, dtype: torch.dtype) -> Any:
        self._looks_left -= 1
        if self._looks_left < 0:
            raise RuntimeError("it reads values again and again, and fake tensors have none")
        if dtype == torch.bool:
            return True
        # Not 0 or 1: divisions by it, by 1 minus it, or by its logarithm would be divisions by 0.
        return 0.5 if dtype.is_floating_point else 2

    def _viewed(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return a view with the kernel's strides for dimensions of size 1.

        They address nothing, but matrix products select kernels by them.
        """
        # On the meta device a view is computed by the kernel's own C++.
        with _disable_current_modes():
            alone = torch.empty_strided(x.size(), x.stride(), device="meta")
            stride = alone.view(result.size()).stride()
        if stride == result.stride():
            return result
        with self:
            return torch.as_strided(result, result.size(), stride, result.storage_offset())


class ValueMode(FakeMode):
    """Fake tensors, but results that depend only on a few small tensors, or on none, have values.

    Such tensors are real ones. Ops only on them run on real numbers; if an operand has no values,
    the result has none.

    tracing : a plan repeats the traced control flow, so only tensors of `give_ones`, and those
        that the model makes itself, have values: others may differ in the next step. Otherwise all
        small host tensors have values that are passed to the model or that it keeps.
    """

    def __init__(self, *, tracing: bool = False) -> None:
        super().__init__()
        self._tracing = tracing
        self._clones: dict[int, torch.Tensor] = {}
        # Storages with values, while tracing; and those whose values are stale, as something
        # without values was written into them. A reference keeps the address from being reused.
        self._known: dict[int, StorageWeakRef] = {}
        self._stale: dict[int, StorageWeakRef] = {}

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to pass to the model for an input; the same one for the same input."""
        if not is_known(tensor):
            return fake_of(self, tensor)
        if id(tensor) not in self._clones:
            with unset_fake_temporarily():
                self._clones[id(tensor)] = tensor.clone()
        return self._clones[id(tensor)]

    def give_ones(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of ones with the layout of a fake one; None if that is impossible."""
        with unset_fake_temporarily():
            # The fake storage of a tensor cut out of another ends with its last element.
            size = like.untyped_storage().nbytes() // like.itemsize
            ones = torch.ones(size, dtype=like.dtype, device=like.device).as_strided(
                like.size(), like.stride(), like.storage_offset()
            )
        # Impossible if the storage's bytes are not a multiple of the element size.
        if ones.untyped_storage().nbytes() != like.untyped_storage().nbytes():
            return None
        self._now_known(ones)
        return ones

    def is_look(self, func: Any, arguments: Any) -> bool:
        """Whether a call returns no tensor, and all its operands have values."""
        if _makes_tensors(func) or func._schema.is_mutable:
            return False
        operands = tensors(arguments)
        return bool(operands) and all(map(self._knows, operands))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = tensors((args, kwargs))
        run = partial(super().__torch_dispatch__, func, types)
        if self._tracing and func is _ATEN.lift_fresh.default:
            return self._lifted(args[0], run)
        # The fill value is known, even if the values of the tensor whose form it takes are not.
        fill = _filling(func, args, kwargs) if operands else None
        if fill is not None:
            result = run(args, kwargs)
            return self._now_known(_filled(result, fill)) if self._may_know(result) else result
        if operands and all(isinstance(value, FakeTensor) for value in operands):
            return run(args, kwargs)  # most calls
        # First without values, which costs nothing, to learn the size of the result.
        if not operands:
            result = run(args, kwargs)
            # The same each time only if it is torch's own op and not random.
            sure = func.namespace == "aten" and _makes_tensors(func) and not _is_drawn(func)
            if not sure or not all(map(self._may_know, tensors(result))):
                return result
        elif all(map(self._has_values, operands)) and _is_view(func):
            pass  # A view must stay an alias: it cannot become a fake tensor.
        elif _is_drawn(func) or not all(map(self._knows, operands)):
            return self._without(func, args, kwargs, run)
        else:
            try:
                result = run(args, kwargs)
            except DataDependentOutputException:
                # A read of values that are known.
                pass
            except DynamicOutputShapeException:
                # The next step's values may give another shape; for a single step it is known.
                if self._tracing:
                    raise
            else:
                if not all(map(self._may_know, tensors(result))):
                    return self._without(func, args, kwargs, run)
        # All operands have values, and the results are small.
        with unset_fake_temporarily():
            return self._now_known(func(*args, **kwargs))

    def _without(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Run an op whose result has no values; tensors it writes to lose theirs."""
        written = written_to(func, args, kwargs)
        for tensor in written:
            if self._has_values(tensor):
                memory = tensor.untyped_storage()
                self._stale[memory._cdata] = StorageWeakRef(memory)
        # Detached: to make it fake, torch reads its `grad`, which warns for non-leaves.
        result = run(*tree_map_only(torch.Tensor, _detached, (args, kwargs)))
        if not written:
            return result
        # The tensor that was written to, not its fake copy that was computed with.
        returned = written[: len(func._schema.returns)]
        return returned[0] if len(returned) == 1 else tuple(returned) or None

    def _lifted(self, lifted: torch.Tensor, run: Callable[..., Any]) -> Any:
        """Handle a tensor of Python data, e.g. torch.tensor([1, 2]): a constant of the plan."""
        if isinstance(lifted, FakeTensor) or not self._may_know(lifted):
            return run((lifted,), {})
        with unset_fake_temporarily():
            # A clone, so that the constant stays unchanged if the model writes to it while traced.
            return self._now_known(lifted.clone())

    def _now_known(self, result: Any) -> Any:
        for tensor in tensors(result) if self._tracing else ():
            memory = tensor.untyped_storage()
            if memory._cdata not in self._known:
                self._known[memory._cdata] = StorageWeakRef(memory)
        return result

    def _may_know(self, result: Any) -> bool:
        """Whether a result may have values: if they are few and not in a device's memory."""
        return (
            result.dtype in COMPUTED
            and result.layout == torch.strided
            and result.numel() <= MOST_KNOWN
            and (self._tracing or result.device.type == "cpu")
        )

    def _has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a real one that has, or once had, valid values."""
        if not may_be_known(tensor, COMPUTED):
            return False
        if self._tracing:
            return tensor.untyped_storage()._cdata in self._known
        return tensor.device.type == "cpu"

    def _knows(self, tensor: torch.Tensor) -> bool:
        return self._has_values(tensor) and tensor.untyped_storage()._cdata not in self._stale


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a step without values knows those of an input: a few integers on the host."""
    return tensor.device.type == "cpu" and may_be_known(tensor)


# Ops that read only the form of their first argument, and their fill values.
_FILLS: dict[Any, Any] = {
    _ATEN.zeros_like: 0,
    _ATEN.new_zeros: 0,
    _ATEN.ones_like: 1,
    _ATEN.new_ones: 1,
}
_FILLS_WITH = {_ATEN.full_like: 1, _ATEN.new_full: 2}


def _filling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the fill value of a call that makes a filled tensor; None for other calls."""
    place = _FILLS_WITH.get(func.overloadpacket)
    if place is None:
        return _FILLS.get(func.overloadpacket)
    return args[place] if len(args) > place else kwargs["fill_value"]


def _filled(like: torch.Tensor, fill: Any) -> torch.Tensor:
    """Return a filled tensor with the layout of a fake one."""
    with unset_fake_temporarily():
        filled = torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device=like.device
        )
        return filled.fill_(fill)


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an op returns tensors; others read values, or compare two tensors."""
    return any("Tensor" in str(output.type) for output in func._schema.returns)


@cache
def _is_drawn(func: Any) -> bool:
    """Whether the results of an op are random, or uninitialized memory to be filled later."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__


@cache
def _is_view(func: Any) -> bool:
    """Whether an op returns a view of an argument."""
    aliases = any(output.alias_info is not None for output in func._schema.returns)
    return aliases and not func._schema.is_mutable


@cache
def _mask_place(func: Any) -> int | None:
    """Index of the argument that selects the gradients a kernel computes; None without one."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # Not `is_leaf`: while autograd regenerates the history of a view, that deadlocks.
    if not tensor.requires_grad or isinstance(tensor, FakeTensor):
        return tensor
    with unset_fake_temporarily():
        return tensor.detach()


def fake_of(
    mode: FakeTensorMode, tensor: torch.Tensor, place: torch.device | None = None
) -> torch.Tensor:
    """Return a fake leaf like a tensor, on another device if one is given.

    A tensor on the meta device counts as one on the CPU, and one kept on the host as one on the
    device where its ops run.
    """
    if is_traceable_wrapper_subclass(tensor):
        raise TraceError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} is a parameter, a buffer or "
            "an input; only plain tensors can be traced. Call this before the model is sharded or "
            "quantised. A sharded one can be planned as well, by plan(..., backend='modules')."
        )
    if place is None and (working := working_device(tensor)) != tensor.device:
        place = working
    if place is None and tensor.device.type != "meta":
        fake = mode.from_tensor(tensor.detach())
    else:
        # On the meta device attention would be decomposed into matrix products.
        like = {"dtype": tensor.dtype, "device": place or "cpu"}
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), **like)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def swapped(
    model: torch.nn.Module, mode: FakeMode, place: torch.device | None = None
) -> Iterator[None]:
    """Replace parameters and buffers by tensors without values inside."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        fake_tensor = fake_of(mode, tensor, place)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake_tensor, tensor.requires_grad)
        return fake_tensor

    with replaced_tensors(model, fake, "_parameters", "_buffers"), quiet():
        yield
