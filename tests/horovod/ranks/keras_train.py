"""One rank: train a small Keras model in one of many ways, then compare all ranks."""

import copy
import pickle
import shutil
import tempfile
from functools import partial
from pathlib import Path

import cases
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensors import assert_equal_ranks as assert_equal
from tensors import flat_of

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.engine.engine_state import from_bytes
from sn_compress.tensorflow.keras import (
    AverageMetrics,
    BroadcastVariables,
    CompressionBackup,
    DistributedOptimizer,
    memory_of,
)

STEPS = 20
FFT = FFTCompression.using(theta=0.9)


def model_of(*, seed=0, dropout=0.0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((96,)),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def data(steps=STEPS, batch=8):
    rng = np.random.default_rng(1 + hvd.rank())
    x = rng.standard_normal((steps * batch, 96)).astype(np.float32)
    return x, rng.integers(0, 10, steps * batch)


def loss_of():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(**settings):
    return keras.optimizers.SGD(0.05, momentum=0.9, **settings)


def everyone(model):
    flat = flat_of([v.value for v in model.weights])
    return hvd.allgather(flat[None], name="everyone").numpy()


def assert_equal_ranks(model, **where):
    variables = [v.value for v in (*model.weights, *model.optimizer.variables)]
    return assert_equal(variables, **where)


def assert_same_bits(some, others):
    """With more ranks than two, plain float sums depend on which tensors Horovod fuses."""
    if hvd.size() == 2:
        assert np.array_equal(some, others)


def fit(optimizer=None, *, model=None, steps=STEPS, callbacks=(), first=0, **options):
    """One epoch of `steps` steps, and the weights and optimizer variables at its end, flat."""
    model = model or model_of()
    optimizer = optimizer or sgd()
    if not hasattr(optimizer, "_sn"):
        DistributedOptimizer(optimizer, **{"compression": FFT, **options})
    if getattr(model, "optimizer", None) is not optimizer:
        model.compile(optimizer, loss_of())
    x, y = data()
    x, y = x[8 * first : 8 * steps], y[8 * first : 8 * steps]
    model.fit(x, y, 8, shuffle=False, verbose=0, callbacks=list(callbacks))
    where = {"process_set": options["process_set"]} if "process_set" in options else {}
    return model, assert_equal_ranks(model, **where)


FEW = 8  # of steps of a loop, which tracing makes slow where there is no graph


def by_hand(graph, *, clip=None, compression=FFT):
    """The same steps as `fit`, in a loop of the user's."""
    model = model_of()
    optimizer = DistributedOptimizer(sgd(global_clipnorm=clip), compression=compression)
    model.optimizer = optimizer
    loss = loss_of()

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if graph else step
    x, y = data()
    for i in range(FEW):
        run(x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8])
    return assert_equal_ranks(model)


def fit_and_loops():
    model, _ = fit()
    by_hand(graph=True)
    by_hand(graph=False)
    _, fitted = fit(compression=None, steps=FEW)
    for graph in (True, False):
        # TensorFlow fuses, and so rounds, the three otherwise: steps of float32.
        assert abs(fitted - by_hand(graph, compression=None)).max() < 1e-5
    report = FFTCompression.report(model.optimizer)
    assert report["steps"] == STEPS, report
    assert report["tensors"] == 3, report
    assert report["ratio"] > 5, report


def plain():
    """Without compression: what one process computes on all the ranks' data."""
    for compression, bound in ((None, 1e-5), (hvd.Compression.fp16, 1e-2)):
        model, _ = fit(compression=compression)
        alone = model_of()
        alone.compile(sgd(), loss_of())
        parts = hvd.allgather_object(data())
        for i in range(0, 8 * STEPS, 8):
            x = np.concatenate([x[i : i + 8] for x, _ in parts])
            y = np.concatenate([y[i : i + 8] for _, y in parts])
            alone.train_on_batch(x, y)
        for ours, his in zip(model.get_weights(), alone.get_weights(), strict=True):
            # 20 steps of float32 sums in another order; fp16 rounds gradients by 2**-11.
            assert abs(ours - his).max() <= bound, abs(ours - his).max()


def stock_diverges():
    """Horovod's own Keras optimizer: no error, and no averaging. The reason for ours."""
    import horovod.tensorflow.keras as stock

    model = model_of()
    model.compile(stock.DistributedOptimizer(sgd()), loss_of())
    x, y = data()
    model.fit(x, y, 8, shuffle=False, verbose=0)
    flats = everyone(model)
    assert not (flats == flats[:1]).all(), "stock averages by now: use it, or reword the docs"
    fit(compression=None)


def clip():
    """Clipping sees the average, so the step is as long as it says on every rank."""
    model = model_of()
    before = [w.copy() for w in model.get_weights()]
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.01)
    fit(optimizer, model=model, steps=1)
    moved = sum(((a - b) ** 2).sum() for a, b in zip(before, model.get_weights(), strict=True))
    # Weights of size 0.1 are rounded by 2**-28 each when the step is added to them.
    assert abs(moved**0.5 - 0.01) < 1e-5, moved**0.5
    by_hand(graph=True, clip=0.1)
    fit(sgd(clipnorm=0.05), steps=FEW)
    fit(sgd(clipvalue=0.01), steps=FEW)


def accumulate():
    """Gradients are averaged once in 4 steps, and the mean of the 4 is what is averaged."""
    model, _ = fit(backward_passes_per_step=4, compression=FFT)
    assert FFTCompression.report(model.optimizer)["steps"] == STEPS // 4
    few, _ = fit(sgd(gradient_accumulation_steps=4), compression=None)
    whole = model_of()
    whole.compile(DistributedOptimizer(sgd()), loss_of())
    x, y = data()
    whole.fit(x, y, 32, shuffle=False, verbose=0)
    for a, b in zip(few.get_weights(), whole.get_weights(), strict=True):
        assert abs(a - b).max() < 1e-5


def mixed_precision():
    """Loss scaling: one rank's overflow makes all skip, and is gone afterwards."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = sgd()
        scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)
        model, _ = fit(scaler)
        assert FFTCompression.report(scaler)["steps"] == STEPS
        own = memory_of(scaler)
        names = own.state_dict()["feedback"]["memory"]
        before, memory = model.get_weights(), {name: own.residual(name) for name in names}
        x, y = data(1)
        if hvd.rank() == 1:
            x[0, 0] = np.inf
        model.fit(x, y, 8, verbose=0)
        assert float(scaler.dynamic_scale) == 2.0**9
        for a, b in zip(before, model.get_weights(), strict=True):
            assert np.array_equal(a, b), "the step was to be skipped on every rank"
        for name, kept in memory.items():
            assert kept.any()
            assert np.array_equal(kept, own.residual(name)), "a skipped step drops nothing"
        fit(scaler, model=model)
        wrong = model_of()
        refused = partial(DistributedOptimizer, sgd(), compression=FFT)
        said = cases.message_of(lambda: wrong.compile(refused(), loss_of()))
        assert "DistributedOptimizer(keras.optimizers.LossScale" in said, said
    finally:
        keras.config.set_dtype_policy("float32")


def variables_of_bfloat16():
    """Which Horovod itself has no type for: all of a model, with and without compression."""
    for compression in (None, FFT):
        keras.utils.set_random_seed(hvd.rank())
        layers = [keras.layers.Dense(96, "tanh", dtype="bfloat16") for _ in range(2)]
        model = keras.Sequential([keras.Input((96,)), *layers])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
        model.compile(optimizer, "mse")
        x, _ = data()
        history = model.fit(x, x, 8, epochs=2, verbose=0, callbacks=[BroadcastVariables()]).history
        assert history["loss"][1] < history["loss"][0], history
        assert_equal([v.value for v in model.weights])


def shared():
    """The shared exchange: dense steps, then sums; resumed in its own way too."""
    fft = LowRankCompression.using(ratio=40, warmup=2, every=8)
    model, whole = fit(compression=fft)
    report = FFTCompression.report(model.optimizer)
    assert report["steps"] == STEPS, report
    assert report["ratio"] > 4, report
    half, _ = fit(compression=fft, steps=7)
    state, weights = FFTCompression.state_dict(half.optimizer), half.get_weights()
    again = model_of(seed=5)
    again.set_weights(weights)
    optimizer = DistributedOptimizer(sgd(), compression=fft)
    optimizer.build(again.trainable_variables)
    optimizer.set_weights([v.numpy() for v in half.optimizer.variables])
    FFTCompression.load_state_dict(optimizer, state)
    _, resumed = fit(optimizer, model=again, first=7)
    assert_same_bits(whole, resumed)


def groups():
    _, one_by_one = fit()
    _, grouped = fit(groups=2)
    assert_same_bits(one_by_one, grouped)
    model = model_of()
    kernels = [layer.kernel for layer in model.layers if hasattr(layer, "kernel")]
    _, listed = fit(model=model, groups=[kernels[:2], kernels[2:]])
    assert_same_bits(one_by_one, listed)


def process_sets():
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    mine = even if hvd.rank() % 2 == 0 else odd
    callbacks = [BroadcastVariables(hvd.rank() % 2, process_set=mine)]
    model, _ = fit(model=model_of(seed=hvd.rank()), process_set=mine, callbacks=callbacks)
    flats = everyone(model)
    assert not (flats[0] == flats[1]).all(), "the sets were to train apart"
    hvd.remove_process_set(even)
    hvd.remove_process_set(odd)


def embedding():
    """Sparse gradients travel as with plain Horovod; made dense, they are compressed."""
    for sparse_as_dense in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), keras.layers.Embedding(512, 64)]
        )
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(10))
        optimizer = DistributedOptimizer(sgd(), compression=FFT, sparse_as_dense=sparse_as_dense)
        model.compile(optimizer, loss_of())
        rng = np.random.default_rng(hvd.rank())
        model.fit(rng.integers(0, 512, (80, 4)), rng.integers(0, 10, 80), 8, verbose=0)
        assert_equal_ranks(model)
        assert FFTCompression.report(optimizer)["tensors"] == 1 + sparse_as_dense


def unused():
    """A variable that one rank does not use counts as zeros there, if that is asked for."""
    keras.utils.set_random_seed(0)
    used, other = (keras.Variable(np.ones((64, 64), np.float32)) for _ in range(2))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), missing_as_zeros=True)
    with tf.GradientTape() as tape:
        both = tf.reduce_sum(used.value) + (0.0 if hvd.rank() else tf.reduce_sum(other.value))
    optimizer.apply(tape.gradient(both, [used.value, other.value]), [used, other])
    assert np.allclose(used, 0)
    assert np.allclose(other, 1 - 1 / hvd.size())


def schedule():
    """Learning-rate schedules, weight decay, averaging of weights, and another optimizer."""
    decay = keras.optimizers.schedules.CosineDecay(0.01, STEPS)
    fit(keras.optimizers.AdamW(decay, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=5))


def callbacks():
    """Broadcast at the start, metrics averaged, and the averages seen by others."""

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.logs = dict(logs)

    seen = Seen()
    model = model_of(seed=hvd.rank(), dropout=0.5)
    model.compile(DistributedOptimizer(sgd(), compression=FFT), loss_of(), metrics=["accuracy"])
    x, y = data()
    history = model.fit(
        x, y, 8, verbose=0, validation_data=(x, y),
        callbacks=[BroadcastVariables(), AverageMetrics(), seen],
    ).history  # fmt: skip
    assert_equal_ranks(model)
    own = model.evaluate(x, y, 160, verbose=0, return_dict=True)
    for logs in (seen.logs, {k: v[-1] for k, v in history.items()}):
        everywhere = hvd.allgather_object(logs)
        assert all(other == logs for other in everywhere)
        assert set(logs) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    losses = hvd.allgather_object(own["loss"])
    assert len(set(losses)) > 1, "this test was to give ranks different data"
    assert abs(seen.logs["val_loss"] - np.mean(losses)) < 1e-5
    seeds = hvd.allgather_object(model.layers[1].seed_generator.state.numpy().tolist())
    assert seeds[0] != seeds[1], "ranks are to drop out different units"


def saved_as_what_it_was():
    """A .keras file needs neither Horovod nor us, and training goes on from it."""
    model, _ = fit()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert np.array_equal(a, b)
    # A built optimizer keeps its momentum and its count of steps.
    DistributedOptimizer(loaded.optimizer, compression=FFT)
    loaded.compile(loaded.optimizer, loss_of())
    FFTCompression.load_state_dict(loaded.optimizer, FFTCompression.state_dict(model.optimizer))
    _, ours = fit(model.optimizer, model=model)
    _, theirs = fit(loaded.optimizer, model=loaded)
    assert_same_bits(ours, theirs)


def copies():
    """A copy, and what is built of a config, is what the optimizer was, and works; it warns."""
    model, _ = fit()
    optimizer = model.optimizer
    with cases.logged() as said:
        built = type(optimizer).from_config(optimizer.get_config())
        pickled = pickle.loads(pickle.dumps(optimizer))
        copied = copy.deepcopy(optimizer)
    assert [one.count("wrap it") for one in said] == [1, 1, 1], said
    for one in (built, pickled, copied):
        assert type(one) is keras.optimizers.SGD
        assert one.get_config() == optimizer.get_config()


def in_a_multi_optimizer():
    """Each of its optimizers is distributed; it sets the loss_scale_factor of each to its own."""

    def several():
        by_name = {".*kernel": DistributedOptimizer(sgd(), compression=FFT)}
        others = DistributedOptimizer(keras.optimizers.Adam(), compression=FFT)
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(others, by_name))

    def trained(optimizer):
        model = model_of()
        model.compile(optimizer, loss_of())
        model.fit(*data(), 8, verbose=0)
        return model

    assert_equal_ranks(trained(several()))
    said = cases.message_of(lambda: trained(keras.optimizers.LossScaleOptimizer(several())))
    assert "DistributedOptimizer(keras.optimizers.LossScale" in said, said
    one = DistributedOptimizer(sgd(), compression=FFT)
    said = cases.message_of(lambda: setattr(one, "loss_scale_factor", 2.0))
    assert "Set it before DistributedOptimizer" in said, said


def resume():
    """A run continued from checkpoints, one per rank, gives the bits of the uninterrupted one."""
    _, whole = fit(sgd(), steps=12)
    model, _ = fit(sgd(), steps=6)
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, memory=memory_of(model.optimizer)
        )
        path = saved.save(f"{folder}/rank{hvd.rank()}")
        # The memory is made before and after the restore reaches it: both have to work.
        for early in (True, False):
            again = model_of(seed=5)
            optimizer = DistributedOptimizer(sgd(), compression=FFT)
            again.compile(optimizer, loss_of())
            if early:
                optimizer.build(again.trainable_variables)
            restore = tf.train.Checkpoint(
                model=again, optimizer=optimizer, memory=memory_of(optimizer)
            ).restore(path)
            if early:
                restore.assert_consumed()
            else:
                optimizer.build(again.trainable_variables)
            _, resumed = fit(optimizer, model=again, first=6, steps=12)
            assert_same_bits(whole, resumed)
    memory = memory_of(optimizer)
    others = partial(from_bytes, memory.serialize(), memory.settings, hvd.rank() + 1)
    said = cases.message_of(lambda: memory.load_state_dict(others()))
    assert "one checkpoint per rank" in said, said


def backed_up(epochs, folder):
    """The weights after some epochs of a run that resumes from a folder."""
    model = model_of()
    optimizer = DistributedOptimizer(sgd(), compression=LowRankCompression.using(warmup=2))
    model.compile(optimizer, loss_of())
    backup = CompressionBackup(folder, delete_checkpoint=False)
    model.fit(*data(4), 8, epochs, shuffle=False, verbose=0, callbacks=[backup])
    assert_equal_ranks(model)
    return flat_of([v.value for v in model.weights]).numpy()


def ended_while_it_wrote():
    """Ranks resume from one epoch, though each was ended at another point of its writing."""
    whole = backed_up(4, tempfile.mkdtemp())
    mine = tempfile.mkdtemp()
    folder = Path(mine) / f"rank{hvd.rank()}"
    backed_up(3, mine)
    if hvd.rank() == 0:  # weights were written, the memory was not
        (folder / "3").rename(folder / "new")
        (folder / "new" / "memory.index").unlink()
    assert np.array_equal(backed_up(4, mine), whole)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]
    if hvd.rank() == 0:
        shutil.rmtree(folder)
    said = cases.message_of(lambda: backed_up(4, mine))
    assert "[[0, 0], [3, 4]] epochs, by rank" in said, said


def built_by_its_first_batch():
    """A model without an Input, as in Horovod's examples: it has weights behind the first step."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(96, activation="tanh"), keras.layers.Dense(10)])
    model.compile(DistributedOptimizer(sgd(), compression=FFT), loss_of())
    model.fit(*data(), 8, verbose=0, callbacks=[BroadcastVariables()])
    assert_equal_ranks(model)


def refusals():
    for call, word in (
        (lambda: DistributedOptimizer("sgd"), "keras.optimizers"),
        (lambda: DistributedOptimizer(DistributedOptimizer(sgd())), "already"),
        (lambda: DistributedOptimizer(sgd(), backward_passes_per_step=0), "at least 1"),
        (lambda: FFTCompression.report(sgd()), "DistributedOptimizer"),
        (
            lambda: DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
            "hvd.Average",
        ),
        (lambda: xla_compiled(FFT), "jit_compile=False"),
        (lambda: xla_compiled(None), "jit_compile=False"),
    ):
        assert word in cases.message_of(call), word


def xla_compiled(compression):
    model = model_of()
    optimizer = DistributedOptimizer(sgd(), compression=compression)
    model.compile(optimizer, loss_of(), jit_compile=True)
    model.fit(*data(1), 8, verbose=0)


CASES = [
    fit_and_loops, plain, stock_diverges, clip, accumulate, mixed_precision, variables_of_bfloat16,
    shared, groups,
    process_sets, embedding, unused, schedule, callbacks, built_by_its_first_batch,
    saved_as_what_it_was, copies, in_a_multi_optimizer, resume, ended_while_it_wrote,
    refusals,
]  # fmt: skip
