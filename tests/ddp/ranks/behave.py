"""One rank: what the hook does, one function a case."""

import copy

import torch
import torch.distributed as dist
from cases import (
    EXACT,
    FFT,
    LAST,
    LOSSY,
    RANK,
    RANKS,
    SHARED,
    Ledger,
    apply,
    assert_alike,
    assert_equal,
    batch,
    everyone,
    gathered,
    hooked,
    loss_of,
    mean,
    message_of,
    net,
    own_memory,
    same_on_all,
    sgd,
    state_of,
    train,
    weights_of,
    wrap,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState


def ranks_stay_bit_identical():
    for way, compression, dtype, options in (
        ("fft", FFTCompression, torch.float32, {}),
        ("fft fp16", FFTCompression, torch.float16, {}),
        ("fft bf16", FFTCompression, torch.bfloat16, {"gradient_as_bucket_view": True}),
        ("paper", FFTCompression.using(mode="paper", theta=0.9), torch.float32, {}),
        ("low rank", SHARED, torch.float32, {"static_graph": True}),
        ("low rank bf16", SHARED, torch.bfloat16, {}),
    ):
        model = net().to(dtype)
        start = weights_of(model)
        ddp = wrap(model, CompressionState(compression), **options)
        optimizer = sgd(model, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            ddp(batch(step).to(dtype)).float().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert same_on_all(norm.reshape(1)), way
            optimizer.step()
        assert_alike(model, way)
        assert not any(map(torch.equal, model.parameters(), start)), way


class Both(nn.Module):
    """A net, a parameter in another layout, and a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = net(), nn.Conv2d(1, 1, 1)
        spare = torch.zeros(32, 3, 8, 8).to(memory_format=torch.channels_last)
        self.spare = nn.Parameter(spare)

    def forward(self, x):
        picture = torch.arange(192.0).view(1, 3, 8, 8)
        return self.net(x).square().mean() + (self.spare * picture).sum() * x[0, 0]


def mean_is_the_mean():
    """Keeping every bin at half precision, the result is the plain mean up to rounding."""
    both, state = Both(), CompressionState(EXACT)
    own = copy.deepcopy(both)
    own(batch(0)).backward()
    ddp = wrap(both, state, find_unused_parameters=True)
    ddp(batch(0)).backward()
    for (name, p), q in zip(both.named_parameters(), own.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        # Half precision rounds each coefficient by 2**-11 relative; the transform keeps norms.
        largest = max(g.norm() for g in gathered(q.grad))
        assert (p.grad - mean(q.grad)).norm() <= 2**-10 * largest, name
    report = state.report()
    # 64*96, 96*64, 64*64, 64*16 and 32*3*8*8 elements are compressed, small ones are not.
    assert report["tensors"] == 5, report
    assert report["elements"] == 2 * 6144 + 4096 + 1024 + 6144, report


def nothing_is_lost():
    """What came in went out or is in the memory, over several layouts of the buckets."""
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        ledger, optimizer = Ledger(model), sgd(model)
        layouts, start = [], state.rounds

        def spy(flats, futures, layouts=layouts, start=start):
            layouts.extend([part.name for part in parts] for _, parts in flats)
            return start(flats, futures)

        state.rounds = spy
        for step in range(6):
            ledger.owe(step)
            apply(ddp, optimizer, step)
            ledger.pay()
        ledger.check(state)
        first = layouts[: len(layouts) // 6]
        assert len(first) > 1, layouts
        assert layouts[-1] not in first, f"the buckets were to be rebuilt: {layouts}"


def nothing_is_lost_when_accumulating():
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        ledger = Ledger(model)
        for step in range(0, 15, 3):
            ledger.owe(step, step + 1, step + 2)
            model.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, step).backward()
                loss_of(ddp, step + 1).backward()
            loss_of(ddp, step + 2).backward()
            ledger.pay()
        ledger.check(state)
        assert state.report()["steps"] == 5


class Forked(nn.Module):
    """Layer `odd` is used by some ranks in some steps, by none in steps 2 and 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.odd = nn.Linear(64, 64), nn.Linear(64, 64)
        self.step = 0

    def forward(self, x):
        x = self.always(x)
        uses = self.step not in (2, 4) and (RANK + self.step) % 2 == 0
        return self.odd(x) if uses else x


def nothing_is_lost_when_unused():
    often_dense = LowRankCompression.using(ratio=20, warmup=1, every=4)  # in step 4, too
    for compression in (*LOSSY, often_dense):
        model = Forked()
        ddp, state = hooked(model, compression, find_unused_parameters=True)
        ledger = Ledger(model)
        for step in range(8):  # by nodes the seventh is dense, after which nothing is left to send
            model.step = step
            ledger.owe(step)
            model.zero_grad()
            loss_of(ddp, step).backward()
            assert (model.odd.weight.grad is None) == (step in (2, 4)), "no rank has used it"
            ledger.pay()
        ledger.check(state)


def not_a_number_reaches_all():
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        for bad in (1.0, 1.0, float("nan"), float("inf"), -float("inf")):
            model.zero_grad()
            (ddp(batch(0)).sum() * (bad if LAST else 1.0)).backward()
            for name, parameter in model.named_parameters():
                # Blocks of finite values may arrive, on all ranks the same ones.
                assert torch.isfinite(parameter.grad).all() == (bad == 1.0), name
                assert same_on_all(parameter.grad.isfinite().byte()), name
                assert torch.isfinite(own_memory(state, name, parameter)).all(), name
        model.zero_grad()
        loss_of(ddp, 0).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters()), "gone afterwards"


def resumed_run_is_bit_equal():
    """From this rank's state; that of all ranks gives the same, and their mean to one rank."""
    name = "0.weight"
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        train(ddp, range(4))
        saved, weights = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
        if RANKS > 2 or compression is LOSSY[2]:
            # A new DDP has other buckets in its first step, and Gloo's ring sums what travels
            # plain in an order that follows from its place there: so it is in plain DDP too. And
            # who remembers what was rounded off a mean follows from the bucket.
            ddp = wrap(model, state)
        train(ddp, range(4, 8))

        def loaded(states, again, *group, compression=compression):
            fresh = state_of(compression, again, *group)
            fresh.load_state_dict(states)
            return fresh, own_memory(fresh, name, again[0].weight)

        again = net(seed=1)
        again.load_state_dict(weights)
        resumed, own = loaded(saved, again)
        own = own.clone()
        assert own.any()
        train(wrap(again, resumed), range(4, 8))
        assert_equal(model.parameters(), again.parameters())

        every, alone, expected = everyone(saved), dist.new_group([0]), mean(own)
        assert torch.equal(loaded(every, again)[1], own)
        if RANK == 0:
            shrunk, kept = loaded(every, again, alone)
            # Transformed there and back, and rounded to float32 once.
            assert (kept - expected).norm() <= 1e-5 * expected.norm()
            for wrong, words in ((saved, "expected this rank's own"), ({}, "state_dict()")):
                said = message_of(lambda state=shrunk, wrong=wrong: state.load_state_dict(wrong))
                assert words in said, said


class Weighed(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, factors):
        pairs = zip(self.model.parameters(), factors, strict=True)
        return sum((parameter * factor).sum() for parameter, factor in pairs)


def a_size_that_was_outgrown_is_chosen_anew():
    """Its ranks vote in one collective more, in few steps; all give the tensor more, or hang."""
    generator = torch.Generator().manual_seed(3)
    sides = [torch.linalg.qr(torch.randn(64, 12, generator=generator))[0] for _ in range(4)]
    many, late = sides[0] @ sides[1].T, sides[2] @ sides[3].T
    faint = 1e-3 * torch.ones(64, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    state = state_of(LowRankCompression.using(ratio=20, warmup=1), model)
    ddp = wrap(Weighed(model), state, bucket_cap_mb=25)
    optimizer, sizes = sgd(model, 1e-3), []
    for step in range(60):
        noise = 1e-3 * batch(step, 64, 64)
        optimizer.zero_grad()
        ddp([many + noise, faint if step < 10 else late + noise]).backward()
        optimizer.step()
        assert same_on_all(model[1].weight.grad)
        chosen = state.engine.shared.tensors["1.weight"].size
        sizes.append(chosen.size if chosen else None)
    assert (sizes[1], sizes[-1]) == (1, max(size or 0 for size in sizes)), sizes
    assert sizes[-1] > 2, sizes


def plain_travels_as_plain():
    """Double precision and sparse gradients: as without the hook."""
    bag = nn.EmbeddingBag(512, 64, sparse=True, mode="sum")
    dist.broadcast(bag.weight.data, 0)
    for ours, x in (
        (net().double(), batch(0).double()),
        (bag, torch.tensor([[RANK, 100]])),
    ):
        stock = copy.deepcopy(ours)
        for ddp in (
            wrap(ours, CompressionState(LowRankCompression)),
            DistributedDataParallel(stock, bucket_cap_mb=0.02),
        ):
            ddp(x).square().sum().backward()
        for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
            a, b = (g.to_dense() if g.is_sparse else g for g in (p.grad, q.grad))
            # The sum of the same numbers, which buckets of other sizes may take in another order.
            assert torch.allclose(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-14), a - b


def damage_reaches_every_rank():
    """Of what is gathered, of what one owner alone is sent, and of sums."""
    for compression, name in (
        (FFT, "gather"), *([(FFT, "all_to_all")] if RANKS > 2 else []), (SHARED, "sum"),
    ):  # fmt: skip
        ddp, state = hooked(net(), compression)
        for step in range(3 if name == "sum" else 0):
            loss_of(ddp, step).backward()
        send = getattr(state.collectives, name)

        def flip(wire, *sizes, send=send, name=name):
            if LAST and (name != "sum" or wire.dtype == torch.int32):
                wire[7 if name == "sum" else 40] ^= 1
            return send(wire, *sizes)

        setattr(state.collectives, name, flip)
        said = message_of(lambda ddp=ddp: loss_of(ddp, 3).backward())
        assert "checksum" in said or "see its traceback" in said, (name, said)


CASES = [
    ranks_stay_bit_identical, mean_is_the_mean, nothing_is_lost, nothing_is_lost_when_accumulating,
    nothing_is_lost_when_unused, not_a_number_reaches_all, resumed_run_is_bit_equal,
    plain_travels_as_plain, damage_reaches_every_rank, a_size_that_was_outgrown_is_chosen_anew,
]  # fmt: skip
