"""What glibc's malloc keeps of what tensors gave back, on a host whose limit counts it.

By default the size from which malloc takes memory from the kernel alone, and gives it back when it
is freed, grows with what is freed, to 32 MiB. Smaller tensors then lie in the heap, whose holes
stay with the process: 90 to 180 MiB beside a step of 150 to 270 (docs/torch_memory.md, "What a
process takes"). With the size fixed each tensor from 128 KiB on is given back as it is freed, and
its pages are made anew next time, which costs a step a fifth of its seconds to as much again.

mallopt is for the whole process, and glibc has no way back to a size that grows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from typing import Final

from .errors import PlanWarning
from .host import smallest_limit
from .sizes import show_bytes

SETTING: Final = "SN_MEMORY_MALLOC"
_WAYS: Final = ("auto", "on", "off")
# <malloc.h>: from which size on the kernel is asked, and how much of the heap's end is kept. The
# sizes are those glibc begins with.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _BYTES = -1, -3, 128 << 10
# A process that may have this many times the peak of a step has room for what malloc keeps: with it
# a step took up to 2.7 times its peak. Not more: a step that malloc gives back for is slower.
_NEAR: Final = 3
# The limit that was near: once in a process is enough.
_WARNED: list[str] = []


def return_freed(peak_bytes: int = 0) -> bool:
    """Let malloc return what is freed, where the limit of this process is near; whether it does.

    peak_bytes : of a planned step; without one, only where the setting says `on`

    Raises
    ------
    ValueError
        For another value of SN_MEMORY_MALLOC than `auto`, `on`, `off`.
    """
    way = os.environ.get(SETTING, "auto")
    if way not in _WAYS:
        raise ValueError(f"got {SETTING}={way!r}, expected one of {', '.join(_WAYS)}.")
    if way == "off" or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    # Another C library has no such function or no such sizes; who set the size chose it.
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    if way == "auto":
        limit = smallest_limit()
        if limit is None or limit.free_bytes >= _NEAR * peak_bytes:
            return False
        if not _WARNED:
            _WARNED.append(limit.name)
            warnings.warn(
                f"{limit.name} leaves {show_bytes(limit.free_bytes)}, less than {_NEAR} times what "
                f"a planned step holds ({show_bytes(peak_bytes)}): from now on malloc returns what "
                "tensors free to the system, so that the limit holds; steps may take up to 1.8 "
                f"times their seconds. {SETTING}=off leaves malloc alone.",
                PlanWarning,
                stacklevel=2,
            )
    done = library.mallopt(_M_MMAP_THRESHOLD, _BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _BYTES)
    library.malloc_trim(0)
    return bool(done)
