"""The FFT codec as two compiled CPU ops of a graph: csrc/compress/graph_bindings.cpp.

Without a GPU, gradients are in host memory, where the extension can access them: one op encodes a
gradient and one decodes the mean, bit-identical to FFTCodec. The codec's array code (`batched.py`)
produces the same payloads on any device, in some thousand nodes; on a CPU that takes several times
as long.
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
    """Whether these ops can encode vectors of these sizes on this machine."""
    return (
        codec.transform == "fft"
        and codec.window != "payload"  # needs the peak of all blocks, known only after all FFTs
        and all(
            spectrum.fits(_span(codec, section)) for n in sizes for section in codec.sections(n)
        )
        and not tf.config.list_logical_devices("GPU")
        and _registered()
    )


def encode(
    codec: FFTCodec, gradient: Any, memory: Sequence[Any], *, decay: float
) -> tuple[Any, list[Any], Any]:
    """Return payload, [words] int32, next memory, and [3] float64: energy, error, saturated.

    gradient : [n] float32; memory : of each section, as from codec.new_state, or []
    """
    n = int(gradient.shape[0])
    # For mode="paper"; the op takes float32.
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
    """Return the mean of one gradient's payloads from all ranks, [n] float32.

    gathered : [ranks * words] int32, each rank's payloads of a bucket, concatenated
    at : offset of this payload within a rank's words
    A corrupt payload ends the step with an error that names the rank.
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
    # The last 8 bytes are the number of saturated values and the checksum, set by the op.
    head = header(codec, n) + bytes(8)
    top = -1  # each block has its own
    if codec.window != "block":
        peak = np.float32(codec.window).view(np.uint32)
        top = int(quantize.window_top(peak, codec.mantissa))
    like = tf.zeros([])
    return op_def_library.apply_op(
        operation,
        # Constants of the graph, created once for all nodes.
        roots=[_roots(_span(codec, section)).on(like) for section in sections],
        layouts=[int(number) for section in sections for number in _section_fields(codec, section)],
        header=np.frombuffer(head, "<u4").tolist(),
        sizes=[n, codec.payload_bytes(n) // 4, top, ranks, stride, at],
        **more,
    )


def _section_fields(codec: FFTCodec, s: Section) -> tuple[Any, ...]:
    return s.start, s.stop, s.count, s.words_at, _span(codec, s), *numbers(s.layout)


def _span(codec: FFTCodec, section: Section) -> int:
    """Return the number of elements of each FFT."""
    return spectrum.span_length(codec.span, section.layout.block)


@cache
def _roots(span: int) -> Constant:
    return Constant(spectrum.roots(span))


@cache
def _registered() -> bool:
    """Whether the ops are registered with TensorFlow; the first call registers them."""
    core = _native.core()
    if core is None:
        return False
    # Through TensorFlow's C API, looked up in its library by name, as the extension is built
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
