"""The core on TensorFlow's tensors, in graphs too, with the bits it has in NumPy.

Where ranks must agree, bits are compared; where an order of sums is the library's own, only what is
made of equal words. Gradients whose products are exact in any order show the rest: each row and
each column of a matrix has one number at most, a power of two.
"""

from functools import cache
from typing import get_args

import numpy as np
import pytest
from bucket_ranks import begin, new_state
from rounds import drive
from samples import alike

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod")  # the package needs it

from sn_compress import arrays  # noqa: E402
from sn_compress.allreduce.bucket import Bucket, bucket_of, traced_step  # noqa: E402
from sn_compress.allreduce.methods.base import StepOptions  # noqa: E402
from sn_compress.allreduce.methods.dense import Dense  # noqa: E402
from sn_compress.allreduce.methods.frequencies import Frequencies, kernels_of  # noqa: E402
from sn_compress.allreduce.methods.low_rank import LowRank  # noqa: E402
from sn_compress.allreduce.methods.rows import Rows  # noqa: E402
from sn_compress.codecs import batched  # noqa: E402
from sn_compress.codecs.fft import FFTCodec  # noqa: E402
from sn_compress.errors import CompressError  # noqa: E402
from sn_compress.ops.orthonormal import Orthonormal  # noqa: E402
from sn_compress.ops.quantize import Layout, Values  # noqa: E402
from sn_compress.ops.record_arrays import decode_values, encode_values  # noqa: E402
from sn_compress.tensorflow import namespace as space  # noqa: E402

RANKS = 2
GRAPHS = ["graph", "xla"]
KINDS = ["eager", *GRAPHS]


def compiled(function, kind):
    """The function as it is, as a graph, or as one that XLA compiles."""
    if kind == "eager":
        return function
    return tf.function(function, autograph=False, jit_compile=kind == "xla")


PARTS = LowRank([(12, 8), (5, 9)], [3, 2]), Rows([(20, 3)], [3]), Dense([(1, 9)])
KERNELS = [kernels_of(shape) for shape in ((8, 6, 3, 3), (3, 3, 6, 8))]
BUCKET = Bucket(PARTS)
# No product of a wave of a frequency is exact. XLA, which is slow, compiles one bucket.
OF_KIND = {"graph": Bucket([*PARTS, Frequencies(KERNELS, [4, 4])]), "xla": BUCKET}


def exact_gradients(rng, shapes):
    """[n] float32 each: one power of two in as many rows and columns as there can be."""
    found = []
    for rows, columns in shapes:
        matrix = np.zeros((rows, columns), np.float32)
        count = min(rows, columns)
        at = rng.permutation(rows)[:count], rng.permutation(columns)[:count]
        matrix[at] = 2.0 ** rng.integers(-3, 4, count) * rng.choice([-1, 1], count)
        found.append(matrix.reshape(-1))
    return found


def chance_gradients(rng, shapes):
    """[n] float32 each."""
    return [rng.standard_normal(rows * columns).astype(np.float32) for rows, columns in shapes]


def both(bucket, state, memories, gradients, add):
    """A step of all ranks, each Stepped as a dict, and the sums that travelled.

    memories, gradients : of each rank, of each tensor
    add : of a round's number and all ranks' words
    """
    steps = [
        traced_step(bucket, state, memory, gradient, StepOptions(RANKS, rank))
        for rank, (memory, gradient) in enumerate(zip(memories, gradients, strict=True))
    ]
    sums = []

    def combine(round_, words):
        sums.append(add(round_, words))
        return sums[-1:] * RANKS

    return [vars(result) for result in drive(steps, combine)], sums


def in_numpy(bucket, state, memories, gradients):
    return both(bucket, state, memories, gradients, lambda _, words: sum(words))


@cache
def in_graph(kind, bucket):
    """The same in a graph, which adds up itself; with `given`, other sums take the place of its."""

    def run(state, memories, gradients, given, totals):
        def add(round_, words):
            return tf.where(given, totals[round_], tf.add_n(words))

        return both(bucket, state, memories, gradients, add)

    traced = compiled(run, kind)

    def call(state, memories, gradients, sums=None):
        totals = sums or [np.zeros(words, np.int32) for words in bucket.words(RANKS)]
        given = tf.constant(sums is not None)
        return traced(*tensors([state, memories, gradients]), given, tensors(totals))

    call.traced = traced
    return call


def tensors(values):
    return tf.nest.map_structure(tf.constant, values)


def start(rng, bucket=BUCKET):
    """A state that has seen a gradient, and memories of zeros for each rank."""
    pairs = zip(exact_gradients(rng, bucket.shapes), bucket.shapes, strict=True)
    state = new_state(bucket, np.zeros(1, np.float32))
    state = begin(bucket, state, [each.reshape(shape) for each, shape in pairs])
    zeros = [np.zeros(rows * columns, np.float32) for rows, columns in bucket.shapes]
    return state, [zeros] * RANKS


@pytest.mark.parametrize("kind", GRAPHS)
def test_steps_have_the_bits_of_numpy_where_no_product_is_rounded(kind):
    rng, run = np.random.default_rng(3), in_graph(kind, BUCKET)
    state, none = start(rng)
    theirs = state
    for _ in range(5):
        gradients = [exact_gradients(rng, BUCKET.shapes) for _ in range(RANKS)]
        ended, sums = in_numpy(BUCKET, state, none, gradients)
        found, totals = run(theirs, none, gradients)
        alike(totals, sums)
        for one, other in zip(found, ended, strict=True):
            alike(one["state"], other["state"])
        alike(found[1]["means"], found[0]["means"])
        state, theirs = ended[0]["state"], found[0]["state"]


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_is_not_sent_is_in_the_memories(kind):
    rng, bucket = np.random.default_rng(8), OF_KIND[kind]
    run, (state, memories) = in_graph(kind, bucket), start(rng, bucket)
    for _ in range(3):
        gradients = [chance_gradients(rng, bucket.shapes) for _ in range(RANKS)]
        found, _ = run(state, memories, gradients)
        alike(found[1]["means"], found[0]["means"])
        for at, mean in enumerate(found[0]["means"]):
            held = sum(memories[rank][at] + gradients[rank][at] for rank in range(RANKS))
            left = sum(found[rank]["memories"][at] for rank in range(RANKS))
            # At most 20 operations on numbers below 64, each off by 2**-24 of them.
            np.testing.assert_allclose(held - left, RANKS * mean, atol=20 * 2.0 ** (6 - 24))
        state, memories = found[0]["state"], [one["memories"] for one in found]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("what", ["NaN", "first sum", "second sum"])
def test_a_step_with_nan_or_a_damaged_sum_is_told_on_all_and_changes_nothing(kind, what):
    rng, bucket = np.random.default_rng(5), OF_KIND[kind]
    run, (state, _) = in_graph(kind, bucket), start(rng, bucket)
    memories = [chance_gradients(rng, bucket.shapes) for _ in range(RANKS)]
    gradients = [chance_gradients(rng, bucket.shapes) for _ in range(RANKS)]
    ended, sums = in_numpy(bucket, state, memories, gradients)
    if what == "NaN":
        spoilt = [[it.copy() for it in own] for own in gradients]
        spoilt[1][2][7] = np.nan
        found, _ = run(state, memories, spoilt)
        assert all(np.isnan(it).all() for one in found for it in one["means"])
    else:
        damaged = [it.copy() for it in sums]
        damaged[what == "second sum"][9] += 1
        found, _ = run(state, memories, gradients, damaged)
    for rank, one in enumerate(found):
        alike(one["state"], state)
        alike(one["memories"], memories[rank])
        assert one["numbers"].numpy()[:2].tolist() == ([1, 0] if what == "NaN" else [0, 1])
    # Of real gradients each library packs its own words; of equal sums it makes the same state.
    found, _ = run(found[0]["state"], [one["memories"] for one in found], gradients, sums)
    for one, other in zip(found, ended, strict=True):
        alike(one["state"], other["state"])
        assert one["numbers"].numpy()[:2].tolist() == [0, 0]
        np.testing.assert_allclose(one["numbers"], other["numbers"], rtol=1e-5)


def test_no_operation_of_a_step_calls_python():
    rng, run = np.random.default_rng(7), in_graph("graph", BUCKET)
    state, memories = start(rng)
    run(state, memories, [chance_gradients(rng, BUCKET.shapes) for _ in range(RANKS)])
    (of,) = run.traced._list_all_concrete_functions()
    graph = of.graph.as_graph_def()
    inner = [node for each in graph.library.function for node in each.node_def]
    operations = {node.op for node in [*graph.node, *inner]}
    assert {"MatMul", "AddN", "GatherV2", "BitwiseAnd"} <= operations
    assert not [name for name in operations if "Py" in name]


def test_a_gradient_of_another_size_is_refused():
    bucket, order = bucket_of((Dense([(1, 40)]),))
    assert order == (0,)
    state = tensors(new_state(bucket, np.zeros(1, np.float32)))
    with pytest.raises(CompressError, match=r"shape \(39,\); expected \(40,\)"):
        next(traced_step(bucket, state, [tf.zeros(40)], [tf.zeros(39)], StepOptions(2, 0)))


@pytest.mark.parametrize(
    ("values", "kind"), [*zip(get_args(Values), [*KINDS, "xla"], strict=True), ("fp16", "xla")]
)
def test_codes_of_values_are_those_of_numpy(values, kind):
    rng, layout = np.random.default_rng(5), Layout(64, 20, values, 4, 1, "bitmap")
    some = rng.standard_normal((6, 40)) * 10.0 ** rng.integers(-20, 20, (6, 1))
    some = some.astype(np.float32)
    some[0], some[1] = 0, -1
    peaks = np.abs(some).max(axis=1).view(np.int32)

    def run(some, peaks):
        heads, scale, codes, saturated = encode_values(some, peaks, layout, None)
        return heads, codes, saturated, decode_values(codes, scale, layout)

    alike(compiled(run, kind)(tf.constant(some), tf.constant(peaks)), run(some, peaks))


@pytest.mark.parametrize("values", get_args(Values))
def test_payloads_of_a_graph_are_those_of_the_codec(values):
    """Whose transform is exact; those of FFTs differ in last bits."""
    codec = FFTCodec(theta=0.9, transform="identity", values=values)
    vector = np.random.default_rng(6).standard_normal(5000).astype(np.float32)

    def encoded(it, memory):
        made = batched.encode(codec, [it], [memory])
        return made.words, made.memories[0]

    run = compiled(encoded, "graph")
    state, own = codec.new_state(5000), codec.new_state(5000)
    for _ in range(2):
        words, state = run(tf.constant(vector), [tf.constant(part) for part in state])
        payload = codec.encode(vector, state=own)
        assert words.numpy().tobytes() == payload.to_bytes()
        alike(state, own)


@pytest.mark.parametrize("kind", KINDS)
def test_orthonormal_rows_and_whole_numbers_are_those_of_numpy(kind):
    # Rows that depend on others, of nearly so, and matrices of unlike shapes, as in test_exact_ops.
    rng = np.random.default_rng(2)
    shapes = [(1, 1), (4, 40), (3, 33), (6, 64), (5, 3)]
    matrices = [rng.integers(-2000, 2000, shape) for shape in shapes]
    matrices[1][2] = matrices[1][0] + matrices[1][1]
    matrices[3][5] = 0
    matrices[3][4] = matrices[3][1]
    matrices[3][4, 0] += 1
    sums = np.concatenate([it.reshape(-1) for it in matrices]).astype(np.int32)
    rows, instead = Orthonormal(shapes), rng.standard_normal(sums.size).astype(np.float32)
    whole = np.array([-(2**31), -(2**20) - 1, -7, -1, 0, 1, 6, 2**31 - 1], np.int32)
    floats = np.array([0.5, 1.5, -0.5, -2.5, 2.0**40, 0.49999997], np.float32)

    def run(sums, instead, whole, floats):
        shifted = whole // 7, whole % 7, arrays.shifted_right(whole, 3), whole & 255
        return rows(sums, instead), rows(sums), *shifted, arrays.rounded(floats + 0, 127)

    given = [sums, instead, whole, floats]
    alike(compiled(run, kind)(*tensors(given)), run(*given))


def test_a_table_is_in_each_graph_it_is_used_in_and_the_library_is_found_for_its_tensors():
    table = arrays.Constant(np.arange(9))

    @tf.function(autograph=False)
    def run(value):
        assert table.on(value) is table.on(value)
        inner = tf.cond(value > 0, lambda: table.on(value)[1], lambda: table.on(value)[2])
        return inner + arrays.take(table.on(value), tf.constant([3]))

    assert run(tf.constant(1)).numpy().tolist() == [4]
    assert run(tf.constant(-1.0)).numpy().tolist() == [5]
    assert table.on(tf.constant(1)).numpy().tolist() == list(range(9))
    assert arrays.namespace(tf.constant(1)) is space
    assert arrays.is_fixed(tf.constant(1))
    assert not arrays.is_fixed(np.zeros(1))
    assert not arrays.is_torch(tf.constant(1))
    assert not arrays.on_host(tf.constant(1))
