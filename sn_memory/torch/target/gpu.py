"""A named GPU that is not here: the kernels torch would choose on it, and how fake tensors run.

Most choices follow from the device of fake tensors. Those that depend on the libraries torch was
built with are made here: attention, batch norm and recurrent layers use the kernels of cuDNN and
flash attention. Ops counted as their parts, where a GPU has one kernel, are listed in `notes`.

The rules of attention are those of torch 2.13's
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`: the order of the kernels, and each one's
conditions on dtypes, sizes and masks. The switches of `torch.nn.attention.sdpa_kernel` apply.

Autograd gets the stream from the guard of a tensor's device, and a CPU build has no guard for CUDA:
torch 2.13 then ends the process. With CUDA built in but no GPU, torch itself installs a guard that
does nothing (`_ensureCUDADeviceGuardSet`). Without CUDA, `fake_gpus` installs the guard of the meta
device, which does nothing either. The table is the exported
`c10::impl::device_guard_impl_registry`, one pointer per type of device.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...cost.devices import NamedDevice, is_here, named
from ...graph.records import Device
from ..errors import TraceError
from ..quirks import recurrent

# Receives the gradient of a leaf.
Take = Callable[[torch.Tensor, torch.Tensor], None]
_LAST = 1 << 62  # above the number of any node
_COPY_THEIR_RESERVE = ("CudnnRnnBackward0", "CudnnBatchNormBackward0")


class _Saved:
    """A tensor that a node saved, until that node has run."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


class Walk:
    """Runs backward passes of forward passes that ran inside `saving`.

    The engine needs the accelerator's stream wherever a gradient arrives, and there is none. So
    autograd's nodes are called one by one, in the engine's order: of those whose gradients are
    complete, the one created last. A node's saved tensors are freed after it has run, as in the
    engine; hooks of tensors and nodes do not run.
    """

    def __init__(self) -> None:
        # Whether a cuDNN node is running that copies its reserve space unless torch's engine calls
        # it; the fake tensor mode skips that copy.
        self.copies_reserve = False
        self._unpacked: list[_Saved] = []
        self._caller: Any = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward pass: wrap saved tensors, so that they can be freed."""
        with torch.autograd.graph.saved_tensors_hooks(_Saved, self._unpack):
            yield

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        assert saved.tensor is not None
        # torch's own nodes unpack within their call, once. Code elsewhere, e.g. a checkpoint that
        # unpacks its inputs, may do so again.
        if sys._getframe(1) is self._caller:
            self._unpacked.append(saved)
        return saved.tensor

    def back(
        self, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], take: Take
    ) -> None:
        """Propagate the gradients of the ends back to the leaves."""
        arrived: dict[Any, dict[int, torch.Tensor]] = {}
        for end, gradient in zip(ends, gradients, strict=True):
            if end.grad_fn is None:
                take(end, gradient)
            else:
                _add(arrived.setdefault(end.grad_fn, {}), end.output_nr, gradient)
        # A root that is reached from another one waits for gradients from there.
        waits = _arrivals(list(arrived))
        # By sequence number, the latest first; then by a counter, as nodes cannot be compared.
        ready: list[tuple[int, int, Any]] = []
        for node in arrived:
            if not waits.get(node):
                heapq.heappush(ready, (-node._sequence_nr(), len(ready), node))
        count = len(ready)
        while ready:
            node = heapq.heappop(ready)[2]
            results = self._run(node, arrived.pop(node, {}), take)
            for place, (target, slot) in enumerate(node.next_functions):
                if target is None:
                    continue
                if place < len(results) and results[place] is not None:
                    form = target._input_metadata[slot]
                    _add(arrived.setdefault(target, {}), slot, _formed(results[place], form))
                # Counted even without a gradient: the engine also runs nodes that get none.
                waits[target] -= 1
                if not waits[target]:
                    # Gradients of leaves are taken immediately.
                    number = _LAST if hasattr(target, "variable") else target._sequence_nr()
                    heapq.heappush(ready, (-number, count, target))
                    count += 1
            # Otherwise they would be alive while the next node runs.
            del results

    def _run(self, node: Any, inputs: dict[int, torch.Tensor], take: Take) -> Sequence[Any]:
        forms = node._input_metadata
        if hasattr(node, "variable"):
            if inputs:
                take(node.variable, inputs.pop(0))
            return ()
        if not inputs:
            return ()
        arguments = [inputs.get(place) for place in range(len(forms))]
        inputs.clear()
        if isinstance(node, BackwardCFunction):
            # A Python function gets zeros in place of None, unless it opts out.
            if getattr(node, "materialize_grads", True):
                arguments = [
                    torch.zeros(form.shape, dtype=form.dtype, device=form.device)
                    if arg is None
                    else arg
                    for arg, form in zip(arguments, forms, strict=True)
                ]
            results: Any = node.apply(*arguments)
            node.maybe_clear_saved_tensors()
        else:
            self._caller = sys._getframe()
            self.copies_reserve = node.name() in _COPY_THEIR_RESERVE
            try:
                results = node(*arguments)
            finally:
                self._caller, self.copies_reserve = None, False
            for saved in self._unpacked:
                saved.tensor = None
            self._unpacked.clear()
        return results if isinstance(results, tuple) else (results,)


def _arrivals(roots: list[Any]) -> dict[Any, int]:
    """Return the number of nodes that send a gradient to each node."""
    waits: Counter[Any] = Counter()
    seen: set[Any] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        targets = [target for target, _ in node.next_functions if target is not None]
        waits.update(targets)
        left += targets
    return waits


def _formed(gradient: torch.Tensor, form: Any) -> torch.Tensor:
    """Return a gradient in the shape and dtype of its tensor, as the engine does."""
    if tuple(gradient.shape) != tuple(form.shape):
        gradient = gradient.sum_to_size(form.shape)
    return gradient if gradient.dtype == form.dtype else gradient.to(form.dtype)


def _add(slots: dict[int, torch.Tensor], place: int, gradient: torch.Tensor) -> None:
    before = slots.get(place)
    slots[place] = gradient if before is None else before + gradient


_aten = torch.ops.aten
GPU = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # c10::DeviceType, whose numbers are stable for serialized files
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_LIBRARY = "libc10.so"
# The largest batches that torch's Normalization.cpp passes to cuDNN, in training and evaluation.
_SPATIAL, _SPATIAL_EVALUATED = 880801, 65535
_ATTENTION: Any = torch.nn.functional.scaled_dot_product_attention
_BATCH_NORM, _RMS_NORM = torch.batch_norm, torch.rms_norm
_GROUPED = "grouped-query attention: keys and values are counted once for each head of queries"
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of flash attention
# torch's flash attention computes on heads padded to a multiple of this.
_HEAD_GRAIN = 8
_MASK_GRAIN = 16


@dataclass
class Gpu:
    """A GPU of the table, as a device for fake tensors.

    notes : after a step, what of it is estimated, or counted in another way than the GPU runs it
    """

    named: NamedDevice
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fake_gpus()
        self.walk = Walk()

    place = GPU

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        kernels = Kernels(self.named.capability)
        try:
            with (
                flags_of_autocast(),
                recurrent.no_flattening(),
                self.walk.saving(),
                kernels.chosen(),
            ):
                yield
        finally:
            self.notes.update(kernels.notes)

    def gradients(
        self,
        ends: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        output_gradients: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of leaves, None for a leaf without one."""
        by_leaf: dict[int, torch.Tensor] = {}

        def take(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            by_leaf[id(leaf)] = gradient

        self.back(ends, output_gradients, take)
        return [by_leaf.get(id(leaf)) for leaf in wanted]

    def back(
        self, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], take: Take
    ) -> None:
        """Run the backward pass; `take` is called with each leaf and its gradient."""
        with torch.no_grad(), Kernels(self.named.capability).chosen():
            self.walk.back(ends, gradients, take)


def gpu_of(device: Device | str | None, place: torch.device) -> Gpu | None:
    """Return the GPU with a name; None for a model that is on a GPU, or without a name."""
    if not isinstance(device, str) or is_here(device):
        return None
    gpu = named(device)
    return None if place.type == "cuda" else Gpu(gpu)


@cache
def fake_gpus() -> None:
    """Allow fake tensors on `cuda:0` in this process; raises TraceError if that is impossible."""
    if torch.cuda.is_available():
        return
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if torch.backends.cuda.is_built() and ensure is not None:
        ensure()
        return
    path = Path(torch.__file__).parent / "lib" / _LIBRARY
    try:
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(path)), _REGISTRY)
        guards[_CUDA] = guards[_CUDA] or guards[_META]
        missing = "" if guards[_CUDA] else "its meta device has no guard"
    except (OSError, ValueError) as error:
        missing = f"its {_LIBRARY} has no table of device guards ({error})"
    if missing:
        raise TraceError(
            f"a step on a GPU that is not here cannot be traced with this build of torch "
            f"({torch.__version__}): {missing}. Use a build with CUDA, or leave device out."
        )


class Kernels(TorchFunctionMode):
    """Makes torch's functions choose kernels as on a GPU of a compute capability (0: AMD's)."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability
        self.notes: dict[str, None] = {}
        layers = {kind: partial(self._recurrent, kind) for kind in recurrent.MODES}
        # By module: torch's own Python functions look them up there, and no mode sees these calls.
        self._places: list[tuple[Any, dict[str, Any]]] = [
            (torch.nn.functional, {"scaled_dot_product_attention": self._attention}),
            (torch, {"batch_norm": self._batch_norm, "rms_norm": self._rms_norm}),
            (torch._VF, layers),
        ]
        if capability:
            # Models check it before they call a kernel, e.g. transformers for expert products.
            asked = {"get_device_capability": lambda device=None: divmod(capability, 10)}
            self._places.append((torch.cuda, asked))

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Use these kernels inside."""
        before = [
            (place, name, place.__dict__.get(name)) for place, own in self._places for name in own
        ]
        for place, own in self._places:
            for name, function in own.items():
                setattr(place, name, function)
        try:
            with self:
                yield
        finally:
            for place, name, function in before:
                if function is None:
                    delattr(place, name)
                else:
                    setattr(place, name, function)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self._attention(*args, **kwargs)
        # A device without an index means the first one.
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        if func is torch.Tensor.to and len(args) > 1 and args[1] == "cuda":
            args = (args[0], GPU, *args[2:])
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": GPU}
        args, kwargs = tree_map_only(torch.device, _first, (args, kwargs))
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        chosen = attention_kernel(query, key, value, attn_mask, dropout_p, self.capability)
        if chosen == "math":
            inputs = query, key, value, attn_mask, dropout_p, is_causal
            return _ATTENTION(*inputs, scale=scale, enable_gqa=enable_gqa)
        # Autocast casts for `scaled_dot_product_attention`, but not for kernels called by name.
        if torch.is_autocast_enabled("cuda"):
            kind = torch.get_autocast_dtype("cuda")
            query, key, value = (tensor.to(kind) for tensor in (query, key, value))
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                attn_mask = attn_mask.to(kind)
            chosen = attention_kernel(query, key, value, attn_mask, dropout_p, self.capability)
        # Flash and cuDNN's kernels support fewer heads of keys; the efficient kernel's rule for
        # fake tensors does not.
        if enable_gqa and key.size(1) != query.size(1) and chosen == "efficient":
            times = query.size(1) // key.size(1)
            key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
            self.notes[_GROUPED] = None
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, chosen)

    def _batch_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
    ) -> torch.Tensor:
        most = _SPATIAL if training else _SPATIAL_EVALUATED
        # As in torch's `_select_batch_norm_backend`; AMD's (0) are assumed to have no cuDNN.
        if (
            self.capability
            and torch.backends.cudnn.enabled
            and weight is not None
            and bias is not None
            and x.dim() >= 3
            and x.size(0) <= most
            and torch.bfloat16 not in (x.dtype, weight.dtype)
            and (x.dtype != torch.float16 or weight.dtype == torch.float32)
            and (mean is not None or training)
        ):
            outputs = _aten.cudnn_batch_norm(
                x, weight, bias, mean, variance, training, momentum, eps
            )
            return outputs[0]
        return _BATCH_NORM(x, weight, bias, mean, variance, training, momentum, eps, cudnn)

    def _rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.notes["rms_norm: counted as its parts; a GPU has one kernel"] = None
        return _RMS_NORM(*args, **kwargs)

    def _recurrent(self, kind: str, *args: Any) -> Any:
        if not self.capability:
            self.notes[f"{kind}: counted as its parts; MIOpen has one kernel"] = None
            return getattr(torch._C._VariableFunctions, kind)(*args)
        self.notes[recurrent.ESTIMATED] = None
        return recurrent.by_cudnn(kind, args)


@contextmanager
def flags_of_autocast() -> Iterator[None]:
    """Turn autocast for the CPU, or for CUDA, into one for CUDA inside; restore it at the end.

    `torch.autocast("cuda")` disables itself in a build without CUDA, so autocast for the CPU is
    used to request it.
    """
    wanted = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")}
    dtype = torch.get_autocast_dtype("cuda")
    try:
        if wanted is not None:
            torch.set_autocast_dtype("cuda", torch.get_autocast_dtype(wanted))
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled("cuda", wanted is not None)
        yield
    finally:
        for kind, was in before.items():
            torch.set_autocast_enabled(kind, was)
        torch.set_autocast_dtype("cuda", dtype)
        torch.clear_autocast_cache()


def _first(device: torch.device) -> torch.device:
    return GPU if device.type == "cuda" and device.index is None else device


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: int,
) -> str:
    """Return `cudnn`, `flash`, `efficient` or `math` for attention on a GPU of this capability.

    query, key, value : [batch, heads, length, head]; capability : e.g. 90; 0 for AMD's, where flash
    and efficient attention have the same conditions (AOTriton).
    """
    head, head_of_value = query.size(-1), value.size(-1)
    half, plain = query.dtype in _HALF, query.dim() == 4 and key.dim() == 4
    recent = capability >= 80 or capability == 0
    switches: Any = torch.backends.cuda
    if not plain or 0 in (*query.shape, *key.shape):
        return "math"
    if (
        switches.cudnn_sdp_enabled()
        and capability in (90, 100)
        and half
        and head == head_of_value
        and head % _HEAD_GRAIN == 0
        and head <= 128
    ):
        return "cudnn"
    if (
        switches.flash_sdp_enabled()
        and recent
        and half
        and mask is None
        and head == head_of_value
        and head <= _LARGEST_HEAD
        # There its backward pass fails with such heads; without gradients torch would use it.
        and not (capability in (86, 89, 120) and head > 192 and (head <= 224 or dropout > 0))
    ):
        return "flash"
    aligned = 8 if half else 4
    if (
        switches.mem_efficient_sdp_enabled()
        and (query.dtype in (torch.float16, torch.float32) or (recent and half))
        and head % aligned == 0
        and head_of_value % aligned == 0
    ):
        return "efficient"
    return "math"


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    chosen: str,
) -> torch.Tensor:
    """Run attention by a kernel other than `math`; arguments as in torch's own."""
    if mask is not None and mask.dtype == torch.bool:
        # Kernels expect a mask of numbers that are added to the scores.
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.full_like(zero, -math.inf))
    logsumexp = any(tensor.requires_grad for tensor in (query, key, value))
    if chosen == "flash":
        head = query.size(-1)
        scale = 1 / math.sqrt(head) if scale is None else scale
        padding = -head % _HEAD_GRAIN
        if padding:
            query, key, value = (
                torch.nn.functional.pad(tensor, (0, padding)) for tensor in (query, key, value)
            )
        result = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )[0]
        return result[..., :head] if padding else result
    if mask is not None:
        # In the kernels' layout: rows are aligned to such multiples, batch and heads are views.
        length = mask.size(-1)
        padding = -length % _MASK_GRAIN
        if padding and length > 1:
            mask = torch.nn.functional.pad(mask, (0, padding))[..., :length]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    if chosen == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, logsumexp, dropout, causal, False, scale=scale
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, logsumexp, dropout, causal, scale=scale
    )[0]
