"""The FFT codec on the device, compared with limits and rivals: benchmarks/codec.py, with targets.

With CuPy the fused kernels, of 2**27 elements, and calls of the codec from Python. In any case what
a user of torch alone has: the array code. On the CPU the rows of the host's codec, of few elements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import codec
import torch

from gpu.section import CannotError, Section, main
from sn_compress import FFTCodec
from sn_compress.codecs import batched
from sn_compress.errors import MissingExtra

PLAIN = (
    {"theta": 0.98},
    {"theta": 0.98, "span": 64},
    {"theta": 0.9},
    {"theta": 0.98, "transform": "dct"},
)


def fused(section: Section, n: int) -> None:
    """Kernels through CuPy, in CUDA graphs."""
    if find_spec("cupy") is None:
        raise CannotError("CuPy is not installed")
    import codec_cuda

    rows = codec_cuda.measure(n, 9, codec.gradient(n))
    for row in rows:
        section.row(kind="fused", **row)
    first = rows[0]
    section.target("fused encode, % of the 12-byte bound", first["encode_percent_of_bound"],
                   least=50)  # fmt: skip
    section.target("fused decode, % of its bound", first["decode_percent_of_bound"], least=40)


def seconds(run: Callable[[], object], device: str, repeat: int) -> float:
    """The median, to the end on the device; two rounds warm up."""
    taken = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def whole_calls(section: Section, n: int) -> None:
    """What `encode` and `decode` of a tensor take from Python, beside a copy of it."""
    tensor = torch.from_numpy(codec.gradient(n)).to(section.device)
    target, repeat = torch.empty_like(tensor), 2 if section.dry else 9
    copy_s = seconds(lambda: target.copy_(tensor), section.device, repeat)
    for settings in PLAIN:
        instance = FFTCodec(**settings)  # type: ignore[arg-type]
        try:
            payload = instance.encode(tensor)
        except MissingExtra as missing:
            raise CannotError(str(missing)) from missing
        encode_s = seconds(
            lambda instance=instance: instance.encode(tensor), section.device, repeat
        )
        decode_s = seconds(
            lambda instance=instance, payload=payload: instance.decode(payload),
            section.device,
            repeat,
        )
        section.row(
            kind="calls", settings=settings, n=n, ratio=4 * n / payload.nbytes,
            encode_gb_s=4e-9 * n / encode_s, decode_gb_s=4e-9 * n / decode_s,
            copy_gb_s=8e-9 * n / copy_s,
        )  # fmt: skip


def over_arrays(section: Section, n: int) -> None:
    """The array code over torch, which needs no CuPy: one tensor, with error memory."""
    tensor = torch.from_numpy(codec.gradient(n)).to(section.device)
    repeat = 2 if section.dry else 9
    for settings in PLAIN:
        instance = FFTCodec(**settings)  # type: ignore[arg-type]
        memory = [batched.new_memory(instance, n, tensor)]
        words = batched.encode(instance, [tensor], memory).words[None]
        encode_s = seconds(
            lambda instance=instance, memory=memory: batched.encode(instance, [tensor], memory),
            section.device, repeat,
        )  # fmt: skip
        decode_s = seconds(
            lambda instance=instance, words=words: batched.decode(instance, words, [n]),
            section.device,
            repeat,
        )
        section.row(
            kind="array code", settings=settings, n=n, encode_gb_s=4e-9 * n / encode_s,
            decode_gb_s=4e-9 * n / decode_s,
        )  # fmt: skip


def on_host(section: Section) -> None:
    """The host's codec, few elements: that the bench runs."""
    args = argparse.Namespace(threads=1, repeat=1, no_torch=False)
    for name, settings in codec.SETTINGS[:2]:
        section.row(kind="host", **codec.measure(name, settings, codec.gradient(100_000), args))


def measure(section: Section) -> None:
    """Fused kernels first, as the targets are theirs."""
    if section.dry:
        section.part("the host's codec", lambda: on_host(section))
    section.part(
        "fused kernels", lambda: fused(section, 1 << (14 if section.dry else 27)), least_s=5
    )
    n = 1 << (16 if section.dry else 26)
    section.part("calls from Python", lambda: whole_calls(section, n))
    section.part("array code over torch", lambda: over_arrays(section, n // 4))


if __name__ == "__main__":
    main("codec_seconds", measure)
