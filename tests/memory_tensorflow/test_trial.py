"""A planned step is tried before it is trusted; what fails falls back, and leaves no trace."""

import random
from importlib import import_module

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras_samples import dense, normal, step_of

import sn_memory.tensorflow as rim
from sn_memory import BudgetError
from sn_memory.tensorflow import eager
from sn_memory.tensorflow.eager import TrialError
from sn_memory.tensorflow.model import run_outside

# By its name: `sn_memory.tensorflow.plan` is the function.
plan_module = import_module("sn_memory.tensorflow.plan")


class Noted(keras.Model):
    """Dropout, statistics, a counter, a list and a random number of Python's."""

    def __init__(self):
        super().__init__()
        self.wide = [keras.layers.Dense(128, "relu") for _ in range(4)]
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3, seed=3)
        self.calls, self.seen, self.notes = 0, [], {}

    def call(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.notes["calls"] = random.random()
        for layer in self.wide:
            x = layer(x)
        return self.drop(self.norm(x))


def rows():
    return normal(2048, 128)


def small():
    return dense(256, 4, "gelu", keras.layers.Dense(10), inputs=128)


def plan(budget="95%", sample=None, **settings):
    sample = rows() if sample is None else sample
    return rim.plan(small(), sample, budget, profile=False, time_limit_s=2, **settings)


def built():
    model = Noted()
    model(tf.ones((2, 128)))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    layers = model._flatten_layers()
    return (
        [it.numpy().tobytes() for it in (*model.variables, *model.optimizer.variables)],
        [dict(it.__dict__) for it in layers],
        (model.calls, list(model.seen), dict(model.notes)),
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # noqa: NPY002
    )


@pytest.mark.parametrize("backend", ["graph", "layers"])
def test_planning_leaves_no_trace(backend):
    model = built()
    before = state(model)
    with pytest.raises(BudgetError, match="smallest peak" if backend == "graph" else "run again"):
        rim.plan(model, rows(), "1MiB", backend=backend, profile=False)
    planned = rim.plan(model, rows(), "100%", backend=backend, profile=False)
    after = state(model)
    assert planned.sn_memory.backend == backend
    assert after[0] == before[0]
    for now, then in zip(after[1], before[1], strict=True):
        assert now.keys() == then.keys()
        assert all(now[key] is then[key] for key in then)
    assert after[2:] == before[2:]
    assert model.losses == []


def lost(*_, **__):
    raise KeyError("value of an op nobody has seen")


def test_a_step_is_put_together_when_it_is_planned(monkeypatch):
    monkeypatch.setattr(eager.Emission, "need", lost)
    with pytest.raises(rim.TraceError, match="cannot be built"):
        rim.plan_step(step_of(small()), rows(), "100%", profile=False)
    # Without values there is nothing to be run, and still the step is put together.
    with pytest.raises(rim.TraceError, match="cannot be built"):
        plan(sample=tf.TensorSpec((2048, 128)), backend="graph")


@pytest.mark.slow
def test_a_plan_that_raises_in_training_falls_back(monkeypatch):
    monkeypatch.setattr(eager.Emission, "need", lost)
    with pytest.warns(rim.PlanWarning, match=r"by layers.*cannot be built.*KeyError.*value"):
        assert plan().sn_memory.backend == "layers"


@pytest.mark.slow
def test_a_plan_with_wrong_results_falls_back(monkeypatch):
    plain = eager.put

    def wrong(node, inputs, after):
        op = plain(node, inputs, after)
        # One sum in the backward pass: the gradient of the last bias.
        return tf.negative(op.outputs[0]).op if op.type == "BiasAddGrad" else op

    monkeypatch.setattr(eager, "put", wrong)
    with pytest.raises(TrialError, match="differ in results"):
        plan(backend="graph")
    with pytest.warns(rim.PlanWarning, match="by layers.*differ in results"):
        plan()


def test_a_plan_that_holds_more_than_its_budget_falls_back(monkeypatch):
    class Greedy(rim.Allocations):
        def __exit__(self, *args):
            super().__exit__(*args)
            self.peak_bytes *= 2

    monkeypatch.setattr(eager, "Allocations", Greedy)
    with pytest.raises(TrialError, match=r"holds .* the budget is"):
        plan("60%", backend="graph")


@pytest.mark.slow
def test_whatever_a_trace_raises_falls_back(monkeypatch):
    monkeypatch.setattr(plan_module, "trace", lost)
    with pytest.warns(rim.PlanWarning, match="by layers.*an op nobody has seen"):
        assert plan().sn_memory.backend == "layers"
    # A budget that layers cannot keep says why it was layers.
    with pytest.raises(BudgetError) as refusal:
        plan("1MiB")
    assert any("an op nobody has seen" in it for it in refusal.value.__notes__)


class Refusing(keras.Model):
    """Its call raises what no one expects, once it is built."""

    def call(self, x):
        if self.built:
            raise NotImplementedError("not today")
        return x


def test_where_nothing_works_the_refusal_names_both_reasons():
    model = Refusing()
    model.build((None, 128))
    model.built = True
    with pytest.raises(rim.TraceError, match=r"neither.*not today.*nor by layers.*not today"):
        rim.plan(model, rows(), "90%", profile=False)


def test_random_numbers_are_no_error():
    class Drawing(keras.layers.Layer):
        def call(self, x):
            return tf.nn.dropout(x, 0.5)

    model = dense(128, 1, None, Drawing(), keras.layers.Dense(128))
    planned = rim.plan(model, rows(), "100%", profile=False)
    assert planned.sn_memory.backend == "graph"


@pytest.mark.slow
def test_gradients_that_are_zero_but_for_rounding_are_no_alarm():
    """Batch norm takes the mean away, so biases before it have no gradient."""
    layers = []
    for _ in range(3):
        layers += [keras.layers.Conv2D(16, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.Activation("gelu")]
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers, keras.layers.Flatten()])
    images = normal(32, 16, 16, 3)
    planned = rim.plan(model, images, "100%", profile=False)
    found = rim.verify(planned, images)
    assert not found.equal
    assert found.difference < 1e-4, str(found)


@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_counting_an_optimizer_leaves_nothing_for_keras_to_make(optimizer):
    """A scope that ended in another thread made the variables; the next here failed at them."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    rim.estimate(model, tf.zeros((4, 16)), optimizer=optimizer)

    def scope():
        with keras.StatelessScope():
            pass

    run_outside(scope)
    scope()
    assert not global_state.get_global_attribute("uninitialized_variables")
