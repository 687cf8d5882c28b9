"""The FFT codec as two compiled CPU operations of a graph: csrc/compress/graph_bindings.cpp.

Where there is no GPU, a gradient lies where the extension can reach it: one node encodes it, one
decodes the mean, with the bytes and bits of FFTCodec. The codec's array code (`batched.py`) makes
the same payloads anywhere, in some thousand nodes; on a CPU that takes several times as long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

from .. import _native
from ..arrays import Constant
from ..codecs.fft import FFTCodec
from ..codecs.fft_settings import Section, header
from ..ops import quantize, spectrum
from ..ops.record import numbers
from . import namespace as _namespace  # noqa: F401 - it makes tensors known to the core

_log = logging.getLogger(__name__)
_LIBRARY = "libtensorflow_framework.so.2"


def serve(codec: FFTCodec, sizes: Sequence[int]) -> bool:
    """Whether these operations encode vectors of so many elements, here."""
    return (
        codec.transform == "fft"
        and codec.window != "payload"  # its peak is that of all blocks, known after all FFTs
        and all(
            spectrum.fits(_span(codec, section)) for n in sizes for section in codec.sections(n)
        )
        and not tf.config.list_logical_devices("GPU")
        and _registered()
    )


def encode(
    codec: FFTCodec, gradient: Any, memory: Sequence[Any], *, decay: float
) -> tuple[Any, list[Any], Any]:
    """Return the payload, [words] int32, the next memory, [3] float64: energy, error, saturated.

    gradient : [n] float32; memory : of each section, as codec.new_state makes it, or []
    """
    n = int(gradient.shape[0])
    # The paper's mode; the operation takes float32.
    if codec.half:
        gradient = tf.cast(tf.cast(gradient, tf.float16), tf.float32)
    payload, stats, memories = _call(
        "SnCompressEncode", codec, n, values=gradient, memories=list(memory), decay=decay
    )
    payload.set_shape([codec.payload_bytes(n) // 4])
    stats.set_shape([3])
    for part, old in zip(memories, memory, strict=True):
        part.set_shape(old.shape)
    return payload, memories, stats


def decode(codec: FFTCodec, gathered: Any, n: int, *, ranks: int, at: int) -> Any:
    """The mean of what all ranks encoded of one gradient, [n] float32.

    gathered : [ranks * words] int32, of each rank the payloads of a bucket, one behind the other
    at : words of a rank before this payload
    A damaged payload ends the step with an error that names the rank.
    """
    sizes = {"ranks": ranks, "stride": int(gathered.shape[0]) // ranks, "at": at}
    mean = _call("SnCompressDecode", codec, n, gathered=gathered, decay=1.0, **sizes)
    mean.set_shape([n])
    return mean


def _call(
    operation: str,
    codec: FFTCodec,
    n: int,
    *,
    ranks: int = 1,
    stride: int = 0,
    at: int = 0,
    **more: Any,
) -> Any:
    sections = codec.sections(n)
    # The last 8 bytes are the count of saturated values and the checksum, which the operation sets.
    head = header(codec, n) + bytes(8)
    top = -1  # each block has its own
    if codec.window != "block":
        peak = np.float32(codec.window).view(np.uint32)
        top = int(quantize.window_top(peak, codec.mantissa))
    like = tf.zeros([])
    return op_def_library.apply_op(
        operation,
        # Constants of the graph, made once for all nodes.
        roots=[_roots(_span(codec, section)).on(like) for section in sections],
        layouts=[int(number) for section in sections for number in _section_fields(codec, section)],
        header=np.frombuffer(head, "<u4").tolist(),
        sizes=[n, codec.payload_bytes(n) // 4, top, ranks, stride, at],
        **more,
    )


def _section_fields(codec: FFTCodec, s: Section) -> tuple[Any, ...]:
    return s.start, s.stop, s.count, s.words_at, _span(codec, s), *numbers(s.layout)


def _span(codec: FFTCodec, section: Section) -> int:
    """Elements of each FFT."""
    return spectrum.span_length(codec.span, section.layout.block)


@cache
def _roots(span: int) -> Constant:
    return Constant(spectrum.roots(span))


@cache
def _registered() -> bool:
    """Whether TensorFlow knows the operations; makes them known when it is asked first."""
    core = _native.core()
    if core is None:
        return False
    # By TensorFlow's plain C interface, looked up in its library by name: the extension is built
    # without TensorFlow (decision 88).
    why = core.register_graph_kernels(str(Path(tf.sysconfig.get_lib()) / _LIBRARY))
    if why is not None:
        _log.warning(
            "TensorFlow %s does not take the compiled codec (%s): FFTCompression is computed by "
            "nodes of the graph, which is slower on a CPU",
            tf.__version__,
            why,
        )
    return why is None
