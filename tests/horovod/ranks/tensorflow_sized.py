"""One rank: LowRankCompression in TensorFlow's graphs, one function a case."""

import cases
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensors import assert_equal_ranks, fitted, noise, step_of, variables_of

from sn_compress import LowRankCompression
from sn_compress.ops import products
from sn_compress.tensorflow.tape import memory_of

PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
LOW = LowRankCompression.using(ratio=20, warmup=2, every=16, check_every=7)


def graphs_of(function):
    """The graph of what was traced last, and those of all functions that it calls always.

    The branches of the two conditions that count steps are left out: they are run once in many.
    """
    whole = function._list_all_concrete_functions()[-1].graph.as_graph_def()
    library = {f.signature.name: f for f in whole.library.function}
    found, names = [whole.node], []
    pending = list(found[0])
    while pending:
        node = pending.pop()
        if node.op.endswith("If") and node.name.rpartition("/")[2].startswith("sn_rare"):
            continue
        for attr in node.attr.values():
            for function in [attr.func, *attr.list.func]:
                if function.name and function.name not in names:
                    names.append(function.name)
                    found.append(library[function.name].node_def)
                    pending += library[function.name].node_def
    return [node for nodes in found for node in nodes]


def an_ordinary_step_calls_no_python():
    """And sums a handful of times for twenty matrices."""
    low, variables = LOW.using(warmup=1), variables_of(20)
    step = step_of(variables, low)
    seen = []
    for t in range(4):
        step(tf.constant(noise(8, 48, seed=t)))
        if t not in (0, 3):
            continue
        nodes = graphs_of(step)
        # Of Horovod's all-reduces of zeros no sum is read, so that TensorFlow runs none of them.
        sums = [node for node in nodes if "Allreduce" in node.op and "token" not in node.input[0]]
        seen.append((sum(node.op in PYTHON for node in nodes), len(sums)))
    assert seen[0][0] > 0, seen  # a dense step chooses sizes
    assert seen[-1][0] == 0, seen
    assert 1 <= seen[-1][1] <= 5, seen
    assert_equal_ranks(variables)


def ranks_stay_equal_over_the_forms():
    """Dense, sized, dense again, sized again; the reports count every step."""
    low, variables = LOW.using(), variables_of()
    step = step_of(variables, low)
    for t in range(30):
        step(tf.constant(noise(8, 48, seed=t)))
        assert_equal_ranks(variables)
    report = memory_of(low).report()
    assert report["steps"] == 30, report
    assert report["tensors"] == report["low_rank"] == 3, report
    assert 2 < report["ratio"] < 20, report
    assert 0 < report["relative_error"] < 1, report


def a_step_that_is_lost_changes_no_memory():
    """NaN on one rank reaches all, and is gone afterwards."""
    low, variables = LOW.using(check_every=0), variables_of(1)
    scale = tf.Variable(1.0)

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=low) as tape:
            loss = tf.reduce_sum(variables[0] * x) * scale
        return tape.gradient(loss, variables)[0]

    for t in range(5):
        step(tf.constant(noise(48, 48, seed=t)))
    before = memory_of(low).exchange().residual("0:w0")
    scale.assign(np.nan if hvd.rank() else 1.0)
    assert not np.isfinite(step(tf.constant(noise(48, 48)))).any()
    assert np.array_equal(memory_of(low).exchange().residual("0:w0"), before)
    scale.assign(1.0)
    assert np.isfinite(step(tf.constant(noise(48, 48)))).all()
    assert not np.array_equal(memory_of(low).exchange().residual("0:w0"), before)


def damaged_sums_end_the_step():
    low, variables = LOW.using(check_every=0), variables_of(1)
    step, x = step_of(variables, low), tf.constant(noise(8, 48))
    total = hvd.allreduce

    def damaging(tensor, **how):
        summed = total(tensor, **how)
        return summed + damage if tensor.dtype == tf.int32 and tensor.shape[0] else summed

    damage = tf.Variable(0)
    hvd.allreduce = damaging
    try:
        for _ in range(5):
            step(x)
        damage.assign(1)
        said = cases.message_of(lambda: step(x), tf.errors.InvalidArgumentError)
        assert "PayloadError" in said, said
    finally:
        hvd.allreduce = total


def unlike_hardware_is_asked_about():
    """Ranks whose products have other bits are told so when they trace, and stay equal."""
    said, rank = products.hardware_fingerprint, hvd.rank()
    for unlike in (False, True):
        products.hardware_fingerprint = lambda like, own=rank * unlike: [("products", str(own))]
        try:
            low, variables = LOW.using(check_every=0), variables_of(1)
            step = step_of(variables, low)
            for t in range(2 + 4 * unlike):
                step(tf.constant(noise(8, 48, seed=t)))
        finally:
            products.hardware_fingerprint = said
        assert memory_of(low).engine.shared.exact == unlike
        assert_equal_ranks(variables)


def keras_fits_in_both_forms():
    """Dense and sized in turns, in inner graphs: two steps in a call; a branch of a step."""
    for per_call, passes in ((2, 1), (1, 2)):
        memory = fitted(LOW, 24, per_call=per_call, passes=passes)
        report = memory.report()
        assert report["low_rank"] == 2, report
        assert report["ratio"] > 2, report
        assert memory.graphs, "the last steps were to be sized"


def a_size_that_was_outgrown_is_chosen_anew():
    """Graphs do not vote: they end before the step in which ranks do."""
    rng = np.random.default_rng(3)
    sides = [np.linalg.qr(rng.standard_normal((48, 12)))[0].astype("f4") for _ in range(4)]
    many, late = sides[0] @ sides[1].T, sides[2] @ sides[3].T
    low, variables = LOW.using(every=2000, check_every=0), variables_of(2)

    @tf.function
    def step(factors):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=low) as tape:
            loss = tf.add_n([tf.reduce_sum(v * factors[at]) for at, v in enumerate(variables)])
        return tape.gradient(loss, variables)

    sizes = []
    for t in range(64):
        noisy = 1e-3 * noise(48, 48, seed=t)
        faint = 1e-3 * np.ones((48, 48), np.float32)
        step(tf.constant(np.stack([many + noisy, faint if t < 20 else late + noisy])))
        size = memory_of(low).exchange().tensors["1:w1"].size
        sizes.append(size.size if size else None)
    assert (sizes[2], sizes[-1]) == (1, max(size or 0 for size in sizes)), sizes
    assert sizes[-1] > 2, sizes
    assert hvd.allgather_object(sizes) == [sizes] * hvd.size(), sizes
    assert not [node for node in graphs_of(step) if node.op in PYTHON]  # a graph again


CASES = [
    an_ordinary_step_calls_no_python, ranks_stay_equal_over_the_forms,
    a_step_that_is_lost_changes_no_memory,
    damaged_sums_end_the_step, a_size_that_was_outgrown_is_chosen_anew,
    unlike_hardware_is_asked_about, keras_fits_in_both_forms,
]  # fmt: skip
