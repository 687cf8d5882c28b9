"""A device beside the CPU, `mock`, for tests where there is no GPU.

Its memory is its own, an op on tensors of two devices is an error, and copies on side streams run
as late as their events allow. `device.cpp` has the rest. A process that has it has it for good, so
tests that want it run in processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).parents[2] / "build" / "mock_device"
NAME = "mock"  # of letters alone: torch takes no other for the type of a mesh


def library() -> Path:
    """Compile the device, if it is not there; return the library."""
    root = Path(torch.__file__).parent
    text = SOURCE.read_bytes() + torch.__version__.encode()
    made = BUILD / f"device-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not made.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        include = root / "include"
        abi = int(torch.compiled_with_cxx11_abi())
        subprocess.run(
            ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
             f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE),
             f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(part)],
            check=True,
        )  # fmt: skip
        part.rename(made)
    return made


class Module(ModuleType):
    """What `torch.mock` is; its names are those of `torch.cuda`."""

    Stream, Event = torch.Stream, torch.Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(0)

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def manual_seed_all(self, seed: int) -> None:
        torch.ops.mock_device.seed(seed)

    def manual_seed(self, seed: int) -> None:
        torch.ops.mock_device.seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.ops.mock_device.chance()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.ops.mock_device.set_chance(state)

    def memory_allocated(self, device: Any = None) -> int:
        return torch.ops.mock_device.allocated()

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.ops.mock_device.peak()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.ops.mock_device.reset_peak()

    def memory_reserved(self, device: Any = None) -> int:
        return torch.ops.mock_device.allocated()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def start() -> torch.device:
    """Let this process have the device; return it. Once it has it, nothing more is done."""
    if hasattr(torch, NAME):
        return torch.device(NAME, 0)
    torch.ops.load_library(str(library()))
    torch.ops.mock_device.start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module(NAME))
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)
