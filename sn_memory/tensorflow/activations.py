"""compress_activations for Keras: inputs of dense and convolution layers, kept in a few bits.

TensorFlow has no hooks for the tensors that a tape saves. A layer's call is therefore wrapped in a
custom gradient that captures only the compressed input, and differentiates the layer at the
decompressed one. A dense or convolution layer is linear in its input, so its input gradient is
exact and its weight gradient unbiased; a ReLU, in the layer or after it, keeps one bit per element,
and max pooling the position of the maximum in each window.

Bits are looked up when a layer compresses, so the controller may change them without a new trace.
Memory is saved in traced steps (tf.function, fit), where control dependencies delay decompression
until it is needed. Eagerly, gradients are the same, but tf.custom_gradient holds each result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record  # tf.recompute_grad stops its tape with this
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from sn_compress.codecs.base import Payload
from sn_compress.codecs.registry import codec as named_codec
from sn_compress.ops.codes import pack_codes, unpack_codes

from ..activations import Controller, coverage
from ..activations.saved import WIDTHS
from ..base.sizes import parse_bytes
from .modules.rerun import in_force, name_of, run_in_sections, settings_now
from .reruns import Mix, cheapest_mix, layers_in

Array = np.ndarray[Any, Any]


def keep(
    call: Callable[[Any], Any],
    x: Any,
    compress: Callable[[Array], Array],
    of: Callable[[Any, Any], Any] = lambda x, y: tf.cast(x, tf.float32),
) -> tuple[Any, Any, Any]:
    """Run a call hidden from tapes; return its result, the kept bytes, and its input's shape.

    compress, of : the kept bytes are `compress(of(input, result))`
    """
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "activations cannot be compressed in a function that XLA compiles (jit_compile=True), "
            "as compressing runs on the host; expected a plain tf.function. In Keras: "
            "model.compile(jit_compile=False)."
        )
    # A tape would keep the input that the buffer replaces.
    with record.stop_recording():
        y = call(x)
        buffer = tf.numpy_function(compress, [of(x, y)], tf.uint8)
        buffer.set_shape([None])
        shape = tf.shape(x)
        with tf.control_dependencies([buffer]):  # before anything else needs memory
            y = tf.identity(y)
    return y, buffer, shape


def restored(decompress: Callable[..., Array], inputs: list[Any], dtype: Any, like: Any) -> Any:
    """Return a NumPy function's result from the kept bytes, with the static shape `like`."""
    values = tf.numpy_function(decompress, inputs, dtype)
    # numpy_function loses even the rank, which calling a layer requires.
    values.set_shape(like)
    return values


def relu_by_signs(compressor: Compressor, key: str) -> Callable[..., Any]:
    """Return a ReLU that keeps only signs, which the compressor counts under a key."""
    signs, from_signs = compressor.noting(key, _signs), compressor.timing(key, _from_signs)

    @tf.custom_gradient
    def relu(x: Any, *_: Any, **__: Any) -> Any:
        y, mask, shape = keep(tf.nn.relu, x, signs, lambda x, y: y > 0)
        static, dtype = x.shape, x.dtype

        def gradient(dy: Any) -> Any:
            with tf.control_dependencies([dy]):
                on = restored(from_signs, [mask, shape], tf.bool, static)
            # Selected, not multiplied by the mask, whose cast would be as large as dy.
            return tf.where(on, dy, tf.zeros((), dtype))

        return y, gradient

    return relu  # type: ignore[no-any-return]


def _signs(on: Array) -> Array:
    return np.packbits(on.reshape(-1), bitorder="little")


def _from_signs(mask: Any, shape: Any) -> Array:
    n = int(np.prod(shape))
    return np.unpackbits(mask, count=n, bitorder="little").view(np.bool_).reshape(shape)


@dataclass(frozen=True)
class Places:
    """Max pooling in non-overlapping windows; `bits` store a position in a window.

    TensorFlow keeps the layer's whole input and output. Without overlap, the gradient of a window
    goes to one of its elements, the first maximum, so only its position must be kept: 2 bits for a
    window of four.
    """

    height: int
    width: int
    bits: int

    @classmethod
    def of(cls, layer: Any) -> Places | None:
        """Return the object for a layer; None if windows overlap, are padded or exceed 16 cells."""
        height, width = layer.pool_size
        disjoint = tuple(layer.strides) == (height, width) and layer.padding == "valid"
        # Widths that divide a byte.
        bits = next((bits for bits in (1, 2, 4) if height * width <= 1 << bits), None)
        if not disjoint or bits is None or layer.data_format != "channels_last":
            return None
        return cls(height, width, bits)

    def wrapped(
        self, call: Callable[..., Any], compressor: Compressor, key: str
    ) -> Callable[..., Any]:
        """Return the layer's call with a gradient from positions; counts them under a key."""
        compress = compressor.noting(key, self.compress)
        spread = compressor.timing(key, self.spread)

        @tf.custom_gradient
        def pooled(x: Any) -> Any:
            y, kept, shape = keep(call, x, compress)
            static, dtype = x.shape, x.dtype

            def gradient(dy: Any) -> Any:
                inputs = [kept, tf.cast(dy, tf.float32), shape]
                return tf.cast(restored(spread, inputs, tf.float32, static), dtype)

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return pooled(inputs)

        return wrapped

    def _views(self, x: Array) -> Iterator[Array]:
        """Yield, per position in a window, a view of its elements: [n, rows, columns, channels]."""
        # Elements left over at the lower and right edge are in no window.
        rows, columns = x.shape[1] // self.height, x.shape[2] // self.width
        for i in range(self.height):
            for j in range(self.width):
                yield x[:, i :: self.height, j :: self.width][:, :rows, :columns]

    def compress(self, x: Array) -> Array:
        """Return the maxima's positions in [n, height, width, channels], packed into uint8."""
        first, *others = self._views(x)
        best, place = first.copy(), np.zeros(first.shape, np.uint8)
        for number, other in enumerate(others, start=1):
            # `>`, not `>=`: the first of equal maxima, as in TensorFlow's own gradient.
            np.copyto(place, number, where=other > best)
            np.maximum(best, other, out=best)
        return pack_codes(place.reshape(-1), self.bits)

    def spread(self, kept: Any, dy: Any, shape: Any) -> Array:
        """Return a gradient of this shape: zeros, and each element of dy at its position."""
        place = unpack_codes(kept, dy.size, self.bits).reshape(dy.shape)
        gradient = np.zeros(tuple(shape), np.float32)
        for number, view in enumerate(self._views(gradient)):
            np.copyto(view, dy, where=place == number)
        return gradient


MIN_ELEMENTS = 1024
"""Smaller tensors are kept as they are."""


class Compressor:
    """Compresses inputs of layers with the bits that a controller chose, and reports to it.

    controller : chooses bits by the name of a layer
    optimizer : Keras optimizer whose momentum is read; None to use magnitudes of gradients
    seed, threads : settings of the codec
    """

    def __init__(self, controller: Controller, optimizer: Any, seed: int, threads: int) -> None:
        self.controller, self.optimizer = controller, optimizer
        # Without a bound, each group has the finest grid that its bits allow. The controller
        # predicts errors instead of measuring them, which takes as long as encoding.
        self._codecs: dict[int, Any] = {
            bits: named_codec(
                "bounded", bound=float("inf"), bits=bits, seed=seed, threads=threads, measure=False
            )
            for bits in WIDTHS
        }
        self._draws = 0  # tensors compressed so far: each is rounded with new random numbers
        self._step = -1
        self._first = ""
        self._observing = False
        self._gathered: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}  # spent packing and unpacking, by key

    def timing(self, key: str, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function that packs or unpacks, and records the seconds it takes."""

        def timed(*args: Any) -> Array:
            began = perf_counter()
            result = function(*args)
            self.seconds[key] = self.seconds.get(key, 0.0) + perf_counter() - began
            return result

        return timed

    def noting(self, key: str, function: Callable[..., Array]) -> Callable[..., Array]:
        """Like `timing`, for bytes independent of the bits chosen; the controller counts them."""
        return self.timing(key, lambda *args: self.noted(key, function(*args)))

    def compress(self, key: str, x: Array) -> Array:
        """Return a payload, or plain float32 if that is smaller or too many elements overflow."""
        self._count(key)
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        bits = self.controller.bits(key)
        if flat.size < MIN_ELEMENTS:
            return self.noted(key, flat.view(np.uint8))
        if bits is None:
            return self._exact(key, flat)
        codec, self._draws = self._codecs[bits], self._draws + 1
        if self._observing:
            # With the payload's random draw, so that the variance is the kept values'.
            quantised = codec.quantise(flat, step=self._draws)
            self.controller.observe(
                key, n=flat.size, bits=bits, variance=quantised.variance(flat.size),
                nonzero=float(np.count_nonzero(flat)) / flat.size,
            )  # fmt: skip
        payload = codec.encode(flat, state=[np.array([self._draws], np.int64)])
        # More elements overflowed than a payload has room for.
        if payload.saturated:
            self.controller.overflowed(key)
            return self._exact(key, flat)
        return np.asarray(payload.buffer)

    def decompress(self, buffer: Array, shape: Array) -> Array:
        """Return the values that `compress` kept."""
        n = int(np.prod(shape))
        # No payload is this long: it has fewer bits per element.
        if buffer.size == 4 * n:
            return buffer.view(np.float32).reshape(shape)
        payload = Payload.from_bytes(buffer)
        # Use the payload's own bits: the current ones may have changed since.
        codec = next(codec for codec in self._codecs.values() if codec.settings == payload.settings)
        return np.asarray(codec.decode(payload).reshape(shape))

    def noted(self, key: str, kept: Array) -> Array:
        """Report bytes independent of the bits chosen: signs, positions, exact values."""
        if self._observing:
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept

    def arrived(self, key: str, layer: Any, x: Any, y: Any) -> Callable[[Array, Array], Any]:
        """Return a function that observes the gradients of a layer's output and weights."""
        about = {"outputs": int(y.shape[-1]), "coverage": coverage_of(layer, x.shape, y.shape)}

        def note(dy: Array, weights: Array) -> Any:
            if self._observing:
                flat = np.asarray(dy, np.float32).reshape(-1)
                yardstick = self._yardstick(layer, weights)
                observed = {"energy": float(np.dot(flat, flat)), "yardstick": yardstick}
                self._gathered[key] = about | observed
            return np.zeros((), np.int32)

        return note

    def refresh(self) -> None:
        """Choose bits now from the gathered statistics; otherwise the next step does."""
        for key, about in self._gathered.items():
            self.controller.observe_gradient(key, **about)
        if self._gathered:
            self._gathered = {}
            self.controller.refresh()

    def _count(self, key: str) -> None:
        """Count a step each time the layer that compressed first compresses again."""
        # In a traced step, none of our code runs at its start, so nothing else marks it.
        self._first = self._first or key
        if key == self._first:
            self.refresh()
            self._step += 1
            self._observing = self.controller.due(self._step)

    def _exact(self, key: str, flat: Array) -> Array:
        """Return all bytes uncompressed; they are counted until compression takes fewer."""
        if self._observing:
            self.controller.observe(key, n=flat.size, bits=None, variance=0.0)
        return flat.view(np.uint8)

    def _yardstick(self, layer: Any, weights: Array) -> float:
        """Return momentum's mean magnitude; for Adam, that of its step times sqrt of v's mean.

        Without momentum, that of the gradient. Entries that never had a gradient have no step.
        """
        momentum, square = self._momenta(layer.kernel)
        if momentum is None:
            return float(np.abs(weights).mean())
        if square is None:
            return float(np.abs(momentum).mean())
        unit = np.zeros_like(square)
        # Where no gradient has arrived yet both are zero, and 0 / 0 would be NaN.
        np.divide(1.0, np.sqrt(square), out=unit, where=square > 0)
        return float((np.abs(momentum) * unit).mean() * np.sqrt(square.mean()))

    def _momenta(self, kernel: Any) -> tuple[Array | None, Array | None]:
        """Return the Keras optimizer's first and second moments of a weight."""
        own = self.optimizer
        # With LoRA, a kernel is a tensor: the weight plus the product of two others.
        if own is None or not own.built or not isinstance(kernel, keras.Variable):
            return None, None
        place = own._trainable_variables_indices.get(own._var_key(kernel))
        # Adam and its variants use the first name, SGD the second. Without momentum the list is
        # empty.
        first = getattr(own, "_momentums", None) or getattr(own, "momentums", None)
        second = getattr(own, "_velocities", None)
        if place is None or not first:
            return None, None
        return first[place].numpy(), second[place].numpy() if second else None


def coverage_of(layer: Any, inputs: Any, outputs: Any) -> float:
    """Return the share of a Keras layer's products that do not involve padding; 1 if unknown."""
    if not hasattr(layer, "kernel_size") or layer.data_format != "channels_last":
        return 1.0
    sizes, output_sizes = inputs.as_list()[1:-1], outputs.as_list()[1:-1]
    # Without padding, no product involves it; for unknown sizes assume the largest error.
    if None in (*sizes, *output_sizes) or layer.padding == "valid":
        return 1.0
    taps, strides, dilation = layer.kernel_size, layer.strides, layer.dilation_rate
    spans = [(count - 1) * rate for count, rate in zip(taps, dilation, strict=True)]
    # Causal: all padding comes before the input.
    before = spans
    if layer.padding == "same":
        # TensorFlow pads as much as the outputs need, an odd element at the end.
        needed = zip(sizes, output_sizes, strides, spans, strict=True)
        before = [
            max((out - 1) * step + span + 1 - size, 0) // 2 for size, out, step, span in needed
        ]
    return coverage(sizes, output_sizes, taps, strides, before, dilation)


_LINEAR = ("Dense", "Conv1D", "Conv2D", "Conv3D")


class CompressedActivations:
    """The wrapped layers of a model, until closed; a context manager.

    controller : chooses the bits; `controller.rows()` has the statistics of each layer's input
    wrapped : unique names of the layers: their paths, if any
    rerun : names of layers that are recomputed in the backward pass, and keep only their inputs
    mix : the choice made on the sample; None without a sample
    """

    def __init__(
        self,
        model: keras.Model,
        compressor: Compressor,
        mix: Mix | None = None,
        excluded: Collection[int] = (),
    ) -> None:
        self.model, self.controller = model, compressor.controller
        self.mix, self.rerun = mix, list(mix.names) if mix else []
        self._compressor = compressor
        self._changes: list[tuple[Any, str, Any]] = []
        self.wrapped: list[str] = []
        self.keys: dict[str, Any] = {}
        for layer in model._flatten_layers(include_self=False):
            if id(layer) not in excluded:
                self._wrap(layer)
        self._reruns = ExitStack()
        if mix:
            # With a sample, the budget covers everything that the forward pass keeps.
            self.controller.observe_other("kept unpacked", nbytes=mix.kept_bytes)
            self._reruns.enter_context(run_in_sections(mix.sections, model))

    def _wrap(self, layer: Any) -> None:
        """Wrap a layer if it is of a supported kind."""
        # By name, because a subclass's call may not be linear in its input.
        kind, key, own = type(layer).__name__, self._name(layer), self._compressor
        signs = relu_by_signs(own, f"{key}/signs")
        if kind in _LINEAR:
            self._set(layer, "call", self._linear(layer, key, signs))
        elif kind == "ReLU" and not any((layer.negative_slope, layer.threshold, layer.max_value)):
            self._set(layer, "call", signs)
        elif kind == "MaxPooling2D" and (places := Places.of(layer)) is not None:
            self._set(layer, "call", places.wrapped(layer.call, own, f"{key}/places"))
        else:
            return
        self.wrapped.append(key)
        self.keys |= dict.fromkeys((key, f"{key}/signs", f"{key}/places"), layer)

    def __enter__(self) -> CompressedActivations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the layers' calls. Compile the model again afterwards: it may hold a trace."""
        self._reruns.close()
        # In reverse, because a layer may have been changed twice.
        for layer, name, own in reversed(self._changes):
            setattr(layer, name, own)
        self._changes = []

    def report(self) -> str:
        """Return a row per layer: elements, bits, predicted error of the weight's gradient.

        With a sample, the bytes it kept and how they were treated come first.
        """
        if self.mix is None:
            return self.controller.report()
        again = f"run again from their input: {', '.join(self.rerun)}\n" if self.rerun else ""
        return (
            f"{self.mix.saved}\npacking and unpacking take {self.mix.price * 2**30:.3g} s for each "
            f"GiB that they free; nothing is offloaded\n{again}{self.controller.report()}"
        )

    def seconds(self) -> dict[str, float]:
        """Return seconds of packing and unpacking by key, and reset them."""
        taken, self._compressor.seconds = self._compressor.seconds, {}
        return taken

    def refresh(self) -> None:
        """Choose bits now from the last step's statistics; otherwise the next step does."""
        self._compressor.refresh()

    def _set(self, layer: Any, name: str, value: Any) -> None:
        self._changes.append((layer, name, getattr(layer, name)))
        setattr(layer, name, value)

    def _name(self, layer: Any) -> str:
        """Return a unique name for a layer, its key in the controller."""
        name = name_of(layer)
        count = sum(wrapped == name or wrapped.startswith(f"{name}:") for wrapped in self.wrapped)
        return f"{name}:{count + 1}" if count else name

    def _linear(self, layer: Any, key: str, signs: Callable[..., Any]) -> Callable[..., Any]:
        # The activation is outside the custom gradient: without it the layer is linear.
        call, own = partial(_without_activation, layer, layer.call), self._compressor
        compress = own.timing(key, partial(own.compress, key))
        decompress = own.timing(key, own.decompress)

        @tf.custom_gradient
        def compressed(x: Any) -> Any:
            y, buffer, shape = keep(call, x, compress)
            # Read here, so that the gradient does not capture `x` itself. The gradient needs Keras'
            # mixed-precision settings: it runs outside of Keras' call, which casts weights.
            static, dtype, then = x.shape, x.dtype, settings_now()
            note = own.arrived(key, layer, x, y)

            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.control_dependencies([dy]):  # not before it is used
                    values = restored(decompress, [buffer, shape], tf.float32, static)
                values, weights = tf.cast(values, dtype), list(variables or [])
                # Persistent, as it is used twice: for the weights' gradients, which need the
                # decompressed input, and for the input's gradient, which does not and comes last,
                # so that no two layers' inputs are decompressed at the same time.
                with in_force(then), tf.GradientTape(persistent=True) as tape:
                    tape.watch(values)
                    rerun = call(values)
                gradients = tape.gradient(rerun, weights, dy)
                done = [gradient for gradient in gradients if gradient is not None]
                # NumPy shares the memory of the gradients: nothing is copied.
                done += [
                    restored(note, [tf.cast(of, tf.float32) for of in (dy, gradient)], tf.int32, [])
                    for gradient in done
                    if gradient.shape.rank > 1
                ]
                with tf.control_dependencies(done):
                    dx = tape.gradient(rerun, values, dy)
                # TensorFlow expects a pair only if it passed variables.
                return (dx, gradients) if weights else dx

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            relu = layer.activation is keras.activations.relu
            return (signs if relu else layer.activation)(compressed(inputs))

        return wrapped


def _without_activation(layer: Any, call: Callable[[Any], Any], x: Any) -> Any:
    """Call a layer as if it had no activation.

    The activation is restored afterwards, so that a model that is saved, cloned or asked for its
    config has it. Bypasses Keras, which forbids setting layers as attributes of a built layer.
    """
    activation = layer.activation
    object.__setattr__(layer, "activation", keras.activations.linear)
    try:
        return call(x)
    finally:
        object.__setattr__(layer, "activation", activation)


def compress_activations(
    model: keras.Model,
    *,
    error: float | None = None,
    budget: float | str | None = None,
    bits: int | None = None,
    optimizer: Any = None,
    sample: Any = None,
    every: int = 200,
    start_bits: int = 8,
    seed: int = 0,
    threads: int = 1,
) -> CompressedActivations:
    """Keep inputs of dense and convolution layers in few bits until closed, and signs of ReLUs.

    Max pooling whose windows do not overlap keeps positions in them. With a sample, layers and
    blocks are recomputed in the backward pass where that frees bytes at a lower cost in seconds;
    everything else that layers keep stays as it is. Without `error`, `budget` and `bits`, inputs
    get 4 bits.

    Parameters
    ----------
    model
        A Keras model; compile it with jit_compile=False, as compression runs on the host. Compile
        it, or make its tf.function, after this call: earlier traces keep everything uncompressed.
        Bits may change without a new trace.
    error
        Acceptable deviation of a weight's gradient, as a fraction of its momentum's mean magnitude
        (of the gradient's, without an optimizer). For Adam both are taken in units of its step.
    budget
        Alternative to `error`: bytes that the wrapped layers may keep, "500 MiB" for example; with
        a sample, all that the forward pass keeps for the backward pass.
    bits
        Alternative to both: 1, 2, 4 or 8 per element of an input.
    optimizer
        Keras optimizer whose momentum is read: SGD, Adam and its variants.
    sample
        A batch of the model's inputs (a tuple: its arguments), as in training. It is run to measure
        the cost and savings of packing and of recomputation. None: nothing is recomputed.
    every
        Steps from one choice to the next, which uses the statistics of the step before it.
    start_bits
        Until the first choice, in the second step; fewer if the sample shows that a budget needs
        fewer.
    seed, threads
        Settings of the codec.

    Raises
    ------
    ValueError
        If no layer is dense, a convolution, a ReLU or such a pooling layer, and none is recomputed;
        or if a setting is invalid.
    BudgetError
        If no mix fits the budget on the sample; states the smallest budget that would.
    tf.errors.UnknownError
        From the second step on, with the text of a BudgetError, if the kept bytes do not fit.
    """
    if error is None and budget is None and bits is None:
        bits = 4
    budget_bytes = None if budget is None else parse_bytes(budget)
    controller = Controller(
        error=error, budget_bytes=budget_bytes, bits=bits, every=every, start_bits=start_bits
    )

    def trial(excluded: Collection[int]) -> CompressedActivations:
        # With its own controller, as running the sample is not a training step.
        fixed = Controller(bits=bits or start_bits)
        return CompressedActivations(
            model, Compressor(fixed, None, seed, threads), excluded=excluded
        )

    mix = None if sample is None else cheapest_mix(model, sample, trial, budget_bytes)
    if mix:  # keep a budget from the first step on
        controller.start_bits = min(start_bits, mix.start_bits)
    compressor = Compressor(controller, optimizer, seed, threads)
    # A tensor inside a recomputed section would be packed in both runs, the first time for nothing.
    excluded = layers_in(mix.sections) if mix else ()
    compressed = CompressedActivations(model, compressor, mix, excluded)
    if not (compressed.wrapped or compressed.rerun or (mix and budget_bytes is not None)):
        raise ValueError(
            f"compress_activations: {model.name} has no layer of {', '.join(_LINEAR)} or ReLU, so "
            "there is nothing to compress. Pass the model that contains them, or budget= with a "
            "sample= to recompute layers."
        )
    return compressed
