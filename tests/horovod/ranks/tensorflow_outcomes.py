"""One rank: what becomes of a tape's gradients that nobody applies, or that are sent again."""

import contextlib
from functools import partial

import cases
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError
from tensors import SIDE, mean_of, means_of, variables_of

from sn_compress import AutoCompression, CompressError, FFTCompression, LowRankCompression
from sn_compress.tensorflow.keras import DistributedOptimizer
from sn_compress.tensorflow.tape import memory_of

FFT = FFTCompression.using(theta=0.9)
ARRAYS = FFTCompression.using(theta=0.9, transform="hadamard")  # no compiled nodes
LOW = LowRankCompression.using(ratio=20, warmup=2, every=1000)
DENSE = LowRankCompression.using(ratio=20, warmup=2, every=4)  # Python functions, again and again
CLASSES = {"fft": FFT, "arrays": ARRAYS, "low": LOW, "dense": DENSE}
EAGER = ("fft", "low", "dense")  # no nodes there, so that "arrays" is as "fft"


def batch(step):
    rng = np.random.default_rng([hvd.rank(), step])
    return tf.constant(rng.standard_normal((8, SIDE)), tf.float32)


def loss_of(variables, x):
    for variable in variables:
        x = tf.tanh(x @ variable)
    return tf.reduce_mean((x - 0.5) ** 2)


def gradients(variables, x, compression, factor=1.0, **options):
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression, **options) as tape:
        loss = factor * loss_of(variables, x)
    return tape.gradient(loss, variables)


def apply(variables, found):
    for variable, gradient in zip(variables, found, strict=True):
        variable.assign_sub(0.5 * gradient)


def numpy_of(variables):
    return [variable.numpy() for variable in variables]


def residuals(compression):
    memory = memory_of(compression)
    own = memory.exchange()
    saved = memory.state_dict()
    names = sorted([*saved["shared"]["tensors"], *saved["feedback"]["memory"]])
    return [own.residual(name) for name in names if own.remembers(name)]


def same(one, other, why):
    assert len(one) == len(other), why
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b), (why, np.abs(a - b).max())


def trained(compression, way, drops, traced):
    """Weights after eight steps; `drops` of each, what is thrown away behind it."""
    variables = variables_of(2)
    makes = {"rejected": rejected, "other place": other_place, "loop": in_a_loop}
    run = makes[way](variables, compression.using())
    run = tf.function(run) if traced else run
    if way == "loop":
        for first in (0, 4):
            steps = range(first, first + 4)
            wanted = [2 if drops and step > 3 else 1 for step in steps]
            run(tf.stack([batch(step) for step in steps]), tf.constant(wanted))
    else:
        yes, no = (True, False) if way == "other place" else (tf.constant(True), tf.constant(False))
        for step in range(8):
            run(batch(step), tf.constant(1.0), yes)
            if drops and step > 2:
                for extra in range(1 + step % 2):
                    run(batch(50 + step + extra), tf.constant(1e4), no)
    return numpy_of(variables)


def rejected(variables, compression):
    """A branch of the graph decides, as one on the norm of the mean does."""

    def step(x, factor, applied):
        found = gradients(variables, x, compression, factor)
        if tf.executing_eagerly():
            if applied:
                apply(variables, found)
        else:
            tf.cond(applied, lambda: apply(variables, found), lambda: None)

    return step


def other_place(variables, compression):
    """Two passes in one graph, of which one is for other variables."""

    def step(x, factor, applied):
        own = gradients(variables, x, compression, factor)
        if applied:
            apply(variables, own)

    return step


def in_a_loop(variables, compression):
    """Many steps of one call, some of them with a pass too many."""

    def steps(xs, wanted):
        for at in tf.range(4):
            for turn in tf.range(wanted[at]):
                found = gradients(
                    variables, xs[at] * (1.0 + tf.cast(turn, tf.float32)), compression
                )
                if turn == 0:
                    apply(variables, found)

    return steps


def what_is_thrown_away_leaves_no_trace():
    """To the bit: in a graph with a branch, in two graphs, in a loop inside of one, eagerly."""
    traced = {"fft": ("rejected", "other place", "loop"), "arrays": ("other place",)}
    traced |= {"low": ("rejected", "loop"), "dense": ("rejected",)}
    rows = [(name, way, True) for name, ways in traced.items() for way in ways]
    for name, way, graph in [*rows, *((name, "rejected", False) for name in EAGER)]:
        never, other = (trained(CLASSES[name], way, drops, graph) for drops in (False, True))
        if name != "dense":  # dropped steps count, so dense ones come at others
            same(never, other, (name, way))
        assert all(np.isfinite(it).all() for it in other)
        first, last = hvd.allgather_object(other)
        same(first, last, name)


def nothing_else_is_lost():
    """All that was applied, and what is left, are what ranks computed: dense steps among them."""
    for name, traced in (*((name, True) for name in CLASSES), *((name, False) for name in EAGER)):
        compression, variables = CLASSES[name].using(), variables_of(1)
        run = means_of(variables, compression, graph=traced)
        before, plain = variables[0].numpy().astype("f8"), np.zeros((SIDE, SIDE))
        rng = np.random.default_rng(hvd.rank())
        for at in range(14):
            for factor in (1.0,) if at == 0 else (100.0, 100.0, 1.0)[at % 2 :]:
                wanted = rng.standard_normal((SIDE, SIDE)).astype("f4")
                (mean,) = run(tf.constant(factor * wanted))
            variables[0].assign_sub(mean)
            plain += mean_of(wanted)
        left = mean_of(residuals(compression)[0])
        applied = before - variables[0].numpy()
        error = np.abs(applied + left.reshape(SIDE, SIDE) - plain).max()
        assert error < 2e-4, (name, traced, error)
        assert np.abs(left).max() > 0.1, "nothing was dropped by compression?"


def of_two_optimizers_one_may_skip():
    """Gradients of both in one exchange: of what one has dropped the other keeps its own."""
    for name in ("fft", "arrays", "low"):
        compression = CLASSES[name].using()
        both = [tf.Variable(np.zeros((SIDE, SIDE), "f4")) for _ in range(2)]
        means = means_of(both, compression, graph=False)

        @tf.function
        def step(wanted, skips, both=both, means=means):
            found = means(wanted[0], wanted[1])
            tf.cond(skips, lambda: None, lambda: apply(both[:1], found[:1]))
            apply(both[1:], found[1:])

        rng = np.random.default_rng(hvd.rank())
        plain = np.zeros((2, SIDE, SIDE))
        for at in range(16):
            skips = at % 3 == 2
            wanted = rng.standard_normal((2, SIDE, SIDE)).astype("f4")
            wanted[0] *= 100 if skips else 1
            step(tf.constant(wanted), tf.constant(skips))
            mean = 0.5 * mean_of(wanted)
            plain -= mean * np.array([not skips, True])[:, None, None]
        left = 0.5 * mean_of(residuals(compression))
        error = numpy_of(both) - left.reshape(plain.shape) - plain
        if skips:
            error = error[1:]
        assert np.abs(error).max() < 2e-4, (name, np.abs(error).max(axis=(1, 2)))


def scaled(compression, scale, growth, overflows=()):
    """Weights of a loop with Keras's loss scaler around a plain optimizer, and the last scale."""
    compression = compression.using()
    variables = variables_of(2)
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), scale, dynamic_growth_steps=growth
    )
    scaler.build(variables)
    memory_of(compression).watch(scaler)

    @tf.function
    def step(x, factor):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
            loss = loss_of(variables, x) + factor * tf.reduce_sum(variables[1])
            loss = scaler.scale_loss(loss)
        scaler.apply(tape.gradient(loss, variables), variables)

    for at in range(12):
        step(batch(at), tf.constant(0.0))
        if at in overflows:
            bad = np.inf if hvd.rank() else 0.0
            step(batch(60 + at), tf.constant(bad, tf.float32))
    return numpy_of(variables), float(scaler.dynamic_scale)


def a_scaler_that_skips_leaves_no_trace():
    """A tensor overflows, and others do not."""
    for name in ("fft", "low"):
        never, _ = scaled(CLASSES[name], 1024.0, 1000)
        other, scale = scaled(CLASSES[name], 1024.0, 1000, overflows=(3, 4, 7))
        assert scale == 128, scale
        same(never, other, name)


def an_exception_is_a_gradient_thrown_away():
    """It comes between the exchange and the update, which is in another function."""

    def bits(compression, fails):
        compression = compression.using()
        variables = variables_of(2)
        step = tf.function(lambda x: gradients(variables, x, compression))
        for at in range(10):
            if fails and at in (4, 5, 7):
                with contextlib.suppress(ZeroDivisionError):
                    apply(variables, [step(batch(70 + at)), 1 / 0])
            apply(variables, step(batch(at)))
        return numpy_of(variables)

    for name in ("fft", "low"):
        same(bits(CLASSES[name], False), bits(CLASSES[name], True), name)


def a_generator_goes_through_the_discriminator():
    """Its tape asks for gradients of both, of which it applies its own."""

    def bits(compression, asks_for_both):
        compression = compression.using()
        judge, maker = variables_of(2), variables_of(2)

        @tf.function
        def step(x):
            apply(judge, gradients(judge, x, compression))
            every = [*maker, *judge] if asks_for_both else maker
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
                loss = -loss_of([*maker, *judge], x)
            apply(maker, tape.gradient(loss, every)[:2])

        for at in range(10):
            step(batch(at))
        return numpy_of([*judge, *maker])

    same(bits(FFT, False), bits(FFT, True), "fft")


def gradients_may_be_added_up():
    """Of a loop that adds gradients up nothing is lost once it says so; else a warning names it."""
    for accumulates in (True, False):
        compression = FFT.using()
        variable = tf.Variable(np.zeros((SIDE, SIDE), "f4"))
        memory = memory_of(compression)
        memory.accumulates = accumulates
        step = means_of([variable], compression)
        rng = np.random.default_rng(hvd.rank())
        plain = np.zeros((SIDE, SIDE))
        with cases.logged() as warnings:
            for _ in range(5):
                total = tf.zeros((SIDE, SIDE))
                for _ in range(3):
                    wanted = rng.standard_normal((SIDE, SIDE)).astype("f4")
                    total += step(tf.constant(wanted))[0]
                    plain -= mean_of(wanted)
                variable.assign_sub(total)
        left = mean_of(residuals(compression)[0])
        error = np.abs(variable.numpy() - left.reshape(SIDE, SIDE) - plain).max()
        assert (error < 1e-4) == accumulates, error
        said = [text for text in warnings if "accumulates" in text]
        assert len(said) == (0 if accumulates else 1), said


def a_loss_scale_changes_nothing():
    """Powers of two, as the scaler raises and lowers it: the same bits as without."""

    with cases.logged() as warnings:
        for name in ("fft", "dense"):
            (steady, one), (grown, other) = (
                scaled(CLASSES[name], 8.0, growth) for growth in (1000, 2)
            )
            assert (one, other) == (8.0, 512.0), (one, other)
            same(steady, grown, name)
    assert not warnings, "nothing was dropped"


def a_gradient_is_exchanged_once():
    """Of a tape's means, an optimizer of ours says that they are means; it does not send them."""

    def loop(compression, of_tape, traced):
        model = keras.Sequential([keras.Input((SIDE,)), keras.layers.Dense(SIDE)])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        variables = [v.value for v in model.trainable_variables]

        def step(x):
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=of_tape) as tape:
                loss = tf.reduce_mean((model(x) - 0.5) ** 2)
            found, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.01)
            optimizer.apply(found, model.trainable_variables)

        run = tf.function(step) if traced else step
        for at in range(3):
            run(batch(at))

    def said(*given):
        call = partial(loop, LowRankCompression.using(warmup=1), *given)
        return cases.message_of(call, (CompressError, StagingError))

    for of_tape in (FFT.using(), LOW.using()):
        for traced in (True, False):
            text = said(of_tape, traced)
            assert "averaged twice" in text, (of_tape, traced, text)
    for of_tape in (hvd.Compression.none, hvd.Compression.fp16):
        assert "averaged twice" in said(of_tape, True), of_tape


def a_norm_over_all_ranks_may_clip_what_an_optimizer_averages():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((SIDE,)), keras.layers.Dense(SIDE)])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=FFT)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 0.5) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
        norm = hvd.allreduce(tf.linalg.global_norm(found), name="norm")
        optimizer.apply([0.1 * each / norm for each in found], model.trainable_variables)

    for at in range(3):
        step(batch(at))
    first, last = hvd.allgather_object(numpy_of(model.trainable_variables))
    same(first, last, "ranks")


def applied_twice_is_sent_twice():
    """`apply` of the same gradients, two times: two updates, of which nothing is lost."""
    variable = keras.Variable(np.zeros((SIDE, SIDE), "f4"))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=FFT)
    optimizer.build([variable])

    @tf.function
    def step(wanted):
        for _ in range(2):
            optimizer.apply([wanted], [variable])

    rng, plain = np.random.default_rng(hvd.rank()), np.zeros((SIDE, SIDE))
    for _ in range(6):
        wanted = rng.standard_normal((SIDE, SIDE)).astype("f4")
        step(tf.constant(wanted))
        plain -= 2 * mean_of(wanted)
    (left,) = FFTCompression.residuals(optimizer).values()
    left = mean_of(left)
    assert np.abs(variable.numpy() - left - plain).max() < 1e-4


def a_choice_of_methods_follows_too():
    """AutoCompression, while it measures and once it rests."""
    compression = AutoCompression.using()
    variables = variables_of(2)

    @tf.function
    def step(x, factor):
        found = gradients(variables, x, compression, factor)
        norm = tf.linalg.global_norm(found)
        tf.cond(norm < 5, lambda: apply(variables, found), lambda: None)
        return norm

    for at in range(40):
        assert step(batch(at), tf.constant(1.0)) < 5, "a dropped gradient came back"
        if at % 3 == 2:
            step(batch(100 + at), tf.constant(1e6))
    first, *others = hvd.allgather_object(numpy_of(variables))
    same(first, others[0], "ranks")


def means_of_zeros_count_as_applied():
    """They change no variable: what was left out of such a step is sent later all the same."""
    for graph in (True, False):
        compression = LOW.using()
        variable = tf.Variable(np.zeros((SIDE, SIDE), "f4"))
        step = means_of([variable], compression, graph=graph)
        rng, plain, zeros = np.random.default_rng(hvd.rank()), np.zeros((SIDE, SIDE)), 0
        for at in range(8):
            wanted = rng.standard_normal((SIDE, SIDE)).astype("f4")
            if at >= LOW.settings.warmup:  # all that is large cancels out
                wanted *= 1e-4 * (hvd.rank() == 0)
                large = np.random.default_rng(at).standard_normal((SIDE - 1, SIDE))
                wanted[:-1] = large * (-1) ** hvd.rank()
            (mean,) = step(tf.constant(wanted))
            variable.assign_sub(mean)
            zeros += not np.any(mean)
            plain -= mean_of(wanted)
        assert zeros, graph
        left = mean_of(residuals(compression)[0]).reshape(SIDE, SIDE)
        lost = np.abs(variable.numpy() - left - plain)[-1].max()
        assert lost < 1e-5, (graph, zeros, lost)


CASES = [
    what_is_thrown_away_leaves_no_trace, nothing_else_is_lost, of_two_optimizers_one_may_skip,
    a_scaler_that_skips_leaves_no_trace,
    an_exception_is_a_gradient_thrown_away, a_generator_goes_through_the_discriminator,
    gradients_may_be_added_up, a_loss_scale_changes_nothing, a_gradient_is_exchanged_once,
    a_norm_over_all_ranks_may_clip_what_an_optimizer_averages, applied_twice_is_sent_twice,
    a_choice_of_methods_follows_too, means_of_zeros_count_as_applied,
]  # fmt: skip
