"""One rank: FFTCompression in TensorFlow's graphs, one function a case."""

from functools import partial

import cases
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from counted import SHAPES
from engines import carried
from rounds import drive
from tensorflow_sized import LOW, PYTHON, graphs_of
from tensors import (
    SIDE,
    fitted,
    goes_on_where_it_was_saved,
    mean_of,
    means_of,
    noise,
    variables_of,
)

from sn_compress import FFTCompression
from sn_compress.collective import Gradient
from sn_compress.engine.engine import Engine
from sn_compress.schedule import Constant, Warmup
from sn_compress.tensorflow import kernels
from sn_compress.tensorflow import memory as memory_module
from sn_compress.tensorflow.tape import memory_of

FFT = FFTCompression.using(theta=0.9, check_every=0)
SERVE = kernels.serve


def python_of(function):
    """How many nodes of an ordinary step call Python, and the collectives of it."""
    nodes = graphs_of(function)
    # Of Horovod's all-reduces of zeros no sum is read, so that TensorFlow runs none of them.
    travel = [n.op for n in nodes if n.op.startswith("Horovod") and "token" not in n.input[0]]
    return sum(node.op in PYTHON for node in nodes), travel


def steps_without_python():
    """In one gather for all, behind a count of the ranks, as it cannot do without one; averages and
    what is kept add up to the plain averages.
    """
    gather, damage = hvd.allgather, tf.Variable(0)

    def damaging(tensor, **how):
        return tf.tensor_scatter_nd_add(gather(tensor, **how), [[40]], damage[None])

    for compiled in (True, False):
        kernels.serve, hvd.allgather = SERVE if compiled else lambda *_: False, damaging
        fft, variables = FFT.using(), variables_of(2)
        step = means_of(variables, fft)
        steps = [noise(SIDE, SIDE, seed=t) for t in range(12)]
        applied = np.sum([step(tf.constant(x))[1].numpy() for x in steps], axis=0)
        hvd.allgather = gather
        expected = (0, ["HorovodAllreduce", "HorovodAllgather"])
        assert python_of(step) == expected, (compiled, python_of(step))
        assert ("SnCompressEncode" in {n.op for n in graphs_of(step)}) == compiled
        plain = mean_of(np.sum(steps, axis=0))
        own = memory_of(fft).residual("1:w1").reshape(SIDE, SIDE)
        kept = mean_of(own)
        # Sums of 12 float32 numbers of size about 1, in two orders, and as many transforms.
        assert abs(applied + kept - plain).max() < 1e-4
        assert np.linalg.norm(kept) > 0.1 * np.linalg.norm(plain), "nothing was dropped?"
        report = memory_of(fft).report()
        codec = memory_of(fft).codec
        assert report["payload_bytes"] == 2 * codec.payload_bytes(SIDE * SIDE), report
        assert (report["steps"], report["frequencies"]) == (12, 2), report
        assert 0.2 < report["relative_error"] < 1, report
        lost_steps(step, fft, steps[0])
        damage.assign(1)
        said = cases.message_of(
            partial(step, tf.constant(steps[0])), tf.errors.InvalidArgumentError
        )
        assert "PayloadError" in said, said
        damage.assign(0)
    kernels.serve = SERVE


def lost_steps(step, fft, x):
    """NaN on one rank reaches all, leaves the memory as it was, and is gone afterwards."""
    before = memory_of(fft).residual("0:w0")
    poor = np.where(hvd.rank(), np.nan, x).astype("f4")
    assert not np.isfinite(step(tf.constant(poor))[0]).any()
    if hvd.rank():
        assert np.array_equal(memory_of(fft).residual("0:w0"), before)
    assert np.isfinite(step(tf.constant(x))[0]).all()
    assert np.isfinite(memory_of(fft).residual("0:w0")).all()


def compiled_nodes_have_the_bits_of_the_codec():
    """Ranks get the bits that the codec gives by hand."""
    fft, variables = FFT.using(decay=0.5), variables_of(1)
    step, codec = means_of(variables, fft), memory_of(fft).codec
    states = [codec.new_state(SIDE**2) for _ in range(hvd.size())]
    for t in range(5):
        every = hvd.allgather_object(noise(SIDE, SIDE, seed=t))
        payloads = [
            codec.encode(x.reshape(-1), state=state, decay=0.5)
            for x, state in zip(every, states, strict=True)
        ]
        mean = step(tf.constant(noise(SIDE, SIDE, seed=t)))[0].numpy().reshape(-1)
        assert np.array_equal(mean, codec.decode_mean(payloads))
    saved = memory_of(fft).state_dict()["feedback"]["memory"]["0:w0"]["state"]["arrays"]
    assert np.array_equal(saved[0], states[hvd.rank()][0])


def many_ranks_have_the_bits_of_the_engine():
    """By way of owners: what is averaged, what is kept, and what is counted.

    In a graph, and outside of one.
    """
    ranks = hvd.size()
    for way in ("compiled", "arrays", "eager"):
        kernels.serve = (lambda *_: False) if way == "arrays" else SERVE
        # Of each library's own FFT the last bit may be another.
        fft = FFT.using(decay=0.5, **({"transform": "hadamard"} if way == "arrays" else {}))
        variables = variables_of(7)
        step, settings = means_of(variables, fft), fft.settings
        run = step.python_function if way == "eager" else step
        engines = [
            Engine(settings, 1, stock="", tuner=None, drops_unused=False) for _ in range(ranks)
        ]
        names = [f"{at}:w{at}" for at in range(7)]
        for t in range(5):
            every = hvd.allgather_object(noise(SIDE, SIDE, seed=t))
            means = exchanged(
                engines, [{name: x.reshape(-1).copy() for name in names} for x in every]
            )
            found = run(tf.constant(noise(SIDE, SIDE, seed=t)))
            for name, each in zip(names, found, strict=True):
                assert np.array_equal(each.numpy().reshape(-1), means[name]), (way, t)
        ops = ["HorovodAlltoall", "HorovodAllgather"] if ranks > 2 else ["HorovodAllgather"]
        ops = ["HorovodAllreduce", *ops]
        assert way == "eager" or python_of(step) == (0, ops), python_of(step)
        own, mine = memory_of(fft), engines[hvd.rank()]
        for name in names:
            assert np.array_equal(own.residual(name), mine.feedback.residual(name))
        told, wanted = own.report(), mine.report()
        assert told["payload_bytes"] == wanted["payload_bytes"]
        assert abs(told["relative_error"] - wanted["relative_error"]) < 1e-6
    kernels.serve = SERVE


def exchanged(engines, values):
    """A step of all ranks' engines; the means."""
    rounds = [
        engine.rounds(
            [Gradient(name, (SIDE, SIDE), own[name]) for name in own],
            ranks=len(engines), rank=rank,
        )
        for rank, (engine, own) in enumerate(zip(engines, values, strict=True))
    ]  # fmt: skip
    drive(rounds, lambda _, asked: [[own.copy()] for own in carried([it for (it,) in asked])])
    return values[0]


def theta_that_changes_is_traced_again():
    """Python while it changes fast, and a graph for each longer stretch of one theta."""
    fft = FFT.using(theta=Warmup(24, Constant(0.96), dense=0.5))
    variables, wanted = variables_of(1), Warmup(24, Constant(0.96), dense=0.5)
    step, sent = means_of(variables, fft), 0
    for t in range(30):
        step(tf.constant(noise(SIDE, SIDE, seed=t)))
        now = memory_of(fft).report()
        total = round(now["payload_bytes"] * now["steps"])
        codec = memory_of(fft).engine.theta.codec_at(wanted.theta(t))
        # The report rounds the mean of t steps to a byte.
        assert abs(total - sent - codec.payload_bytes(SIDE * SIDE)) <= 2 * t + 1, t
        sent = total
        if 14 <= t <= 22:  # in between its traces are forgotten
            assert python_of(step)[0] > 0, t
        elif t in (5, 29):
            assert python_of(step)[0] == 0, t
    assert memory_of(fft).engine.theta.steps == 30


def unlike_ranks_and_settings_without_nodes_go_through_python():
    """They stay equal."""
    kernels.serve, digest = (lambda *_: False), memory_module.decoding_digest
    memory_module.decoding_digest = lambda codec: str(hvd.rank())
    try:
        assert train(FFT) > 0
    finally:
        memory_module.decoding_digest = digest
    assert train(FFT.using(values="fp16")) == 0, "array code has half precision"
    kernels.serve = SERVE
    assert train(FFT.using(values="fp16")) == 0
    assert train(FFT.using(window="payload")) > 0, "a range of a whole payload has no nodes"


def train(fft):
    """How many nodes of a step call Python; ranks are equal."""
    step = means_of(variables_of(1), fft.using())
    for t in range(2):
        found = step(tf.constant(noise(SIDE, SIDE, seed=t)))[0].numpy()
        first, *others = hvd.allgather_object(found)
        assert all(np.array_equal(first, other) for other in others), "ranks differ"
    return python_of(step)[0]


def keras_fits_without_python():
    """In inner graphs: two steps in a call; a branch of a step."""
    for per_call, passes in ((2, 1), (1, 2)):
        memory = fitted(FFT, 12, per_call=per_call, passes=passes, layers=1)
        assert memory.report()["frequencies"] == 1, memory.report()
        assert memory.graphs, "the steps were to be sized"


def bare_computes_ffts():
    """A compiled node for each gradient; as array code one FFT for each size of blocks."""
    for compiled in (True, False):
        kernels.serve = SERVE if compiled else lambda *_: False
        variables = [tf.Variable(np.zeros(shape, "f4")) for shape in SHAPES]
        step = means_of(variables, FFTCompression.using(check_every=0))
        for _ in range(3):
            step(tf.constant(1.0))
        found = [node.op for node in graphs_of(step)]
        expected = {"SnCompressEncode": 3, "RFFT": 0} if compiled else {"RFFT": 2, "IRFFT": 2}
        assert {op: found.count(op) for op in expected} == expected, found
    kernels.serve = SERVE


def graphs_go_on_where_they_were_saved():
    goes_on_where_it_was_saved(FFT, 5, 3)
    goes_on_where_it_was_saved(LOW, 7, 5)


CASES = [
    bare_computes_ffts,
    steps_without_python, many_ranks_have_the_bits_of_the_engine,
    compiled_nodes_have_the_bits_of_the_codec,
    graphs_go_on_where_they_were_saved, theta_that_changes_is_traced_again,
    unlike_ranks_and_settings_without_nodes_go_through_python, keras_fits_without_python,
]  # fmt: skip
