"""Allocators on paper, torch's and TensorFlow's BFC: what their sources say of sizes and cuts."""

import itertools
import random
import time

import pytest

from sn_memory.cost.bfc import MOST_LEFT, BFCAllocator, BFCSettings
from sn_memory.cost.caching import AllocatorSettings, CachingAllocator

MIB = 1 << 20
GROWTH, ONE = "growth", "one region"
DEFAULT, EXPANDABLE = "", "expandable_segments:True"

# A step of a case is MiB to allocate under the next letter, or a letter to free. Each row follows
# one branch of the source.

# Settings, limit in MiB, steps, reserved and in use at the end in MiB; None where the last step
# finds no room.
BFC_CASES = {
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
    # ... or 128 MiB are left.
    "128 MiB left are cut": (ONE, 300, [172, 128], 300, 300),
    "less is not cut": (ONE, 299, [172, 1], None, None),
    # Best fit: the hole of 4 MiB, not the one of 8 before it; of equal holes the lowest.
    "best fit": (ONE, 32, [8, 1, 4, 1, "a", "c", 3, 8], 32, 14),
    "the lowest": (ONE, 8, [2, 2, 2, 2, "c", "a", 2, "d", 4], 8, 8),
    # DeallocateRaw: joined with free neighbours on both sides ...
    "joined": (ONE, 12, [4, 4, 4, "a", "c", "b", 12], 12, 12),
    # ... of the same region.
    "regions are not joined": (GROWTH, 64, [2, 4, "a", "b", 6], 14, 8),
    # DeallocateFreeRegions: those that nothing is in, where that makes room.
    "given back": (GROWTH, 10, [2, 4, "a", "b", 9], 10, 10),
    "what is in use stays": (GROWTH, 10, [2, 4, "b", 7], 10, 10),
    "not where it does not help": (GROWTH, 10, [2, 4, "b", 9], None, None),
}


def replayed(memory, steps):
    letters = iter("abcdefgh")
    for step in steps:
        if isinstance(step, str):
            memory.free(step)
        else:
            memory.allocate(next(letters), round(step * MIB))
    return memory


@pytest.mark.parametrize("name", BFC_CASES)
def test_rules_of_bfc(name):
    how, limit, steps, reserved, used = BFC_CASES[name]
    settings = BFCSettings(growth=how == GROWTH, limit_bytes=limit * MIB)
    if reserved is None:
        with pytest.raises(MemoryError, match="do not fit"):
            replayed(BFCAllocator(settings), steps)
        replayed(BFCAllocator(settings), steps[:-1])
        return
    memory = replayed(BFCAllocator(settings), steps)
    assert (memory.reserved_bytes, memory.allocated_bytes) == (reserved * MIB, used * MIB)
    assert memory.peak_reserved_bytes <= limit * MIB


def test_sizes_of_bfc_are_multiples_of_256_bytes():
    memory = BFCAllocator(BFCSettings(growth=True))
    for name, asked, total in (("a", 1, 256), ("b", 256, 512), ("c", 257, 1024), ("d", 0, 1024)):
        memory.allocate(name, asked)
        assert memory.allocated_bytes == total


def test_without_garbage_collection_nothing_is_given_back():
    settings = BFCSettings(growth=True, limit_bytes=10 * MIB, gives_back=False)
    with pytest.raises(MemoryError):
        replayed(BFCAllocator(settings), [2, 4, "a", "b", 9])


B512 = 512 / MIB
# Settings, steps, reserved at the end in MiB.
TORCH_CASES = {
    # Segments: 2 MiB for up to 1, 20 for up to 10, then whole ones of 2 MiB.
    "one byte": (DEFAULT, [1 / MIB], 2),
    "small": (DEFAULT, [1], 2),
    "large": (DEFAULT, [1 + B512], 20),
    # Rounded to 512 bytes it is 10 MiB: a segment of its own.
    "up to 10 MiB": (DEFAULT, [10 - 1 / MIB], 10),
    "512 bytes less": (DEFAULT, [10 - B512], 20),
    "more than 10 MiB": (DEFAULT, [10 + B512], 12),
    "an odd number": (DEFAULT, [21], 22),
    # get_free_block: the smallest that is large enough, whatever its segment.
    "best fit": (DEFAULT, [12, 30, "a", "b", 11, 30], 42),
    # should_split, large: more than 1 MiB must remain.
    "1 MiB left is not cut": (DEFAULT, [12, "a", 11, 1 + B512], 32),
    "more than 1 MiB left is cut": (DEFAULT, [13, "a", 11, 2], 14),
    # should_split, small: 512 bytes.
    "512 bytes left are cut": (DEFAULT, [1, 1 - B512, B512], 2),
    # Pools: a small block never comes from a large segment.
    "small not from large": (DEFAULT, [30, "a", 1], 32),
    "large not from small": (DEFAULT, [B512, "a", 1 + B512], 22),
    # What is cached stays, and a hole between blocks in use is of no use to a larger request.
    "holes": (DEFAULT, [9, 2, 9, "a", "c", 10], 30),
    "free neighbours are joined": (DEFAULT, [5, 5, 5, 5, "a", "c", "b", 15], 20),
    # Expandable: one segment, in granules of 2 and of 20 MiB.
    "granules": (EXPANDABLE, [B512, 1 + B512], 22),
    "grows by what is missing": (EXPANDABLE, [15, 15], 40),
    "the end is filled up": (EXPANDABLE, [15, 24], 40),
    "grows for a block at the end that is free": (EXPANDABLE, [19, 15, "b", 35], 60),
    "holes of it are joined": (EXPANDABLE, [19, 19, "a", "b", 40], 40),
    # should_split with expandable segments: 512 bytes, of large blocks as well.
    "cut to 512 bytes": (EXPANDABLE, [12, 8, "a", 12 - B512], 20),
    # get_free_block: 3 MiB fit the end, which is spared for the hole of 6 MiB; so 6 MiB do not.
    "the end is spared": (EXPANDABLE, [4, 6, 7, "b", 3, 6], 40),
    # Above max_split_size_mb: not cut, not given to smaller requests, and given to one as large
    # only where less than 20 MiB would be lost.
    "large ones are not cut": ("max_split_size_mb:32", [40, "a", 33, 2], 60),
    "not for smaller ones": ("max_split_size_mb:32", [40, "a", 30], 70),
    "not where 20 MiB are lost": ("max_split_size_mb:32", [60, "a", 40], 100),
    "where less is lost": ("max_split_size_mb:32", [60, "a", 40 + B512], 60),
    "another loss": ("max_split_size_mb:32,max_non_split_rounding_mb:21", [60, "a", 40], 60),
    "one below the limit is cut": ("max_split_size_mb:64", [40, "a", 33, 2], 40),
    # Powers of two in parts: 33 MiB in eighths is 36 MiB.
    "eighths": ("roundup_power2_divisions:8", [33], 36),
    "a power of two": ("roundup_power2_divisions:8", [32], 32),
    "by intervals": ("roundup_power2_divisions:[16:2,32:4,>:1]", [17, 33, 65], 130),
    "segments of another size": ("large_segment_size_mb:12", [3], 12),
    "granules of another size": (f"large_segment_size_mb:12,{EXPANDABLE}", [3], 12),
}


@pytest.mark.parametrize("name", TORCH_CASES)
def test_rules_of_torch(name):
    text, steps, reserved = TORCH_CASES[name]
    memory = CachingAllocator(AllocatorSettings.of(text))
    assert replayed(memory, steps).reserved_bytes == reserved * MIB


def test_settings_are_read_as_torch_reads_them():
    found = AllocatorSettings.of(
        "max_split_size_mb:40, max_non_split_rounding_mb:30, garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
        "pinned_use_background_threads:True"
    )
    assert (found.expandable, found.max_split_bytes, found.caching) == (True, 40 * MIB, True)
    assert found.non_split_bytes == 30 * MIB
    # From 1 MiB on, one for each power of two: the first holds for what is smaller.
    assert found.divisions == (8,) * 7 + (2, 4, 2, 4) + (1,) * 5
    assert AllocatorSettings.of("") == AllocatorSettings()
    assert AllocatorSettings.of("").name == "torch's allocator (default settings)"
    expandable = AllocatorSettings.of("expandable_segments:True")
    assert expandable.name == "torch's allocator (expandable_segments:True)"
    # How it was written makes no other settings of it.
    assert expandable == AllocatorSettings(expandable=True)
    assert not AllocatorSettings.of("backend:cudaMallocAsync").caching


BFCS = {"one region": BFCSettings(), "growth": BFCSettings(growth=True)}
TORCHS = (DEFAULT, EXPANDABLE, "max_split_size_mb:24", "roundup_power2_divisions:4")
PAPER = {
    **{name: lambda it=it: BFCAllocator(it) for name, it in BFCS.items()},
    **{it: lambda it=it: CachingAllocator(AllocatorSettings.of(it)) for it in TORCHS},
}


@pytest.mark.parametrize("kind", PAPER)
def test_what_is_held_never_overlaps(kind):
    memory, chance, held = PAPER[kind](), random.Random(0), {}
    for number in range(3000):
        if held and chance.random() < 0.5:
            key = chance.choice(list(held))
            del held[key]
            memory.free(key)
        else:
            size = chance.choice([100, 4000, MIB, 3 * MIB, 30 * MIB, 200 * MIB])
            held[number] = size + chance.randrange(999)
            memory.allocate(number, held[number])
        assert sum(held.values()) <= memory.allocated_bytes <= memory.reserved_bytes
    blocks = {key: memory._held[key] for key in held}
    assert all(size <= blocks[key].size for key, size in held.items())
    spans = sorted((it.address, it.size) for it in blocks.values())
    for (address, size), (other, _) in itertools.pairwise(spans):
        assert address + size <= other
    if kind in BFCS:
        assert all(blocks[key].size < 2 * size + MOST_LEFT for key, size in held.items())
        assert sum(spans[-1]) <= memory.reach_bytes
        return
    assert memory.allocated_bytes == sum(it.size for it in blocks.values())
    for key in held:
        memory.free(key)
    assert memory.allocated_bytes == 0
    # All are whole segments again, and are reserved still.
    free = [row for rows in memory._free.values() for row in rows]
    assert sum(size for size, _ in free) == memory.reserved_bytes
    for _, address in free:
        block = memory._at[address]
        assert block.before is None
        assert block.after is None or block.after.state == "unmapped"


@pytest.mark.parametrize("kind", ["growth", DEFAULT, EXPANDABLE])
def test_a_hundred_thousand_events_take_a_moment(kind):
    memory, chance = PAPER[kind](), random.Random(1)
    began = time.process_time()
    for number in range(50_000):
        memory.allocate(number, chance.randrange(1, 8 * MIB))
        if number >= 1000:
            memory.free(chance.randrange(number))
    # 0.3 s on a quiet machine; a list that is searched from its start would take minutes.
    assert time.process_time() - began < 20


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

    def reserved(**settings):
        return BFCSettings(**settings).reserved(resident, step).peak_bytes

    grown, needs = reserved(growth=True), reserved()
    assert needs <= reserved(growth=True, limit_bytes=grown - 1) < grown
    assert reserved(growth=True, limit_bytes=needs // 2) > needs // 2


def test_regions_that_grow_fill_a_budget_by_leaps():
    growth = BFCSettings(growth=True, limit_bytes=700 * MIB)
    # The last region is cut to the limit.
    for budget, filled in ((1, 0), (6, 6), (431, 254), (509, 254), (510, 510), (699, 510),
                           (700, 700)):  # fmt: skip
        assert growth.most(budget * MIB) == filled * MIB
    assert BFCSettings().most(431 * MIB) == 431 * MIB
