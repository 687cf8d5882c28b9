"""What ops asked for, to the byte, whatever blocks the allocator had lying about."""

import keras
import pytest
import tensorflow as tf
from keras_samples import peak_of, step_of

import sn_memory.tensorflow as rim
from sn_memory.graph.liveness import peak

MIB = 2**20


def test_bytes_are_those_of_the_tensors_alive():
    with rim.Allocations() as found:
        x = tf.random.uniform((3, MIB // 4))
        y = tf.random.uniform((5, MIB // 4))
        del x
        z = tf.random.uniform((2, MIB // 4))
    assert found.peak_bytes == 8 * MIB
    assert found.left_bytes == 7 * MIB
    assert [it.bytes // MIB for it in found.holders] == [5, 3]
    assert {it.op for it in found.holders} == {"RandomUniform"}
    assert found.allocated_peak_bytes >= found.peak_bytes
    del y, z


def test_blocks_handed_out_too_large_do_not_count():
    hole = tf.random.uniform((3, MIB // 4))
    wall = tf.random.uniform((1, MIB // 4))
    del hole
    with rim.Allocations() as found:
        x = tf.random.uniform((2, MIB // 4))
    assert found.peak_bytes == 2 * MIB
    del x, wall


def test_one_profiler_at_a_time():
    with (
        rim.Allocations(),
        pytest.raises(rim.TraceError, match="another profiler"),
        rim.Allocations(),
    ):
        pass


def test_scratch_of_a_kernel_is_told_from_its_results():
    # Attention's products are transposed first: a copy of an operand beside the result.
    x = tf.random.uniform((8, 128, 4, 64))
    run = tf.function(lambda: tf.einsum("btnh,bsnh->bnts", x, x))
    run()
    with rim.Allocations() as found:
        run()
    assert "temp" in {it.use for it in found.holders}


def test_pooling_remembers_where_its_maxima_were():
    layers = [keras.layers.MaxPool2D() for _ in range(2)]
    model = keras.Sequential([keras.Input((64, 64, 32)), keras.layers.Conv2D(32, 1), *layers])
    x = tf.ones((32, 64, 64, 32))

    step = step_of(model)
    graph = rim.trace(step, x, profile=False).graph
    maxima = [it.bytes for it in graph.storages if it.name.endswith(":maxima")]
    assert maxima == [32 * 32 * 32 * 32, 32 * 16 * 16 * 32]
    planned = rim.plan_step(step, x, "100%")
    graph = planned.sn_memory.trace.graph
    assert peak_of(planned, x) == pytest.approx(peak(graph).bytes - graph.base_bytes, rel=0.01)
