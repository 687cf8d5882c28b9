"""One rank: what a compression does in TensorFlow at the edges, one function a case."""

import contextlib
import re
from functools import partial

import cases
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from counted import SHAPES, transforms
from tensors import mean_of, means_of, noise

from sn_compress import CastCompression, FFTCompression, LowRankCompression
from sn_compress.errors import CompressError
from sn_compress.ops.casts import Cast
from sn_compress.tensorflow.tape import memory_of

SHARED = LowRankCompression.using(ratio=40, warmup=2)
EXACT = FFTCompression.using(theta=0.0, values="fp16")


def gradients_of(values, compression, *, graph=False, **options):
    """What a tape makes of variables whose gradients on this rank are `values`, one step each."""
    variables = [tf.Variable(np.zeros_like(step)) for step in values[0]]
    run = means_of(variables, compression, graph=graph, **options)
    return [[g.numpy() for g in run(*map(tf.constant, step))] for step in values]


def mean_is_the_mean():
    """Keeping every bin at half precision, the result is the plain mean up to rounding."""
    gradient = noise(64, 64)
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        for graph in (False, True):
            (((reduced,)),) = gradients_of([[gradient]], EXACT, op=op, graph=graph)
            # Half precision rounds each coefficient by 2**-11 relative; the transform keeps norms.
            error = np.linalg.norm(reduced - factor * mean_of(gradient))
            assert error <= factor * 2**-10 * np.linalg.norm(gradient), error


def constant_gradients_are_encoded_each_step():
    """A gradient known when tracing is not folded into a constant: the memory lives on."""
    fft = FFTCompression.using(theta=0.9)
    variable = tf.Variable(noise(64, 64))
    ramp = tf.constant(np.arange(4096, dtype=np.float32).reshape(64, 64) ** 0.5)

    @tf.function
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
            loss = tf.reduce_sum(variable * ramp)
        return tape.gradient(loss, [variable])[0]

    seen = [step().numpy() for _ in range(3)]
    assert memory_of(fft).report()["steps"] == 3
    assert not np.array_equal(seen[0], seen[1])


def eager_tapes_of_one_shape_keep_apart():
    """Outside of a tf.function Horovod keeps one graph for all of them: each has its own memory."""
    low = LowRankCompression.using(ratio=20, warmup=2, every=16, check_every=0)
    for way in (FFTCompression.using(theta=0.9), low):
        nets = [tf.Variable(np.zeros((48, 48), np.float32), name="w") for _ in range(2)]
        kept = [np.zeros((48, 48)) for _ in nets]
        for t in range(6):
            for i, net in enumerate(nets):
                x = noise(48, 48, seed=2 * t + i)
                (mean,) = means_of([net], way, graph=False)(tf.constant(x))
                kept[i] += mean_of(x) - mean.numpy()
        for i, name in enumerate(("0:w", "1:w")):
            left = mean_of(memory_of(way).residual(name)).reshape(48, 48)
            assert np.linalg.norm(left) > 1
            np.testing.assert_allclose(kept[i], left, atol=1e-4)
        assert not memory_of(way).remembers("2:w")


def retracing_keeps_the_memory():
    """A tf.function traced again, for a batch of another size, goes on with the same memory."""
    fft = FFTCompression.using(theta=0.9)
    variable = tf.Variable(noise(64, 64))

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
            loss = tf.reduce_mean((x @ variable) ** 2)
        return tape.gradient(loss, [variable])[0]

    for rows in (8, 8, 5, 8):
        step(tf.constant(noise(rows, 64)))
    assert step.experimental_get_tracing_count() > 1, "this test was to trace twice"
    assert list(memory_of(fft).state_dict()["feedback"]["memory"]) == ["0:Variable"]


def retracing_for_sizes_is_no_alarm():
    """TensorFlow warns of code that is traced often, but not where compression has it traced."""

    def traced_step(compression, variable):
        @tf.function
        def step(values):
            traces.append(values)
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
                loss = tf.reduce_sum(variable * values)
            return tape.gradient(loss, [variable])[0]

        return step

    traces = []
    with cases.logged("tensorflow") as heard:
        for _ in range(4):  # as models that are compiled one after another: of one code
            step = traced_step(SHARED.using(), tf.Variable(noise(64, 64)))
            for t in range(4):
                step(tf.constant(noise(64, 64, seed=t)))
    assert len(traces) >= 8, len(traces)
    assert not [message for message in heard if "retracing" in message], heard


def a_memory_of_other_variables_is_refused():
    """By names, as in torch: when it is loaded, or when they are known."""

    def exchange(compression, *names):
        variables = [tf.Variable(noise(64, 64), name=name) for name in names]
        for _ in range(3):
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
                loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
            tape.gradient(loss, variables)

    for way in (FFTCompression.using(theta=0.9), SHARED):
        saved, same, other, known = (way.using() for _ in range(4))
        exchange(saved, "a", "b")
        state = memory_of(saved).state_dict()
        memory_of(same).load_state_dict(state)
        exchange(same, "a", "b")
        memory_of(other).load_state_dict(state)
        with pytest.raises(Exception, match="memory is of '0:a' where the gradient of '0:b'"):
            exchange(other, "b", "a")
        exchange(known, "b", "a")
        before = memory_of(known).residual("0:b")
        with pytest.raises(CompressError, match="memory is of '0:a' where the gradient of '0:b'"):
            memory_of(known).load_state_dict(state)
        assert np.array_equal(memory_of(known).residual("0:b"), before)


def not_a_number_reaches_all():
    for bad in (np.nan, np.inf, -np.inf):
        fft = FFTCompression.using(theta=0.9)
        good, poor = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
        if hvd.rank() == hvd.size() - 1:
            poor[3, 3] = bad
        (first,), (after,) = gradients_of([[poor], [good]], fft)
        assert not np.isfinite(first).any(), "every rank has to see it"
        assert np.isfinite(after).all(), "and it has to be gone afterwards"
        assert np.isfinite(memory_of(fft).residual("0:Variable")).all()


def sparse_travels_as_plain():
    for sparse_as_dense in (False, True):
        for graph in (False, True):
            fft = EXACT.using()
            table = tf.Variable(np.zeros((512, 64), np.float32))

            def step(table=table, fft=fft, dense=sparse_as_dense):
                with hvd.DistributedGradientTape(
                    tf.GradientTape(), compression=fft, sparse_as_dense=dense
                ) as tape:
                    loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 100]))
                return tf.convert_to_tensor(tape.gradient(loss, [table])[0])

            gradient = (tf.function(step) if graph else step)().numpy()
            assert np.allclose(gradient[100], 1, atol=2e-3)
            assert np.allclose(gradient[hvd.rank()], 1 / hvd.size(), atol=2e-3)
            report = memory_of(fft).report()
            assert report["steps"] == int(sparse_as_dense), (report, graph)


def every_type_is_averaged_or_refused():
    """As the plain tape: what Horovod takes comes out as without compression, the rest raises."""
    right = set()
    types = {it for it in vars(tf).values() if isinstance(it, tf.DType)}
    for dtype in sorted(types, key=lambda it: it.name):
        found = []
        for compression in (hvd.Compression.none, EXACT, SHARED):
            with contextlib.suppress(tf.errors.OpError, TypeError, ValueError):
                variable = tf.Variable(tf.cast(noise(64, 64, seed=1), dtype))
                with hvd.DistributedGradientTape(
                    tf.GradientTape(), compression=compression
                ) as tape:
                    loss = tf.reduce_sum(tf.abs(tf.cast(variable, dtype)))
                (gradient,) = tape.gradient(loss, [variable])
                if gradient is not None:
                    found.append(np.asarray(tf.cast(gradient, tf.complex128)))
        if dtype == tf.bfloat16:  # Horovod itself reduces none
            found.insert(0, mean_of(np.sign(noise(64, 64, seed=1))))
        assert len(found) in (0, 3), (dtype, len(found))
        if found:
            right.add(dtype)
            for mean in found[1:]:
                # Rounded to bfloat16 at most; dense steps of low rank come first.
                error = np.linalg.norm(mean - found[0])
                assert error <= 2**-6 * np.linalg.norm(found[0]), (dtype, error)
    assert right >= {tf.float16, tf.bfloat16, tf.float32, tf.float64}, right


def doubles_and_small_tensors_travel_as_plain():
    for plain in (np.full((64, 64), 1 / 3), np.full(7, 1 / 3, np.float32)):
        fft = FFTCompression.using()
        (((mean,)),) = gradients_of([[plain]], fft)
        assert np.allclose(mean, plain, rtol=1e-7, atol=0)  # one rounding of float32
        report = memory_of(fft).report()
        assert report["payload_bytes"] == plain.nbytes
        assert report["tensors"] == 0


def missing_gradients_are_left_out():
    a, b = (tf.Variable(noise(64, 64)) for _ in range(2))
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=FFTCompression) as tape:
        loss = tf.reduce_sum(a)
    assert [one is None for one in tape.gradient(loss, [a, b])] == [False, True]


def plain_allreduce():
    """The same object serves hvd.allreduce; a named one has a memory."""
    tensor = tf.constant(noise(3, 4000))
    expected = mean_of(tensor.numpy())
    reduce = tf.function(lambda t, name: hvd.allreduce(t, name=name, compression=EXACT))
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        mean = reduce(tf.cast(tensor, dtype), f"ours_{dtype.name}")
        assert (mean.dtype, mean.shape) == (dtype, tensor.shape)
        error = np.linalg.norm(tf.cast(mean, tf.float32) - expected)
        assert error < 2**-7 * np.linalg.norm(expected), error
    assert "ours_float32" in memory_of(EXACT).state_dict()["feedback"]["memory"]
    scaled = hvd.allreduce(tensor, compression=EXACT, op=hvd.Sum, prescale_factor=0.5)
    assert np.allclose(scaled, expected * hvd.size() / 2, atol=0.01)
    group = hvd.grouped_allreduce([tensor, tensor + 1], name="group", compression=EXACT)
    assert np.allclose(group[1], expected + 1, atol=0.01)
    watched = tf.Variable(tensor)
    weights = tf.constant(np.arange(12000, dtype=np.float32).reshape(3, 4000))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allreduce(watched, name="watched", compression=EXACT) * weights)
    assert np.allclose(tape.gradient(loss, watched), weights), "gradients flow as in plain"


def refusals():
    tensor = tf.ones((64, 64))

    @tf.function(jit_compile=True)
    def compiled():
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=FFTCompression) as tape:
            loss = tf.reduce_sum(variable**2)
        return tape.gradient(loss, [variable])

    variable = tf.Variable(tensor)
    calls = (
        (lambda: hvd.reducescatter(tensor, compression=FFTCompression), "reducescatter"),
        (lambda: hvd.allreduce(tensor, op=hvd.Min, compression=FFTCompression), "hvd.Average"),
        (lambda: hvd.allreduce(tensor, op=hvd.Adasum, compression=FFTCompression), "Adasum"),
        (lambda: gradients_of([[tensor.numpy()]], FFTCompression, op=hvd.Adasum), "Adasum"),
        (lambda: FFTCompression.compress(tensor), "not called by Horovod"),
        (lambda: FFTCompression.report(tf.GradientTape()), "memory_of"),
        (lambda: memory_of("fft"), "memory_of got 'fft' as compression; expected FFTCompression"),
        (compiled, "jit_compile"),
    )
    for call, word in calls:
        # From inside a trace AutoGraph raises an error of its own, which holds ours.
        with pytest.raises(Exception, match=re.escape(word)) as raised:
            call()
        assert "CompressError" in f"{raised.typename}: {raised.value}", raised


def damaged_payload_is_an_error():
    """A payload changed on its way ends the step on every rank, with the reason."""
    gather = hvd.allgather

    def damaging(tensor, **how):
        every = gather(tensor, **how)
        return tf.tensor_scatter_nd_add(every, [[40]], tf.constant([1], every.dtype))

    hvd.allgather = damaging
    try:
        for graph in (False, True):
            fft = FFTCompression.using(theta=0.9)
            call = partial(gradients_of, [[noise(64, 64)]], fft, graph=graph)
            said = cases.message_of(call, tf.errors.OpError)
            assert "PayloadError: from rank 0" in said, said
            assert "checksum" in said, said
    finally:
        hvd.allgather = gather


def synchronize():
    """After it every rank has the mean memory, and what is yet to be sent is what it was."""
    for fft in (FFTCompression.using(theta=0.9), SHARED.using()):
        gradients_of([[noise(64, 64, seed=t)] for t in range(3)], fft)
        memory = memory_of(fft)
        own = memory.exchange().residual("0:Variable")
        assert own.any()
        memory.synchronize()
        ours = hvd.allgather_object(memory.exchange().residual("0:Variable"))
        assert all(np.array_equal(ours[0], other) for other in ours)
        # Spectra and their inverses in float32, of numbers of size about 1.
        assert abs(ours[0] - mean_of(own)).max() < 1e-5


def shared_exchange_with_a_rank_that_joined():
    """With the shared exchange a rank may run out of data: the others go on, and stay equal."""
    fft = SHARED.using()
    variable = tf.Variable(noise(64, 64, seed=7) * 0 + 1)
    steps = 4 if hvd.rank() == 0 else 7

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
            loss = tf.reduce_mean((x @ variable) ** 2)
        variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])

    for t in range(steps):
        step(tf.constant(noise(8, 64, seed=t)))
    hvd.join()
    everyone = hvd.allgather_object(variable.numpy())[1:]
    assert all(np.array_equal(everyone[0], other) for other in everyone)
    assert np.isfinite(everyone).all()


def bare_computes_ffts():
    """One of each gradient's blocks, whatever its shape; tensorflow_gathered.py has the graph's."""
    with transforms() as found:
        gradients_of([[noise(*shape) for shape in SHAPES]], FFTCompression.using())
    assert found == ["fft"] * 3, found


def casts_are_added_up_in_float32():
    """The mean of rounded gradients, rounded once; and fp8 remembers what it has rounded off."""
    for dtype in ("fp16", "bf16", "fp8"):
        way, cast = CastCompression.using(dtype=dtype), Cast(dtype)
        steps = [[noise(64, 64, seed=t)] for t in range(3)]
        found = gradients_of(steps, way, graph=True)
        every = hvd.allgather_object(cast.decode(cast.encode(steps[0][0].reshape(-1))))
        total = np.zeros(64 * 64, np.float32)
        for own in every:
            total += own
        due = cast.decode(cast.encode(total / np.float32(hvd.size())))
        assert np.array_equal(found[0][0].reshape(-1), due), dtype
        report = memory_of(way).report()
        assert report["cast"] == 1, report
        assert report["ratio"] == (4 * 256 / 257 if dtype == "fp8" else 2), report
        if dtype == "fp8":
            kept = mean_of(memory_of(way).residual("0:Variable").reshape(64, 64))
            sent, plain = (np.sum([step[0] for step in it], axis=0) for it in (found, steps))
            # Sums of three float32 numbers of size about 1.
            assert abs(sent + kept - mean_of(plain)).max() < 1e-5


CASES = [
    bare_computes_ffts, mean_is_the_mean, constant_gradients_are_encoded_each_step,
    eager_tapes_of_one_shape_keep_apart, retracing_keeps_the_memory, not_a_number_reaches_all,
    sparse_travels_as_plain, doubles_and_small_tensors_travel_as_plain,
    every_type_is_averaged_or_refused,
    missing_gradients_are_left_out, plain_allreduce, refusals, damaged_payload_is_an_error,
    retracing_for_sizes_is_no_alarm, a_memory_of_other_variables_is_refused,
    synchronize, shared_exchange_with_a_rank_that_joined, casts_are_added_up_in_float32,
]  # fmt: skip
