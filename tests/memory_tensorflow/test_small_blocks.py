"""Blocks that no allocator's trace shows on a CPU are counted from the graph of a step."""

import keras
import pytest
import tensorflow as tf
from keras_samples import dense

import sn_memory.tensorflow as rim
from sn_memory import BudgetError
from sn_memory.run.measured_choice import min_recompute
from sn_memory.tensorflow.model import model_step
from sn_memory.tensorflow.modules import backend
from sn_memory.tensorflow.trace.small_blocks import small_bytes

ROWS = tf.TensorSpec((64, 64))
BLOCK = 64 * 64 * 4


def counted(function, *specs):
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return small_bytes(graph, "CPU:0")


def test_live_blocks_of_a_graph():
    def chain(x):
        a = tf.matmul(x, x)
        b = tf.matmul(a, a)  # with a
        c = tf.nn.relu(b)  # written over b
        return tf.matmul(c, a)  # with a and c

    assert counted(chain, ROWS) == 3 * BLOCK
    # A whole block of 256 KiB is in the allocator's trace.
    assert counted(chain, tf.TensorSpec((256, 256))) == 0
    graph = tf.function(chain).get_concrete_function(ROWS).graph
    assert small_bytes(graph, "GPU:0") == 0


def loop(passes):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(
                lambda at, y: True,
                lambda at, y: (at + 1, tf.tanh(y)),
                (0, x),
                maximum_iterations=passes,
            )
        return tape.gradient(y, x)

    return run


def test_what_loops_collect():
    """The gradient of a hyperbolic tangent needs its result, of each pass."""
    more = counted(loop(50), ROWS) - counted(loop(20), ROWS)
    assert more == 30 * BLOCK
    with pytest.raises(rim.TraceError, match="length is not known"):
        counted(loop(None), ROWS)


def test_an_error_names_what_a_small_model_needs():
    """The allocator's trace shows nothing of it: "needs" was its variables and the batch."""
    layers = [keras.layers.LSTM(16, return_sequences=True) for _ in range(2)]
    model = keras.Sequential([keras.Input((12, 8)), *layers, keras.layers.Dense(8)])
    sample = tf.ones((16, 12, 8))
    step = model_step(model).get_concrete_function(sample)
    with pytest.raises(BudgetError, match="with layers run again") as refusal:
        rim.plan(model, sample, "70%", backend="layers")
    # Each pass of a layer keeps four gates and two states at least.
    collected = 2 * 12 * 6 * 16 * 16 * 4
    assert refusal.value.peak_bytes > small_bytes(step.graph, "CPU:0") > collected


def test_verify_counts_small_blocks():
    model, sample = dense(64, 4), tf.ones((256, 64))
    planned = rim.plan(model, sample, "100%", backend="layers")
    found = rim.verify(planned, sample)
    resident = sum(it.numpy().nbytes for it in model.variables) + 256 * 64 * 4
    # What enters each layer is kept, and what enters its GELU.
    assert found.measured_peak_bytes > resident + 2 * 4 * 256 * 64 * 4
    assert abs(found.error) < 0.05, str(found)


class Part:
    name, seconds, saved_bytes = "part", 1.0, 1


def test_a_step_in_which_nothing_runs_again_is_no_choice():
    """Its peak was above the budget once; a lucky measurement below does not make it a plan."""
    parts, tried = [Part(), Part()], []

    def measured(again):
        tried.append(len(again))
        return backend._Measured(1, "")

    chosen, _ = min_recompute(
        parts, backend._Measured(2, ""), measured, budget_bytes=2, baseline_bytes=3, how=""
    )
    assert len(chosen) == 1
    assert 0 not in tried


@pytest.mark.slow
def test_a_choice_takes_the_worst_of_many_steps_and_a_margin(monkeypatch):
    """One order of ops in four has a peak of its own."""
    model, sample = dense(256, 6), tf.ones((512, 256))
    plain = backend._Search.counted
    runs = []

    def counted(self, step, count):
        peaks, op = plain(self, step, count)
        runs.append(len(peaks))
        return [it + (0 if at % 4 else 2**20) for at, it in enumerate(peaks)], op

    monkeypatch.setattr(backend._Search, "counted", counted)
    planned = rim.plan(model, sample, "80%", backend="layers")
    plan = planned.sn_memory.plan
    assert plan.decided("recompute")
    assert sum(runs[:2]) >= backend._LEAST_STEPS
    monkeypatch.undo()
    found = rim.verify(planned, sample)
    margin = 2**20 + 2**20 // backend._MARGIN
    assert plan.peak_bytes >= found.measured_peak_bytes + margin - 2**19
    assert plan.baseline_peak_bytes >= found.unplanned_peak_bytes + 2**20 - 2**19
