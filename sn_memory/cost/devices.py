"""Speeds of devices that were not measured: only ratios count.

`NOMINAL` has the speeds of a present accelerator, for the roofline where nothing is measured.
"""

from __future__ import annotations

from typing import Final

from ..graph.records import Device

NOMINAL_BYTES_PER_S: Final = 2e12
NOMINAL: Final = Device("nominal", 1e14, NOMINAL_BYTES_PER_S, 2.5e10, 2.5e10, 1e-5)
