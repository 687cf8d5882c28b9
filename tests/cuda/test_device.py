"""What Python does around the kernels, on a CuPy of NumPy arrays (fake.py)."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake import FakeArray, FakeDevice, fake, tensor
from samples import alike

from sn_compress import FFTCodec
from sn_compress.codecs import _fft_cuda, batched
from sn_compress.codecs.base import Payload
from sn_compress.collective import Gradient
from sn_compress.engine import payloads
from sn_compress.errors import CompressError, PayloadError

ml_dtypes = pytest.importorskip("ml_dtypes")

READING = ("bool", "int", "float", "index", "iter", "complex")
SIZES = (0, 1, 31, 33, 1000, 4096, 9000)
SAME_BYTES = [
    {"transform": "identity"},
    {"transform": "identity", "values": "2bit", "block": 256},
    {"transform": "identity", "theta": 0.0, "values": "sign"},
    {"transform": "hadamard", "positions": "bitmap"},
    {"transform": "identity", "window": 0.5},
    {"transform": "identity", "half": True},
    {"transform": "identity", "block": None},
    {"transform": "identity", "block": 1 << 14, "values": "fp16"},
    {"transform": "axes", "shape": (10, 3, 3, 100), "axes": (1, 2)},
]  # fmt: skip


def values(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("settings", SAME_BYTES, ids=str)
def test_payload_memory_and_mean_are_those_of_the_cpu(gpu, settings):
    codec = FFTCodec(**{"theta": 0.9, **settings})
    for n in [9000] if "shape" in settings else SIZES:
        state, device_state = codec.new_state(n), codec.new_state(n, like=fake(values(n)))
        payloads, device_payloads = [], []
        for seed in range(3):
            payloads.append(codec.encode(values(n, seed), state=state, decay=0.9))
            sent = codec.encode(fake(values(n, seed)), state=device_state, decay=0.9)
            assert sent.to_bytes() == payloads[-1].to_bytes()
            device_payloads.append(sent)
        alike(device_state, state)
        got, expected = codec.decode_mean(device_payloads), codec.decode_mean(payloads)
        np.testing.assert_array_equal(np.asarray(got), expected)
        _fft_cuda.raise_if_damaged()


# Float transforms differ in the last bits, so bins near the threshold may be exchanged. What the
# memory keeps and what is sent add up to the input all the same: test_fused.py has the bound.
@pytest.mark.parametrize("settings", [
    *({"transform": it, "block": block} for it in ("fft", "dct") for block in (256, None)),
    *({"span": 64, "block": block} for block in (256, 1 << 14)),
], ids=str)  # fmt: skip
def test_what_is_sent_and_kept_add_up(gpu, settings):
    codec = FFTCodec(theta=0.9, **settings)
    for n in SIZES[1:]:
        given = values(n)
        state = codec.new_state(n, like=fake(given))
        payload = codec.encode(fake(given), state=state)
        assert Payload.from_bytes(payload.to_bytes()).n == n
        kept = codec.state_to_values(batched.memory_on_host(state), n)
        total = np.asarray(codec.decode(payload)) + kept
        # (log2(n) + 3) * 7 u for each of two transforms, in the 2-norm; padding counts.
        bound = 2 * (np.log2(max(n, 32)) + 4) * 7 * 2.0**-24 * np.linalg.norm(given)
        assert np.linalg.norm(total - given) <= bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats(gpu, dtype):
    codec = FFTCodec(theta=0.9, transform="identity")
    given = values(5000).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert codec.encode(fake(given)).to_bytes() == codec.encode(given).to_bytes()


def test_many_tensors_take_few_launches(gpu):
    codec = FFTCodec(theta=0.9)
    tensors = [fake(values(n, n)) for n in [4096 * 3, 4096, 8192] * 10]
    payloads = _fft_cuda.Encoder(codec, tensors).run()
    assert gpu.launches == [("open_payloads", 30), ("encode_blocks", 60), ("seal_payloads", 30)]
    for each, payload in zip(tensors, payloads, strict=True):
        assert payload.to_bytes() == codec.encode(each).to_bytes()


@pytest.mark.parametrize("block", [256, 1 << 14, None], ids=str)
@pytest.mark.parametrize("transform", ["fft", "spans", "axes", "identity"])
def test_a_step_reads_no_value(gpu, monkeypatch, transform, block):
    """Whatever brings one of a device's to the host raises."""

    def reads(*_: object) -> None:
        raise AssertionError("a value of the device was asked for")

    kinds = {
        "axes": {"transform": "axes", "shape": (100, 90), "axes": (1,)},
        "spans": {"span": 64 if block else None},
    }
    codec = FFTCodec(theta=0.9, block=block, **kinds.get(transform, {"transform": transform}))
    tensors = [fake(values(9000, seed)) for seed in range(3)]
    states = [codec.new_state(9000, like=each) for each in tensors]

    def step() -> None:
        payloads = _fft_cuda.Encoder(codec, tensors, states).run(0.9)
        gathered = _fft_cuda.side_by_side([payload.buffer for payload in payloads])
        _fft_cuda.Decoder(codec, [gathered], [tensors[0]]).run()

    step()  # the first on a device waits once, for the flag of damage
    for name in ("get", "item", "tolist", "tobytes", *map("__{}__".format, READING)):
        monkeypatch.setattr(FakeArray, name, reads, raising=False)
    monkeypatch.setattr(gpu, "stream", SimpleNamespace(synchronize=reads), raising=False)
    monkeypatch.setattr(FakeDevice, "synchronize", reads)
    step()
    with pytest.raises(AssertionError, match="asked for"):
        bool(tensors[0][:1] > 0)


def test_several_ranks_in_one_gathered_buffer(gpu):
    codec = FFTCodec(theta=0.9)
    made = [codec.encode(values(9000, seed)) for seed in range(3)]
    gathered = fake(np.stack([payload.buffer for payload in made]))
    outs = [np.empty(9000, "f4"), np.empty(9000, "f2")]
    for out in outs:
        _fft_cuda.Decoder(codec, [gathered], [fake(out)]).run()
    mean = codec.decode_mean(made)
    np.testing.assert_allclose(outs[0], mean, atol=1e-6 * abs(mean).max())
    np.testing.assert_array_equal(outs[1], outs[0].astype("f2"))


def test_damage_is_told_when_asked_for(gpu):
    codec = FFTCodec(theta=0.9)
    good = codec.encode(fake(values(9000)))
    for at, said in ((5, "another"), (13, "another"), (29, "checksum"), (500, "checksum")):
        bad = good.buffer.copy()
        bad[at] ^= 0x40
        codec.decode_mean([Payload(bad, 1, 9000, codec.settings)])
        with pytest.raises(PayloadError, match=said):
            _fft_cuda.raise_if_damaged()
    _fft_cuda.raise_if_damaged()  # once told, forgotten
    with pytest.raises(PayloadError, match="cut"):
        _fft_cuda.Decoder(codec, [good.buffer[None, :-16]], [fake(values(9000))])


def test_damage_in_a_step_is_told_when_the_next_one_begins(gpu):
    """Without a wait: the flag is copied behind the decoding, and read then."""
    codec = FFTCodec(theta=0.9)
    good = codec.encode(values(9000)).buffer
    bad = good.copy()
    bad[500] ^= 0x40
    for second, damaged in ((good, False), (bad, True), (good, False)):
        given = [Gradient("w", (90, 100), tensor(values(9000)))]
        arrival = payloads.decode(codec, tensor(np.concatenate([good, second])), given, ranks=2)
        assert arrival is not None
        if damaged:
            with pytest.raises(PayloadError, match="checksum"):
                arrival.conclude()
        else:
            arrival.conclude()


def test_what_a_gpu_does_not_do_is_refused_by_name(gpu):
    given = fake(values(20000))
    with pytest.raises(CompressError, match="window"):
        FFTCodec(window="payload").encode(given)
    with pytest.raises(CompressError, match="like=tensor"):
        FFTCodec().encode(given, state=FFTCodec().new_state(20000))
    with pytest.raises(CompressError, match="float64"):
        FFTCodec().encode(given.astype(np.float64))
    with pytest.raises(CompressError, match="Flatten"):
        FFTCodec().encode(given.reshape(10, 2000))
