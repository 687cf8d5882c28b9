"""The table of kernels that write over their input, held against the allocator."""

import pytest
import tensorflow as tf

from sn_memory.tensorflow import Allocations
from sn_memory.tensorflow.trace.kernels import OVERWRITES

SHAPE = (1024, 256)
WHOLE = 1024 * 256 * 4
LISTS = {"AddN"}
# What takes other arguments than two tensors of one shape is exercised by the networks.
SPECIAL = {"BiasAdd", "SelectV2", "SoftmaxCrossEntropyWithLogits"}


def arguments(kind):
    from tensorflow.python.framework import op_def_registry

    return [it.name for it in op_def_registry.get(kind).input_arg]


@pytest.mark.parametrize("kind", sorted(OVERWRITES - SPECIAL))
def test_the_result_takes_no_memory_of_its_own(kind):
    names = arguments(kind)
    count = 2 if kind in LISTS else len(names)

    @tf.function(autograph=False)
    def run():
        given = [
            tf.raw_ops.RandomUniform(shape=SHAPE, dtype=tf.float32, seed=at + 1)
            for at in range(count)
        ]
        feed = {names[0]: given} if kind in LISTS else dict(zip(names, given, strict=True))
        return tf.reduce_sum(getattr(tf.raw_ops, kind)(**feed))

    run()
    with Allocations() as found:
        run()
    # Half a tensor beside the inputs: scratch of reductions, and no second result. Bytes asked for,
    # as blocks handed out depend on what the process did before.
    assert found.peak_bytes < (count + 0.5) * WHOLE
