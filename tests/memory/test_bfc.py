"""TensorFlow's BFC allocator on paper: what its source says of sizes, regions and cuts."""

import itertools
import random
import time

import pytest

from sn_memory.cost.bfc import MOST_LEFT, BFCAllocator, BFCSettings

MIB = 1 << 20
GROWTH, ONE = "growth", "one region"

# Settings, limit in MiB, steps, reserved and in use at the end in MiB; None where the last step
# finds no room. A step is MiB to allocate under the next letter, or a letter to free. Each row
# follows one branch of the source.
CASES = {
    # Extend, without growth: the limit, at the first request.
    "one region": (ONE, 64, [1], 64, 1),
    # Extend, with growth: 2 MiB, and twice as much each time.
    "the first region": (GROWTH, 64, [1], 2, 1),
    "regions double": (GROWTH, 64, [2, 1], 6, 3),
    "and double again": (GROWTH, 64, [2, 4, 1], 14, 7),
    # ... or until the request has room; then the next is as large, not twice as large.
    "as large as it takes": (GROWTH, 64, [5], 8, 8),
    "and no larger then": (GROWTH, 64, [8, 1], 16, 9),
    # ... and no larger than what the limit leaves.
    "what the limit leaves": (GROWTH, 10, [2, 4, 4], 10, 10),
    "no room": (GROWTH, 10, [2, 4, 5], None, None),
    # FindChunkPtr: cut where the block is twice as large as asked ...
    "twice as large is cut": (ONE, 8, [4, 4], 8, 8),
    "less than that is not": (ONE, 8, [5, 1], None, None),
    "a block is handed out whole": (ONE, 8, [5], 8, 8),
    # ... or 128 MiB are left.
    "128 MiB left are cut": (ONE, 300, [172, 128], 300, 300),
    "less is not cut": (ONE, 299, [172, 1], None, None),
    # Best fit: the hole of 4 MiB, not the one of 8 before it.
    "best fit": (ONE, 32, [8, 1, 4, 1, "a", "c", 3, 8], 32, 14),
    # DeallocateRaw: joined with free neighbours on both sides ...
    "joined": (ONE, 12, [4, 4, 4, "a", "c", "b", 12], 12, 12),
    # ... of the same region.
    "regions are not joined": (GROWTH, 64, [2, 4, "a", "b", 6], 14, 8),
    # DeallocateFreeRegions: those that nothing is in, where that makes room.
    "given back": (GROWTH, 10, [2, 4, "a", "b", 9], 10, 10),
    "what is in use stays": (GROWTH, 10, [2, 4, "b", 7], 10, 10),
    "not where it does not help": (GROWTH, 10, [2, 4, "b", 9], None, None),
}


def replayed(settings, steps):
    memory, letters = BFCAllocator(settings), iter("abcdefgh")
    for step in steps:
        if isinstance(step, str):
            memory.free(step)
        else:
            memory.allocate(next(letters), step * MIB)
    return memory


@pytest.mark.parametrize("name", CASES)
def test_rules(name):
    how, limit, steps, reserved, used = CASES[name]
    settings = BFCSettings(growth=how == GROWTH, limit_bytes=limit * MIB)
    if reserved is None:
        with pytest.raises(MemoryError, match="do not fit"):
            replayed(settings, steps)
        replayed(settings, steps[:-1])
        return
    memory = replayed(settings, steps)
    assert (memory.reserved_bytes, memory.allocated_bytes) == (reserved * MIB, used * MIB)
    assert memory.peak_reserved_bytes <= limit * MIB


def test_sizes_are_multiples_of_256_bytes():
    for asked, size in ((1, 256), (256, 256), (257, 512)):
        memory = BFCAllocator(BFCSettings(growth=True))
        memory.allocate("x", asked)
        assert memory.allocated_bytes == size
    memory.allocate("nothing", 0)
    assert memory.allocated_bytes == 512


def test_of_equal_holes_the_lowest_is_taken():
    memory = replayed(BFCSettings(limit_bytes=32 * MIB), [2, 2, 2, 2, "c", "a", 2])
    assert memory._held["e"].address == 0


def test_without_garbage_collection_nothing_is_given_back():
    settings = BFCSettings(growth=True, limit_bytes=10 * MIB, gives_back=False)
    with pytest.raises(MemoryError):
        replayed(settings, [2, 4, "a", "b", 9])


@pytest.mark.parametrize("growth", [True, False])
def test_what_is_held_never_overlaps(growth):
    memory, chance, held = BFCAllocator(BFCSettings(growth=growth)), random.Random(0), {}
    for number in range(3000):
        if held and chance.random() < 0.5:
            key = chance.choice(list(held))
            del held[key]
            memory.free(key)
        else:
            held[number] = chance.choice([100, 4000, MIB, 30 * MIB, 200 * MIB])
            held[number] += chance.randrange(999)
            memory.allocate(number, held[number])
        assert sum(held.values()) <= memory.allocated_bytes <= memory.reserved_bytes
    blocks = {key: memory._held[key] for key in held}
    assert all(size <= blocks[key].size < 2 * size + MOST_LEFT for key, size in held.items())
    spans = sorted((it.address, it.size) for it in blocks.values())
    for (address, size), (other, _) in itertools.pairwise(spans):
        assert address + size <= other
    assert spans[-1][0] + spans[-1][1] <= memory.reach_bytes


def rows(seed, count=200):
    chance = random.Random(seed)
    starts = [chance.randrange(count) for _ in range(count)]
    return [
        (at, at + 1 + chance.randrange(count // 2), int(MIB * 10 ** chance.uniform(-2, 2)))
        for at in starts
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_fits_in_the_region_it_needs(seed):
    resident, step = [(0, 1, 7 * MIB)], rows(seed)
    settings = BFCSettings()
    needs = settings.reserved(resident, step).peak_bytes
    assert needs % 256 == 0
    settings._steps(needs, resident, step)
    # And in one with room to spare, as where a process has the whole card.
    settings._steps(needs + MOST_LEFT, resident, step)
    live = max(sum(size for low, up, size in step if low <= at < up) for at in range(300))
    assert live + 7 * MIB <= needs
    with pytest.raises(MemoryError):
        settings._steps(live, resident, step)


def test_growth_beyond_the_limit_is_more_than_the_limit():
    resident, step = [(0, 1, 7 * MIB)], rows(0)
    grown = BFCSettings(growth=True).reserved(resident, step).peak_bytes
    needs = BFCSettings().reserved(resident, step).peak_bytes
    within = BFCSettings(growth=True, limit_bytes=grown - 1).reserved(resident, step).peak_bytes
    assert needs <= within < grown
    short = BFCSettings(growth=True, limit_bytes=needs // 2).reserved(resident, step).peak_bytes
    assert short > needs // 2


def test_regions_that_grow_fill_a_budget_by_leaps():
    growth = BFCSettings(growth=True, limit_bytes=700 * MIB)
    assert [growth.most(it * MIB) // MIB for it in (1, 6, 431, 509, 510, 699)] == [
        0, 6, 254, 254, 510, 510,
    ]  # fmt: skip
    # The last region is cut to the limit.
    assert growth.most(700 * MIB) == 700 * MIB
    assert BFCSettings().most(431 * MIB) == 431 * MIB


def test_a_hundred_thousand_events_take_a_moment():
    memory, chance = BFCAllocator(BFCSettings(growth=True)), random.Random(1)
    began = time.process_time()
    for number in range(50_000):
        memory.allocate(number, chance.randrange(1, 8 * MIB))
        if number >= 1000:
            memory.free(chance.randrange(number))
    assert time.process_time() - began < 20
