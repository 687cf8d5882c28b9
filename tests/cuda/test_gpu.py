"""On a real GPU: what the host-run bodies say, plus streams, graphs, damage and memory."""

import numpy as np
import oracle
import pytest
from fused_case import decode as host_decode
from fused_case import encode as host_encode
from fused_case import samples
from host import Host
from rivals.codecs import codec as make_codec

from sn_compress import ErrorFeedback, FFTCodec
from sn_compress import _cuda as cuda
from sn_compress.codecs import _fft_cuda, batched
from sn_compress.codecs.base import Payload
from sn_compress.errors import PayloadError
from sn_compress.ops import launch
from sn_compress.ops.launch import Piece

pytestmark = pytest.mark.gpu("cupy")

TRANSFORMS = ("spectrum", "fft", "spans", "dct", "hadamard", "identity")


@pytest.fixture
def xp():
    import cupy

    return cupy


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no CUDA device")
    return torch


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("kind", ["range", "fp16", "sign", "2bit"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("block", [32, 1024, 4096, 8192])
def test_bits_are_those_of_the_host_run(xp, block, transform, kind):
    device = cuda.CudaDevice(0, xp.cuda.get_current_stream())
    span = 32 if transform == "spans" else None
    transform = "fft" if span else transform
    for theta in (0.0, 0.9, 0.98):
        form = oracle.make_format(block, transform, theta, kind, span=span)
        for name, case in samples(form).items():
            given = case.reshape(-1)
            # CuPy compiles with -ftz=true, after options of ours: what is smaller than the smallest
            # normal number is a zero there.
            flushed = np.copysign(np.float32(0), given)
            given = np.where(np.abs(given) < np.finfo("f4").tiny, flushed, given)
            if transform != "spectrum":
                given = given[: 4 * block - 3]
            memory = np.zeros((4, form.layout.bins * form.layout.parts), np.float32)
            expected = host_encode(Host(), form, given, memory, decay=0.5)
            there, kept = xp.asarray(given), xp.asarray(memory)
            words, totals = xp.zeros((4, form.layout.words), "u4"), xp.zeros(2, "u8")
            piece = Piece(there.data.ptr, "float32", given.size, 4, words.data.ptr, 8,
                          totals.data.ptr, kept.data.ptr)  # fmt: skip
            launch.encode_blocks(device, form, [piece], decay=0.5)
            np.testing.assert_array_equal(words.get(), expected.words, err_msg=name)
            np.testing.assert_array_equal(
                kept.get().view("u4"), expected.memory.view("u4"), err_msg=name
            )
            np.testing.assert_array_equal(totals.get(), expected.totals)

            records = expected.words[None]
            mean, flags, sums = host_decode(Host(), form, records, given.size)
            there = xp.empty(given.size, "f4")
            ours, flag, total = xp.asarray(records), xp.zeros(1, "u4"), xp.zeros(1, "u8")
            piece = Piece(there.data.ptr, "float32", given.size, 4, ours.data.ptr, 8,
                          total.data.ptr, flag.data.ptr, rank_words=ours.size)  # fmt: skip
            launch.decode_blocks(device, form, [piece], ranks=1, weight=1.0)
            got = there.get()
            number = ~np.isnan(mean)  # the bits of a NaN are the machine's
            np.testing.assert_array_equal(np.isnan(got), ~number)
            np.testing.assert_array_equal(got[number].view("u4"), mean[number].view("u4"))
            assert flag.get()[0] == flags
            np.testing.assert_array_equal(total.get(), sums)


@pytest.mark.parametrize("settings", [
    {"transform": "identity"},
    {"transform": "identity", "values": "2bit"},
    {"transform": "hadamard", "block": 512},
    {"transform": "identity", "block": None},
    {"transform": "identity", "block": None, "positions": "bitmap", "values": "fp16"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("n", [0, 1, 33, 1000, 100_000, 2**20 + 1])
def test_payloads_are_those_of_the_cpu(xp, settings, n):
    codec = FFTCodec(theta=0.95, **settings)
    state, device_state = codec.new_state(n), codec.new_state(n, like=xp.zeros(n, "f4"))
    for seed in range(3):
        payload = codec.encode(values(n, seed), state=state)
        there = codec.encode(xp.asarray(values(n, seed)), state=device_state)
        assert there.to_bytes() == payload.to_bytes()
    np.testing.assert_array_equal(codec.decode(there).get(), codec.decode(payload))
    _fft_cuda.raise_if_damaged()


@pytest.mark.parametrize("settings", [
    *({"transform": it, "block": block} for it in ("fft", "dct") for block in (4096, None)),
    *({"span": 64, "block": block} for block in (4096, 1 << 14)),
], ids=str)  # fmt: skip
def test_cufft_and_fused_paths_add_up(xp, settings):
    codec = FFTCodec(theta=0.95, **settings)
    n = 100_000
    given = values(n)
    state = codec.new_state(n, like=xp.asarray(given))
    payload = codec.encode(xp.asarray(given), state=state)
    back = Payload.from_bytes(payload.to_bytes())  # a sealed payload, to the CPU, too
    kept = codec.state_to_values(batched.memory_on_host(state), n)
    # test_device.py has this bound.
    bound = 2 * (np.log2(n) + 4) * 7 * 2.0**-24 * np.linalg.norm(given)
    assert np.linalg.norm(codec.decode(payload).get() + kept - given) <= bound
    assert np.linalg.norm(codec.decode(back) + kept - given) <= bound


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_of_every_type(torch, dtype):
    codec = FFTCodec(theta=0.9, transform="identity")
    tensor = torch.from_numpy(values(50_000)).to("cuda", getattr(torch, dtype))
    payload = codec.encode(tensor)
    assert payload.to_bytes() == codec.encode(tensor.float().cpu().numpy()).to_bytes()
    out = torch.empty_like(tensor)
    _fft_cuda.decode_mean(codec, [payload, payload], out)
    expected = codec.decode(Payload.from_bytes(payload.to_bytes()))
    assert torch.equal(out.cpu(), torch.from_numpy(expected).to(out.dtype))


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize(("name", "settings"), [
    ("auto", {"ratio": 12, "shape": (100, 90)}),
    ("lowrank", {"shape": (100, 90)}),
    ("powersgd", {"shape": (100, 90)}),
    ("demo", {"shape": (100, 90)}),
    *(
        (name, {})
        for name in ("topk", "dgc", "onebit", "qsgd", "terngrad", "fp16", "bf16", "fp8")
    ),
])  # fmt: skip
def test_codecs_without_kernels(xp, request, kind, name, settings):
    made, host, there = (
        make_codec(name, **settings),
        *(ErrorFeedback(make_codec(name, **settings)) for _ in range(2)),
    )
    for seed in range(3):
        given = values(9000, seed)
        if kind == "torch":
            array = request.getfixturevalue("torch").from_numpy(given).cuda()
        else:
            array = xp.asarray(given)
        payload, expected = there.encode("w", array), host.encode("w", given)
        assert payload.to_bytes() == expected.to_bytes()
        mean = made.decode_mean([payload, payload])
        assert type(mean) is type(array)
        assert mean.device == array.device
        np.testing.assert_array_equal(
            mean.cpu().numpy() if kind == "torch" else mean.get(),
            made.decode_mean([expected, expected]),
        )


def test_torch_in_a_side_stream_is_read_and_written_in_order(torch):
    made, given = make_codec("topk"), torch.from_numpy(values(1 << 16)).cuda()
    expected = made.encode(given.cpu().numpy())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        late = torch.zeros_like(given)
        late += given
        payload = made.encode(late)
        mean = made.decode(payload)
        torch.cuda.current_stream().synchronize()  # CuPy copies on a stream of its own
        assert payload.to_bytes() == expected.to_bytes()
        np.testing.assert_array_equal(mean.cpu().numpy(), made.decode(expected))


def test_work_goes_to_torchs_stream_and_waits_for_nothing(torch):
    codec = FFTCodec(theta=0.9)
    tensor = torch.from_numpy(values(1 << 20)).cuda()
    expected = codec.encode(tensor).to_bytes()  # compiles, too
    codec.encode(torch.zeros_like(tensor))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        late = torch.zeros_like(tensor)
        late += tensor
        payload = codec.encode(late)
        assert not stream.query(), "encode waited for the device, or ran on another stream"
    stream.synchronize()
    assert payload.to_bytes() == expected


def test_encode_and_decode_in_a_cuda_graph(torch, xp):
    codec = FFTCodec(theta=0.95)
    tensors = [torch.zeros(n, device="cuda") for n in (100_000, 4096, 70)]
    states = [codec.new_state(t.numel(), like=t) for t in tensors]
    encoder = _fft_cuda.Encoder(codec, tensors, states)
    outs = [torch.empty_like(t) for t in tensors]
    decoder = _fft_cuda.Decoder(codec, [b[None] for b in encoder.buffers], outs)
    encoder.run()
    decoder.run()  # compiles and makes tables
    torch.cuda.synchronize()
    for state in states:
        for part in state:
            part.fill(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encoder.run()
        decoder.run()
    feedback = ErrorFeedback(codec)
    for step in range(3):
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.from_numpy(values(tensor.numel(), 10 * step + i)))
        graph.replay()
        torch.cuda.synchronize()
        for i, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
            payload = feedback.encode(str(i), tensor)
            assert payload.to_bytes() == encoder.buffers[i].tobytes()
            assert torch.equal(codec.decode(payload), out)
    _fft_cuda.raise_if_damaged()


def test_damaged_payloads_are_reported_and_harm_nothing(xp):
    codec, rng = FFTCodec(theta=0.9), np.random.default_rng(0)
    good = codec.encode(xp.asarray(values(9000)))
    for block in (4096, None):
        codec = FFTCodec(theta=0.9, block=block)
        size = codec.payload_bytes(9000)
        for _ in range(20):
            noise = xp.asarray(rng.integers(0, 256, size, dtype=np.uint8))
            codec.decode_mean([Payload(noise, 1, 9000, codec.settings)])
            with pytest.raises(PayloadError):
                _fft_cuda.raise_if_damaged()
    codec = FFTCodec(theta=0.9)
    codec.decode(good)
    _fft_cuda.raise_if_damaged()


def test_memory_beside_payload_and_state_is_small(xp):
    codec, n = FFTCodec(theta=0.98), 1 << 24
    tensor = xp.asarray(values(n))
    state = codec.new_state(n, like=tensor)
    codec.encode(tensor, state=state)
    pool = xp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    payload = codec.encode(tensor, state=state)
    # The payload, 16 bytes of counters, and what the pool rounds up to.
    assert pool.total_bytes() - before <= payload.nbytes + 4096


def test_more_than_two_to_the_31_elements(xp):
    n = 2**31 + 5000
    free, _ = xp.cuda.runtime.memGetInfo()
    if free < 3.2 * 4 * n:
        pytest.skip(f"needs {3.2 * 4 * n / 2**30:.0f} GiB of device memory")
    codec = FFTCodec(theta=0.99, transform="identity")
    tensor = xp.zeros(n, "f4")
    tail = xp.asarray(values(5000))
    tensor[-5000:] = tail
    payload = codec.encode(tensor)
    out = codec.decode(payload)
    _fft_cuda.raise_if_damaged()
    # The last section's blocks start at 2**31, a multiple of the block.
    assert not bool(out[:-5000].any())
    np.testing.assert_array_equal(out[-5000:].get(), codec.decode(codec.encode(tail)).get())
