"""One rank: train a small net with TensorFlow in one of many ways, then compare all ranks."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensors import assert_equal_ranks, flat_of

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.tensorflow.tape import memory_of

STEPS = 20
FFT = FFTCompression.using(theta=0.9)
SHARED = LowRankCompression.using(ratio=40, warmup=2, every=8)
SHAPES = {"first": (96, 128), "branch": (128, 128), "last": (128, 10), "bias": (10,)}


def fresh(dtype=tf.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: tf.Variable(rng.standard_normal(shape) / shape[0] ** 0.5, dtype=dtype, name=name)
        for name, shape in SHAPES.items()
    }


def loss_of(net, x, y):
    x = tf.tanh(x @ net["first"])
    x = x + tf.tanh(x @ net["branch"])
    logits = tf.cast(x @ net["last"] + net["bias"], tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def batches(dtype, steps=STEPS):
    rng = np.random.default_rng(1 + hvd.rank())
    for _ in range(steps):
        x = tf.constant(rng.standard_normal((8, 96)), dtype)
        yield x, tf.constant(rng.integers(0, 10, 8))


def train(dtype=tf.float32, *, graph, compression=None, generic=False, **options):
    fft = (compression or FFT).using()  # a memory of its own
    net = fresh(dtype)
    variables = list(net.values())
    if isinstance(options.get("groups"), list):
        options["groups"] = [[net["first"], net["bias"]], [net["branch"]]]
    momenta = [tf.Variable(tf.zeros_like(v)) for v in variables]

    def step(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft, **options) as tape:
            loss = loss_of(net, x, y)
        gradients = tape.gradient(loss, variables, use_generic_names=generic)
        for v, m, g in zip(variables, momenta, gradients, strict=True):
            m.assign(tf.cast(0.9, dtype) * m + tf.cast(g, dtype))
            v.assign_sub(tf.cast(0.05, dtype) * m)

    run = tf.function(step) if graph else step
    for number, (x, y) in enumerate(batches(dtype)):
        run(x, y)
        if number % 5 < 4:  # ranks that differ stay so
            continue
        where = {"process_set": options["process_set"]} if "process_set" in options else {}
        assert_equal_ranks(variables, **where)
    report = memory_of(fft).report()
    if options.get("process_set", hvd.global_process_set).size() == 1:
        assert report["steps"] == 0, report  # traced, but never run
        return variables, fft
    assert report["steps"] == STEPS, report
    assert report["tensors"] == 3, report
    how = "low_rank" if issubclass(fft, LowRankCompression) else "frequencies"
    assert (report[how], report["plain"]) == (3, 1), report
    assert report["ratio"] > 4, report
    return variables, fft


def process_sets(graph):
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    variables, _ = train(graph=graph, process_set=even if hvd.rank() % 2 == 0 else odd)
    everyone = hvd.allgather(flat_of(variables)[None], name="sets").numpy()
    assert not np.array_equal(everyone[0], everyone[1]), "the sets were to train apart"
    hvd.remove_process_set(even)
    hvd.remove_process_set(odd)


def both(**options):
    """Eager and traced runs of the same steps end with the same bits.

    With more ranks than two, plain float sums depend on which tensors Horovod fuses.
    """
    ends = [flat_of(train(graph=graph, **options)[0]).numpy() for graph in (False, True)]
    assert hvd.size() > 2 or np.array_equal(*ends)


CASES = {
    "fp32": lambda: both(),
    "fp16": lambda: train(tf.float16, graph=True),
    "bf16": lambda: train(tf.bfloat16, graph=True),
    "paper": lambda: train(graph=False, compression=FFTCompression.using(mode="paper", theta=0.9)),
    "sum": lambda: train(graph=True, op=hvd.Sum),
    "predivide": lambda: train(graph=True, gradient_predivide_factor=2.0),
    "groups": lambda: both(groups=2),
    "groups-listed": lambda: train(graph=False, groups=[]),
    "shared": lambda: both(compression=SHARED),
    "shared-sum": lambda: train(graph=False, compression=SHARED, op=hvd.Sum),
    "shared-groups": lambda: train(tf.bfloat16, graph=True, compression=SHARED, groups=2),
    "generic-names": lambda: train(graph=False, generic=True),
    "process-sets": lambda: process_sets(graph=False),
    "process-sets-traced": lambda: process_sets(graph=True),
}


def named(word):
    return CASES[word]
