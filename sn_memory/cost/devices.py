"""Devices by name: speeds and bytes as their vendors state them, for those that are not here.

Nothing in this table was measured by this project. Arithmetic is dense, without sparsity, and a
vendor's peak; `device` takes the shares of it that steps of training are expected to reach, which
are assumptions as well (decision 64).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from ..graph.records import Device

NOMINAL_BYTES_PER_S: Final = 2e12
NOMINAL: Final = Device("nominal", 1e14, NOMINAL_BYTES_PER_S, 2.5e10, 2.5e10, 1e-5)

# What a step reaches of the vendor's peak: matrix products, memory, the host link.
MATRIX_SHARE: Final = 0.6
BYTES_SHARE: Final = 0.8
LINK_SHARE: Final = 0.8
# From one eager op to the next; a host's, not a device's.
LAUNCH_S: Final = 5e-6
TRANSFER_LATENCY_S: Final = 1e-5
_MIB, _GIB = 1 << 20, 1 << 30
# What the driver's context and loaded kernels take: torch issues 28394 and 107667 say 300 MB and
# more, by version; half a GiB leaves room for kernels loaded later.
CONTEXT_BYTES: Final = 512 * _MIB


@dataclass(frozen=True)
class NamedDevice:
    """A device as its vendor describes it.

    Parameters
    ----------
    name, title
        The name to pass, in lower case; what its vendor calls it.
    architecture
        `sm_80` and the like, or `gfx942`: decides which kernels there are.
    total_bytes
        As CUDA or HIP reports them, not as they are sold. `nvidia-smi` names more: what the
        driver keeps for itself is in its total.
    bytes_per_s
        Of the device's own memory, peak.
    flops_per_s
        Peak by type of the operands, dense. `fp32` is without tensor cores, `tf32` with. A type
        that is missing has no units of its own there.
    link_bytes_per_s
        To the host, one direction, peak.
    workspace_bytes
        What cuBLAS (hipBLAS) keeps for each handle and stream under torch.
    source
        Where these figures stand.
    """

    name: str
    title: str
    architecture: str
    total_bytes: int
    bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]
    link: str
    link_bytes_per_s: float
    workspace_bytes: int
    source: str

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can reserve: all but the context."""
        return self.total_bytes - CONTEXT_BYTES

    @property
    def kept_bytes(self) -> int:
        """What cuBLAS keeps in training: a handle for the caller's thread, one for autograd's.

        An H200 kept 64 MiB, 32 each, in steps of ResNet-50 and GPT-2 (torch 2.11).
        """
        return 2 * self.workspace_bytes

    @property
    def capability(self) -> int:
        """Compute capability of NVIDIA's as major * 10 + minor; 0 for others."""
        return int(self.architecture[3:]) if self.architecture.startswith("sm_") else 0

    def device(self) -> Device:
        """Return it as a graph has it: what is expected of peaks."""
        peaks = dict(self.flops_per_s)
        matrix = {dtype: peaks[dtype] * MATRIX_SHARE for dtype in peaks}
        link = self.link_bytes_per_s * LINK_SHARE
        return Device(
            self.name,
            peaks["fp32"] * MATRIX_SHARE,
            self.bytes_per_s * BYTES_SHARE,
            link,
            link,
            TRANSFER_LATENCY_S,
            launch_s=LAUNCH_S,
            flops_per_s_by_dtype=tuple(matrix.items()),
        )


_PCIE_3, _PCIE_4, _PCIE_5 = ("PCIe 3 x16", 16e9), ("PCIe 4 x16", 32e9), ("PCIe 5 x16", 64e9)
# torch/aten CublasHandlePool.cpp: ":4096:2:16:8" KiB; 32 MiB on Hopper and, since pull request
# 175344 (February 2026), on Blackwell; 128 MiB on gfx942. There hipBLASLt, which torch prefers, has
# 76 MiB of its own, not counted here; cuBLASLt shares what cuBLAS has.
_CUBLAS, _CUBLAS_HOPPER, _HIPBLAS = (2 * 4096 + 8 * 16) << 10, 32 * _MIB, 128 * _MIB
# Of H100, H200, B200 and L4 the datasheets state figures "with sparsity": half of them is dense.
_VOLTA = (("fp32", 15.7e12), ("fp16", 125e12))
_AMPERE = (("fp32", 19.5e12), ("tf32", 156e12), ("fp16", 312e12), ("bf16", 312e12))
_HOPPER = (
    ("fp32", 67e12), ("tf32", 494.5e12), ("fp16", 989.5e12), ("bf16", 989.5e12), ("fp8", 1979e12)
)  # fmt: skip
_BLACKWELL = (
    ("fp32", 75e12), ("tf32", 1.125e15), ("fp16", 2.25e15), ("bf16", 2.25e15), ("fp8", 4.5e15)
)  # fmt: skip
_L4 = (("fp32", 30.3e12), ("tf32", 60e12), ("fp16", 121e12), ("bf16", 121e12), ("fp8", 242.5e12))
_ADA = (
    ("fp32", 82.6e12), ("tf32", 82.6e12), ("fp16", 165.2e12), ("bf16", 165.2e12), ("fp8", 330.3e12)
)  # fmt: skip
_MI300X = (
    ("fp32", 163.4e12), ("tf32", 653.7e12), ("fp16", 1307.4e12), ("bf16", 1307.4e12),
    ("fp8", 2614.9e12),
)  # fmt: skip


# Total bytes: the least that reports of users name ("GPU 0 has a total capacity of ...").
def _device(
    name: str, title: str, architecture: str, total_gib: float, bytes_per_s: float,
    flops_per_s: tuple[tuple[str, float], ...], link: tuple[str, float], workspace_bytes: int,
    source: str,
) -> NamedDevice:  # fmt: skip
    total_bytes = round(total_gib * _GIB)
    source += "; total bytes as torch's out-of-memory messages report them"
    return NamedDevice(
        name, title, architecture, total_bytes, bytes_per_s, flops_per_s, *link, workspace_bytes,
        source,
    )  # fmt: skip


DEVICES: Final = {device.name: device for device in (
    _device("v100", "NVIDIA V100 SXM2 32 GB", "sm_70", 31.73, 900e9, _VOLTA, _PCIE_3, _CUBLAS,
            "NVIDIA V100 datasheet (January 2020), Specifications, SXM2"),
    _device("a100-40", "NVIDIA A100 SXM4 40 GB", "sm_80", 39.38, 1555e9, _AMPERE, _PCIE_4, _CUBLAS,
            "NVIDIA A100 datasheet (40 GB, 2020), Specifications, SXM"),
    _device("a100-80", "NVIDIA A100 SXM4 80 GB", "sm_80", 79.14, 2039e9, _AMPERE, _PCIE_4, _CUBLAS,
            "NVIDIA A100 datasheet (June 2021), Specifications, 80GB SXM"),
    _device("h100", "NVIDIA H100 SXM5 80 GB", "sm_90", 79.10, 3.35e12, _HOPPER, _PCIE_5,
            _CUBLAS_HOPPER, "NVIDIA H100 datasheet, Product Specifications, H100 SXM"),
    _device("h200", "NVIDIA H200 SXM 141 GB", "sm_90", 139.72, 4.8e12, _HOPPER, _PCIE_5,
            _CUBLAS_HOPPER, "NVIDIA H200 datasheet, Specifications, H200 SXM"),
    _device("b200", "NVIDIA B200 SXM 180 GB", "sm_100", 178.35, 7.7e12, _BLACKWELL, _PCIE_5,
            _CUBLAS_HOPPER,
            "NVIDIA Blackwell datasheet, HGX B200, each GPU (the page of DGX B200 says 8 TB/s); "
            "arithmetic an eighth of the board, HGX page"),
    _device("l4", "NVIDIA L4 24 GB", "sm_89", 21.95, 300e9, _L4, _PCIE_4, _CUBLAS,
            "NVIDIA L4 datasheet, Specifications"),
    _device("rtx4090", "NVIDIA GeForce RTX 4090 24 GB", "sm_89", 23.49, 1008e9, _ADA, _PCIE_4,
            _CUBLAS,
            "NVIDIA Ada GPU Architecture whitepaper, appendix A, products summed in fp32"),
    _device("mi300x", "AMD Instinct MI300X 192 GB", "gfx942", 191.69, 5.3e12, _MI300X, _PCIE_5,
            _HIPBLAS, "AMD Instinct MI300X datasheet, Peak Performance"),
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
    """Return a device of the table by its name, whatever its case, spaces or underscores.

    Raises ValueError that lists the names, the nearest first, for one that is not there.
    """
    asked = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-")
    device = DEVICES.get(_OTHER_NAMES.get(asked, asked)) or DEVICES.get(asked.replace("-", ""))
    if device is not None:
        return device
    near = difflib.get_close_matches(asked, [*DEVICES, *_OTHER_NAMES], n=1)
    hint = f" Did you mean {_OTHER_NAMES.get(near[0], near[0])!r}?" if near else ""
    if asked.partition(":")[0] in ("cuda", "gpu", "hip", "xpu", "mps"):
        hint = " A GPU that is here is measured: leave device out, with the model on it."
    raise ValueError(
        f"got device {name!r}, expected one of {', '.join(DEVICES)}, 'cpu', or an "
        f"sn_memory.Device.{hint}"
    )


def speeds(device: Device | str | None) -> Device | None:
    """Return the speeds a user asked for: those of a table, their own, or None to measure.

    Raises ValueError for a name that is not in the table, TypeError for what is neither.
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
    """Whether a name stands for the processor that runs this: it is measured."""
    return name.strip().lower() == "cpu"
