"""Algorithms of a convolution: scratch bytes and seconds, computed, not measured.

Libraries offer several algorithms and the fast ones want scratch memory. Their true times belong
to one library on one card; here each is priced by the arithmetic and the bytes it must do, at the
speeds of the stated device:

- implicit: the product over windows built in registers; no scratch, 70 % of the attained speed.
- precomputed: the same with a table of offsets, at full attained speed.
- winograd F(4x4, 3x3), for 3x3 at stride 1 (Lavin and Gray, 2016): a quarter of the products;
  input and output tiles are transformed through memory, 36 numbers for 16.
- fft, for kernels of 5 and more at stride 1: spectra of input, weight and output in memory.
"""

from __future__ import annotations

import math

from sn_memory import Device, Workspace


def ways(
    device: Device,
    shape: tuple[int, ...],
    out: tuple[int, ...],
    kernel: tuple[int, int],
    stride: int,
    groups: int,
    flops: float,
    traffic: float,
    passes: int = 1,
) -> tuple[Workspace, ...]:
    """Return the algorithms for a convolution [n, c, h, w] -> [n, k, p, q], default first."""
    assert device.flops_per_s is not None
    assert device.bytes_per_s is not None
    speed, bus = device.flops_per_s, device.bytes_per_s
    n, c, h, w = shape
    k, p, q = out[1:]

    def seconds(work: float, moved: float) -> float:
        return passes * max(work / speed, moved / bus)

    workspaces = [
        Workspace(0, seconds(flops / 0.7, traffic), "implicit"),
        Workspace(4 * p * q * math.prod(kernel), seconds(flops, traffic), "precomputed"),
    ]
    if kernel == (3, 3) and stride == 1 and groups == 1:
        scratch = 4 * 36 * (n * (c + k) * math.ceil(p / 4) * math.ceil(q / 4) + c * k)
        # Transformed tiles are written once and read once.
        workspaces.append(Workspace(scratch, seconds(flops / 4, traffic + 2 * scratch), "winograd"))
    if min(kernel) >= 5 and stride == 1 and groups == 1:
        points = (h + kernel[0]) * (w + kernel[1])
        spectra = n * c + n * k + c * k
        scratch = 4 * points * spectra
        # A real transform costs 2.5 p log2 p; a product of spectra 8 flops at p / 2 points.
        work = 2.5 * points * math.log2(points) * spectra + 4 * points * n * c * k
        workspaces.append(Workspace(scratch, seconds(work, traffic + 2 * scratch), "fft"))
    return tuple(workspaces)
