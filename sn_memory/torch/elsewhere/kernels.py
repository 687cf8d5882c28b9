"""What torch's own functions choose on a GPU, where a build without CUDA would choose otherwise.

Most choices follow from the device of fake tensors. Those that ask which libraries torch was built
with are made here: attention, batch norm and recurrent layers take the kernels of cuDNN and of
flash attention. What is counted as its parts, where a GPU has one kernel, is kept in `notes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .attention import attend, kernel

_aten = torch.ops.aten
GPU = torch.device("cuda", 0)
_SPATIAL, _SPATIAL_EVALUATED = 880801, 65535
_ATTENTION: Any = torch.nn.functional.scaled_dot_product_attention
_BATCH_NORM, _RMS_NORM = torch.batch_norm, torch.rms_norm
_GROUPED = "grouped-query attention: keys and values are counted once for each head of queries"
_RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class Kernels(TorchFunctionMode):
    """Inside, torch's functions choose as on a GPU of a compute capability (0: AMD's)."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability
        self.notes: dict[str, None] = {}
        recurrent = {kind: partial(self._recurrent, kind) for kind in _RNN_MODES}
        # By place: torch's own Python functions find them there, and no mode sees what those call.
        self._places: list[tuple[Any, dict[str, Any]]] = [
            (torch.nn.functional, {"scaled_dot_product_attention": self._attention}),
            (torch, {"batch_norm": self._batch_norm, "rms_norm": self._rms_norm}),
            (torch._VF, recurrent),
        ]

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Choose inside."""
        before = [(it, name, it.__dict__.get(name)) for it, own in self._places for name in own]
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
        # Whoever names the device without a number means the first one.
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
        chosen = kernel(query, key, value, attn_mask, dropout_p, self.capability)
        if chosen == "math":
            return _ATTENTION(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if _autocast():
            kind = torch.get_autocast_dtype("cuda")
            query, key, value = (it.to(kind) for it in (query, key, value))
            attn_mask = attn_mask if attn_mask is None else _cast_mask(attn_mask, kind)
            chosen = kernel(query, key, value, attn_mask, dropout_p, self.capability)
        # Flash and cuDNN's read fewer heads of keys as they are; of the other, torch's rules for
        # fake tensors do not know it.
        if enable_gqa and key.size(1) != query.size(1) and chosen == "efficient":
            times = query.size(1) // key.size(1)
            key, value = (it.repeat_interleave(times, 1) for it in (key, value))
            self.notes[_GROUPED] = None
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, chosen)

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
            made = _aten.cudnn_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
            return made[0]
        return _BATCH_NORM(x, weight, bias, mean, variance, training, momentum, eps, cudnn)

    def _rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.notes["rms_norm: counted as its parts; a GPU has one kernel"] = None
        return _RMS_NORM(*args, **kwargs)

    def _recurrent(self, kind: str, *args: Any) -> Any:
        """Run a recurrent layer as cuDNN does; packed sequences have their batch sizes second."""
        if not self.capability:
            self.notes[f"{kind}: counted as its parts; MIOpen has one kernel"] = None
            return getattr(torch._C._VariableFunctions, kind)(*args)
        packed = isinstance(args[3], list | tuple)
        x, states = (args[0], args[2]) if packed else (args[0], args[1])
        batch_sizes = args[1].tolist() if packed else []
        rest = args[3:] if packed else args[2:]
        weights, _, layers, dropout, train, both = rest[:6]
        batch_first = False if packed else bool(rest[6])
        hidden, cell = (states[0], states[1]) if kind == "lstm" else (states, None)
        per_layer = len(weights) // (layers * (2 if both else 1))
        projected = hidden.size(2) if per_layer in (3, 5) else 0
        size = cell.size(2) if cell is not None else hidden.size(2)
        self.notes["recurrent layers: what cuDNN reserves for the backward pass is estimated"] = (
            None
        )
        made = _aten._cudnn_rnn(
            x.to(weights[0].dtype),
            weights,
            per_layer,
            weights[0].detach(),  # on a GPU, the buffer that all of them are views of
            hidden,
            cell,
            _RNN_MODES[kind],
            size,
            projected,
            layers,
            batch_first,
            float(dropout),
            train,
            both,
            batch_sizes,
            None,
        )
        return made[:3] if kind == "lstm" else made[:2]


@contextmanager
def flags_of_autocast() -> Iterator[None]:
    """Let autocast for the CPU, or for CUDA, be one for CUDA; off again at the end.

    `torch.autocast("cuda")` turns itself off in a build without CUDA, so the one for the CPU says
    what is wanted.
    """
    wanted = next((it for it in ("cuda", "cpu") if torch.is_autocast_enabled(it)), None)
    before = {it: torch.is_autocast_enabled(it) for it in ("cuda", "cpu")}
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


@contextmanager
def no_flattening() -> Iterator[None]:
    """Let recurrent layers leave their weights where they are; on a GPU they lie in one buffer."""
    before = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]


def _autocast() -> bool:
    return bool(torch.is_autocast_enabled("cuda"))


def _cast_mask(mask: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask.to(kind)


def _first(device: torch.device) -> torch.device:
    return GPU if device.type == "cuda" and device.index is None else device
