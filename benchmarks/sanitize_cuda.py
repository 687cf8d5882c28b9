"""Every CUDA kernel on small inputs, for compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/sanitize_cuda.py
compute-sanitizer --tool racecheck python benchmarks/sanitize_cuda.py
"""

from __future__ import annotations

from contextlib import suppress

import cupy
import numpy as np

from sn_compress import FFTCodec
from sn_compress.codecs import _fft_cuda
from sn_compress.codecs.base import Payload
from sn_compress.errors import PayloadError

SETTINGS = [
    {},
    {"span": 64},
    {"values": "2bit"},
    {"values": "sign", "positions": "bitmap"},
    {"values": "fp16", "block": 8192, "theta": 0.0},
    {"transform": "dct", "block": 64},
    {"transform": "hadamard"},
    {"transform": "identity", "block": 512},
    {"block": None, "positions": "bitmap"},
    {"transform": "identity", "block": None},
]


def main() -> None:
    """Encode with memory, decode two ranks and a damaged one, for each kind of kernel."""
    rng = np.random.default_rng(0)
    for settings in SETTINGS:
        codec = FFTCodec(**{"theta": 0.9, **settings})
        for n in (70, 20_001):
            values = rng.laplace(size=n).astype(np.float32)
            values[: n // 2] = np.round(values[: n // 2])  # ties
            tensor = cupy.asarray(values)
            state = codec.new_state(n, like=tensor)
            payloads = [codec.encode(tensor, state=state) for _ in range(2)]
            codec.decode_mean(payloads)
            _fft_cuda.raise_if_damaged()
            noise = cupy.asarray(rng.integers(0, 256, payloads[0].nbytes, dtype=np.uint8))
            codec.decode_mean([Payload(noise, codec.codec_id, n, codec.settings)])
            with suppress(PayloadError):  # it is kept until asked for, and would be the next case's
                _fft_cuda.raise_if_damaged()
            tensor[n // 2] = cupy.nan
            codec.decode(codec.encode(tensor, state=state))
    cupy.cuda.Device().synchronize()
    print(f"{2 * len(SETTINGS)} cases done")


if __name__ == "__main__":
    main()
