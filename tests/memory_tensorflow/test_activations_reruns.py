"""Layers that run again under compress_activations: chosen by a sample, exact, and fewer bytes."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sn_memory import BudgetError, settings
from sn_memory.tensorflow import Allocations, compress_activations
from sn_memory.tensorflow.memory import has_statistics


def unpackable():
    """Nothing of it packs: norms, GELU, dropout, attention's softmax, a block of these."""
    block = keras.Sequential(
        [layers.LayerNormalization(), layers.Activation("gelu"), layers.Dropout(0.3)], name="block"
    )
    x = keras.Input((32, 64))
    y = layers.BatchNormalization()(block(layers.LayerNormalization()(x)))
    y = layers.Softmax()(layers.Activation("tanh")(layers.GaussianNoise(0.1)(y)))
    return keras.Model(x, layers.GroupNormalization(8)(y))


def mixed():
    """Norms and GELU between dense layers that pack."""
    x = keras.Input((64, 64))
    y = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
    y = layers.Dropout(0.2)(layers.Dense(64)(y))
    y = layers.Dense(128, activation="relu")(layers.LayerNormalization()(layers.Add()([x, y])))
    return keras.Model(x, layers.Dense(4)(y))


def step_of(model):
    """A step that changes the model's state, as training does: gradients, and what it moved."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(tf.cast(model(x, training=True), tf.float32) + 1))
        return tape.gradient(loss, [x, *(it.value for it in model.trainable_variables)])

    return step


def drawn(shape, dtype=tf.float32):
    return tf.random.stateless_normal(shape, (1, 2), dtype=dtype)


def two_steps(model, x):
    """Gradients of two steps from a fixed state, and the state after them."""
    start = [variable.numpy() for variable in model.variables]
    step = step_of(model)
    found = [it.numpy() for _ in range(2) for it in step(x)]
    state = [variable.numpy() for variable in model.variables]
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    return found + state


def fewest(model, x):
    """The smallest budget, as the error has it."""
    with pytest.raises(BudgetError, match="Raise the budget") as error:
        compress_activations(model, budget=1, sample=x)
    return error.value.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True])
def test_what_runs_again_has_exact_gradients_and_moves_state_once(rewritten):
    """Bit-equal in two steps, seeds of dropout and means of batch norm included.

    So without Grappler, which rewrites both passes as it sees fit, and rounds otherwise by that.
    """
    model, x = unpackable(), drawn((16, 32, 64))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not rewritten})
    try:
        plain = two_steps(model, x)
        before = [variable.numpy() for variable in model.variables]
        with compress_activations(model, budget="1 GiB", sample=x) as compressed:
            assert compressed.rerun == [], "all fits"
        with compress_activations(model, budget=fewest(model, x), sample=x) as compressed:
            assert compressed.wrapped == []
            assert len(compressed.rerun) >= 4
            after_sample = [variable.numpy() for variable in model.variables]
            found = two_steps(model, x)
        again = two_steps(model, x)
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert all(map(np.array_equal, after_sample, before)), "the sample leaves no mark"
    for got, expected in zip(found, plain, strict=True):
        bound = 1e-5 * np.abs(expected).max() + 1e-7 if rewritten else 0.0
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
    assert rewritten or all(map(np.array_equal, again, plain)), "closed, it is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_budgets_are_kept_and_the_smallest_is_named(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = mixed()
    finally:
        keras.config.set_dtype_policy("float32")
    x = drawn((16, 64, 64))
    least, held = fewest(model, x), []
    plain_bytes = None
    for budget in (least, 2 * least, 4 * least):
        with compress_activations(model, budget=budget, sample=x, every=1) as compressed:
            step = step_of(model)
            for _ in range(2):
                step(x)
                assert compressed.controller.total_bytes <= budget, "from the first step on"
            plain_bytes = compressed.mix.saved.plain_bytes
            held.append(len(compressed.rerun))
    assert held[0] >= held[-1]
    assert held[0] > 0
    assert plain_bytes > 4 * least


def test_the_report_says_how_much_went_each_way():
    model, x = mixed(), drawn((16, 64, 64))
    with compress_activations(model, bits=4, sample=x) as compressed:
        saved = compressed.mix.saved
        text = compressed.report()
    assert {what for what, *_ in saved.ways} == {
        "layers run again", "tensors packed", "left as they are"
    }  # fmt: skip
    assert sum(size for *_, size in saved.ways) == saved.plain_bytes
    assert f"{len(compressed.rerun)} layers run again" in text
    assert all(name in text for name in compressed.rerun)
    assert re.search(r"take [\d.e-]+ s for each GiB", text)


@pytest.mark.slow
def test_the_peak_falls_by_what_the_report_says():
    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    x = keras.Input((64, 256))
    y = x
    # Of eight blocks one is rebuilt at a time: what it holds then is an eighth of what is saved.
    for _ in range(8):
        y = layers.Add()([y, layers.Activation("gelu")(layers.LayerNormalization()(y))])
    model, x = keras.Model(x, y), drawn((64, 64, 256))

    def peak():
        step = step_of(model)
        step(x)
        found = []
        for _ in range(3):
            with Allocations() as allocations:
                step(x)
            found.append(allocations.peak_bytes)
        return found

    plain = min(peak())
    with compress_activations(model, budget=fewest(model, x), sample=x) as compressed:
        lower, saved = max(peak()), compressed.mix.saved
    # Threads take ops in their own order, so that one or two tensors of 40 more are there at once.
    assert plain - lower >= 0.7 * (saved.plain_bytes - saved.compressed_bytes)
    assert saved.ratio > 3


def test_it_trains_under_fit_with_several_steps_at_once():
    model, x = mixed(), drawn((64, 64, 64))
    y = tf.reduce_mean(x, (1, 2))[:, None, None] + tf.zeros((64, 64, 4))
    least = fewest(model, x[:16])
    with compress_activations(model, budget=2 * least, sample=x[:16]) as compressed:
        assert compressed.rerun
        assert compressed.wrapped
        model.compile("adam", "mse", jit_compile=False, steps_per_execution=2)
        losses = model.fit(x, y, batch_size=16, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


WHY = [
    "", "loss", "attribute", "variable of TensorFlow", "random numbers without a seed",
    "random numbers of NumPy",
]  # fmt: skip


class Noted(layers.Layer):
    """A layer that something forbids to run again."""

    def __init__(self, why):
        super().__init__()
        self.why, self.calls = why, 0
        self.own = tf.Variable(1.0)

    def call(self, x):
        y = tf.nn.gelu(tf.nn.gelu(x))
        if self.why == "loss":
            self.add_loss(tf.reduce_mean(y))
        elif self.why == "attribute":
            self.calls += 1
        elif self.why == "variable of TensorFlow":
            y *= self.own
        elif self.why == "random numbers without a seed":
            y += tf.random.normal(tf.shape(y))
        elif self.why == "random numbers of NumPy":
            y *= float(np.random.rand())  # noqa: NPY002
        return y


@pytest.mark.parametrize("why", WHY)
def test_what_would_not_be_the_same_does_not_run_again(why):
    noted = Noted(why)
    model = keras.Sequential([keras.Input((64, 64)), layers.LayerNormalization(), noted])
    x = drawn((16, 64, 64))
    with compress_activations(model, budget=fewest(model, x), sample=x) as compressed:
        assert (f"{model.name}/{noted.name}" in compressed.rerun) == (not why)
        assert "layer_normalization" in "".join(compressed.rerun)


def test_a_layer_used_twice_does_not_run_again():
    norm = layers.LayerNormalization(name="twice")
    x = keras.Input((64, 64))
    model = keras.Model(x, norm(layers.Activation("gelu", name="once")(norm(x))))
    sample = drawn((16, 64, 64))
    with compress_activations(model, budget=fewest(model, sample), sample=sample) as compressed:
        assert compressed.rerun == ["once"]


def test_bytes_stand_for_seconds_where_each_run_is_to_choose_alike(monkeypatch):
    monkeypatch.setattr(settings, "deterministic", True)
    model, x = mixed(), drawn((16, 64, 64))
    chosen = []
    for _ in range(2):
        with compress_activations(model, bits=4, sample=x) as compressed:
            chosen.append((compressed.rerun, compressed.mix.price))
    assert chosen[0] == chosen[1]
