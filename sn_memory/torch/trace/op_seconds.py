"""Seconds and scratch of each call: measured once per signature, kept in a file.

A signature is the op with the shape, strides and dtype of each tensor. Calls are timed on new
tensors of that form, so memory for one op's working set is enough, and a model too large to run can
be timed. Ops that cannot be timed like this (e.g. one that checks its values) are estimated by a
roofline, and the plan states their number. So are ops that must not be. A call is timed on random
floats and on integers that are 0. Most kernels take any; some read or write at addresses given by
integers, or take bytes that another kernel packed, and synthetic values then crash the process, or
on a GPU its context, which cannot be caught like an error. `timeable` selects what is safe:

- only torch's own ops: ops registered by others may expect anything, and a collective waits;
- ops that take only floats and booleans, unless they are listed here as odd;
- with integers among their tensors: elementwise ops, reductions, sorts and moves, and ops that
  check their indices, for which 0 is a valid index.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves

from ...base.sizes import is_count
from ...cost.devices import NOMINAL
from ...cost.op_times import OpTimes, is_seconds, plain_name, quickest, while_time_lasts
from ...graph.records import Device
from ..chunked_loss import chunked_scratch, is_chunked_loss, no_values
from ..model.tracker import is_profiled, measured_bytes
from ..quirks import recurrent
from ..target.accelerator import is_apart, module_of, synchronize
from ..target.scratch import cpu_scratch_bytes
from .record import Call, Recording, View, form_of

log = logging.getLogger(__name__)

# Per device and settings: the number of elements with which speeds were measured, and the speeds.
_MEASURED: dict[tuple[str, str], tuple[int, Device]] = {}
_TRAINING: ContextVar[bool] = ContextVar("sn_memory.training", default=False)
_OWN = ("aten", "prims", "torch_nn")
_ANY_INTEGER = (torch.Tag.pointwise, torch.Tag.reduction)
_MOVES = (
    "copy_ _to_copy _copy_from clone fill_ zero_ cat stack repeat roll flip constant_pad_nd "
    "tril triu slice_backward slice_scatter select_backward select_scatter diagonal_scatter "
    "as_strided_scatter unfold_copy cumsum cumprod cummax cummin logcumsumexp sort topk "
    "argsort argmax argmin max min median mode sum mean prod any all amax amin floor_divide "
    "bincount searchsorted bucketize one_hot unique_dim unique_consecutive eye arange mm bmm "
    "addmm matmul dot "
)
_INDEXES = (
    "embedding embedding_dense_backward index _unsafe_index index_put index_put_ "
    "_unsafe_index_put _index_put_impl_ index_select index_select_backward index_add "
    "index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_ "
    "gather take take_along_dim put put_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward "
    "value_selecting_reduction_backward "
    "_linear_cross_entropy_batch_chunked _linear_cross_entropy_batch_chunked_no_reduction "
)
# Their integers are the seed and the offset of random numbers.
_SEEDED = (
    "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward native_dropout_backward "
)
# Its packed argument is made by the forward kernel before it is timed.
_PACKED = "mkldnn_rnn_layer_backward "
_INTEGERS = frozenset((_MOVES + _INDEXES + _SEEDED + _PACKED).split())
# Their floats are packed by another kernel, or must be consistent.
_ODD = (
    "_cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight "
    "miopen_rnn miopen_rnn_backward _ctc_loss _ctc_loss_backward _cudnn_ctc_loss "
    "cudnn_batch_norm_backward mkldnn_linear mkldnn_reorder_conv2d_weight "
)
_NOT_TIMED = frozenset(_ODD.split())


@contextmanager
def while_training() -> Iterator[None]:
    """Measure nothing inside: that takes memory, for which a budget has no room."""
    token = _TRAINING.set(True)
    try:
        yield
    finally:
        _TRAINING.reset(token)


def _may_measure(device: torch.device) -> bool:
    # The CPU's allocator reports to one profiler only: with a caller's running, measuring fails,
    # and the op would be stored as one that cannot be measured. Other devices have statistics.
    return not _TRAINING.get() and (is_apart(device) or not is_profiled())


# Seconds and scratch bytes of a call; None if it could not or must not be run.
Cost = tuple[float, int] | None
_NONE: Final[Mapping[tuple[str, str], OpTimes]] = {}
# The open tables, by the names of their files and their settings.
_OPEN: ContextVar[Mapping[tuple[str, str], OpTimes]] = ContextVar("sn_memory.op_times")


@contextmanager
def op_times(device: torch.device) -> Iterator[OpTimes]:
    """Yield the table of a device's ops, and save new measurements once, at the end.

    A nested block for the same device and settings yields the same table, which the outermost block
    saves: a save takes a lock, and writes the whole file.
    """
    where = cache_name(device), circumstances()
    opened = _OPEN.get(_NONE)
    if where in opened:
        yield opened[where]
        return
    times = read_times(device)
    token = _OPEN.set({**opened, where: times})
    try:
        yield times
    finally:
        _OPEN.reset(token)
        # After an error as well: what was measured by then is valid.
        times.save(device)


def read_times(device: torch.device) -> OpTimes:
    """Return the table of a device's ops under current settings: the open one, or the file's."""
    name, settings = cache_name(device), circumstances()
    return _OPEN.get(_NONE).get((name, settings)) or OpTimes(name, _is_cost, settings)


def timed(
    recording: Recording,
    place: torch.device,
    *,
    profile: bool,
    device: Device | None,
    untimed: Container[int] = (),
) -> tuple[Device, list[Cost]]:
    """Return a device's speeds and the cost of each call on it; None: estimated by the speeds.

    device : speeds that are known; untimed : indices of calls that are not timed
    """
    if not profile or place.type == "meta":  # nothing can run there
        return device or NOMINAL, [None] * len(recording.calls)
    calls = {at: call for at, call in enumerate(recording.calls) if at not in untimed}
    if device is None:
        # With arrays no larger than an op's, so that this takes no more memory than timing ops.
        touched = ({*call.reads, *call.makes, *call.writes} for call in calls.values())
        sizes = (sum(recording.nbytes[storage] for storage in storages) for storages in touched)
        device = measured_device(place, max(sizes, default=0))
    calls = {at: call for at, call in calls.items() if timeable(call)}
    works = [(signature(call), partial(_cost, call, recording, place)) for call in calls.values()]
    costs = dict(zip(calls, cached_costs(works, place), strict=True))
    return device, [costs.get(at) for at in range(len(recording.calls))]


def cached_costs(
    works: Sequence[tuple[str, Callable[[], Cost]]], device: torch.device
) -> list[Cost]:
    """Return costs per (signature, function that measures it), from the file where possible."""
    with op_times(device) as times:
        keys = [times.key(text) for text, _ in works]
        if _may_measure(device):
            measures = zip(keys, (measure for _, measure in works), strict=True)
            missing = {key: measure for key, measure in measures if key not in times.table}
            times.table.update(while_time_lasts(missing))
        # Read from the table again, as time may have run out before all were measured.
        return _known(times, keys)


def known_costs(recording: Recording, device: torch.device) -> list[Cost]:
    """Return the costs of calls as far as the file has them; nothing is measured."""
    times = read_times(device)
    return _known(times, [times.key(signature(call)) for call in recording.calls])


def _known(times: OpTimes, keys: Sequence[str]) -> list[Cost]:
    # JSON has lists.
    costs = map(times.table.get, keys)
    return [None if cost is None else (cost[0], cost[1]) for cost in costs]


def scratch_of(call: Call, recording: Recording, device: torch.device, cost: Cost) -> int:
    """Return the scratch of a call: measured, else by rule."""
    if cost is not None:
        return cost[1]
    if is_chunked_loss(call.target):
        return chunked_scratch(call.target, call.arguments(no_values)[0], device)
    if is_apart(device):
        return 0
    outputs = [output.form for output in call.outputs if output is not None]
    return cpu_scratch_bytes(call.name, [view.form for view in call.views], outputs)


def scratch_of_steps(device: torch.device, *, profile: bool) -> Callable[..., int]:
    """Return a function for the scratch of calls in a step without values.

    Measurements of earlier traces are used. Ops that need scratch by rule are measured now if
    `profile`, else the rule counts. On a device without a rule, each op is measured.
    """
    times = read_times(device)

    def scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> int:
        flat, spec = tree_flatten((args, kwargs))
        ends = tree_leaves(results)
        operands = [end for end in (*flat, *ends) if isinstance(end, torch.Tensor)]
        if not all(tensor.layout is torch.strided for tensor in operands):
            return 0  # the rule is for strided tensors, as is planning
        storages: dict[int, int] = {}
        nbytes: list[int] = []

        def view(tensor: torch.Tensor) -> View:
            memory = tensor.untyped_storage()
            number = storages.setdefault(memory._cdata, len(storages))
            if number == len(nbytes):
                nbytes.append(memory.nbytes())
            return form_of(tensor, number)

        leaves = tuple(view(value) if isinstance(value, torch.Tensor) else value for value in flat)
        outputs = tuple(view(end) if isinstance(end, torch.Tensor) else None for end in ends)
        call = Call(func, leaves, spec, outputs, (), (), "", random=False)
        recording = Recording([call], nbytes, [device] * len(nbytes))
        key = times.key(signature(call))
        by_rule = scratch_of(call, recording, device, None)
        wanted = profile and (by_rule or is_apart(device)) and _may_measure(device)
        if wanted and key not in times.table:
            with unset_fake_temporarily(), op_times(device) as saved:
                measured = _cost(call, recording, device) if timeable(call) else None
                times.table[key] = saved.table[key] = measured
        cost = times.table.get(key)
        return by_rule if cost is None else int(cost[1])

    return scratch


def _is_cost(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and is_seconds(value[0])
        and is_count(value[1])
    )


def circumstances() -> str:
    """Settings of torch on which the time or the kernel of a call depends."""
    backends: Any = torch.backends
    products = backends.cuda.matmul
    settings = {
        "float32": _precisions(),
        "reduced": (
            products.allow_fp16_reduced_precision_reduction,
            products.allow_bf16_reduced_precision_reduction,
        ),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": getattr(backends.mkldnn, "enabled", None),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        # Limits the instruction sets that oneDNN uses.
        "isa": os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA")),
    }
    return str(settings)


def _precisions() -> list[Any]:
    """Precision of float32 products, by library."""
    backends: Any = torch.backends
    try:
        places = (
            backends.cuda.matmul,
            *(backends.cudnn.conv, backends.cudnn.rnn),
            *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
        )
        # Not by allow_tf32 and similar flags, which raise if these settings were used.
        return [place.fp32_precision for place in places]
    except AttributeError:  # before torch 2.9
        flags = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        return [torch.get_float32_matmul_precision(), *flags]


def cache_name(device: torch.device) -> str:
    """Name of the file of times for a device, this torch and this number of threads."""
    if is_apart(device):
        what = module_of(device).get_device_name(device)
    else:
        what = f"{device.type}-{torch.get_num_threads()}-{torch.backends.cpu.get_cpu_capability()}"
    return f"op-costs-1-{plain_name(what)}-torch-{torch.__version__}.json"


def signature(call: Call) -> str:
    """Everything that the cost of a call depends on, as text."""
    numbers: dict[int, int] = {}
    parts = []
    for arg in call.flat:
        if isinstance(arg, View):
            # Whether two arguments share their storage matters: an in-place op reads less.
            same = numbers.setdefault(arg.storage, len(numbers))
            parts.append(f"{arg.dtype}{arg.size}{arg.stride}@{same}")
        else:
            parts.append(repr(arg))
    missing = sum(output is None for output in call.outputs)
    return f"{call.target}({', '.join(parts)}){call.spec}{f' less {missing}' if missing else ''}"


def measured_device(device: torch.device, room_bytes: int) -> Device:
    """Return the measured speeds of a device: matrix products, copies, transfers.

    They are measured once per process, again only with more room, and never while a model trains.

    room_bytes : bytes of the largest op that is timed; this takes no more
    """
    # Three blocks of floats: two factors and their product.
    count = max(min(1 << 24, room_bytes // 12), 1 << 12)
    key = (str(device), circumstances())
    measured, speeds = _MEASURED.get(key, (0, NOMINAL))
    if measured >= count or _TRAINING.get():
        return speeds
    side = min(8192 if is_apart(device) else 1024, math.isqrt(count))
    left = torch.rand(side, side, device=device)
    product_s = best_seconds(partial(torch.mm, left, left), device)
    del left
    block = torch.rand(count, device=device)
    target = torch.empty_like(block)
    copy_s = best_seconds(partial(target.copy_, block), device)
    del target
    to_host, back = transfer_speeds(block)
    speeds = Device(
        str(device), 2 * side**3 / product_s, 2 * block.nbytes / copy_s, to_host, back, 1e-5
    )
    _MEASURED[key] = (count, speeds)
    return speeds


def transfer_speeds(block: torch.Tensor) -> tuple[float, float]:
    """Return bytes per second from a block's device to the host (pinned memory) and back."""
    device = block.device
    host = torch.empty_like(block, device="cpu", pin_memory=is_apart(device))
    to_host_s = best_seconds(lambda: host.copy_(block), device)
    back_s = best_seconds(lambda: block.copy_(host), device)
    return block.nbytes / to_host_s, block.nbytes / back_s


def rebuilt(call: Call, recording: Recording) -> Callable[[], Any]:
    """Return a call on new tensors of the recorded forms."""
    storages: dict[int, torch.UntypedStorage] = {}
    # A storage may be viewed as floats and as integers, where only the shape of the floats is read;
    # the integers decide the contents, as they may be addresses.
    types = {view.storage: view.dtype for view in call.views}
    types |= {view.storage: view.dtype for view in call.views if not view.dtype.is_floating_point}

    def tensor_of(view: View) -> torch.Tensor:
        place = recording.device[view.storage]
        if view.storage not in storages:
            kind = types[view.storage]
            storages[view.storage] = _filled(recording.nbytes[view.storage], kind, place)
        empty = torch.empty(0, dtype=view.dtype, device=place)
        return empty.set_(storages[view.storage], view.offset, view.size, view.stride)

    args, kwargs = call.arguments(tensor_of)
    if call.target is recurrent.LAYER_BACKWARD:
        args = recurrent.packed_by_forward(args)
    return lambda: call.target(*args, **kwargs)


def _cost(call: Call, recording: Recording, device: torch.device) -> Cost:
    try:
        # Only oneDNN's LSTM kernel does less without gradients: it then makes no workspace.
        saves = call.target is recurrent.LAYER and None not in call.outputs
        with torch.set_grad_enabled(saves):
            run = rebuilt(call, recording)
            seconds = best_seconds(run, device)
            # After the timed runs, which fill kernels' caches, as these are kept.
            return seconds, measured_bytes(run, device)
    except Exception as error:  # noqa: BLE001 - an op may raise anything on synthetic values
        log.info(
            "%s could not be timed (%s); its seconds are estimated by a roofline",
            call.target,
            error,
        )
        return None


def _filled(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.UntypedStorage:
    count = nbytes // dtype.itemsize
    if dtype.is_floating_point:
        # Not zeros: denormals and zeros are slower or faster than values in training.
        return torch.rand(count, device=device).to(dtype).untyped_storage()
    # Indices: 0 is always in range.
    return torch.zeros(count, dtype=dtype, device=device).untyped_storage()


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock by which work on a device is timed."""
    # A single thread's CPU time excludes time lost on a busy machine; several threads wait for each
    # other, which only wall-clock time includes.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def best_seconds(work: Any, device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after a warm-up."""
    clock = clock_of(device)

    def done() -> None:
        work()
        synchronize(device)

    return quickest(done, clock)


def timeable(call: Call) -> bool:
    """Whether a call may be run on synthetic tensors."""
    if call.target.namespace not in _OWN or call.name in _NOT_TIMED:
        return False
    types = {view.dtype for view in call.views}
    if all(kind.is_floating_point or kind.is_complex or kind == torch.bool for kind in types):
        return True
    return call.name in _INTEGERS or any(tag in call.target.tags for tag in _ANY_INTEGER)
