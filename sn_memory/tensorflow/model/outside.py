"""Run something as if no function were being traced: no graph, no tape, no call of Keras around it.

tf.init_scope leaves the graph, and stops all tapes of the thread with it, those opened inside too;
what is run here opens its own. All of that belongs to a thread, so another one has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from keras.src.backend.common import global_state  # has no public name

# What Keras has in force around a call; all else it keeps for a thread are settings and seeds.
_AROUND: Final = ("current_call_ctx", "autocast_scope", "name_scope_stack", "stateless_scope")

T = TypeVar("T")


def run_outside(function: Callable[[], T]) -> T:
    """Run a function outside of everything that is in force in this thread, and wait for it."""
    held: dict[str, Any] = vars(global_state.GLOBAL_STATE_TRACKER)
    settings = {key: it for key, it in held.items() if key not in _AROUND}

    def run() -> T:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="sn_memory") as pool:
        return pool.submit(run).result()
