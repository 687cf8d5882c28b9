"""Inputs that nobody planned for, while training: within the budget at first sight, and equal."""

import gc
import logging
import weakref

import keras
import keras_samples
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import dense, normal, peak_of

import sn_memory.tensorflow as rim
from sn_memory import BudgetError, PlanError
from sn_memory.run import unseen
from sn_memory.tensorflow import planned as records

SETTINGS = {"profile": False, "time_limit_s": 1.0, "backend": "graph"}
WIDTH = 128


def mlp(blocks=5):
    return dense(WIDTH, blocks, "silu", use_bias=False)


def rows(count, seed=0):
    return normal(count, WIDTH, seed=seed)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """A machine that stands still for a while does not count."""
    monkeypatch.setattr(unseen, "ALLOWED_S", 1e6)


@pytest.fixture
def searched(monkeypatch):
    """The searches for plans while training."""
    found = []
    own = records.PlanOptions.search
    monkeypatch.setattr(
        records.PlanOptions,
        "search",
        lambda it, budget: lambda graph: found.append(graph) or own(it, budget)(graph),
    )
    return found


def trained(model, dataset, **settings):
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False, **settings)
    losses = model.fit(dataset, epochs=2, verbose=0, shuffle=False).history["loss"]
    return losses, [it.numpy() for it in model.variables]


def step_of(model):
    """A training step of the user's own, in a function for each shape."""
    return keras_samples.step_of(model, lambda out: tf.reduce_mean(out**2))


def equal(one, other):
    """Whether a loss and gradients are the same but for the last bits of sums of 2**18 numbers."""
    pairs = list(zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True))
    # What is zero but for rounding (a bias of keys) is compared with all.
    largest = max(np.abs(it).max() for _, it in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * largest)
    return True


def kept(planned, x):
    """Whether a planned step is the model's own, and holds no more than the budget."""
    found = rim.verify(planned, x)
    assert found.difference < 1e-5, str(found)
    # Blocks below 256 KiB are malloc's and in no trace.
    assert found.measured_peak_bytes <= planned.sn_memory.budget_bytes, str(found)
    # The tolerance of test_plan.py, one way: elementwise ops that TensorFlow lets overwrite their
    # input are counted with both.
    assert found.measured_peak_bytes <= 1.05 * found.predicted_peak_bytes, str(found)
    return True


@pytest.mark.parametrize("steps", [1, 2])
def test_an_epoch_with_a_partial_last_batch(steps, searched):
    data = tf.data.Dataset.from_tensor_slices((rows(2648), rows(2648, 1))).batch(1024)
    plain = trained(mlp(), data, steps_per_execution=steps)
    budgeted = rim.plan(mlp(), rows(1024), "75%", **SETTINGS)
    mine = trained(budgeted, data, steps_per_execution=steps)
    assert equal(mine, plain)
    assert [it.how for it in budgeted.sn_memory.kinds] == ["planned", "nothing runs again"]
    assert budgeted.sn_memory.kinds[1].inputs == f"inputs=float32[600, {WIDTH}]"
    assert kept(budgeted, rows(600))
    assert kept(budgeted, rows(1024))
    assert not searched


def test_what_no_plan_is_small_enough_for_is_planned_at_once(searched):
    budgeted = rim.plan(mlp(), rows(1024), "100%", **SETTINGS)
    assert kept(budgeted, rows(1100))
    assert budgeted.sn_memory.kinds[-1].how == "planned at once"
    assert len(searched) == 1
    assert kept(budgeted, rows(1090))
    assert budgeted.sn_memory.kinds[-1].how.startswith("carried over from the plan of")
    assert len(searched) == 1


def test_many_kinds_are_no_alarm():
    """TensorFlow warns of code that is traced often, also where each kind has a function."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    budgeted = rim.plan(mlp(), rows(64), "100%", **SETTINGS)
    budgeted.compile("sgd", "mse")
    tf.get_logger().addHandler(handler)
    try:
        for n in range(40, 48):
            budgeted.train_on_batch(rows(n), rows(n, 1))
            rim.verify(budgeted, rows(n))
    finally:
        tf.get_logger().removeHandler(handler)
    assert len(budgeted.sn_memory.kinds) == 9
    assert not [message for message in heard if "retracing" in message], heard


def test_settings_and_what_trains_are_planned_for_too():
    model = mlp()
    budgeted = rim.plan(model, rows(1024), "80%", **SETTINGS)
    model.layers[1].trainable = False
    assert kept(budgeted, rows(1024))
    model.layers[1].trainable = True
    model.layers[1].activation = tf.nn.relu
    assert equal(step_of(budgeted)(rows(1024)), step_of(model)(rows(1024)))
    assert kept(budgeted, rows(1024))


def test_several_samples(searched):
    model = mlp()
    both = rim.plan(model, [rows(256), rows(1024)], "75%", **SETTINGS)
    large = rim.plan(model, rows(1024), "75%", **SETTINGS)
    assert both.sn_memory.budget_bytes == large.sn_memory.budget_bytes
    assert [it.how for it in both.sn_memory.kinds] == ["planned", "planned"]
    assert both.sn_memory.plan.peak_bytes == large.sn_memory.plan.peak_bytes
    assert kept(both, rows(256))
    assert kept(both, rows(1024))
    assert not searched
    with pytest.raises(ValueError, match="empty list"):
        rim.plan(model, [], "75%", **SETTINGS)
    with pytest.raises(TypeError, match="several samples"):
        rim.trace(model, [rows(8)])


def test_inputs_of_a_functional_model_are_one_argument():
    """Keras takes its inputs as a list, which is several samples here."""
    inputs = [keras.Input((WIDTH,)), keras.Input((WIDTH,))]
    model = keras.Model(inputs, keras.layers.Dense(8)(keras.layers.Add()(inputs)))
    for sample in ([rows(8), rows(8)], (rows(8), rows(8)), rows(8)):
        with pytest.raises(TypeError, match=r"2 inputs in one argument.*\(\[\.\.\.\],\)"):
            rim.plan(model, sample, "100%", **SETTINGS)
    with pytest.raises(TypeError, match="2 inputs in one argument"):
        rim.estimate(model, rows(8))
    rim.trace(model, ([rows(8), rows(8)],))


def relaxed(model):
    """A step whose function leaves the batch open.

    Its loss holds a gradient alone, as what is measured does: what a user's own loss holds beside
    the model is in no budget.
    """

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return tf.function(step, autograph=False, input_signature=[tf.TensorSpec((None, WIDTH))])


def test_an_open_batch_runs_layers_again():
    model = mlp()
    budgeted = rim.plan(model, tf.TensorSpec((4096, WIDTH)), "80%", **SETTINGS)
    step = relaxed(budgeted)
    with pytest.warns(
        rim.PlanWarning,
        match=r"float32\[None, 128\]: layers run again \(on \[4096, 128\].*is unknown \(None\)",
    ) as said:
        found = step(rows(4096))
    assert len(said) == 1
    assert equal(found, relaxed(model)(rows(4096)))
    for count in (4096, 3000):
        held = count * WIDTH * 4 + sum(4 * int(np.prod(it.shape)) for it in model.variables)
        assert peak_of(step, rows(count)) + held <= budgeted.sn_memory.budget_bytes
    assert peak_of(relaxed(model), rows(4096)) + held > budgeted.sn_memory.budget_bytes
    assert budgeted.sn_memory.kinds[-1].how == "layers run again"
    relaxed(budgeted)(rows(2000))


def test_a_gradient_of_the_input_runs_layers_again():
    model = mlp()
    budgeted = rim.plan(model, rows(4096), "75%", **SETTINGS)

    def step(it):
        @tf.function(autograph=False)
        def found(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean(it(2.0 * x, training=True) ** 2)
            return tape.gradient(loss, [x, *model.trainable_variables])

        return found(rows(4096))

    with pytest.warns(rim.PlanWarning, match="layers run again.*gradient of its input"):
        found = step(budgeted)
    assert equal(found, step(model))
    # That is no matter of the shape: the plan is still there.
    assert kept(budgeted, rows(4096))


def test_where_nothing_counts_the_finest_cut_runs_again(monkeypatch):
    from sn_memory.tensorflow.modules import backend

    model = mlp()
    budgeted = rim.plan(model, rows(2048), "75%", **SETTINGS)
    monkeypatch.setattr(backend, "has_statistics", lambda _: False)
    step = relaxed(budgeted)
    with pytest.warns(rim.PlanWarning, match=r"layers run again.*not measured"):
        found = step(rows(2048))
    assert equal(found, relaxed(model)(rows(2048)))
    assert peak_of(step, rows(2048)) < peak_of(relaxed(model), rows(2048))


@pytest.fixture
def untraceable(monkeypatch):
    """Models are planned; new inputs of theirs cannot be traced."""
    from sn_memory.tensorflow import planned_call

    def broken(*_, **__):
        raise KeyError("an op nobody has seen")

    monkeypatch.setattr(planned_call, "trace_like", broken)


def test_what_cannot_be_traced_runs_layers_again_or_raises_if_strict(untraceable):
    model = mlp()
    step = step_of(rim.plan(model, rows(4096), "80%", **SETTINGS))
    with pytest.warns(rim.PlanWarning, match=r"\[3000, 128\].*layers run again.*nobody has seen"):
        assert equal(step(rows(3000)), step_of(model)(rows(3000)))
    budgeted = rim.plan(mlp(), rows(1024), "80%", strict=True, **SETTINGS)
    with pytest.raises(PlanError, match=r"strict.*\[600, 128\].*nobody has seen.*Plan it ahead"):
        step_of(budgeted)(rows(600))
    with pytest.raises(PlanError, match=r"strict.*\[None, 128\].*is unknown"):
        relaxed(budgeted)(rows(1024))
    with pytest.raises(PlanError, match=r"strict.*eagerly"):
        budgeted(rows(1024), training=True)
    budgeted(rows(1024))
    assert kept(budgeted, rows(1024))


@pytest.mark.slow
def test_a_budget_that_cannot_be_kept():
    model = mlp()
    budgeted = rim.plan(model, rows(1024), "75%", **SETTINGS)
    with pytest.warns(rim.PlanWarning, match=r"\[8192, 128\].*bytes above the budget"):
        found = step_of(budgeted)(rows(8192))
    assert equal(found, step_of(model)(rows(8192)))
    strict = rim.plan(model, rows(1024), "75%", strict=True, **SETTINGS)
    with pytest.raises(BudgetError, match=r"strict.*\[8192, 128\]") as error:
        step_of(strict)(rows(8192))
    assert error.value.peak_bytes > error.value.budget_bytes == strict.sn_memory.budget_bytes


def test_kinds_that_were_not_used_for_long_go(monkeypatch):
    from sn_memory.tensorflow import planned_call

    for it in (records, planned_call):
        monkeypatch.setattr(it, "KINDS", 2)
    budgeted = rim.plan(mlp(2), rows(512), "100%", **SETTINGS)
    budgeted.compile(keras.optimizers.SGD(0.0), "mse")
    ran = []
    for count in (512, 500, 490, 480):
        budgeted.train_on_batch(rows(count), rows(count, 1))
        ran.append(weakref.ref(budgeted.sn_memory.running))
    shapes = [it.inputs.partition("[")[2].partition(",")[0] for it in budgeted.sn_memory.kinds]
    assert shapes == ["512", "490", "480"]
    assert len(budgeted.sn_memory.steps) == 3
    assert len(budgeted.train_function.functions) == 2
    gc.collect()
    # With the graphs it was made of and put into.
    assert [it() is None for it in ran] == [False, True, False, False]


def test_beyond_a_share_of_time_layers_run_again(monkeypatch):
    monkeypatch.setattr(unseen, "ALLOWED_S", -100.0)
    budgeted = rim.plan(mlp(), rows(4096), "80%", **SETTINGS)
    with pytest.warns(rim.PlanWarning, match=r"layers run again.*planning new kinds .* has taken"):
        step_of(budgeted)(rows(4000))
    monkeypatch.setattr(unseen, "ALLOWED_S", 1e6)
    step_of(budgeted)(rows(4000))
    assert budgeted.sn_memory.kinds[-1].how.startswith("carried over")
