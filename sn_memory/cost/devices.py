"""Devices by name, with speeds and memory stated by their vendors, for planning without them.

Nothing in this table was measured by this project. FLOP/s are a vendor's dense peak, without
sparsity; `device` applies the shares of it that training steps are expected to reach, which are
assumptions as well (decision 64).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..graph.records import Device

NOMINAL_BYTES_PER_S: Final = 2e12
NOMINAL: Final = Device("nominal", 1e14, NOMINAL_BYTES_PER_S, 2.5e10, 2.5e10, 1e-5)

# Shares of the vendor's peak that a step reaches: matrix products, memory, the host link.
MATRIX_SHARE: Final = 0.6
BYTES_SHARE: Final = 0.8
LINK_SHARE: Final = 0.8
# Seconds from one eager op to the next; depends on the host, not on the device.
LAUNCH_S: Final = 5e-6
TRANSFER_LATENCY_S: Final = 1e-5
_MIB = 1 << 20
# Memory of the driver's context and loaded kernels: torch issues 28394 and 107667 report 300 MB
# and more, depending on the version; half a GiB leaves room for kernels loaded later.
CONTEXT_BYTES: Final = 512 * _MIB


@dataclass(frozen=True)
class NamedDevice:
    """A device as its vendor describes it.

    Parameters
    ----------
    name
        The name to pass, in lower case.
    capability
        NVIDIA's compute capability as major * 10 + minor, which determines the available kernels; 0
        for others.
    total_gib
        As reported by CUDA or HIP, not as sold: the least stated in out-of-memory messages of
        torch's users ("GPU 0 has a total capacity of ..."). `nvidia-smi` reports more: its total
        includes what the driver keeps for itself.
    bytes_per_s
        Of the device's own memory, peak.
    flops_per_s
        Dense peak by dtype of the operands. `fp32` is without tensor cores, `tf32` with. A missing
        dtype has no hardware support.
    link_bytes_per_s
        To the host, one direction, peak.
    workspace_bytes
        What cuBLAS (hipBLAS) keeps for each handle and stream under torch.
    """

    name: str
    capability: int
    total_gib: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return round(self.total_gib * (1 << 30))

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can reserve: everything except the context."""
        return self.total_bytes - CONTEXT_BYTES

    @property
    def kept_bytes(self) -> int:
        """Bytes kept by cuBLAS: one handle for the caller's thread, one for autograd's.

        An H200 kept 64 MiB, 32 each, in steps of ResNet-50 and GPT-2 (torch 2.11).
        """
        return 2 * self.workspace_bytes

    def device(self) -> Device:
        """Return the `Device` of a graph: the expected shares of the peaks."""
        matrix = {dtype: peak * MATRIX_SHARE for dtype, peak in self.flops_per_s.items()}
        link = self.link_bytes_per_s * LINK_SHARE
        return Device(
            self.name,
            matrix["fp32"],
            self.bytes_per_s * BYTES_SHARE,
            link,
            link,
            TRANSFER_LATENCY_S,
            launch_s=LAUNCH_S,
            flops_per_s_by_dtype=tuple(matrix.items()),
        )


# Sixteen lanes of PCIe 3, 4 and 5.
_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9
# torch/aten CublasHandlePool.cpp: ":4096:2:16:8" KiB; 32 MiB on Hopper and, since pull request
# 175344 (February 2026), on Blackwell; 128 MiB on gfx942. There hipBLASLt, which torch prefers, has
# 76 MiB of its own, not counted here; cuBLASLt shares what cuBLAS has.
_CUBLAS, _CUBLAS_HOPPER, _HIPBLAS = (2 * 4096 + 8 * 16) << 10, 32 * _MIB, 128 * _MIB


def _peaks(fp32: float, tf32: float = 0, half: float = 0, fp8: float = 0) -> dict[str, float]:
    """Return peaks by dtype, given in 10^12 operations per second; `half` for fp16 and bf16."""
    peaks = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half, "fp8": fp8}
    return {dtype: peak * 1e12 for dtype, peak in peaks.items() if peak}


# The datasheets of H100, H200, B200 and L4 state figures "with sparsity": half of them is dense.
_AMPERE, _HOPPER = _peaks(19.5, 156, 312), _peaks(67, 494.5, 989.5, 1979)
DEVICES: Final = {device.name: device for device in (
    # V100 datasheet (January 2020), SXM2, which has no bf16.
    NamedDevice("v100", 70, 31.73, 900e9, {"fp32": 15.7e12, "fp16": 125e12}, _PCIE_3, _CUBLAS),
    # A100 datasheets (40 GB, 2020; June 2021), SXM4.
    NamedDevice("a100-40", 80, 39.38, 1555e9, _AMPERE, _PCIE_4, _CUBLAS),
    NamedDevice("a100-80", 80, 79.14, 2039e9, _AMPERE, _PCIE_4, _CUBLAS),
    # H100 datasheet, SXM5; H200 datasheet, SXM.
    NamedDevice("h100", 90, 79.10, 3.35e12, _HOPPER, _PCIE_5, _CUBLAS_HOPPER),
    NamedDevice("h200", 90, 139.72, 4.8e12, _HOPPER, _PCIE_5, _CUBLAS_HOPPER),
    # Blackwell datasheet, HGX B200, each GPU (the page of DGX B200 says 8 TB/s); arithmetic an
    # eighth of the board, HGX page.
    NamedDevice("b200", 100, 178.35, 7.7e12, _peaks(75, 1125, 2250, 4500), _PCIE_5, _CUBLAS_HOPPER),
    # L4 datasheet.
    NamedDevice("l4", 89, 21.95, 300e9, _peaks(30.3, 60, 121, 242.5), _PCIE_4, _CUBLAS),
    # Ada GPU Architecture whitepaper, appendix A, products summed in fp32.
    NamedDevice("rtx4090", 89, 23.49, 1008e9, _peaks(82.6, 82.6, 165.2, 330.3), _PCIE_4, _CUBLAS),
    # AMD Instinct MI300X datasheet, Peak Performance.
    NamedDevice("mi300x", 0, 191.69, 5.3e12, _peaks(163.4, 653.7, 1307.4, 2614.9), _PCIE_5,
                _HIPBLAS),
)}  # fmt: skip
"""Name -> device."""

_OTHER_NAMES: Final = {
    "a100": "a100-80",
    "a100-80gb": "a100-80",
    "a100-40gb": "a100-40",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
    "h100-sxm": "h100",
}


def named(name: str) -> NamedDevice:
    """Return a device of the table by its name, ignoring case, spaces and underscores.

    Raises ValueError with the known names, the most similar first, for an unknown one.
    """
    asked = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-")
    device = DEVICES.get(_OTHER_NAMES.get(asked, asked)) or DEVICES.get(asked.replace("-", ""))
    if device is not None:
        return device
    near = difflib.get_close_matches(asked, [*DEVICES, *_OTHER_NAMES], n=1)
    hint = f" Did you mean {_OTHER_NAMES.get(near[0], near[0])!r}?" if near else ""
    if asked.partition(":")[0] in ("cuda", "gpu", "hip", "xpu", "mps"):
        hint = " A present GPU is measured: leave device out, with the model on it."
    raise ValueError(
        f"got device {name!r}, expected one of {', '.join(DEVICES)}, 'cpu', or an "
        f"sn_memory.Device.{hint}"
    )


def speeds(device: Device | str | None) -> Device | None:
    """Return the requested speeds: from the table, the user's own, or None to measure.

    Raises ValueError for a name that is not in the table, TypeError for another type.
    """
    if device is None or isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"got a {type(device).__name__} as device, expected a name of the table "
            f"({', '.join(DEVICES)}), 'cpu', or an sn_memory.Device."
        )
    return None if is_here(device) else named(device).device()


def is_here(name: str) -> bool:
    """Whether a name means the processor that runs this, which is measured."""
    return name.strip().lower() == "cpu"
