"""One rank of TensorFlow on nodes of two, as horovodrun -H HOST:2,HOST:2 makes them.

Run as `tensorflow_nodes.py [CASE...]`; prints "ok CASE" on every rank, or fails with an assertion.
"""

import copy
import logging
import os
import sys
import time
from contextlib import contextmanager
from functools import partial

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.errors import CompressError
from sn_compress.tensorflow.keras import DistributedOptimizer
from sn_compress.tensorflow.tape import memory_of

SHARED = LowRankCompression.using(ratio=8, warmup=2, every=20)
WAYS = {"fft": FFTCompression.using(), "low rank": SHARED}
SHAPES = [(64, 48), (48,), (48, 96), (96,), (96, 64), (64,)]


def fresh(way, **changes):
    return WAYS[way].using(**changes)


def net(shapes=SHAPES):
    generator = np.random.default_rng(0)
    return [
        tf.Variable(generator.standard_normal(shape).astype("f4") * 0.2, name=f"v{at}")
        for at, shape in enumerate(shapes)
    ]


def batch(step):
    generator = np.random.default_rng([step, hvd.rank()])
    return tf.constant(generator.standard_normal((16, 64)).astype("f4"))


def step_of(variables, compression, *, graph=True):
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
            out = x
            for matrix, offset in zip(variables[::2], variables[1::2], strict=True):
                out = tf.tanh(out @ matrix + offset)
            loss = tf.reduce_mean((out - x) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    return tf.function(step) if graph else step


def train(variables, compression, steps, *, graph=True):
    step = step_of(variables, compression, graph=graph)
    return [float(step(batch(at))) for at in steps]


def vector(variables):
    return np.concatenate([np.ravel(v.numpy()) for v in variables])


def assert_alike(variables):
    every = hvd.allgather_object(vector(variables).tobytes())
    assert all(each == every[0] for each in every)


def message_of(function):
    try:
        function()
    except (CompressError, tf.errors.OpError) as error:
        return str(error)
    raise AssertionError("raised nothing")


@contextmanager
def on_nodes_of(size):
    """As many ranks of each node as this, the last one as many as are left."""
    before = os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = f"node {hvd.rank() // size}"
    try:
        yield
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before


def each_tensor_has_one_owner_in_a_node():
    """On the host, and as nodes of the graph; alike in what is sent inside."""
    for way in WAYS:
        for graph in (False, True):
            variables, own = net(), fresh(way)
            train(variables, own, range(14), graph=graph)
            assert_alike(variables)
            memory = memory_of(own)
            assert bool(memory.graphs) == graph, (way, graph)
            report = memory.report()
            assert report["nodes"] == 2
            elements = sum(v.shape.num_elements() for v in variables if len(v.shape) > 1)
            assert report["inside_bytes"] == 4 * elements, (way, graph, report)
            for at, variable in enumerate(variables):
                if len(variable.shape) > 1:
                    name = f"{at}:v{at}"
                    owner = memory.nodes.place.owners.of_name[name]
                    has = hvd.allgather_object(memory.remembers(name))
                    assert has == [rank % 2 == owner for rank in range(4)], (name, has)


def nodes_of_a_graph_have_the_bits_of_the_host():
    """Of payloads; of sums the array code has others, so these learn alike."""
    for way in WAYS:
        ends = []
        for graph in (False, True):
            variables, own = net(), fresh(way)
            losses = train(variables, own, range(40), graph=graph)
            ends.append((vector(variables), losses))
            assert_alike(variables)
        if way == "fft":
            assert np.array_equal(ends[0][0], ends[1][0])
        first, last = ends[0][1][0], [float(np.mean(losses[-5:])) for _, losses in ends]
        assert abs(last[0] - last[1]) < 0.05 * first, (way, last)


CASES = [
    each_tensor_has_one_owner_in_a_node, nodes_of_a_graph_have_the_bits_of_the_host,
]  # fmt: skip

if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    wanted = sys.argv[1:]
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        start = time.monotonic()
        case()
        if hvd.rank() == 0:
            print(f"{case.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        print(f"ok {case.__name__}", flush=True)
