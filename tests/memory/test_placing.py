"""The placing allocator over the host's memory: recordings, places, classes, and bad input."""

import ctypes
import random
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from sn_memory import Graph, Op, Storage
from sn_memory.plan.policies import policy
from sn_memory.pool.placing import (
    GRANULE,
    PlacingAllocator,
    StepStatistics,
    class_bytes,
    classes_bytes,
    library_path,
)
from sn_memory.run.reserved import PlacingSettings, reserved

pytestmark = pytest.mark.skipif(
    not library_path().exists(), reason="sn_memory._placing was not built"
)
MIB = 1 << 20


@contextmanager
def opened(*arguments, **settings):
    now = PlacingAllocator(*arguments, **settings)
    try:
        yield now
    finally:
        now.close()


@pytest.fixture
def memory():
    with opened("host") as now:
        yield now


def run(memory, pool, sizes, *, step=1, stream=0, other=0):
    """A chain: each block is freed once the next one is there. Returns addresses."""
    memory.begin(pool, step, stream)
    at, before = [], None
    with memory.inside(pool):
        for size in sizes:
            at.append(memory.allocate(size, stream=stream))
            if other:
                memory.release(memory.allocate(other, stream=64))
            if before is not None:
                memory.release(before)
            before = at[-1]
    memory.release(before)
    return at


SIZES = [5 * MIB, 3 * MIB, 7 * MIB, MIB, 100]


def test_the_second_step_lies_where_it_was_packed(memory):
    pool = memory.new_pool(0)
    run(memory, pool, SIZES)
    assert memory.step_statistics(pool, 1) == StepStatistics(0, 0, 0, 0)
    first = run(memory, pool, SIZES)
    assert run(memory, pool, SIZES) == first
    assert memory.step_statistics(pool, 1) == StepStatistics(5, 0, 0, 0)
    now = memory.statistics()
    # Two neighbours are alive together, 7 and 3 MiB at most, and nothing else is kept back.
    assert now.arena_bytes == now.reserved_bytes == 10 * MIB
    assert (now.hits, now.misses, now.allocated_bytes) == (10, 0, 0)
    memory.give_back(pool)
    assert memory.statistics().reserved_bytes == 0
    run(memory, pool, SIZES)
    assert memory.statistics().arena_bytes == 10 * MIB
    memory.forget(pool)
    assert memory.statistics().reserved_bytes == 0


def test_what_outlives_a_step_lies_in_classes_and_never_below_another(memory):
    pool, held = memory.new_pool(0), []
    for turn in range(4):
        memory.begin(pool, 1)
        with memory.inside(pool):
            memory.release(memory.allocate(4 * MIB))
            if held:
                memory.release(held.pop())
            held.append(memory.allocate(2 * MIB))
        now = memory.step_statistics(pool, 1)
        assert now == (StepStatistics(0, 0, 0, 0) if not turn else StepStatistics(1, 0, 1, 0))
    assert memory.statistics().arena_bytes == 4 * MIB


def test_a_place_that_is_taken_is_not_given_away(memory):
    pool = memory.new_pool(0)
    for _ in range(2):
        run(memory, pool, [4 * MIB])
    memory.begin(pool, 1)
    with memory.inside(pool):
        held = memory.allocate(4 * MIB)
    memory.begin(pool, 1)
    with memory.inside(pool):
        other = memory.allocate(4 * MIB)
    assert abs(other - held) >= 4 * MIB
    assert memory.step_statistics(pool, 1) == StepStatistics(0, 1, 0, 0)


def test_a_step_that_differs_meets_its_recording_again_and_is_recorded_anew(memory):
    """As the first step, which allocates what libraries keep, or tries kernels."""
    pool = memory.new_pool(0)
    run(memory, pool, [MIB, 32 * MIB, *SIZES])
    run(memory, pool, [MIB, *SIZES])
    run(memory, pool, [MIB, *SIZES])  # recorded again: a place of 32 MiB was for nothing
    assert memory.statistics().arena_bytes == 0
    run(memory, pool, [MIB, *SIZES])
    assert memory.step_statistics(pool, 1) == StepStatistics(6, 0, 0, 0)
    assert memory.statistics().arena_bytes == 10 * MIB
    for _ in range(3):
        run(memory, pool, [*SIZES, 9 * MIB])
    # The third recording is the last.
    run(memory, pool, [*SIZES, 8 * MIB])
    run(memory, pool, [*SIZES, 8 * MIB])
    assert memory.step_statistics(pool, 1).misses == 1


def test_allocations_of_other_streams_and_threads_are_not_the_steps(memory):
    pool = memory.new_pool(0)
    for _ in range(2):
        run(memory, pool, SIZES, other=3 * MIB)
    assert memory.step_statistics(pool, 1) == StepStatistics(5, 0, 0, 0)
    outside = memory.allocate(SIZES[0])
    memory.release(outside)
    # A block of one stream is not another's.
    assert memory.allocate(SIZES[0], stream=64) != outside
    assert memory.allocate(SIZES[0]) == outside


def test_kinds_of_steps_share_an_arena(memory):
    pool = memory.new_pool(0)
    for _ in range(3):
        run(memory, pool, SIZES)
        run(memory, pool, [2 * it for it in SIZES], step=2)
    assert memory.statistics().arena_bytes == 20 * MIB
    assert memory.step_statistics(pool, 1).misses == memory.step_statistics(pool, 2).misses == 0


def test_while_it_is_recorded_a_step_holds_little_more_than_is_live(memory):
    pool = memory.new_pool(0)
    run(memory, pool, [20 * MIB + MIB * it for it in range(20)])
    assert memory.statistics().peak_reserved_bytes <= 82 * MIB


def test_bad_pointers_are_refused_and_counted(memory):
    address = memory.allocate(1000)
    memory.release(address)
    with pytest.raises(ValueError, match="freed already"):
        memory.release(address)
    with pytest.raises(ValueError, match="not allocated here"):
        memory.release(id(memory))
    assert memory.statistics().bad_frees == 2


def test_out_of_memory_gives_cached_blocks_back_first():
    with opened("host", limit_bytes=40 * MIB) as memory:
        first = memory.allocate(30 * MIB)
        memory.release(first)
        memory.release(memory.allocate(36 * MIB))
        pool = memory.new_pool(0)
        run(memory, pool, [20 * MIB])
        held = memory.allocate(32 * MIB)
        with pytest.raises(MemoryError, match="33554432 are reserved, 33554432 of them in use"):
            memory.allocate(10 * MIB)
        with pytest.raises(MemoryError, match="an arena of 20971520 bytes"):
            memory.begin(pool, 1)
        memory.release(held)
        assert run(memory, pool, [20 * MIB])


def test_opening_says_why_it_did_not(memory):
    with pytest.raises(RuntimeError, match="open already"):
        PlacingAllocator("host")
    memory.close()
    with pytest.raises(RuntimeError, match=r"from 'libcudart\.so\.0': the library"):
        PlacingAllocator("libcudart.so.0")
    with pytest.raises(MemoryError, match="not open"):
        memory.allocate(8)


RUNTIME = """
#include <cstdlib>
#include <cstring>
static int device = 0, error = 0;
static char notes[4096];
static void note(const char* what, int at) {
  std::strcat(notes, what);
  std::strcat(notes, at == 0 ? "0 " : "1 ");
}
extern "C" {
int cudaGetDevice(int* at) { *at = device; return 0; }
int cudaSetDevice(int at) { device = at; return 0; }
int cudaGetLastError() { int was = error; error = 0; note("error", device); return was; }
int cudaDeviceSynchronize() { note("wait", device); return 0; }
int cudaMalloc(void** to, size_t size) {
  note("malloc", device);
  if (size > (100u << 20)) return error = 2;
  *to = std::aligned_alloc(512, size);
  return 0;
}
int cudaFree(void* block) { note("free", device); std::free(block); return 0; }
const char* calls() { return notes; }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_calls_of_a_runtime_go_to_the_device_and_back(tmp_path):
    """What CUDA is asked for, by a library with the names of its runtime."""
    library = tmp_path / "libmockrt.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=RUNTIME, text=True, check=True)
    mock = ctypes.CDLL(str(library))
    mock.calls.restype = ctypes.c_char_p
    with opened(str(library)) as memory:
        address = memory.allocate(3 * MIB, device=1)
        memory.cross(address, stream=64)
        memory.release(address)  # another stream has used it
        memory.trim()
        with pytest.raises(MemoryError, match="device 1, where 0 are reserved"):
            memory.allocate(200 * MIB, device=1)
        assert mock.calls().decode() == "malloc1 wait1 wait1 free1 malloc1 error1 malloc1 error1 "
        device = ctypes.c_int(-1)
        mock.cudaGetDevice(ctypes.byref(device))
        assert device.value == 0
        assert memory.statistics(0).peak_reserved_bytes == 0


def test_classes_on_paper_are_those_of_the_library(memory):
    rng = random.Random(3)
    sizes = [round(2 ** rng.uniform(1, 26)) for _ in range(300)] + [MIB, 9 * MIB, 16 * MIB, 512, 1]
    total = 0
    for at, size in enumerate(sizes, 1):
        memory.allocate(size)
        total += class_bytes(size)
        assert memory.statistics().allocated_bytes == total
        assert memory.statistics().reserved_bytes == classes_bytes(sizes[:at])
        assert size <= class_bytes(size) <= max(size * 17 / 16 + 512, GRANULE) + GRANULE


def test_a_plan_for_it_counts_the_height_of_the_step_and_classes_of_the_rest():
    storages = [Storage("x", 3 * MIB, "input"), Storage("w", 20 * MIB, "parameter")]
    storages += [Storage("h", 5 * MIB), Storage("y", 4 * MIB, keep=True)]
    ops = [Op("f", ("x", "w"), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)]
    graph = Graph(storages, ops)
    plan = policy("liveness")(graph, budget_bytes=None)
    now = reserved(graph, plan, PlacingSettings())
    assert (now.peak_bytes, now.pool_bytes) == (26 * MIB + 10 * MIB, 0)
