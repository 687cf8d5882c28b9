"""The ways of under_limit.py in TensorFlow: a tf.function with its tape, plain and planned.

The step updates by SGD inside the function, each variable as its gradient is complete, as
TensorFlow's executor does it; `plan_step` plans forward pass, backward pass and updates together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import sn_memory.tensorflow
from sn_memory import BudgetError

RATE = 1e-3
# Images of 224 pixels: of a graph of TensorFlow each op takes 80 to 100 KB itself, beside which the
# activations of smaller ones are little.
BATCH, SIDE, WIDTH = 16, 224, 16
Step = Callable[[], float]


def load() -> None:
    """Have everything there that some way needs late: threads, kernels, planner."""
    sys.setrecursionlimit(100_000)  # Keras walks a functional model layer by layer
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    weight = tf.Variable(tf.ones((2, 2)))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weight)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    x = tf.ones((2, 2))
    tf.function(step)(x)
    sn_memory.tensorflow.plan_step(step, x, "100%", profile=False)(x)


def refuses(error: BaseException) -> bool:
    """Whether it is sn_memory that says the budget cannot be kept."""
    return isinstance(error, BudgetError)


def prepared(asked: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Return what runs a step, and what there is to say of it."""
    keras.utils.set_random_seed(0)
    third, width, side = asked["size"], asked.get("width", WIDTH), asked.get("side", SIDE)
    model = resnet(third, width, side)
    images = tf.random.stateless_normal((BATCH, side, side, 3), (1, 2))
    labels = tf.random.stateless_uniform((BATCH,), (3, 4), 0, 1000, tf.int32)

    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.value.assign_sub(RATE * gradient)
        return loss

    about: dict[str, Any] = {"depth": 3 * (44 + third) + 2, "images": BATCH}
    about["parameter_bytes"] = 4 * model.count_params()
    # Work is counted, not seconds: the machine is shared with others.
    sn_memory.settings.deterministic = True
    if asked["way"] == "plain":
        run = tf.function(step)
    else:
        began = time.process_time()
        budget = asked["limit_bytes"] - asked["margin_bytes"]
        run = sn_memory.tensorflow.plan_step(
            step,
            (images, labels),
            budget,
            profile=False,
            time_limit_s=asked["time_limit_s"],
        )
        plan = run.sn_memory.plan
        about |= {"budget_bytes": budget, "predicted_bytes": plan.peak_bytes}
        about |= {"planned_extra": plan.overhead, "planning_cpu_s": time.process_time() - began}
        about["ops"] = len(run.sn_memory.trace.graph.ops)
    return lambda: float(run(images, labels)), about


def resnet(third: int, width: int, side: int) -> keras.Model:
    """The net of benchmarks/models/resnet.py, 6, 32, third and 6 bottlenecks, in Keras."""
    layers = keras.layers

    def norm(x: Any) -> Any:
        return layers.BatchNormalization()(x)

    def conv(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        layer = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)
        return norm(layer(x))

    def block(x: Any, filters: int, stride: int) -> Any:
        y = layers.ReLU()(conv(x, filters, 1))
        y = layers.ReLU()(conv(y, filters, 3, stride))
        y = conv(y, 4 * filters, 1)
        same = stride == 1 and x.shape[-1] == 4 * filters
        return layers.ReLU()(y + (x if same else conv(x, 4 * filters, 1, stride)))

    images = keras.Input((side, side, 3))
    x = layers.ReLU()(conv(images, width, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, count in enumerate((6, 32, third, 6)):
        for number in range(count):
            x = block(x, width << stage, 2 if stage and not number else 1)
    return keras.Model(images, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))
