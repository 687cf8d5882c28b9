"""Fake tensors on a GPU, in a build of torch that knows of none.

Autograd asks the guard of a tensor's device for its stream, and a build for the CPU has no guard
for CUDA: torch 2.13 then ends the process. torch itself puts a guard that does nothing into that
place where CUDA is built in and no GPU is there (`_ensureCUDADeviceGuardSet`). Where CUDA is not
built in, the place is filled here with the guard of the meta device, which does nothing either.
The table is the exported `c10::impl::device_guard_impl_registry`, one pointer a type of device.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from ..errors import TraceError

_CUDA, _META = 1, 14  # c10::DeviceType, whose numbers are kept for files of old
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_LIBRARY = "libc10.so"


@cache
def fake_gpus() -> None:
    """Let fake tensors be on `cuda:0` in this process; raises TraceError where that cannot be."""
    if torch.cuda.is_available():
        return
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if torch.backends.cuda.is_built() and ensure is not None:
        ensure()
        return
    path = Path(torch.__file__).parent / "lib" / _LIBRARY
    try:
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(path)), _REGISTRY)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"a step on a GPU that is not here cannot be traced with this build of torch "
            f"({torch.__version__}): its {_LIBRARY} has no table of device guards ({error}). Use a "
            "build with CUDA, or leave device out."
        ) from error
    if not guards[_CUDA]:
        if not guards[_META]:
            raise TraceError(
                f"a step on a GPU that is not here cannot be traced with this build of torch "
                f"({torch.__version__}): its meta device has no guard. Use a build with CUDA, or "
                "leave device out."
            )
        guards[_CUDA] = guards[_META]
