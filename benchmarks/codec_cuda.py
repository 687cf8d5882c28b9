"""The codec on a GPU, compared with its limits and rivals; `benchmarks/codec.py --device cuda`.

Times are medians of CUDA-event measurements after a warm-up, of a CUDA graph where the path allows
one (`*_eager_s` has the calls from Python); every repetition times all contenders
in turn. Limits: `copy` is the device's own copy of the vector, bytes read plus bytes written.
Encoding must move 12 bytes per float32 element (gradient in, memory in and out) and the payload;
decoding 4 bytes and the payloads. `percent of
bound` is the time that takes at the copy's bandwidth over the time taken.

Rivals, written plainly in torch: top-k over the whole vector with error feedback, and a chunked
DCT with top-k per chunk and a momentum-like residual, in the way of DeMo.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from machine import commit
from timing import interleave

from sn_compress import FFTCodec
from sn_compress.codecs import _fft_cuda
from sn_compress.text_table import text_table

SETTINGS: list[tuple[str, dict[str, Any], int]] = [
    # name, settings, ranks decoded
    ("fft theta 0.98", {"theta": 0.98}, 8),
    ("fft theta 0.98, spans of 64", {"theta": 0.98, "span": 64}, 8),
    ("fft theta 0.98, one rank", {"theta": 0.98}, 1),
    ("fft theta 0.9", {"theta": 0.9}, 8),
    ("dct theta 0.98", {"theta": 0.98, "transform": "dct"}, 8),
    ("hadamard theta 0.98", {"theta": 0.98, "transform": "hadamard"}, 8),
    ("identity theta 0.98", {"theta": 0.98, "transform": "identity"}, 8),
    ("identity theta 0.98 sign", {"theta": 0.98, "transform": "identity", "values": "sign"}, 8),
    ("fft theta 0.9 whole vector", {"theta": 0.9, "block": None}, 2),
]  # fmt: skip


def topk(torch: Any, tensor: Any, keep: float) -> Callable[[], object]:
    """Top-k over the vector with error feedback."""
    memory, k = torch.zeros_like(tensor), max(1, int(keep * tensor.numel()))

    def step() -> object:
        memory.add_(tensor)
        index = torch.topk(memory.abs(), k, sorted=False).indices
        sent = memory[index]
        memory[index] = 0
        return sent, index

    return step


def chunked_dct(torch: Any, tensor: Any, keep: float, chunk: int = 64) -> Callable[[], object]:
    """DCT of chunks as a matrix product, top-k per chunk, the rest stays in the residual."""
    place = torch.arange(chunk, device=tensor.device, dtype=torch.float64)
    basis = torch.cos(torch.pi / chunk * (place[None] + 0.5) * place[:, None])
    basis *= (2 / chunk) ** 0.5
    basis[0] *= 0.5**0.5
    basis = basis.to(tensor.dtype)
    rows = tensor[: tensor.numel() // chunk * chunk].view(-1, chunk)
    residual, k = torch.zeros_like(rows), max(1, round(keep * chunk))

    def step() -> object:
        residual.add_(rows)
        coefs = residual @ basis.T
        index = torch.topk(coefs.abs(), k, dim=1, sorted=False).indices
        sent = torch.gather(coefs, 1, index)
        kept = torch.zeros_like(coefs).scatter_(1, index, sent)
        residual.sub_(kept @ basis)
        return sent, index

    return step


def measure(n: int, repeat: int, values: np.ndarray) -> list[dict[str, Any]]:
    """Rows for all settings and, in each, the rivals of the same run."""
    import cupy
    import torch

    tensor = torch.from_numpy(values).cuda()
    rows = []
    for name, settings, ranks in SETTINGS:
        codec = FFTCodec(**settings)
        state = _fft_cuda.new_state(codec, tensor)
        encoder = _fft_cuda.Encoder(codec, [tensor], [state])
        payload = encoder.run()[0]
        # torch and CuPy both start out on the default stream.
        gathered = cupy.stack([payload.buffer] * ranks)
        out, target = torch.empty_like(tensor), torch.empty_like(tensor)
        decoder = _fft_cuda.Decoder(codec, [gathered], [out])
        keep = 1 - codec.theta
        contenders: dict[str, Callable[[], object]] = {
            "copy": lambda target=target: target.copy_(tensor),
            "encode": graphed(torch, encoder.run) if codec.block else encoder.run,
            "decode": graphed(torch, decoder.run) if codec.block else decoder.run,
            "encode_eager": encoder.run,
            "decode_eager": decoder.run,
            "topk": topk(torch, tensor, keep),
            "chunked_dct": chunked_dct(torch, tensor, keep),
        }
        plain = FFTCodec(**settings)
        sent = plain.decode(plain.encode(tensor))
        lost = (tensor - sent).double()
        nmse = float(lost.square().sum() / tensor.double().square().sum())
        steps = {key: partial(seconds_on_device, torch, run) for key, run in contenders.items()}
        seconds = interleave(steps, repeat, settle=2)
        _fft_cuda.raise_if_damaged()
        rows.append(
            row(name, n, payload.nbytes, ranks, nmse, seconds)
            | {"repeat": repeat, "commit": commit(), "machine": torch.cuda.get_device_name()}
        )
        del encoder, decoder, contenders, state, gathered, out, target, sent, lost
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return rows


def graphed(torch: Any, run: Callable[[], object]) -> Callable[[], object]:
    """The launches of `run` as a CUDA graph: what the device needs, without Python's share."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds_on_device(torch: Any, run: Callable[[], object]) -> float:
    """Seconds by events on the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    seconds: float = start.elapsed_time(stop) / 1000
    return seconds


def row(
    name: str,
    n: int,
    payload_bytes: int,
    ranks: int,
    nmse: float,
    seconds: dict[str, list[float]],
) -> dict[str, Any]:
    """One flat row; every limit is taken from the copy of the same run."""
    took = {key: statistics.median(times) for key, times in seconds.items()}
    bandwidth = 8 * n / took["copy"]
    encode_bound = 12 * n / bandwidth
    decode_bound = (4 * n + ranks * payload_bytes) / bandwidth
    return {
        "method": name,
        "device": "cuda",
        "backend": "cupy",
        "ranks": ranks,
        "n": n,
        "payload_bytes": payload_bytes,
        "ratio": 4 * n / payload_bytes,
        "nmse": nmse,
        "encode_s": took["encode"],
        "decode_s": took["decode"],
        "encode_eager_s": took["encode_eager"],
        "decode_eager_s": took["decode_eager"],
        "copy_s": took["copy"],
        "encode_gb_s": 4 * n / took["encode"] / 1e9,
        "decode_gb_s": 4 * n / took["decode"] / 1e9,
        "copy_gb_s": bandwidth / 1e9,
        "encode_percent_of_bound": 100 * encode_bound / took["encode"],
        "decode_percent_of_bound": 100 * decode_bound / took["decode"],
        "encode_times_topk": took["topk"] / took["encode"],
        "encode_times_chunked_dct": took["chunked_dct"] / took["encode"],
        "topk_s": took["topk"],
        "chunked_dct_s": took["chunked_dct"],
    }


_SHOWN = (
    "method", "ranks", "ratio", "nmse", "encode_gb_s", "decode_gb_s", "encode_percent_of_bound",
    "decode_percent_of_bound", "encode_times_topk", "encode_times_chunked_dct",
)  # fmt: skip
_HEAD = (
    "method", "ranks", "ratio", "NMSE", "encode", "decode", "encode", "decode", "topk", "dct+topk",
)  # fmt: skip
_UNITS = ("", "", "x", "", "GB/s", "GB/s", "% bound", "% bound", "x slower", "x slower")
_FORMATS = ("", "", ".1f", ".4f", ".0f", ".0f", ".1f", ".1f", ".1f", ".1f")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
    cells = [[r[name] for name in _SHOWN] for r in rows]
    return text_table(_HEAD, [_UNITS, *cells], _FORMATS)
