"""A Keras model shrinks: nothing it puts out changes for duplicates, and its optimizer follows."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
import keras  # noqa: E402 - without TensorFlow there is nothing to import
from keras import layers  # noqa: E402

from sn_memory.apoptosis.tensorflow import Apoptosis, rebuild  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# float32 sums of some hundred products, then a batch norm: a few hundred units in the last place.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def chain(activation="relu"):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, activation, name="one"),
         layers.Dense(7, activation, name="two"), layers.Dense(3, name="three")]
    )  # fmt: skip


def convolutions(dropout=0.5):
    return keras.Sequential(
        [keras.Input((8, 8, 2)), layers.Conv2D(6, 3, padding="same", name="one"),
         layers.BatchNormalization(name="norm"), layers.ReLU(), layers.MaxPooling2D(),
         layers.Conv2D(5, 3, activation="tanh", name="two"), layers.Dropout(dropout),
         layers.Flatten(), layers.Dense(4, "softmax", name="soft"), layers.Dense(3, name="three")]
    )  # fmt: skip


def residual():
    x = keras.Input((8, 8, 2))
    stem = layers.Activation("relu")(layers.Conv2D(6, 1, name="stem")(x))
    more = layers.Conv2D(6, 3, padding="same", activation="relu", name="more")(stem)
    y = layers.Add()([stem, more]) + stem
    return keras.Model(x, layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(y)))


def duplicate(model, names, one=1, other=3):
    """Make channel `other` of these layers' variables channel `one`."""
    for name in names:
        for held in model.get_layer(name).variables:
            value = held.numpy()
            value[..., other] = value[..., one]
            held.assign(value)


def apoptosis(model, optimizer, **settings):
    defaults = {"tolerance": 1e-4, "every": 1, "min_width": 1, "round_to": 1, "overhead": None}
    return Apoptosis(model, optimizer, **{**defaults, "schedule": "aggressive", **settings})


def images(n=16):
    return np.random.default_rng(0).standard_normal((n, 8, 8, 2)).astype(np.float32)


def rows(n=64):
    return np.random.default_rng(0).standard_normal((n, 5)).astype(np.float32)


def train(model, optimizer, inputs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
    gradients = tape.gradient(loss, [held.value for held in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def trained(model, optimizer, inputs, steps, **settings):
    """The last event after as many steps as an apoptosis looks at."""
    shrink = apoptosis(model, optimizer, every=steps, **settings)
    for _ in range(steps):
        shrink.observe(inputs)
        train(model, optimizer, inputs)
        event = shrink.step()
    return event


CASES = {
    **{kind: (lambda kind=kind: chain(kind), ["one"], rows) for kind in
       ("linear", "relu", "leaky_relu", "elu", "tanh", "softplus", "sigmoid", "gelu", "silu")},
    "conv and batch norm": (convolutions, ["one", "norm"], images),
    "conv before flatten": (convolutions, ["two"], images),
    "residual": (residual, ["stem", "more"], images),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_duplicates_change_nothing_in(case):
    make, names, data = CASES[case]
    model, inputs = make(), data()
    duplicate(model, names)
    before = model(inputs).numpy()
    moving = [held.numpy() for held in model.non_trainable_variables]
    shrink = apoptosis(model, keras.optimizers.SGD())
    shrink.observe(inputs)
    event = shrink.step()
    (merged,) = event.merged
    assert merged.before - merged.after == 1
    assert set(merged.pairs[0]) == {1, 3}
    after = model(inputs).numpy()
    assert abs(after - before).max() <= ROUNDING * abs(before).max()
    for held, old in zip(model.non_trainable_variables, moving, strict=True):
        if held.name.startswith("moving"):
            kept = np.delete(old, merged.pairs[0][0]) if "norm" in names else old
            np.testing.assert_array_equal(held.numpy(), kept)
    # What the model says of itself is true: its configuration makes one of the same shapes.
    again = type(model).from_config(model.get_config())
    assert [v.shape for v in again.variables] == [v.shape for v in model.variables]
    assert model.get_layer(names[0]).output.shape[-1] == merged.after
    if case == "conv before flatten":
        assert "activation of soft" in event.refused["soft/kernel"]


def optimizer_of(kind, rate):
    if kind == "LossScaleOptimizer":
        return keras.optimizers.LossScaleOptimizer(optimizer_of("Adam", rate), initial_scale=1.0)
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(keras.optimizers, kind)(learning_rate=rate, **settings)


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Muon", "LossScaleOptimizer"]
)
def test_the_next_step_is_that_of_the_small_net(kind):
    model, inputs = convolutions(dropout=0.0), images()
    duplicate(model, ["one", "norm"])
    optimizer, fresh = optimizer_of(kind, 1e-4), optimizer_of(kind, 1e-4)
    assert trained(model, optimizer, inputs, 4, tolerance=0.05)
    small = keras.Sequential.from_config(model.get_config())
    fresh.build(small.trainable_variables)
    for of_model, of_small in ((model, small), (optimizer, fresh)):
        for ours, theirs in zip(of_model.variables, of_small.variables, strict=True):
            assert ours.shape == theirs.shape
            theirs.assign(ours)
    train(model, optimizer, inputs)
    train(small, fresh, inputs)
    for ours, theirs in zip(model.variables, small.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_the_average_of_the_weights_shrinks_as_the_weights_do():
    """`fit` ends with `use_ema=True` by writing it over the weights."""
    model = chain("tanh")
    duplicate(model, ["one"])
    optimizer = keras.optimizers.SGD(1e-3, use_ema=True, ema_momentum=0.5)
    shrink = apoptosis(model, optimizer, tolerance=1e-3)
    for _ in range(2):
        train(model, optimizer, rows())
    weights, averages = model.get_weights(), optimizer._model_variables_moving_average
    model.set_weights([held.numpy() for held in averages])
    before = model(rows()).numpy()
    model.set_weights(weights)
    shrink.observe(rows())
    assert shrink.step().merged
    optimizer.finalize_variable_values(model.trainable_variables)
    # Duplicates have come apart by what two steps of 1e-3 have taught them.
    assert abs(model(rows()).numpy() - before).max() < 1e-2 * abs(before).max()


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_memory_of_duplicates_is_what_the_small_net_has(kind):
    # The small net with a_1 + a_3 has, by the chain rule, the gradient g_1 + g_3 for its neuron.
    def net(width):
        return keras.Sequential(
            [keras.Input((5,)), layers.Dense(width, "tanh", name="one"), layers.Dense(3)]
        )

    big, small = net(4), net(3)
    duplicate(big, ["one"])
    kernel, bias, read, last = (held.numpy() for held in big.variables)
    read[3] = 0.5 * read[1]  # then squares add up exactly, too
    big.variables[2].assign(read)
    less = read[:3].copy()
    less[1] += read[3]
    small.set_weights([kernel[:, :3], bias[:3], less, last])
    # Keras's momentum holds the rate: so small that weights stay where they are, but not zero.
    first, second = optimizer_of(kind, 1e-6), optimizer_of(kind, 1e-6)
    for _ in range(2):
        train(small, second, rows())
    (merged,) = trained(big, first, rows(), 2).merged
    # Where 3 survived, it stands for 1.
    order = [1 if i == 3 else i for i in range(4) if i != merged.pairs[0][0]]
    for ours, theirs in zip(first.variables, second.variables, strict=True):
        theirs = theirs.numpy()
        if theirs.shape == (5, 3) or (theirs.shape == (3,) and "one" in ours.path):
            theirs = theirs[..., order]
        elif "kernel" in ours.path:
            theirs = theirs[order]
        # Steps of 1e-6 on weights of about 1 change gradients in the sixth digit.
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-9)


def tanh(kind):
    return kind(8, 1, activation="tanh")


READERS = {
    "rows": ((5,), lambda: [layers.Dense(8, "tanh"), layers.Dense(3)]),
    "same": ((8, 8, 2), lambda: [tanh(layers.Conv2D), layers.Conv2D(3, 3, 2, "same")]),
    "dilated": ((8, 8, 2), lambda: [tanh(layers.Conv2D), layers.Conv2D(3, 3, dilation_rate=2)]),
    "causal": ((9, 2), lambda: [tanh(layers.Conv1D), layers.Conv1D(3, 3, padding="causal")]),
    "flattened": ((4, 4, 2), lambda: [tanh(layers.Conv2D), layers.Flatten(), layers.Dense(3)]),
}


@pytest.mark.parametrize("kind", READERS)
def test_what_is_said_to_change_changes_on_rows_that_were_not_fitted(kind):
    shape, make = READERS[kind]
    model = keras.Sequential([keras.Input(shape), *make()])
    inputs = np.random.default_rng(0).standard_normal((16, *shape)).astype(np.float32)
    shrink = apoptosis(model, keras.optimizers.SGD(), tolerance=0.6)
    before = model(inputs).numpy()
    shrink.observe(inputs)
    (merged,) = shrink.step().merged
    after = model(inputs).numpy()
    change = np.linalg.norm((after - before)[1::2]) / np.linalg.norm(before[1::2])
    # Sums in float32 of some thousand products; the model sums in another order.
    assert change == pytest.approx(*merged.changes.values(), rel=1e-4)
    assert 0 < change <= 0.6


def test_a_recorded_step_is_made_anew_and_an_old_one_is_loud():
    model, inputs = chain(), rows()
    duplicate(model, ["one"])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def recorded():
        return tf.function(lambda x: train(model, optimizer, x))

    old = step = recorded()
    shrink = apoptosis(model, optimizer, every=3, tolerance=0.01)
    losses, events = [], 0
    for _ in range(8):
        shrink.observe(inputs)
        losses.append(float(step(tf.constant(inputs))))
        if shrink.step():
            step, events = recorded(), events + 1
    assert events
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        old(tf.constant(inputs))


# Keras saves files through an interface of TensorFlow that NumPy warns of.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_fit_shrinks_by_its_callback_and_exports(tmp_path):
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 6)).astype(np.float32)
    y = x[:, :1] * x[:, 1:2]
    model = keras.Sequential([keras.Input((6,)), layers.Dense(64, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    shrink = apoptosis(model, model.optimizer, tolerance=0.05, every=8, round_to=4, min_width=8)
    model.predict(x, verbose=0)
    told = model.fit(
        x, y, batch_size=64, epochs=6, verbose=0, validation_data=(x, y),
        callbacks=[shrink.callback(x)],
    ).history  # fmt: skip
    assert model.layers[0].units < 64
    assert model.layers[0].units % 4 == 0
    assert all(max(m.changes.values()) <= 0.05 for e in shrink.events for m in e.merged)
    assert told["loss"][-1] < 0.7 * told["loss"][0]
    expected = model.predict(x, verbose=0)
    shrink.export(tmp_path / "small.keras")
    shrink.export(tmp_path / "saved")
    wide = keras.Sequential([keras.Input((6,)), layers.Dense(64, "relu"), layers.Dense(1)])
    again = rebuild(wide, tmp_path / "small.keras")
    np.testing.assert_array_equal(again(x).numpy(), model(x).numpy())
    assert wide.layers[0].units == model.layers[0].units
    assert json.loads((tmp_path / "small.json").read_text())["events"]
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "expected.npy", expected)
    code = f"""
import keras, numpy as np, tensorflow as tf
x, expected = (np.load({str(tmp_path)!r} + name) for name in ("/x.npy", "/expected.npy"))
plain = keras.models.load_model({str(tmp_path / "small.keras")!r})
saved = tf.saved_model.load({str(tmp_path / "saved")!r})
for out in (plain(x), saved.serve(x)):
    assert abs(np.asarray(out) - expected).max() <= {ROUNDING} * abs(expected).max()
assert "sn_memory" not in __import__("sys").modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def shared():
    x, layer = keras.Input((5,)), layers.Dense(5, "relu", name="one")
    return keras.Model(x, layers.Dense(3)(layer(layer(x))))


def normed():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, name="one"), layers.LayerNormalization(),
         layers.Dense(3)]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "says"), [(shared, "shared"), (normed, "LayerNormalization is not understood")]
)
def test_what_is_not_understood_is_left_with_a_reason(make, says):
    model = make()
    duplicate(model, ["one"])
    before = model.get_weights()
    shrink = apoptosis(model, keras.optimizers.Adam())
    shrink.observe(rows())
    event = shrink.step()
    assert not event
    assert not event.refused or any(says in reason for reason in event.refused.values())
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_no_batch_and_no_graph_are_said():
    model = chain()
    event = apoptosis(model, keras.optimizers.Adam()).step()
    assert "no batch was seen" in event.refused["the model"]
    with pytest.raises(ValueError, match="graph of layers"):
        apoptosis(keras.Sequential([layers.Dense(3)]), keras.optimizers.Adam())
