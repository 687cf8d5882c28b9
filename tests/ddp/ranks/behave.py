"""One rank: what the hook does, one function a case.

Run as `behave.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails with an assertion.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
from cases import RANK, RANKS, gathered, process_group, run, same_on_all
from cases import message_of as message_of_kind
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import CastCompression, CompressError, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

EXACT = FFTCompression.using(theta=0.0, values="fp16")
SHARED = LowRankCompression.using(warmup=2, ratio=20.0)
LOSSY = (FFTCompression.using(theta=0.9), SHARED, CastCompression.using(dtype="fp8"))
message_of = partial(message_of_kind, kinds=(CompressError, RuntimeError))


def net(seed=0):
    """Eight parameters: four that are compressed, one of them between small ones."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 16))


def wrap(model, state, **options):
    # Small, so that there are several buckets, and new ones after the first step.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    ddp.register_comm_hook(state, compression_hook)
    return ddp


def batch(step, size=8, features=64):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randn(size, features, generator=generator)


def loss_of(model, step):
    return model(batch(step)).square().mean()


def mean(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / RANKS


def residual(state, name, like):
    """What all ranks together have not sent yet, as a mean; of each node's, one rank has it."""
    own = own_memory(state, name, like)
    return mean(own if state.nodes is None else own * state.nodes.layout.size)


def own_memory(state, name, like):
    if name in state.feedback.state_dict()["memory"]:
        return torch.from_numpy(state.feedback.residual(name)).view(like.shape)
    if state.shared.remembers(name):
        return torch.from_numpy(state.shared.residual(name)).view(like.shape)
    return torch.zeros_like(like)


class Ledger:
    """Mean gradients that came in, and what went out: the difference is in the memory."""

    def __init__(self, model):
        self.model = model
        self.due = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.paid = copy.deepcopy(self.due)

    def owe(self, local):
        for name, gradient in local.items():
            self.due[name] += mean(gradient)

    def pay(self):
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.paid[name] += parameter.grad

    def check(self, state, scale=1.0):
        for name, due in self.due.items():
            kept = residual(state, name, due) / scale
            # Each of under 20 steps rounds sums of float32 as large as the gradients a few times,
            # and so does the transform: 20 * 2**-24 * log2(4096) = 1.4e-5 of the norm at worst.
            assert (self.paid[name] + kept - due).norm() <= 2e-5 * due.norm(), name
            if due.numel() >= 1024:
                assert (self.paid[name] - due).norm() > 1e-3 * due.norm(), "was it compressed?"


def local_gradients(model, steps):
    """The sum of this rank's own gradients, from a model that no hook is on; zeros if unused."""
    own = copy.deepcopy(model)
    own.zero_grad()
    for step in steps:
        loss_of(own, step).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in own.named_parameters()
    }


def ranks_stay_bit_identical():
    ways = {
        "fft": (FFTCompression, {}), "low rank": (LowRankCompression, {}),
        "static": (LowRankCompression, {"static_graph": True}),
        "bf16": (FFTCompression, {"dtype": torch.bfloat16}),
        "fp16": (FFTCompression, {"dtype": torch.float16}),
        "paper": (FFTCompression.using(mode="paper", theta=0.9), {}),
        "views": (FFTCompression, {"gradient_as_bucket_view": True}),
        "factors": (SHARED, {}), "factors bf16": (SHARED, {"dtype": torch.bfloat16}),
    }  # fmt: skip
    for way, (compression, options) in ways.items():
        dtype = options.pop("dtype", torch.float32)
        model = net().to(dtype)
        ddp = wrap(model, CompressionState(compression), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad()
            ddp(batch(step).to(dtype)).float().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert same_on_all(norm.reshape(1)), way
            optimizer.step()
        start = net().to(dtype)
        for parameter, first in zip(model.parameters(), start.parameters(), strict=True):
            assert same_on_all(parameter), way
            assert not torch.equal(parameter, first), way


def mean_is_the_mean():
    """Keeping every bin at half precision, the result is the plain mean up to rounding."""
    model = nn.Sequential(net(), nn.Conv2d(1, 1, 1))  # the convolution is never used
    model.register_parameter("spare", nn.Parameter(torch.zeros(32, 3, 8, 8)))
    model.spare.data = model.spare.to(memory_format=torch.channels_last)
    state = CompressionState(EXACT)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            picture = torch.arange(192.0).view(1, 3, 8, 8)
            return self.inner[0](x).square().mean() + (self.inner.spare * picture).sum() * x[0, 0]

    both = Both()
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
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp, ledger = wrap(model, state), Ledger(model)
        sizes = []
        start = state.rounds

        def spy(flats, futures, sizes=sizes, start=start):
            sizes.extend([part.name for part in parts] for _, parts in flats)
            return start(flats, futures)

        state.rounds = spy
        for step in range(6):
            ledger.owe(local_gradients(model, [step]))
            model.zero_grad()
            loss_of(ddp, step).backward()
            ledger.pay()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        ledger.check(state)
        first, last = sizes[: len(sizes) // 6], sizes[-2:]
        assert len(first) > 1, sizes
        assert last[-1] not in first, f"the buckets were to be rebuilt: {sizes}"


def nothing_is_lost_when_accumulating():
    for compression in LOSSY:
        model = net()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp, ledger = wrap(model, state), Ledger(model)
        for step in range(0, 15, 3):
            ledger.owe(local_gradients(model, range(step, step + 3)))
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
    for compression in LOSSY:
        model = Forked()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp = wrap(model, state, find_unused_parameters=True)
        ledger = Ledger(model)
        for step in range(7):
            model.step = step
            ledger.owe(local_gradients(model, [step]))
            model.zero_grad()
            loss_of(ddp, step).backward()
            if step in (2, 4):
                assert model.odd.weight.grad is None, "no rank has used it"
            ledger.pay()
        ledger.check(state)


def skipped_steps_are_taken_back():
    """Overflow on one rank: all skip, and the memory is what it was, in the new scale."""
    for compression in LOSSY:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        state = CompressionState(
            compression, named_parameters=model.named_parameters(), scaler=scaler
        )
        ddp, ledger = wrap(model, state), Ledger(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = set()
        for step in range(9):
            seen.add(scaler.get_scale())
            bad = step in (4, 5)
            if not bad:
                ledger.owe(local_gradients(model, [step]))
            optimizer.zero_grad()
            if bad and RANK == RANKS - 1:  # in one layer; what the others send is finite
                hook = model[-1].weight.register_hook(lambda gradient: gradient * float("inf"))
            scaler.scale(loss_of(ddp, step)).backward()
            if bad and RANK == RANKS - 1:
                hook.remove()
            scaler.unscale_(optimizer)
            before = model[0].weight.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(before, model[0].weight) == bad, step
            if not bad:
                ledger.pay()
            scaler.update()
        assert len(seen) >= 3, seen
        # The memory of the last step is in the scale it had then.
        state.state_dict()
        ledger.check(state, scaler.get_scale())


def not_a_number_reaches_all():
    for compression in LOSSY:
        model = net()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp = wrap(model, state)
        for bad in (1.0, 1.0, float("nan"), float("inf"), -float("inf")):
            model.zero_grad()
            (ddp(batch(0)).sum() * (bad if RANK == RANKS - 1 else 1.0)).backward()
            for name, parameter in model.named_parameters():
                # Blocks of finite values may arrive, on all ranks the same ones.
                assert torch.isfinite(parameter.grad).all() == (bad == 1.0), name
                assert same_on_all(parameter.grad.isfinite().byte()), name
                assert torch.isfinite(own_memory(state, name, parameter)).all(), name
        model.zero_grad()
        loss_of(ddp, 0).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters()), "gone afterwards"


def resumed_run_is_bit_equal():
    for compression in LOSSY:

        def run(model, ddp, steps):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in steps:
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                optimizer.step()

        model = net()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp = wrap(model, state)
        run(model, ddp, range(4))
        saved, weights = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
        if RANKS > 2 or compression is LOSSY[2]:
            # A new DDP has other buckets in its first step, and Gloo's ring sums what travels
            # plain in an order that follows from its place there: so it is in plain DDP too. And
            # who remembers what was rounded off a mean follows from the bucket.
            ddp = wrap(model, state)
        run(model, ddp, range(4, 8))

        again = net(seed=1)
        again.load_state_dict(weights)
        resumed = CompressionState(compression, named_parameters=again.named_parameters())
        resumed.load_state_dict(saved)
        run(again, wrap(again, resumed), range(4, 8))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)

        every = [None] * RANKS
        dist.all_gather_object(every, saved)
        from_list = CompressionState(compression, named_parameters=again.named_parameters())
        from_list.load_state_dict(every)
        # The memory as it was saved, not that of the run that has gone on.
        name, like = "0.weight", again[0].weight
        reloaded = CompressionState(compression, named_parameters=again.named_parameters())
        reloaded.load_state_dict(saved)
        own = own_memory(reloaded, name, like)
        assert torch.equal(own_memory(from_list, name, like), own)
        assert own.any()
        alone = dist.new_group([0])
        expected = mean(own)
        if RANK == 0:
            shrunk = CompressionState(compression, alone, named_parameters=again.named_parameters())
            shrunk.load_state_dict(every)
            # Transformed there and back, and rounded to float32 once.
            kept = own_memory(shrunk, name, like)
            assert (kept - expected).norm() <= 1e-5 * expected.norm()
            said = message_of(lambda state=shrunk, saved=saved: state.load_state_dict(saved))
            assert "expected this rank's own" in said, said
            said = message_of(lambda state=shrunk: state.load_state_dict({"memory": {}}))
            assert "state_dict()" in said, said


def a_size_that_was_outgrown_is_chosen_anew():
    """Its ranks vote in one collective more, in few steps; all give the tensor more, or hang."""
    generator = torch.Generator().manual_seed(3)
    sides = [torch.linalg.qr(torch.randn(64, 12, generator=generator))[0] for _ in range(4)]
    many, late = sides[0] @ sides[1].T, sides[2] @ sides[3].T
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    state = CompressionState(
        LowRankCompression.using(ratio=20, warmup=1), named_parameters=model.named_parameters()
    )
    ddp = DistributedDataParallel(Weighed(model))
    ddp.register_comm_hook(state, compression_hook)
    optimizer, sizes = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(60):
        faint = 1e-3 * torch.ones(64, 64)
        noise = 1e-3 * batch(step, 64, 64)
        optimizer.zero_grad()
        ddp([many + noise, faint if step < 10 else late + noise]).backward()
        optimizer.step()
        assert same_on_all(model[1].weight.grad)
        chosen = state.shared.tensors["1.weight"].size
        sizes.append(chosen.size if chosen else None)
    assert (sizes[1], sizes[-1]) == (1, max(size or 0 for size in sizes)), sizes
    assert sizes[-1] > 2, sizes


class Weighed(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, factors):
        pairs = zip(self.model.parameters(), factors, strict=True)
        return sum((parameter * factor).sum() for parameter, factor in pairs)


def plain_travels_as_plain():
    """Double precision and sparse gradients: the same bits as without the hook."""
    for make, x in (
        (lambda: net().double(), batch(0).double()),
        (lambda: nn.EmbeddingBag(512, 64, sparse=True, mode="sum"), torch.tensor([[RANK, 100]])),
    ):
        torch.manual_seed(0)
        ours = make()
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


def errors_reach_every_rank():
    def fails(state):
        model = net()
        ddp = wrap(model, state)
        return message_of(lambda: loss_of(ddp, 0).backward())

    said = fails(CompressionState(FFTCompression.using(theta=0.9 if RANK else 0.8)))
    assert "different settings" in said, said
    said = fails(CompressionState(LowRankCompression, named_parameters=net().named_parameters()))
    assert "named_parameters" in said, said

    for name in ("gather", "all_to_all")[: 1 if RANKS < 3 else 2]:
        damaged = CompressionState(FFTCompression)
        send = getattr(damaged.collectives, name)

        def flip(wire, *sizes, send=send):
            if RANK == RANKS - 1:
                wire[40] ^= 1
            return send(wire, *sizes)

        setattr(damaged.collectives, name, flip)
        said = fails(damaged)
        assert "checksum" in said or "see its traceback" in said, said
    shared = CompressionState(LowRankCompression.using(warmup=1))
    ddp = wrap(net(), shared)
    loss_of(ddp, 0).backward()
    add = shared.collectives.sum

    def flip_sum(tensor):
        if RANK == RANKS - 1 and tensor.dtype == torch.int32:
            tensor[7] ^= 1
        return add(tensor)

    shared.collectives.sum = flip_sum
    said = message_of(lambda: loss_of(ddp, 1).backward())
    assert "checksum" in said, said
    unnamed = CompressionState(LowRankCompression)
    ddp = wrap(net(), unnamed)
    loss_of(ddp, 0).backward()
    assert "names" in message_of(unnamed.state_dict)
    model, make = net(), CompressionState
    for call, words in (
        (lambda: make(model), "got a Sequential as compression; expected FFTCompression"),
        (lambda: make("fft"), "got 'fft' as compression"),
        (lambda: make(FFTCompression.settings), "got a Settings as compression"),
        (lambda: make(FFTCompression(theta=0.9)), "FFTCompression.using(theta=0.9)"),
        (lambda: make(nn.Linear), "got the class Linear as compression"),
        (lambda: make(dist.group.WORLD), "got a ProcessGroup as compression"),
        (lambda: make(FFTCompression, model), "got a Sequential as process_group"),
        (lambda: make(FFTCompression, unnamed), "got a CompressionState as process_group"),
    ):
        assert words in message_of(call), (words, message_of(call))
    for state in (None, FFTCompression, dist.group.WORLD):
        said = fails(state)
        assert "as its state; expected a CompressionState" in said, said


CASES = [
    ranks_stay_bit_identical, mean_is_the_mean, nothing_is_lost, nothing_is_lost_when_accumulating,
    nothing_is_lost_when_unused, skipped_steps_are_taken_back, not_a_number_reaches_all,
    resumed_run_is_bit_equal, plain_travels_as_plain, errors_reach_every_rank,
    a_size_that_was_outgrown_is_chosen_anew,
]  # fmt: skip

if __name__ == "__main__":
    with process_group():
        run(CASES)
