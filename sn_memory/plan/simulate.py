"""From decisions to actions: what runs again when, what is held how long, and what that costs.

A choice says for each hole of each storage: keep, or let go. The ops run in their order. Before an
op, what it needs and is not there is rebuilt: all ops this takes, in their order. What a rebuild
makes on the way may be held for its own next use or dropped again; that is the number of the
choice:

    KEEP (-1)      the storage stays through the hole
    h >= 0         it leaves; a rebuild at op t inside the hole holds it if t >= h, else drops it

0 is SuperNeurons' speed-centric recomputation (rebuild once, hold), the number of ops is its
memory-centric one (rebuild for each use), and values between give the nested checkpoints of
multi-level schedules, where a second-level checkpoint is held only while its segment is at work.

Storages leave right after the last run that touches them, so the memory at any run follows from
the intervals between first and last touch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.clock import spend
from ..cost.offload import windows
from ..cost.schedule import HostCopy, Impossible, Schedule
from ..graph.holes import Holes
from .compiled import compiled

# Units of work an op, most of them to bring what was found to Python.
AROUND = 10


def simulate(
    holes: Holes, choice: Sequence[int], moves: Mapping[int, tuple[int, int]] | None = None
) -> Schedule:
    """Carry a choice out; `choice` has one number per hole.

    `moves` are the holes that are spent on the host: the op after which the device memory is given
    back and the op before which it is taken again.

    A rebuild that needs what is on the host fetches it at once, earlier than `moves` says.

    Raises Impossible if a rebuild would have to run an op whose inputs have changed since, or would
    need what cannot be made again.
    """
    spend(AROUND * len(holes.graph.ops))
    found = compiled(holes).simulate(choice, moves)
    if found is None:
        raise Impossible
    ops, at, intervals, live, host_copies, seconds = found
    return Schedule(
        ops, at, intervals, live, seconds, tuple(HostCopy(*host_copy) for host_copy in host_copies)
    )


def simulate_moved(
    holes: Holes, choice: Sequence[int], moved: Mapping[int, int]
) -> tuple[Schedule, dict[int, tuple[int, int]]]:
    """Carry a choice out with holes spent on the host; return the schedule and the windows.

    Rebuilds may need a storage earlier than its own next use. Simulated once, that moment is known,
    and the copy back gets a window that ends there. Raises Impossible as `simulate` does.
    """
    first = windows(holes, moved)
    schedule = simulate(holes, choice, first)
    needed = {}
    for hole, (_, back) in first.items():
        storage = holes.storage[hole]
        for host_copy in schedule.host_copies:
            mine = host_copy.storage == storage and schedule.at[host_copy.left] == holes.start[hole]
            if mine and schedule.at[host_copy.fetched] < back:
                needed[hole] = schedule.at[host_copy.fetched]
    if not needed:
        return schedule, first
    again = windows(holes, moved, needed)
    return simulate(holes, choice, again), again
