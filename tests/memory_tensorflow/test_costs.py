"""The file of op costs: what is wrong with it is ignored in one line; what it depends on."""

import logging

import keras
import pytest
import tensorflow as tf

from sn_memory.cost.devices import NOMINAL
from sn_memory.tensorflow import trace
from sn_memory.tensorflow.trace import op_seconds
from sn_memory.tensorflow.trace.op_seconds import circumstances, is_cost

MEASURED = op_seconds._seconds


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sn_memory"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What an op takes is not looked at here."""
    monkeypatch.setattr(op_seconds, "_seconds", lambda *_: 1e-6)


def graph():
    layers = [keras.Input((4,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(256)]
    return trace(keras.Sequential(layers), tf.TensorSpec((64, 4)), device=NOMINAL).graph


def times(traced):
    return [op.seconds for op in traced.ops]


@pytest.mark.parametrize("content", ["{", '{"a": [1.0]}'])
def test_a_damaged_file_is_no_reason_not_to_plan(folder, caplog, content):
    before = times(graph())
    (file,) = folder.iterdir()
    file.write_text(content, encoding="utf-8")
    with caplog.at_level(logging.WARNING, "sn_memory"):
        assert times(graph()) == before
    assert len([it for it in caplog.records if it.name.startswith("sn_memory")]) == 1
    # It was written anew.
    caplog.clear()
    graph()
    assert not [it for it in caplog.records if it.name.startswith("sn_memory")]


def test_another_setting_is_another_time(folder, monkeypatch):
    plain = circumstances()
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(not before)
    try:
        assert circumstances() != plain
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    assert circumstances() == plain
    graph()
    (file,) = folder.iterdir()
    entries = len(op_seconds.MeasuredCosts("CPU:0").table)
    monkeypatch.setattr(op_seconds, "circumstances", lambda: "others")
    graph()
    assert len(op_seconds.MeasuredCosts("CPU:0").table) == 2 * entries
    assert list(folder.iterdir()) == [file]


def test_what_is_a_cost():
    assert all(map(is_cost, ([0.5, 8], [0, 0])))
    others = (None, 1.0, [], [1.0], [1.0, -1], [1.0, 2**62], [1.0, 0.5], {}, [None, 0])
    assert not any(map(is_cost, others))


def test_a_device_by_name_gives_speeds_and_times_nothing():
    layers = [keras.Input((512,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(256)]
    model, sample = keras.Sequential(layers), tf.TensorSpec((64, 512))
    graph = trace(model, sample, device="h100").graph
    assert graph.device.name == "h100"
    assert "measured" not in {it for it, op in zip(graph.arrays.source, graph.ops, strict=True)
                              if op.kind != "loss"}  # fmt: skip
    with pytest.raises(ValueError, match="got device 'cuda', expected one of"):
        trace(model, sample, device="cuda")


def test_what_was_not_timed_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(op_seconds, "_seconds", lambda *_: None)
    assert graph().ops
    assert not folder.exists()


def test_ops_are_run_at_their_sizes(folder, monkeypatch):
    """Convolutions are told the sizes of their gradients by an op whose value was not known: given
    zeros, oneDNN's kernels did nothing, and those of float64 raised and had no scratch."""
    monkeypatch.setattr(op_seconds, "_seconds", MEASURED)
    shape = (16, 24, 24, 16)
    layers = [keras.layers.Conv2D(16, 3, padding="same", dtype="float64") for _ in range(2)]
    model = keras.Sequential([keras.Input(shape[1:], dtype="float64"), *layers])
    ops = trace(model, tf.TensorSpec(shape, tf.float64)).graph.ops
    scratch = [it.workspaces for it in ops if it.name.endswith("Conv2DBackpropFilter")]
    assert len(scratch) == 2
    assert all(it[0].bytes > 1 << 20 for it in scratch)

    with tf.Graph().as_default():
        unknown = tf.raw_ops.Fill(dims=tf.compat.v1.placeholder(tf.int32, (2,)), value=1.0)
    assert op_seconds._seconds(unknown.op, "CPU:0", "mark") is not None
    unknown.set_shape((64, 64))
    assert op_seconds._seconds(unknown.op, "CPU:0", "mark") is None
