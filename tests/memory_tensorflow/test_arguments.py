"""A planned Keras model is called as the plain one: other arguments are another call."""

import inspect
import operator
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import dense, normal

import sn_memory.tensorflow as rim


class Arguments(keras.Model):
    """Arguments of many kinds, and settings in attributes, lists and dicts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(32, "relu"), keras.layers.Dense(32)
        self.drop = keras.layers.Dropout(0.5, seed=1)
        self.factor, self.factors, self.by_name = 1.0, [1.0, 2.0], {"scale": 1.0}

    def call(self, x, added=None, taken=None, *, scale: float = 1.0, training=None):
        """Add, take away and scale."""
        x = self.second(self.first(x))
        x = x if added is None else x + added
        x = x if taken is None else x - taken
        scale = scale * self.factor * self.factors[0] * self.by_name["scale"]
        return {"out": scale * self.drop(x, training=training), "name": "it", "none": None}


X, MORE = normal(16, 32), normal(16, 32, seed=4)


def network():
    keras.utils.set_random_seed(1)
    model = Arguments()
    model(X)
    return model


def both(model, planned, *args, **kwargs):
    """Return what a training call of each returns, and whether the planned one warned."""
    found, warned = [], False
    for it in (model, planned):
        seed = [it.numpy() for it in model.variables]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = tf.function(lambda it=it: it(*args, training=True, **kwargs)["out"])()
        for variable, value in zip(model.variables, seed, strict=True):
            variable.assign(value)
        warned = any(issubclass(note.category, rim.PlanWarning) for note in said)
        found.append(made.numpy())
    return found, warned


@pytest.fixture(scope="module")
def pair():
    model = network()
    return model, rim.plan(model, (X, MORE), "100%", profile=False, backend="graph")


@pytest.mark.parametrize(
    ("args", "kwargs", "known"),
    [
        ((X, MORE), {}, True),
        ((X,), {"added": MORE}, True),
        ((X, MORE), {"taken": None, "scale": 1.0}, True),
        ((X,), {"taken": MORE}, False),
        ((X, None, MORE), {}, False),
        ((X, MORE), {"scale": 3.0}, False),
        ((X,), {}, False),
    ],
)
def test_other_arguments_are_another_call(pair, args, kwargs, known):
    model, planned = pair
    (plain, got), warned = both(model, planned, *args, **kwargs)
    np.testing.assert_array_equal(got, plain)
    assert not warned
    sample = next(iter(planned.sn_memory.steps.values()))
    assert (planned.sn_memory.running is sample) == known


CHANGES = {
    "rate": lambda model: setattr(model.drop, "rate", 0.1),
    "factor": lambda model: setattr(model, "factor", 2.0),
    "in a list": lambda model: operator.setitem(model.factors, 0, 2.0),
    "in a dict": lambda model: operator.setitem(model.by_name, "scale", 2.0),
    "activation": lambda model: setattr(model.first, "activation", tf.tanh),
    "trainable": lambda model: setattr(model.second, "trainable", False),
    "LoRA": lambda model: model.first.enable_lora(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_changed_after_planning_are_noticed(change):
    model = network()
    planned = rim.plan(model, X, "1MiB", profile=False, backend="graph")
    # Attributes of the model itself are the planned one's own; layers are shared.
    CHANGES[change](planned)
    model.factor = planned.factor
    (plain, got), warned = both(model, planned, X)
    # TensorFlow merges ops of the plain step: sums of 32 numbers of about 1 in another order.
    np.testing.assert_allclose(got, plain, rtol=0, atol=32 * 2**-24)
    assert not warned
    assert planned.sn_memory.kinds[-1].how == "nothing runs again"


def test_signature_and_results_are_the_models(pair):
    model, planned = pair
    assert inspect.signature(planned.call) == inspect.signature(model.call)
    assert type(planned).call.__doc__ == Arguments.call.__doc__
    assert type(planned).__doc__ == Arguments.__doc__
    assert type(planned).__name__ == "Arguments"
    # Results hold no symbolic tensors.
    run = tf.function(lambda it, *args: it(*args, training=True))
    plain, got = run(model, X, MORE), run(planned, X, MORE)
    assert plain.keys() == got.keys()
    assert got["none"] is None
    assert np.isfinite(got["out"].numpy()).all()


class Result:
    """What TensorFlow cannot look into."""

    def __init__(self, value):
        self.value = value


class Hidden(keras.Model):
    """Returns an object, by way of a layer that does so too."""

    class Inner(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(64, "gelu")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return Result(self.dense(x))

        def compute_output_spec(self, x):
            return Result(x)

    def __init__(self, opened):
        super().__init__()
        self.opened, self.inner = opened, [Hidden.Inner() for _ in range(3)]

    def call(self, x):
        for layer in self.inner:
            x = layer(x).value
        return x if self.opened else {"found": x, "object": Result(x)}


def test_objects_in_results_are_not_planned_as_ops_and_gradients_go_through_them():
    x = normal(4096, 64)
    model = Hidden(opened=False)
    model(x)
    with pytest.raises(rim.TraceError, match="returns a Result"):
        rim.plan(model, x, "100%", profile=False, backend="graph")
    model = Hidden(opened=True)
    model(x)
    planned = rim.plan(model, x, "80%", profile=False, backend="layers")
    assert planned.sn_memory.plan.decided("recompute")
    assert rim.verify(planned, x).difference < 1e-5


class Bag(keras.Model):
    """Means of rows whose number differs, of a ragged tensor; the second argument may be left out.

    Rows are of one tensor as well.
    """

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(64, "gelu") for _ in range(4)]

    def call(self, x, weights=None):
        values = x.values if isinstance(x, tf.RaggedTensor) else x
        for block in self.blocks:
            values = block(values)
        return values if weights is None else values * weights


def test_a_ragged_sample_and_an_argument_that_is_none_are_planned_by_layers():
    rows = normal(4096, 64)
    ragged = tf.RaggedTensor.from_row_lengths(rows, [1000, 3000, 96])
    model = Bag()
    model(rows)
    with pytest.raises(rim.TraceError, match="holds a RaggedTensor"):
        rim.plan(model, ragged, "100%", profile=False, backend="graph")
    for sample in (ragged, (rows, None)):
        planned = rim.plan(model, sample, "80%", profile=False, backend="layers")
        assert planned.sn_memory.plan.decided("recompute")
        assert rim.verify(planned, sample).difference < 1e-5
    specs = tf.type_spec_from_value(ragged)
    with pytest.raises(rim.TraceError, match="Pass a tensor"):
        rim.plan(model, specs, "80%", profile=False, backend="layers")


def test_fit_with_weights_of_samples_and_a_metric():
    x, y = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
    weights = np.linspace(0, 1, 64, dtype=np.float32)
    losses = []
    for planned in (False, True):
        keras.utils.set_random_seed(1)  # the last layer is there before dense sets it
        model = dense(64, 1, "relu", keras.layers.Dense(32), inputs=32)
        if planned:
            model = rim.plan(model, tf.TensorSpec((16, 32)), "100%", profile=False)
        model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], jit_compile=False)
        history = model.fit(
            x, y, 16, 3, sample_weight=weights, verbose=0, shuffle=False,
            callbacks=[keras.callbacks.EarlyStopping("loss")],
        )  # fmt: skip
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
        model.compile("sgd", "mae", jit_compile=False)
        model.fit(x, y, 16, 1, verbose=0, shuffle=False)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_what_is_no_tensor_is_a_constant_of_a_planned_step():
    """Other values, another model or another variable were ignored: the sample's were used."""

    def step(model, x, rate, scale=1.0):
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(model(x, training=True) ** 2)
        weight = model.trainable_variables[0]
        weight.assign_sub(rate * tape.gradient(loss, weight.value))
        return loss

    one, other, rate = dense(32, 2), dense(32, 2), tf.Variable(0.1)
    planned = rim.plan_step(step, (one, X, rate, 2.0), "100%", profile=False, planner="sqrt_n")
    assert float(planned(one, X.numpy(), rate, 2.0)) > 0
    before = [it.numpy() for it in other.trainable_variables]
    wrong = {
        "0": (other, X, rate, 2.0),
        "2": (one, X, tf.Variable(0.0), 2.0),
        "3": (one, X, rate, 3.0),
        "3 ": (one, X, rate),
        " 3": (one, X, rate, tf.constant(2.0)),
    }
    for place, args in wrong.items():
        with pytest.raises(ValueError, match=f"as argument {place.strip()} .*plan the step for"):
            planned(*args)
    np.testing.assert_array_equal(before[0], other.trainable_variables[0])


class Plain(keras.Model):
    """Its `call` takes no `training`, so Keras' `fit` does not say that it trains."""

    def __init__(self):
        super().__init__()
        self.all = [keras.layers.Dense(128, "gelu") for _ in range(5)]
        self.drop, self.last = keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(32)

    def call(self, x):
        for layer in self.all:
            x = layer(x)
        return self.last(self.drop(x))


def test_a_model_that_is_not_told_that_it_trains_trains_as_planned():
    """Before, it ran without its plan and without a word."""
    x = normal(256, 32)

    def trained(plan):
        keras.utils.set_random_seed(1)
        model = Plain()
        model(x)
        model = rim.plan(model, x, "85%", profile=False) if plan else model
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(x, x, 256, epochs=3, verbose=0).history["loss"]
        # No training: nothing of these is planned.
        model.evaluate(x, x, verbose=0)

        @tf.function
        def saliency(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                out = model(x)
            return tape.gradient(out, x)

        return [losses, saliency(x), *model.get_weights()], model

    with warnings.catch_warnings():
        warnings.simplefilter("error", rim.PlanWarning)
        mine, planned = trained(plan=True)
    for one, other in zip(mine, trained(plan=False)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    kinds = [it.inputs for it in planned.sn_memory.kinds]
    assert kinds == ["x=float32[256, 32]", "training=None, x=float32[256, 32]"]
