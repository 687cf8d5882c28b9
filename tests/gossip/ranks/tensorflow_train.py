"""One rank: train a small Keras model by gossip, and compare with what the rules say.

Run as `tensorflow_train.py CASE...`; prints "ok CASE" on every rank, or fails with an assertion.
"""

import sys
from itertools import chain

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

from sn_compress import CompressError, codec
from sn_compress.gossip import topology
from sn_compress.tensorflow.gossip import Consensus, GossipOptimizer, ring_shuffle

STEPS, BATCH, RATE, MOMENTUM = 7, 8, 0.05, 0.9


def model_of():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(48, activation="tanh"), keras.layers.Dense(32)]
    return keras.Sequential([keras.Input((40,)), *layers])


def data(rank):
    rng = np.random.default_rng(1 + rank)
    x = rng.standard_normal((STEPS * BATCH, 40)).astype(np.float32)
    return x, rng.integers(0, 32, STEPS * BATCH)


def loss_of():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(callbacks=(), rank=None, eagerly=False, **settings):
    model = model_of()
    optimizer = GossipOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM), **settings)
    model.compile(optimizer, loss_of(), jit_compile=False, run_eagerly=eagerly)
    x, y = data(hvd.rank() if rank is None else rank)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, optimizer


def flat(variables):
    return np.concatenate([np.asarray(v).reshape(-1) for v in variables])


def everyone(model):
    return hvd.allgather(flat(model.trainable_variables)[None], name="everyone").numpy()


def reference(graph, *, overlap=True, momentum=0):
    """Weights of all ranks [ranks, n]: SGD as Keras does it, and the mixing matrix of each step."""
    model = model_of()
    start = flat(model.trainable_variables)
    sizes = np.cumsum([int(np.prod(v.shape)) for v in model.trainable_variables])[:-1]
    weights = np.tile(start, (graph.ranks, 1))
    speeds = np.zeros_like(weights)

    @tf.function
    def gradient(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of()(y, model(x, training=True))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    for step in range(STEPS):
        gradients = []
        for rank in range(graph.ranks):
            for variable, part in zip(
                model.trainable_variables, np.split(weights[rank], sizes), strict=True
            ):
                variable.assign(part.reshape(variable.shape))
            x, y = (part[step * BATCH :][:BATCH] for part in data(rank))
            gradients.append(flat(gradient(x, y)))
        mix = graph.at(step).mix
        speeds = MOMENTUM * speeds - RATE * np.array(gradients)
        weights = mix(weights) + speeds if overlap else mix(weights + speeds)
        if momentum and step % momentum == 0:
            speeds = mix(speeds)
    return weights


def rules():
    for settings in ({}, {"overlap": False}, {"momentum": 2}):
        model, optimizer = fit(**settings)
        expected = reference(topology("dissemination", hvd.size()), **settings)
        # float32 of a few units through seven steps; nothing amplifies it.
        found = flat(model.trainable_variables)
        np.testing.assert_allclose(found, expected[hvd.rank()], rtol=0, atol=5e-6)
        if settings in ({}, {"momentum": 2}):  # else two ranks have just averaged, and are equal
            assert abs(expected[0] - expected[1]).max() > 1e-3, "replicas were to differ"
        assert optimizer.report()["steps"] == STEPS
        assert optimizer.report()["bytes_per_step"] == 4 * found.size


def eager():
    """Outside of a tf.function it is the same, up to rounding; the spread is measured as well."""
    (model, optimizer), (other, its) = fit(every=2), fit(every=2, eagerly=True)
    found, expected = flat(other.trainable_variables), flat(model.trainable_variables)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
    np.testing.assert_allclose(its.spread, optimizer.spread, rtol=1e-3)


def idle_ranks():
    size = min(3, hvd.size())
    part = hvd.add_process_set(list(range(size))) if size < hvd.size() else hvd.global_process_set
    if hvd.rank() < size:
        model, _ = fit(topology="exact", process_set=part)
        expected = reference(topology("exact", size))
        found = flat(model.trainable_variables)
        np.testing.assert_allclose(found, expected[hvd.rank()], rtol=0, atol=5e-6)
    hvd.allreduce(tf.zeros(1), name="together")


def consensus():
    model, optimizer = fit(callbacks=[Consensus()])
    found = everyone(model)
    assert (found == found[:1]).all()
    expected = reference(topology("dissemination", hvd.size())).mean(0)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=5e-6)
    assert optimizer.report()["averages"] == 1
    assert optimizer.report()["average_bytes"] == 2 * 4 * found.shape[1], "weights and momenta"


def limit():
    _, optimizer = fit(every=2)
    assert optimizer.spread > 0
    assert optimizer.report()["averages"] == 0
    _, limited = fit(every=2, limit=optimizer.spread / 5)
    counts = hvd.allgather_object(limited.report()["averages"])
    assert counts[0] > 0
    assert len(set(counts)) == 1
    for settings in ({}, {"codec": codec("topk", theta=0.95), "pull": 0.5}):
        model, optimizer = fit(every=STEPS - 1, **settings)
        found = everyone(model)
        apart = np.sqrt(((found - found.mean(0)) ** 2).sum() / (found**2).sum())
        # Of a sketch, 4 % where rows deviate independently; measured at the end of the last step.
        assert optimizer.spread == pytest.approx(apart, rel=0.15), settings


def coded():
    topk = codec("topk", theta=0.95)
    model, optimizer = fit(codec=topk)
    assert optimizer.report()["bytes_per_step"] < 4 * flat(model.trainable_variables).size / 6
    copies = optimizer.state_dict()
    target = next(iter(copies["told"]))
    told = hvd.allgather_object({target: copies["told"][target]})
    heard = hvd.allgather_object(copies["heard"])
    for rank, by_target in enumerate(told):
        for other, copy in by_target.items():
            assert (heard[other][rank] == copy).all(), "both ends were to hold the same"
    optimizer.consensus()
    found = everyone(model)
    assert (found == found[:1]).all()
    optimizer.load_state_dict(optimizer.state_dict())
    _, limited = fit(codec=topk, every=2, limit=1e-3)
    assert limited.report()["averages"] > 0
    bases = hvd.allgather(limited.state_dict()["base"][None], name="bases").numpy()
    assert (bases == bases[:1]).all(), "copies were to begin anew from the same weights"


def refused():
    try:
        fit(overlap=hvd.rank() == 0)
    except CompressError as error:
        said = "ranks have different settings or tensors: setting overlap: True on rank 0, False"
        assert str(error).startswith(said), error  # noqa: PT017
    else:
        raise AssertionError("ranks with other settings were to be told so")
    with pytest.raises(CompressError, match="does not scale the loss"):
        GossipOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    model = model_of()
    model.compile(GossipOptimizer(keras.optimizers.SGD()), loss_of(), jit_compile=True)
    with pytest.raises(CompressError, match="jit_compile=False"):
        model.fit(*data(0), verbose=0)


def ring():
    """As many epochs as ranks: each sample on each rank once; then through Keras."""
    ranks, rank = hvd.size(), hvd.rank()
    x = np.arange(10 * rank, 10 * (rank + 1))
    stage = ring_shuffle(x, x.astype(np.float32), batch_size=4)
    assert len(stage) == 3
    mine = []
    for _ in range(ranks):
        used = [int(n) for batch, _ in stage for n in batch]
        assert sorted(chain(*hvd.allgather_object(used))) == list(range(10 * ranks))
        mine += used
    assert sorted(mine) == list(range(10 * ranks))
    model = model_of()
    model.compile(GossipOptimizer(keras.optimizers.SGD(RATE)), loss_of(), jit_compile=False)
    model.fit(ring_shuffle(*data(rank), batch_size=BATCH), epochs=2, verbose=0)
    assert model.optimizer.report()["steps"] == 2 * STEPS


CASES = {
    "rules": rules, "eager": eager, "idle-ranks": idle_ranks, "consensus": consensus,
    "limit": limit, "coded": coded, "refused": refused, "ring": ring,
}  # fmt: skip

if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets="dynamic")
    for case in sys.argv[1:]:
        CASES[case]()
        print(f"ok {case}", flush=True)
