"""Every kernel once under the address and undefined-behaviour sanitizers; a process of its own.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
    PYTHONPATH=. python tests/cuda/sanitized.py

NumPy's arrays come from malloc, so reading or writing one element beyond an input, a record or a
memory ends the process, as do shared memory, alignment, shifts and overflow.
"""

from __future__ import annotations

import numpy as np
import oracle
from fused_case import decode, encode, samples
from host import SANITIZE, Host, address

from sn_compress.ops import launch


def fused() -> None:
    device = Host("mixed", SANITIZE)
    rng = np.random.default_rng(0)
    for block, transform, span in (
        (32, "fft", None), (4096, "fft", None), (4096, "fft", 64), (64, "fft", 32),
        (64, "dct", None), (64, "hadamard", None), (32, "identity", None),
        (128, "spectrum", None),
    ):  # fmt: skip
        for values, positions in (("range", "elias-fano"), ("fp16", "bitmap"), ("sign", "all"),
                                  ("2bit", "elias-fano")):  # fmt: skip
            for theta in (0.0, 0.9):
                if theta and positions == "all":
                    continue
                form = oracle.make_format(
                    block, transform, theta, values, positions=positions, span=span
                )
                for case in samples(form).values():
                    size = case.size if transform == "spectrum" else 4 * block - 5
                    given = case.reshape(-1)[:size]
                    memory = np.zeros((4, form.layout.bins * form.layout.parts), np.float32)
                    done = encode(device, form, given, memory)
                    decode(device, form, done.words[None], given.size)
                for _ in range(5):
                    garbage = rng.integers(0, 2**32, (2, 4, form.layout.words), dtype=np.uint32)
                    decode(device, form, garbage, given.size, "bfloat16")


def seals() -> None:
    device, buffer = Host("mixed", SANITIZE), np.zeros((3, 20), np.uint32)
    totals, flags = np.zeros(3, np.uint64), np.zeros(1, np.uint32)
    sheet = launch.Sheet(address(buffer), address(totals), 20, 18, b"x" * 24, address(flags), 20)
    launch.open_payloads(device, [sheet])
    launch.seal_payloads(device, [sheet])
    launch.open_checks(device, [sheet], 3)
    launch.check_payloads(device, [sheet], 3)


if __name__ == "__main__":
    fused()
    seals()
    print("no complaint")
