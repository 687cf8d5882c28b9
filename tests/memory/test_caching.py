"""torch's caching allocator on paper: what its source says of sizes, segments and cuts."""

import itertools
import random
import time

import pytest

from sn_memory.cost.caching import AllocatorSettings, CachingAllocator

MIB = 1 << 20
KIB = 1 << 10
DEFAULT, EXPANDABLE = "", "expandable_segments:True"


def test_sizes_of_segments():
    for asked, reserved in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),  # rounded to 512 bytes it is 10 MiB: a segment of its own
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ):
        memory = CachingAllocator()
        memory.allocate("x", asked)
        assert memory.reserved_bytes == reserved, asked


# Settings, steps, reserved at the end. A step is a size to allocate under the next letter, or a
# letter to free. Each row follows one branch of the source.
CASES = {
    # get_free_block: the smallest that is large enough, whatever its segment.
    "best fit": (DEFAULT, [12 * MIB, 30 * MIB, "a", "b", 11 * MIB, 30 * MIB], 42 * MIB),
    # should_split, large: more than 1 MiB must remain.
    "1 MiB left is not cut": (DEFAULT, [12 * MIB, "a", 11 * MIB, 1 * MIB + 512], 32 * MIB),
    "more than 1 MiB left is cut": (DEFAULT, [13 * MIB, "a", 11 * MIB, 2 * MIB], 14 * MIB),
    # should_split, small: 512 bytes.
    "512 bytes left are cut": (DEFAULT, [MIB, MIB - 512, 512], 2 * MIB),
    # Pools: a small block never comes from a large segment.
    "small not from large": (DEFAULT, [30 * MIB, "a", MIB], 32 * MIB),
    "large not from small": (DEFAULT, [512, "a", MIB + 512], 22 * MIB),
    # What is cached stays, and a hole between blocks in use is of no use to a larger request.
    "holes": (DEFAULT, [9 * MIB, 2 * MIB, 9 * MIB, "a", "c", 10 * MIB], 30 * MIB),
    # Expandable: one segment, in granules of 2 and of 20 MiB.
    "granules": (EXPANDABLE, [512, MIB + 512], 22 * MIB),
    "grows by what is missing": (EXPANDABLE, [15 * MIB, 15 * MIB], 40 * MIB),
    "the end is filled up": (EXPANDABLE, [15 * MIB, 24 * MIB], 40 * MIB),
    "grows for a block at the end that is free": (
        EXPANDABLE,
        [19 * MIB, 15 * MIB, "b", 35 * MIB],
        60 * MIB,
    ),
    "holes are joined": (EXPANDABLE, [19 * MIB, 19 * MIB, "a", "b", 40 * MIB], 40 * MIB),
    # should_split with expandable segments: 512 bytes, of large blocks as well.
    "cut to 512 bytes": (EXPANDABLE, [12 * MIB, 8 * MIB, "a", 12 * MIB - 512], 20 * MIB),
    # get_free_block: 3 MiB fit the end, which is spared for the hole of 6 MiB; so 6 MiB do not.
    "the end is spared": (
        EXPANDABLE,
        [4 * MIB, 6 * MIB, 7 * MIB, "b", 3 * MIB, 6 * MIB],
        40 * MIB,
    ),
    # Above max_split_size_mb: not cut, not given to smaller requests, and given to one as large
    # only where less than 20 MiB would be lost.
    "large ones are not cut": (
        "max_split_size_mb:32",
        [40 * MIB, "a", 33 * MIB, 2 * MIB],
        60 * MIB,
    ),
    "not for smaller ones": ("max_split_size_mb:32", [40 * MIB, "a", 30 * MIB], 70 * MIB),
    "not where 20 MiB are lost": ("max_split_size_mb:32", [60 * MIB, "a", 40 * MIB], 100 * MIB),
    "where less is lost": ("max_split_size_mb:32", [60 * MIB, "a", 40 * MIB + 512], 60 * MIB),
    "another loss": (
        "max_split_size_mb:32,max_non_split_rounding_mb:21",
        [60 * MIB, "a", 40 * MIB],
        60 * MIB,
    ),
    "one below the limit is cut": (
        "max_split_size_mb:64",
        [40 * MIB, "a", 33 * MIB, 2 * MIB],
        40 * MIB,
    ),
    # Powers of two in parts: 33 MiB in eighths is 36 MiB.
    "eighths": ("roundup_power2_divisions:8", [33 * MIB], 36 * MIB),
    "a power of two": ("roundup_power2_divisions:8", [32 * MIB], 32 * MIB),
    "by intervals": (
        "roundup_power2_divisions:[16:2,32:4,>:1]",
        [17 * MIB, 33 * MIB, 65 * MIB],
        130 * MIB,
    ),
    "segments of another size": ("large_segment_size_mb:12", [3 * MIB], 12 * MIB),
    "granules of another size": (
        "large_segment_size_mb:12,expandable_segments:True",
        [3 * MIB],
        12 * MIB,
    ),
}


def replayed(text, steps):
    memory, letters = CachingAllocator(AllocatorSettings.of(text)), iter("abcdefgh")
    for step in steps:
        if isinstance(step, str):
            memory.free(step)
        else:
            memory.allocate(next(letters), step)
    return memory


@pytest.mark.parametrize("name", CASES)
def test_rules(name):
    text, steps, reserved = CASES[name]
    assert replayed(text, steps).reserved_bytes == reserved


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


def test_blocks_share_segments_and_large_ones_are_not_cut_for_little():
    memory = CachingAllocator()
    for number in range(4):
        memory.allocate(number, 5 * MIB)
    assert memory.reserved_bytes == 20 * MIB
    memory.free(1)
    memory.allocate("less", 4 * MIB + MIB // 2)  # half a MiB is left: not cut
    assert memory.allocated_bytes == 20 * MIB
    memory.allocate("more", 2 * MIB)
    assert memory.reserved_bytes == 40 * MIB


def test_free_neighbours_are_joined():
    memory = CachingAllocator()
    for number in range(4):
        memory.allocate(number, 5 * MIB)
    for number in (0, 2, 1):
        memory.free(number)
    memory.allocate("wide", 15 * MIB)
    assert memory.reserved_bytes == 20 * MIB


@pytest.mark.parametrize(
    "text", [DEFAULT, EXPANDABLE, "max_split_size_mb:24", "roundup_power2_divisions:4"]
)
def test_what_is_held_never_overlaps(text):
    settings = AllocatorSettings.of(text)
    memory, chance, held = CachingAllocator(settings), random.Random(0), {}
    for number in range(3000):
        if held and chance.random() < 0.5:
            key = chance.choice(list(held))
            del held[key]
            memory.free(key)
        else:
            held[number] = chance.choice([100, 4000, MIB, 3 * MIB, 30 * MIB]) + chance.randrange(
                999
            )
            memory.allocate(number, held[number])
        assert sum(held.values()) <= memory.allocated_bytes <= memory.reserved_bytes
    blocks = [memory._held[key] for key in held]
    assert memory.allocated_bytes == sum(it.size for it in blocks)
    assert all(memory._held[key].size >= size for key, size in held.items())
    spans = sorted((it.address, it.size) for it in blocks)
    for (address, size), (other, _) in itertools.pairwise(spans):
        assert address + size <= other
    for key in list(held):
        memory.free(key)
    assert memory.allocated_bytes == 0
    # All are whole segments again, and are reserved still.
    free = [row for rows in memory._free.values() for row in rows]
    assert sum(size for size, _ in free) == memory.reserved_bytes
    blocks = [memory._at[address] for _, address in free]
    assert all(it.before is None for it in blocks)
    assert all(it.after is None or it.after.state == "unmapped" for it in blocks)


@pytest.mark.parametrize("text", [DEFAULT, EXPANDABLE])
def test_a_hundred_thousand_events_take_a_moment(text):
    memory, chance = CachingAllocator(AllocatorSettings.of(text)), random.Random(1)
    began = time.process_time()
    for number in range(50_000):
        memory.allocate(number, chance.randrange(1, 8 * MIB))
        if number >= 1000:
            memory.free(chance.randrange(number))
    # 0.3 s on a quiet machine; a list that is searched from its start would take minutes.
    assert time.process_time() - began < 20
