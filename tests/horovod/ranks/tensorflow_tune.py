"""One rank: AutoCompression in TensorFlow; the clock says that it pays, or that it does not."""

from functools import partial

import cases
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from rank_programs import Clock, price
from tensorflow_sized import PYTHON, graphs_of
from tensors import assert_equal_ranks, fitted, mean_of, means_of, noise, step_of, variables_of

import sn_compress.prediction.tuning as tuning
from sn_compress import AutoCompression
from sn_compress.prediction.rates import FREE
from sn_compress.tensorflow.agreement import total
from sn_compress.tensorflow.tape import memory_of

AUTO = AutoCompression.using(ratio=20, warmup=2, every=200, check_every=7)


def tune(auto, pays):
    """A tuner with a clock of ours, for which compression is worth a trial, or not."""
    price(0.0 if pays else 1e9)
    memory, clock = memory_of(auto), Clock()
    memory.tuner = tuning.Tuner(
        auto.settings,
        ranks=hvd.size(),
        total=partial(total, hvd.global_process_set, memory.count_beside),
        rates=FREE,
        clock=clock,
    )
    return memory, clock


def run(step, steps, memory, clock, trial_s, begin=0):
    """What each step returned; a step with compression takes `trial_s`, a plain one 1 s."""
    found = []
    for t in range(begin, begin + steps):
        found.append(step(tf.constant(noise(48, 48, seed=t))))
        clock.now += trial_s if memory.tuner.choice != "plain" else 1.0
    return found


def sums_and_python(function):
    nodes = graphs_of(function)
    sums = [node for node in nodes if "Allreduce" in node.op and "token" not in node.input[0]]
    return len(sums), sum(node.op in PYTHON for node in nodes)


def where_it_pays_the_graph_ends_up_sized():
    """All three tensors, and in an ordinary step no Python."""
    auto, variables = AUTO.using(), variables_of()
    memory, clock = tune(auto, True)
    step = step_of(variables, auto)
    run(step, 40, memory, clock, 0.5)
    assert_equal_ranks(variables)
    report = memory.report()
    assert report["steps"] == 40, report
    assert (report["tuned"], report["tuned_tensors"]) == (1, 3), report
    assert (report["plain_step_s"], report["trial_step_s"]) == (1.0, 0.5), report
    assert (report["low_rank"], report["plain"], report["tensors"]) == (3, 0, 3), report
    assert report["ratio_after_warmup"] > 1, report
    assert sums_and_python(step) == (2, 0), sums_and_python(step)  # of words


def where_nothing_is_tried_it_is_plain_horovod():
    """The bits of plain, and the graph of stock Horovod but for what counts."""
    found = []
    for compressed in (False, True):
        variables = variables_of()
        if not compressed:
            step = step_of(variables, hvd.Compression.none)
            for t in range(14):
                step(tf.constant(noise(48, 48, seed=t)))
        else:
            auto = AUTO.using()
            memory, clock = tune(auto, False)
            step = step_of(variables, auto)
            run(step, 14, memory, clock, 1.0)
            assert sums_and_python(step) == (3, 0), sums_and_python(step)
            report = memory.report()
            assert (report["tuned"], report["tuned_tensors"]) == (1, 0), report
            assert (report["steps"], report["ratio"], report["plain"]) == (14, 1.0, 3), report
        found.append(assert_equal_ranks(variables))
    assert np.array_equal(*found)


def what_was_not_sent_leaves_when_it_is_given_up():
    """Plain, a trial, plain for good; nothing is lost, and plain is plain's bits."""
    auto, variables = AUTO.using(), variables_of()
    memory, clock = tune(auto, True)
    step, plain = means_of(variables, auto), means_of(variables, hvd.Compression.none)
    count = 30
    made = run(step, count, memory, clock, 2.0)
    assert memory.tuner.settled, memory.report()
    wanted = [plain(tf.constant(noise(48, 48, seed=t))) for t in range(count)]
    for i in range(3):
        ours, theirs = (np.stack([each[i].numpy() for each in it]) for it in (made, wanted))
        same = [np.array_equal(*both) for both in zip(ours, theirs, strict=True)]
        # Sums of 30 float32 numbers of size about 3, in the two orders.
        assert abs(ours.sum(0) - theirs.sum(0)).max() < 3e-4
        others = [t for t in range(count) if not same[t]]
        assert 5 < len(others) < 15, others
        assert all(same[:8]), same
        assert all(same[-4:]), same
    assert not any(memory.remembers(name) for name in memory.engine.shared.tensors)
    assert sums_and_python(step) == (3, 0), sums_and_python(step)
    report = memory.report()
    assert (report["steps"], report["tuned"], report["tuned_tensors"]) == (count, 1, 0), report
    assert (report["plain"], report["low_rank"]) == (3, 0), report

    memory.load_state_dict(memory.state_dict())
    run(step, 30, memory, clock, 2.0)
    assert step.experimental_get_tracing_count() == 1, "a graph was to be kept for good"


def what_a_run_before_has_left_leaves_with_plain_gradients():
    """The memories of a run in which it pays, loaded where nothing is tried."""
    auto, variables = AUTO.using(), variables_of()
    memory, clock = tune(auto, True)
    run(means_of(variables, auto), 30, memory, clock, 0.5)
    plain = means_of(variables, hvd.Compression.none)
    assert memory.remembers("0:w0")
    saved = memory.state_dict()
    again = AUTO.using()
    memory, clock = tune(again, False)
    memory.load_state_dict(saved)
    left = memory.residual("0:w0").reshape(48, 48)
    other = means_of(variables, again)
    x = tf.constant(noise(48, 48))
    mean = mean_of(left)
    assert np.linalg.norm(mean) > 1
    np.testing.assert_allclose(other(x)[0] - plain(x)[0], mean, atol=1e-5)
    assert np.array_equal(other(x)[0], plain(x)[0])


def steps_in_a_loop_are_asked_about_when_they_are_what_is_meant():
    """Four steps a call: between a choice and the next call nothing is timed."""
    auto, variables = AUTO.using(), variables_of(2)
    memory, clock = tune(auto, True)
    one = step_of(variables, auto).python_function
    asked = []
    method = memory.tuner.method
    memory.tuner.method = lambda *of: asked.append(of[0]) or method(*of)

    @tf.function
    def four(x):
        for _ in tf.range(4):
            one(x)

    counts = []
    for t in range(16):
        before = len(asked)
        four(tf.constant(noise(8, 48, seed=t)))
        clock.now += 2.0
        counts.append((len(asked) - before) // 2)
    assert_equal_ranks(variables)
    assert counts[0] == 4, counts
    assert 0 < min(counts[:3]) < 4, counts  # the call in which the trial was chosen
    assert counts[-1] == 0, counts
    assert memory.report()["steps"] == 64, memory.report()
    assert memory.tuner.settled


def calls_beside_each_other_are_chosen_for_together():
    """Named all-reduces and a tape with a sparse gradient, in one function; also in bfloat16."""
    auto = AUTO.using()
    weights, table = variables_of(1)[0], tf.Variable(tf.zeros([64, 48]))
    memory, clock = tune(auto, True)

    @tf.function
    def step(x):
        with tf.GradientTape() as own:
            own.watch(x)
            one = hvd.allreduce(x, name="one", compression=auto)
            loss = tf.reduce_sum(one * x)
        back = own.gradient(loss, x)
        two = hvd.allreduce(tf.cast(x, tf.bfloat16), name="two", compression=auto)
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=auto) as tape:
            loss = tf.reduce_sum((tf.gather(table, [1, 2]) @ weights) * x[:2])
        dense, sparse = tape.gradient(loss, [weights, table])
        table.assign_sub(0.1 * tf.convert_to_tensor(sparse))
        return [one, tf.cast(two, tf.float32), dense, back - one]

    inputs = [noise(48, 48, seed=t) for t in range(30)]
    kept = 0.0
    for t, x in enumerate(inputs):
        one, two, _, back = step(tf.constant(x))
        clock.now += 2.0 if memory.tuner.choice != "plain" else 1.0
        kept = kept + mean_of(x) - one.numpy()
        np.testing.assert_allclose(back, mean_of(x), atol=1e-5, err_msg=str(t))
        for each in (one, two, table.numpy()):
            assert_equal_ranks([tf.Variable(each)])
    assert abs(kept).max() < 1e-4
    assert np.array_equal(one, mean_of(x))
    assert memory.tuner.settled
    assert len(memory.graphs) == 3
    report = memory.report()
    assert (report["steps"], report["low_rank"], report["tuned"]) == (30, 0, 1), report


def where_no_graph_can_be_traced_again_it_is_an_error():
    variables = variables_of(1)

    def eager_tape():
        tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=AUTO.using())
        with tape:
            loss = tf.reduce_sum(variables[0] ** 2)
        tape.gradient(loss, variables)

    for call, words in (
        (
            lambda: hvd.allreduce(tf.ones([48, 48]), name="x", compression=AUTO.using()),
            "outside of a tf.function",
        ),
        (eager_tape, "a tape that Horovod traces"),
    ):
        said = cases.message_of(call)  # AutoGraph makes an error of its own that is one, too
        assert words in said, said
        assert "Use LowRankCompression" in said, said


def keras_fits():
    """By a clock that nobody knows; whatever it says, ranks stay equal."""
    price(0.0)
    memory = fitted(AUTO, 40)
    report = memory.report()
    assert report["tuned"] == 1, report
    assert report["plain_step_s"] > 0, report
    assert report["trial_step_s"] > 0, report
    assert report["low_rank"] == report["tuned_tensors"] == report["tensors"], report
    assert all(form.rests for form in memory.graphs.values()), "the last steps were to ask nobody"
    assert len(memory.graphs) == 1


CASES = [
    where_it_pays_the_graph_ends_up_sized, where_nothing_is_tried_it_is_plain_horovod,
    what_was_not_sent_leaves_when_it_is_given_up,
    what_a_run_before_has_left_leaves_with_plain_gradients,
    steps_in_a_loop_are_asked_about_when_they_are_what_is_meant,
    calls_beside_each_other_are_chosen_for_together,
    where_no_graph_can_be_traced_again_it_is_an_error, keras_fits,
]  # fmt: skip
