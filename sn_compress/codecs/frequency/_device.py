"""FFTCodec on tensors that are on a GPU: the same bytes, made where the tensor is.

Blocks of up to 8192 go through the fused kernels, one launch for all blocks of one length, of up
to 48 tensors. Larger blocks and whole vectors go through cuFFT and `ops/cuda/whole.py`.

Nothing here waits for the device. So a payload's `saturated`, `energy` and `error` are not known
on the host (the header has the first), and a damaged payload decodes to NaN where an error would
need waiting: `raise_if_damaged` asks, once a step, say. `Encoder` and `Decoder` allocate when they
are made and only launch when they run, so a run over blocks may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.errors import CompressError
from ...devices import _cuda, arrays
from ...devices.arrays import on_cuda
from ..base import Payload
from ._device_decode import Decoder as Decoder
from ._device_decode import damage_of as damage_of
from ._device_decode import raise_if_damaged as raise_if_damaged
from ._device_decode import side_by_side
from ._device_encode import Encoder as Encoder
from ._device_vector import Coder


def new_state(codec: Coder, like: Any, dtype: str = "float32") -> list[Any]:
    """Zero memory for encoding tensors like this one, on its device.

    One [blocks, bins * parts] CuPy array per section: float32, or uint16 that holds bfloat16.
    """
    if dtype not in ("float32", "bfloat16"):
        raise CompressError(f"memory of dtype {dtype!r}; expected 'float32' or 'bfloat16'")
    vector = _cuda.view(like)
    kind = "float32" if dtype == "float32" else "uint16"
    with vector.run().context() as xp:
        return [
            xp.zeros((s.count, s.layout.bins * s.layout.parts), kind)
            for s in codec.sections(vector.elements)
        ]


def to_host(state: Sequence[Any]) -> list[Any]:
    """A copy of a memory, wherever it is, as NumPy float32; waits for the device."""
    parts = [np.array(arrays.to_host(part)) for part in state]
    return [
        (p.astype(np.uint32) << 16).view(np.float32) if p.dtype == np.uint16 else p for p in parts
    ]


def to_device(state: Sequence[Any], like: Any) -> list[Any]:
    """The memory on the device of `like`; copied only if it is not on a device yet."""
    with _cuda.view(like).run().context() as xp:
        return [part if on_cuda(part) else xp.asarray(part) for part in state]


def encode(
    codec: Coder, tensor: Any, state: list[Any] | None = None, decay: float = 1.0
) -> Payload:
    """FFTCodec.encode for a tensor on a GPU; the payload stays there."""
    return Encoder(codec, [tensor], None if state is None else [state]).run(decay)[0]


def decode_mean(codec: Coder, payloads: Sequence[Payload], out: Any = None) -> Any:
    """FFTCodec.decode_mean for payloads on a GPU.

    Returns `out`; or float32 in the framework of the first payload, a CuPy array if that is not
    known, made on the stream that framework works on now.
    """
    n = payloads[0].n
    buffers: list[Any] = [payload.buffer for payload in payloads]
    if out is None:
        out = _cuda.empty(n, int(buffers[0].device.id), payloads[0].framework)
    Decoder(codec, [side_by_side(buffers)], [out]).run()
    return out
