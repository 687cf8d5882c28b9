"""What only the mock device tells: what crosses over, what is late, what is held."""

import os

import pytest

if os.environ.get("SN_TEST_DEVICE") != "mock":
    pytest.skip("runs where test_gpu_tests.py has started the device", allow_module_level=True)

import copy
import ctypes
import dataclasses
import gc
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))
import mock_device
from alone_group import init_alone

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook
from sn_memory import Device
from sn_memory.pool.placing import GRANULE, PlacingAllocator, library_path
from sn_memory.torch import PinnedState, plan, trace
from sn_memory.torch.target import allocator as placing
from sn_memory.torch.target.accelerator import StreamLanes

pytestmark = pytest.mark.usefixtures("counted_work")
DEVICE = mock_device.start()
COUNTS = torch.ops.mock_device
LINK = Device("link", 5e10, 2e10, 1e11, 1e11, 0.0, launch_s=1e-5)


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    COUNTS.run_late(True)
    yield
    COUNTS.run_late(True)


def net():
    block = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
    )
    return nn.Sequential(*(block() for _ in range(6))).to(DEVICE)


def gradients(model, sample):
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    model(sample).square().mean().backward()
    return [it.grad.cpu() for it in model.parameters()]


def test_two_devices_do_not_mix_and_copies_are_late():
    here = torch.ones(1000, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(1000)
    host, side = torch.zeros(1000, pin_memory=True), torch.Stream(DEVICE)
    with side:
        host.copy_(here, non_blocking=True)
        copied = side.record_event()
    assert not host.any()
    copied.synchronize()
    assert host.all()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("techniques", [("keep", "recompute"), ("keep", "offload")], ids=str)
def test_a_step_keeps_its_budget_by_the_devices_own_count(techniques, late):
    COUNTS.run_late(late)
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    expected = gradients(copy.deepcopy(model), sample)
    mine = plan(model, sample, "60%", techniques=techniques, device=LINK, profile=False)
    gradients(mine, sample)
    mine.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    resident = sum(it.nbytes for it in (*mine.parameters(), sample))
    before = COUNTS.allocated() - resident
    crossed, asked, was_late = COUNTS.copies_to_host(), COUNTS.scalars(), COUNTS.late_copies()
    COUNTS.reset_peak()
    mine(sample).square().mean().backward()
    # The loss is outside of the plan; blocks are rounded up to 512 bytes.
    storages = len(mine.sn_memory.latest_trace.graph.storages)
    assert COUNTS.peak() - before <= mine.sn_memory.plan.peak_bytes + 512 * storages
    assert COUNTS.scalars() == asked
    moves = COUNTS.late_copies() - was_late
    assert COUNTS.copies_to_host() - crossed <= moves
    assert bool(moves) == ("offload" in techniques)
    assert all(map(torch.equal, gradients(mine, sample), expected))


def test_who_does_not_wait_is_found_out(monkeypatch):
    """Otherwise the tests beside this one prove nothing."""
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    expected = gradients(copy.deepcopy(model), sample)
    mine = plan(model, sample, "60%", techniques=("keep", "offload"), device=LINK, profile=False)
    monkeypatch.setattr(StreamLanes, "wait", lambda self, ticket: None)
    assert not all(map(torch.equal, gradients(mine, sample), expected))


def test_backward_returns_when_gradients_are_on_the_host(monkeypatch):
    """Ops of the device wait for copies by themselves; the program, which reads `.grad`, must."""
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = gradients(copy.deepcopy(model), sample)
    mine = plan(
        model, sample, "40%", optimizer=optimizer, state="host", device=LINK, profile=False,
        time_limit_s=0.5,
    )  # fmt: skip
    on_host = [it for it in mine.parameters() if it.device.type == "cpu"]
    assert on_host
    finished, own = [], StreamLanes.finish
    monkeypatch.setattr(
        StreamLanes, "finish", lambda self, ticket: (finished.append(ticket), own(self, ticket))
    )
    found = gradients(mine, sample)
    assert len(finished) == len(on_host)
    assert all(map(torch.equal, found, expected))


def test_a_trace_goes_backward_in_its_own_thread():
    """In autograd's, the last gradients could outlive the call: "leaves a result"."""
    threads = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient * 2

    class Net(nn.Linear):
        def forward(self, x):
            return Doubled.apply(super().forward(x))

    trace(Net(8, 8).to(DEVICE), torch.ones(4, 8, device=DEVICE), profile=False)
    assert threads[0] == threading.get_ident()  # the recorded pass; the second one is measured


def test_inputs_of_the_host_go_where_the_model_works():
    """`generate` of transformers puts tokens where the first parameter is, and it rests."""
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = copy.deepcopy(model).eval()(sample)
    mine = plan(
        model, sample, "40%", optimizer=optimizer, state="host", device=LINK, profile=False,
        time_limit_s=0.5,
    )  # fmt: skip
    assert next(mine.parameters()).device.type == "cpu"
    mine.eval()
    with torch.no_grad():
        assert torch.equal(mine(sample.cpu()), expected)
    assert torch.equal(mine(sample.cpu()), expected)


def test_pinned_blocks_are_storages_of_their_own_and_speeds_are_measured():
    buffers = PinnedState(DEVICE)
    first, second = (buffers.empty_like(torch.empty(3, 5)) for _ in range(2))
    assert first.is_pinned()
    assert first.untyped_storage().nbytes() == first.nbytes
    second.fill_(1)
    assert not first.any()
    large = buffers.empty_like(torch.empty(1 << 25))
    assert large.is_pinned()
    assert buffers.nbytes == (1 << 26) + (1 << 27)
    assert all(it > 0 for it in buffers.speeds())
    with pytest.raises(ValueError, match="separate memory and streams"):
        PinnedState("cpu")


class Pools:
    """What `torch.cuda` has of pools: notes who allocates from which."""

    def __init__(self, monkeypatch):
        self.depth, self.entered, self.first, self.made = {}, [], [], 0
        module = torch.mock
        for name, value in {
            "MemPool": self.new,
            "use_mem_pool": self.use,
            "caching_allocator_alloc": lambda size, device: self.first.append(size),
            "caching_allocator_delete": lambda pointer: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)

    def new(self):
        self.made += 1
        return object()

    @contextmanager
    def use(self, pool, device=None):
        me = threading.get_ident()
        assert not self.depth.get(me)
        self.depth[me] = 1
        self.entered.append((me, pool))
        try:
            yield
        finally:
            self.depth[me] = 0


def test_a_planned_model_has_a_pool_of_its_own_in_each_thread_that_runs_it(monkeypatch):
    pools = Pools(monkeypatch)
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    expected = gradients(copy.deepcopy(model), sample)
    mine = plan(model, sample, "60%", device=LINK, profile=False)
    assert not pools.made  # it was tried without, beside the model's own step
    step = mine.sn_memory.latest
    step.plan = dataclasses.replace(step.plan, reserved_peak_bytes=1 << 22, pool_bytes=1 << 20)
    assert all(map(torch.equal, gradients(mine, sample), expected))
    assert (pools.made, pools.first) == (1, [1 << 20])
    # The forward pass here, the backward pass in autograd's thread; all have left it again.
    assert len({me for me, _ in pools.entered}) == 2
    assert len({pool for _, pool in pools.entered}) == 1
    assert not any(pools.depth.values())
    gradients(mine, sample)
    assert pools.made == 1
    mine.sn_memory.release()
    assert all(map(torch.equal, gradients(mine, sample), expected))
    assert pools.made == 2
    # What fails inside leaves it, too. Without gradients: a warning would come first of what a step
    # that finds some takes beyond the budget.
    mine.zero_grad()
    with pytest.raises(RuntimeError):
        mine(sample.cpu())
    assert not any(pools.depth.values())


@pytest.fixture(scope="module")
def opened():
    """The placing allocator over the host's memory; what is allocated by it stays in use."""
    return PlacingAllocator("host")


@pytest.fixture
def placed(opened, monkeypatch):
    """The device allocates by the placing allocator, as CUDA with `use_placing_allocator`."""
    library = ctypes.CDLL(str(library_path()))
    malloc, free = (
        ctypes.cast(getattr(library, f"sn_placing_{name}"), ctypes.c_void_p).value
        for name in ("malloc", "free")
    )
    monkeypatch.setattr(placing, "_active", opened)
    monkeypatch.setattr(placing, "_DEVICE_TYPE", DEVICE.type)
    stream_of = lambda device: torch.accelerator.current_stream(device).stream_id  # noqa: E731
    monkeypatch.setattr(placing, "stream_of", stream_of)
    COUNTS.allocate_by(malloc, free)
    yield opened
    COUNTS.allocate_by(0, 0)


def test_too_much_for_the_placing_allocator_is_an_error_of_torchs(placed):
    with pytest.raises(RuntimeError, match="placing allocator: out of memory: 1125899906842624"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    assert not placed.statistics().bad_frees


@pytest.mark.parametrize("holds_output", [False, True])
@pytest.mark.parametrize("techniques", [("keep", "recompute"), ("keep", "offload")], ids=str)
def test_a_planned_model_lies_where_it_was_packed(placed, techniques, holds_output):
    model, sample = net(), torch.randn(256, 64, device=DEVICE)
    expected = gradients(copy.deepcopy(model), sample)
    mine = plan(model, sample, "60%", techniques=techniques, device=LINK, profile=False)
    assert not placed.statistics().arena_bytes  # it was tried without
    step = mine.sn_memory.latest
    step.plan = dataclasses.replace(step.plan, reserved_peak_bytes=1 << 22)
    reserved = []
    for turn in range(5):
        torch.manual_seed(5)
        mine.zero_grad(set_to_none=True)
        output = mine(sample)
        output.square().mean().backward()
        if not holds_output:
            output = None
        got = [it.grad.cpu() for it in mine.parameters()]
        assert all(map(torch.equal, got, expected))
        now = placed.statistics()
        reserved.append(now.reserved_bytes)
        found = placed.step_statistics(mine.sn_memory.pool._arena, step.number)
        if turn == 0:
            assert (found.hits, found.misses, now.arena_bytes) == (0, 0, 0)
        else:
            assert (found.misses, found.skipped) == (0, 0)
            assert found.hits > 60
            # What outlives a step lies in classes.
            assert found.kept == holds_output
            assert now.arena_bytes <= -(-step.plan.peak_bytes // GRANULE) * GRANULE
    assert len(set(reserved[1:])) == 1
    assert not placed.statistics().bad_frees
    mine.sn_memory.release()
    mine.zero_grad(set_to_none=True)
    assert not placed.statistics().arena_bytes
    assert all(map(torch.equal, gradients(mine, sample), expected))
    arenas = placed.statistics().arena_bytes
    del mine, model, step, output
    gc.collect()
    assert arenas
    assert not placed.statistics().arena_bytes


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("compression", [
    FFTCompression.using(theta=0.9),
    FFTCompression.using(theta=0.9, transform="dct"),
    LowRankCompression.using(ratio=20, warmup=1),
    AutoCompression.using(ratio=20, warmup=1),
], ids=["fft", "dct", "low rank", "auto"])  # fmt: skip
def test_a_compressed_step_asks_the_device_for_nothing(tmp_path, compression, late):
    """No value crosses over but the flag of damage, which is copied to pinned memory."""
    COUNTS.run_late(late)
    init_alone(DEVICE.type, tmp_path / "meet")
    try:
        model = net()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, compression_hook)
        sample = torch.randn(256, 64, device=DEVICE)
        for _ in range(4):
            ddp.zero_grad()
            ddp(sample).square().mean().backward()
        before = COUNTS.copies_to_host(), COUNTS.scalars()
        for _ in range(3):
            ddp.zero_grad()
            ddp(sample).square().mean().backward()
        crossed, asked = COUNTS.copies_to_host() - before[0], COUNTS.scalars() - before[1]
        assert asked == 0
        assert crossed <= 3
        assert all(it.grad.isfinite().all() for it in ddp.parameters())
    finally:
        torch.distributed.destroy_process_group()
