"""What a process takes beyond the tensors of a plan, and the budget that its limits leave.

Of a host whose malloc returns what is freed (`base/host.py`).
"""

from __future__ import annotations

import importlib
from typing import Final

from ..base.errors import PlanError
from ..base.host import READ, smallest_limit
from ..base.sizes import show_bytes
from ..graph.graph import Graph

# A budget in a word: what is free where the model is.
LIMIT: Final = "limit"
# Kept after a plan and between its steps: the stack of a thread, BLAS's buffers, the heap's holes.
# 9 to 18 MiB of networks without convolutions; results of benchmarks/process_bytes.py, whose table
# is in docs/torch_memory.md.
FIXED_BYTES: Final = 24 << 20
# Code that oneDNN makes for the shapes of a convolution, forward and backward, and keeps: 0.3 to
# 1.9 MiB; of up to 120 convolutions 13 to 43 MiB together.
CONVOLUTION_BYTES: Final = 3 << 20
MOST_CODE_BYTES: Final = 64 << 20
# Objects of a plan for each call of its step: 3.1 to 4.8 KB, of 19 calls 9.
CALL_BYTES: Final = 8 << 10
# Of what is free, for ends of pages and calls that are not known before a step is traced.
SHARE: Final = 1 / 32


def process_bytes(graph: Graph | None) -> int:
    """Return what a process takes beyond a plan's tensors and what it held before the plan.

    graph : what was planned; None where that is not known, and the most is taken
    """
    if graph is None:
        return FIXED_BYTES + MOST_CODE_BYTES
    names = [it.name.lower() for it in graph.ops]
    backward = ("backward", "backprop")
    code = CONVOLUTION_BYTES * sum(
        "conv" in it.rpartition("/")[2] and not any(word in it for word in backward) for it in names
    )
    return FIXED_BYTES + min(code, MOST_CODE_BYTES) + CALL_BYTES * len(names)


def host_budget(resident_bytes: int) -> int:
    """Return the bytes that a step on the host may hold, by the smallest limit of the process.

    resident_bytes : what of the step is there already, and counts in its budget

    Raises
    ------
    PlanError
        Where no limit is known, or the smallest leaves nothing.
    """
    # What the search imports late (57 MiB with its threads' buffers) is no room for tensors.
    importlib.import_module("scipy.optimize")
    limit = smallest_limit()
    if limit is None:
        raise unknown(f"this host, where these were read: {READ}")
    margin = process_bytes(None) + int(SHARE * limit.free_bytes)
    return left(limit.name, limit.free_bytes, margin, resident_bytes, f" Read were {READ}.")


def left(name: str, free_bytes: int, margin_bytes: int, resident_bytes: int, read: str = "") -> int:
    """Return what is free less a margin, and what is there; raise PlanError if nothing is free."""
    if free_bytes <= margin_bytes:
        raise PlanError(
            f"got no budget, and the smallest limit, {name}, leaves {show_bytes(free_bytes)}; "
            f"expected more than {show_bytes(margin_bytes)}, which a process takes beside its "
            f"tensors. Raise that limit, or pass budget=... to try within it.{read}"
        )
    return free_bytes - margin_bytes + resident_bytes


def unknown(where: str) -> PlanError:
    """Return the error where nothing says what is free."""
    return PlanError(
        f"got no budget, and nothing says how much memory is free on {where}. "
        'Pass budget="6GiB", or what there is.'
    )
