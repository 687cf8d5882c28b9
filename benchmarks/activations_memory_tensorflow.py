"""How much compressed activations lower the peak of a Keras step, and at what cost.

    python -m benchmarks activations_memory_tensorflow            all nets, some minutes
    python -m benchmarks activations_memory_tensorflow --quick    one

Peaks are those of forward and backward pass beyond variables and input: what ops ask for in blocks
of 256 KiB and more, of three steps the least without compression and the most with it, as ops
change places from run to run. Seconds are processor time on one thread, the best of several steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from _peaks import cells, make_rows
from activations_tensorflow import BATCH, network
from keras import layers
from tables import markdown

import sn_memory.tensorflow
from sn_memory.tensorflow import Allocations
from sn_memory.tensorflow.model import model_step

# Bits of inputs, and whether layers may run again, as a sample shows.
LEVELS = ((8, False), (4, False), (4, True))
IMAGES = (BATCH, 32, 32, 3)
TOKENS = (32, 64, 128)
Net = tuple[keras.Model, tuple[int, ...]]


def cnn() -> Net:
    """The net of the study."""
    return network(0), (BATCH, 28, 28, 1)


def deep_cnn() -> Net:
    """Six convolutions with ReLU, a pooling layer after each two."""
    stack: list[Any] = [keras.Input(IMAGES[1:])]
    for width in (16, 32, 64):
        stack += [layers.Conv2D(width, 3, padding="same", activation="relu") for _ in range(2)]
        stack.append(layers.MaxPooling2D())
    stack += [layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)]
    return keras.Sequential(stack), IMAGES


def normalized_cnn() -> Net:
    """Six convolutions with batch norm, which is not compressed, and ReLU."""
    stack: list[Any] = [keras.Input(IMAGES[1:])]
    for width, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        stack.append(layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False))
        stack += [layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(10)]), IMAGES


def dense() -> Net:
    """Ten dense layers of 256 with ReLU."""
    hidden = [layers.Dense(256, activation="relu") for _ in range(10)]
    return keras.Sequential([keras.Input((256,)), *hidden]), (2048, 256)


def residual() -> Net:
    """Six blocks of layer norm, dense, ReLU, dense and a skip."""
    return _blocks(6, attention=False), TOKENS


def transformer() -> Net:
    """Four such blocks, with attention before each."""
    return _blocks(4, attention=True), TOKENS


def _blocks(count: int, *, attention: bool) -> keras.Model:
    inputs = x = keras.Input(TOKENS[1:])
    for _ in range(count):
        if attention:
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(TOKENS[-1])(y)])
    return keras.Model(inputs, layers.Dense(10)(x))


NETS: dict[str, Callable[[], Net]] = {
    "CNN": cnn,
    "deeper CNN": deep_cnn,
    "CNN with batch norm": normalized_cnn,
    "10 dense layers": dense,
    "6 residual blocks": residual,
    "transformer of 4 layers": transformer,
}


def step_seconds(model: keras.Model, x: Any, steps: int) -> float:
    """Processor time of forward and backward, the best."""
    step, best = model_step(model), float("inf")
    for _ in range(steps + 1):
        start = time.process_time()
        step(x)
        best = min(best, time.process_time() - start)
    return best


def peaks_of(model: keras.Model, x: Any) -> list[int]:
    """Peaks of three steps, beyond variables and input."""
    step, peaks = model_step(model), []
    step(x)  # it is traced, and kernels get ready
    for _ in range(3):
        with Allocations() as allocations:
            step(x)
        peaks.append(allocations.peak_bytes)
    return peaks


def row_of(name: str, level: tuple[int, bool], steps: int) -> dict[str, Any]:
    """One net with inputs in so many bits, as a flat row."""
    bits, again = level
    keras.utils.set_random_seed(0)
    model, shape = NETS[name]()
    x = tf.random.stateless_normal(shape, (1, 2))
    plain_s, plain_peak_bytes = step_seconds(model, x, steps), min(peaks_of(model, x))
    options = {"sample": x} if again else {}
    with sn_memory.tensorflow.compress_activations(model, bits=bits, **options) as compressed:
        return {
            "net": name,
            "bits": bits,
            "rerun": len(compressed.rerun) if again else None,
            "plain_peak_bytes": plain_peak_bytes,
            "peak_bytes": max(peaks_of(model, x)),
            "plain_step_s": round(plain_s, 5),
            "step_s": round(step_seconds(model, x, steps), 5),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = (
        "net", "inputs in", "peak beyond variables and input, MiB: plain, compressed", "less",
        "step, ms: plain, compressed",
    )  # fmt: skip
    return markdown(head, ([row["net"], _level(row), *cells(row)] for row in rows))


def _level(row: dict[str, Any]) -> str:
    again = "" if row.get("rerun") is None else f", sample: {row['rerun']} layers run again"
    return f"{row['bits']} bits{again}"


def main() -> None:
    """Make all rows and print the table."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    purpose = __doc__.splitlines()[0]
    make_rows(purpose, "activations_memory_tensorflow.json", NETS, LEVELS, "CNN", row_of, table)


if __name__ == "__main__":
    main()
