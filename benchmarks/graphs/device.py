"""Devices with stated figures: how long an op takes where nothing was measured.

The speeds are what large kernels and pinned copies commonly attain, 60 % of the data sheet's
arithmetic and 80 % of its bandwidth; they are assumptions, the same for every planner compared.
"""

from __future__ import annotations

from sn_memory import Device

# V100 SXM2 data sheet: 15.7 Tflop/s in float32, 900 GB/s, PCIe 3.0 x16 (16 GB/s each way).
V100_LIKE = Device("V100-like", 0.6 * 15.7e12, 0.8 * 900e9, 12e9, 12e9, transfer_latency_s=1e-5)
# K40 data sheet: 4.29 Tflop/s in float32, 288 GB/s; the card of the SuperNeurons paper.
K40_LIKE = Device("K40-like", 0.6 * 4.29e12, 0.8 * 288e9, 10e9, 10e9, transfer_latency_s=1e-5)
