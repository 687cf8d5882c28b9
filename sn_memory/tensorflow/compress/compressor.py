"""What runs on the host while a step with compressed activations runs, and what is seen of it.

Bits are looked up when a layer compresses, so the controller may change them without a new trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from sn_compress.codecs.base import Payload
from sn_compress.codecs.registry import codec as named_codec

from ...activations import Controller, coverage
from ...activations.saved import WIDTHS

Array = np.ndarray[Any, Any]

MIN_ELEMENTS = 1024
"""Smaller tensors are kept as they are."""


class Compressor:
    """Compresses inputs of layers in the bits that a controller chose, and tells it what it wants.

    Parameters
    ----------
    controller
        Chooses bits by the name of a layer.
    optimizer
        Of Keras, where momentum is read; None: magnitudes are those of gradients.
    seed, threads
        Of the codec.
    """

    def __init__(self, controller: Controller, optimizer: Any, seed: int, threads: int) -> None:
        self.controller, self.optimizer = controller, optimizer
        self._codecs: dict[int, Any] = {
            bits: named_codec(
                "bounded", bound=float("inf"), bits=bits, seed=seed, threads=threads, measure=False
            )
            for bits in WIDTHS
        }
        self._draws = 0  # tensors compressed so far: each rounds by other chances
        self._step = -1
        self._first = ""
        self._looking = False
        self._gathered: dict[str, dict[str, Any]] = {}

    def nbytes(self, key: str, n: int) -> int:
        """Return what n elements are compressed in just now, if not too many escape."""
        bits = self.controller.bits(key) if n >= MIN_ELEMENTS else None
        return 4 * n if bits is None else int(self._codecs[bits].payload_bytes(n))

    def compress(self, key: str, x: Array) -> Array:
        """A payload; or plain float32 where that is smaller, or too many elements escape."""
        self._count(key)
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        bits = self.controller.bits(key)
        if flat.size < MIN_ELEMENTS:
            return self.noted(key, flat.view(np.uint8))
        if bits is None:
            return self._exact(key, flat)
        codec, self._draws = self._codecs[bits], self._draws + 1
        if self._looking:
            self._look(key, flat, bits)
        payload = codec.encode(flat, state=[np.array([self._draws], np.int64)])
        if payload.saturated:
            self.controller.overflowed(key)
            return self._exact(key, flat)
        return np.asarray(payload.buffer)

    def decompress(self, buffer: Array, shape: Array) -> Array:
        """Return what `compress` was given, as it was kept."""
        n = int(np.prod(shape))
        if buffer.size == 4 * n:
            return buffer.view(np.float32).reshape(shape)
        payload = Payload.from_bytes(buffer)
        codec = next(it for it in self._codecs.values() if it.settings == payload.settings)
        return np.asarray(codec.decode(payload).reshape(shape))

    def noted(self, key: str, made: Array) -> Array:
        """Let the controller count bytes that no choice changes: signs, places, what is exact."""
        if self._looking:
            self.controller.observe_other(key, nbytes=made.nbytes)
        return made

    def arrived(self, key: str, layer: Any, x: Any, y: Any) -> Callable[[Array, Array], Any]:
        """Return what takes note of gradients that come to a layer: of its output, and weights."""
        about = {"outputs": int(y.shape[-1]), "coverage": coverage_of(layer, x.shape, y.shape)}

        def note(dy: Array, weights: Array) -> Any:
            if self._looking:
                flat = np.asarray(dy, np.float32).reshape(-1)
                energy = float(np.dot(flat, flat))
                known = {"energy": energy, "yardstick": self._yardstick(layer, weights)}
                self._gathered[key] = about | known
            return np.zeros((), np.int32)

        return note

    def refresh(self) -> None:
        """Choose bits now from what was gathered; otherwise the next step does."""
        for key, about in self._gathered.items():
            self.controller.observe_gradient(key, **about)
        if self._gathered:
            self._gathered = {}
            self.controller.refresh()

    def _count(self, key: str) -> None:
        """A step begins where the layer compresses that compressed first of all."""
        self._first = self._first or key
        if key == self._first:
            self.refresh()
            self._step += 1
            self._looking = self.controller.due(self._step)

    def _look(self, key: str, flat: Array, bits: int) -> None:
        kept = self._codecs[bits].quantise(flat, step=self._draws)
        nonzero = float(np.count_nonzero(flat)) / flat.size
        variance = kept.variance(flat.size)
        self.controller.observe(key, n=flat.size, bits=bits, variance=variance, nonzero=nonzero)

    def _exact(self, key: str, flat: Array) -> Array:
        """All bytes, which the controller counts until fewer are compressed."""
        if self._looking:
            self.controller.observe(key, n=flat.size, bits=None, variance=0.0)
        return flat.view(np.uint8)

    def _yardstick(self, layer: Any, weights: Array) -> float:
        """Mean magnitude of momentum; for Adam that of its step, times the root of the mean of v.

        Without momentum, that of the gradient. Entries that never had one have no step.
        """
        momentum, square = self._momenta(layer.kernel)
        if momentum is None:
            return float(np.abs(weights).mean())
        if square is None:
            return float(np.abs(momentum).mean())
        unit = np.zeros_like(square)
        np.divide(1.0, np.sqrt(square), out=unit, where=square > 0)
        return float((np.abs(momentum) * unit).mean() * np.sqrt(square.mean()))

    def _momenta(self, kernel: Any) -> tuple[Array | None, Array | None]:
        """What a Keras optimizer remembers of a weight: means, and means of squares."""
        own = self.optimizer
        place = self._places.get(kernel.path) if own is not None and own.built else None
        if place is None:
            return None, None
        first = getattr(own, "_momentums", None) or getattr(own, "momentums", None)
        second = getattr(own, "_velocities", None)
        return (
            None if not first else first[place].numpy(),
            None if not first or not second else second[place].numpy(),
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        variables = self.optimizer._trainable_variables
        return {variable.path: place for place, variable in enumerate(variables)}


def coverage_of(layer: Any, inputs: Any, outputs: Any) -> float:
    """Return the part of a Keras layer's products that do not meet padding; 1 if unknown sizes."""
    if not hasattr(layer, "kernel_size") or layer.data_format != "channels_last":
        return 1.0
    sizes, made = inputs.as_list()[1:-1], outputs.as_list()[1:-1]
    if None in (*sizes, *made) or layer.padding == "valid":
        return 1.0
    spans = [
        (taps - 1) * apart
        for taps, apart in zip(layer.kernel_size, layer.dilation_rate, strict=True)
    ]
    before = spans
    if layer.padding == "same":
        needed = zip(sizes, made, layer.strides, spans, strict=True)
        before = [
            max((out - 1) * step + span + 1 - size, 0) // 2 for size, out, step, span in needed
        ]
    return coverage(sizes, made, layer.kernel_size, layer.strides, before, layer.dilation_rate)
