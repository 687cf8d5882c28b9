"""torch's caching allocator on paper: what its source says of sizes, segments and cuts."""

import itertools
import random

from sn_memory.cost.caching import CachingAllocator

MIB = 1 << 20


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


def test_what_is_held_never_overlaps():
    memory, chance, held = CachingAllocator(), random.Random(0), {}
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
    spans = sorted((*memory._held[key], held[key]) for key in held)
    for (segment, offset, size), (other, start, _) in itertools.pairwise(spans):
        assert segment != other or offset + size <= start
    for key in list(held):
        memory.free(key)
    assert memory.allocated_bytes == 0
    # All are whole segments again.
    assert all(list(blocks) == [0] for _, blocks in memory._segments)
