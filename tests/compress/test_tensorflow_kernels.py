"""The compiled codec in TensorFlow's graphs: the bytes and bits of FFTCodec, and its errors."""

import numpy as np
import pytest
from samples import alike, for_each

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod")  # the package needs it

from sn_compress import FFTCodec, _native  # noqa: E402
from sn_compress.codecs.base import Payload  # noqa: E402
from sn_compress.tensorflow import kernels  # noqa: E402

RANKS = 3
pytestmark = pytest.mark.skipif(_native.core() is None, reason="the extension was not built")


def graph(function):
    return tf.function(function, autograph=False)


def vectors(n, seed=0):
    rng = np.random.default_rng([n, seed])
    return rng.standard_normal(n).astype("f4") * 2.0 ** rng.integers(-20, 20, n).astype("f4")


def words_of(payload):
    return payload.buffer.view("<i4")


@for_each("n", (1, 63, 8192 + 33))
@pytest.mark.parametrize("settings", [
    {"theta": 0.98}, {"theta": 0.0}, {"theta": 0.9, "values": "fp16"},
    {"theta": 0.9, "block": 64, "bits": 12, "mantissa": 6, "positions": "bitmap"},
    {"theta": 0.9, "window": 1.0, "half": True}, {"theta": 0.95, "values": "sign"},
    {"theta": 0.95, "span": 64, "bits": 4, "mantissa": 1},
    {"theta": 0.95, "span": 64, "values": "2bit"},
], ids=str)  # fmt: skip
def test_payloads_memories_and_means_are_those_of_the_codec(settings, n):
    codec = FFTCodec(**settings)
    assert kernels.serve(codec, [n])
    encode = graph(lambda values, memory: kernels.encode(codec, values, memory, decay=0.75))
    state = [codec.new_state(n) for _ in range(RANKS)]
    for step in range(2):
        payloads = []
        for rank, own in enumerate(state):
            values = vectors(n, RANKS * step + rank)
            if (step, rank) == (1, 2):
                values[n // 2] = np.nan
            before = [tf.constant(part) for part in own]
            payload, left, told = encode(tf.constant(values), before)
            made = codec.encode(values, state=own, decay=0.75)
            assert payload.numpy().tobytes() == made.to_bytes()
            alike(left, own)
            assert told.numpy().tolist() == [made.energy, made.error, made.saturated]
            payloads.append(made)
        # Among others of a bucket.
        parts = [np.concatenate([[7], words_of(it), [9, 9]]) for it in payloads]
        gathered = tf.constant(np.concatenate(parts).astype("i4"))
        mean = graph(lambda words: kernels.decode(codec, words, n, ranks=RANKS, at=1))(gathered)
        assert mean.numpy().tobytes() == codec.decode_mean(payloads).tobytes()


def test_without_a_memory_nothing_is_remembered_and_what_was_handed_over_is_not_changed():
    codec, values = FFTCodec(theta=0.9), vectors(5000)
    payload, left, _ = graph(lambda it: kernels.encode(codec, it, [], decay=1.0))(values)
    assert left == []
    assert payload.numpy().tobytes() == codec.encode(values).to_bytes()
    variables = [tf.Variable(part) for part in codec.new_state(5000)]
    step = graph(
        lambda it: kernels.encode(codec, it, [v.read_value() for v in variables], decay=1.0)
    )
    first, second = step(tf.constant(values)), step(tf.constant(values))
    assert not any(v.numpy().any() for v in variables)
    assert first[0].numpy().tobytes() == second[0].numpy().tobytes()


def test_each_damaged_word_is_an_error_that_names_the_rank():
    codec, n = FFTCodec(theta=0.9), 5000
    decode = graph(lambda words: kernels.decode(codec, words, n, ranks=RANKS, at=0))
    sound = [words_of(codec.encode(vectors(n, rank))) for rank in range(RANKS)]
    for word in (0, 2, 6, 7, 8, 20):
        parts = [part.copy() for part in sound]
        parts[1][word] ^= 1 << 9
        with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: from rank 1: "):
            decode(tf.constant(np.concatenate(parts)))


def test_a_record_that_is_damaged_under_a_right_checksum_is_an_error():
    codec, n = FFTCodec(theta=0.9), 4096
    buffer = codec.encode(vectors(n)).buffer.copy()
    buffer[-40:] = 255  # positions
    sealed = Payload.seal(buffer, codec_id=1, n=n, settings=codec.settings)
    with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: record 0 is damaged"):
        graph(lambda words: kernels.decode(codec, words, n, ranks=1, at=0))(words_of(sealed))


def test_sizes_that_a_graph_was_not_traced_for_are_errors():
    codec = FFTCodec(theta=0.9)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None])])
    def encode(values):
        values.set_shape([5000])  # which is not true
        return kernels.encode(codec, values, [], decay=1.0)[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="a gradient of another size"):
        encode(tf.zeros(4999))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int32)])
    def decode(words):
        words.set_shape([2 * codec.payload_bytes(5000) // 4])
        return kernels.decode(codec, words, 5000, ranks=2, at=0)

    with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: gathered 7 words"):
        decode(tf.zeros(7, tf.int32))


def test_codecs_of_other_transforms_and_lengths_are_not_served_nor_a_library_without_functions():
    for settings in ({"transform": "dct"}, {"block": None}, {"window": "payload"}):
        assert not kernels.serve(FFTCodec(theta=0.9, **settings), [5000])
    why = _native.core().register_graph_kernels("libm.so.6")
    assert why in ("no TF_NewStatus", "libm.so.6 is not loaded")
