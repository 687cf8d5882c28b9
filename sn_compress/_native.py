"""The compiled extension `sn_compress._core`, if it was built, and threads for either back end.

`ops` calls `core()`, and falls back to equivalent NumPy code if that is None: the extension was not
built, or SN_COMPRESS_BACKEND is "numpy". The choice is made once; `sn_compress.backends()` reports
it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from .errors import CompressError

T = TypeVar("T")


@cache
def load() -> tuple[Any, str]:
    """Return the extension module or None, and the reason in words."""
    wish = os.environ.get("SN_COMPRESS_BACKEND", "")
    if wish not in ("", "numpy", "cpp"):
        raise CompressError(f'SN_COMPRESS_BACKEND={wish!r}; expected "numpy", "cpp" or nothing')
    if wish == "numpy":
        return None, "numpy: requested by SN_COMPRESS_BACKEND"
    try:
        return import_module("sn_compress._core"), "cpp: the compiled extension is there"
    except ImportError as missing:
        note = Path(__file__).parent / "_core_missing.txt"  # left by setup.py
        why = note.read_text("utf-8").splitlines()[0] if note.exists() else str(missing)
        reason = f"the compiled extension is missing ({why}); reinstall with a C++17 compiler"
        if wish == "cpp":
            raise CompressError(f"SN_COMPRESS_BACKEND=cpp, but {reason}") from missing
        logging.getLogger(__name__).warning("encoding with NumPy, many times slower: %s", reason)
        return None, f"numpy: {reason}"


def core() -> Any:
    """Return the extension module, or None if NumPy code runs instead."""
    return load()[0]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sn_compress")


# Threads do not survive a fork, and a pool without its threads would hang.
os.register_at_fork(after_in_child=_pool.cache_clear)


def parallel(work: Callable[[Iterator[int]], T], items: Iterable[int], threads: int) -> list[T]:
    """Run `work` on up to `threads` threads that share the items; return each thread's result.

    Each thread calls `work` once, with an iterator over a common queue. So scratch memory is reused
    for all items of a thread, a delayed thread leaves its items to the others, and there is no task
    per item. SciPy's FFT and the extension release the GIL.
    """
    queue = deque(items)
    threads = min(threads, len(queue))
    if threads < 2:
        return [work(_drain(queue))]
    return list(_pool(threads).map(work, [_drain(queue) for _ in range(threads)]))


def _drain(queue: deque[int]) -> Iterator[int]:
    while True:
        try:
            item = queue.popleft()  # thread-safe
        except IndexError:
            return
        yield item
