"""What GossipOptimizer has to do, rank by rank: run by threads and by real ranks.

The reference trains all ranks in one place, with the mixing matrix of each step and nothing of
GossipOptimizer.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sn_compress import CompressError, codec
from sn_compress.gossip import consensus_distance, topology
from sn_compress.torch.gossip import GossipOptimizer, ring_shuffle

STEPS = 9


@dataclass
class World:
    """The ranks of a run as seen from one.

    places : arguments of GossipOptimizer, one for each transport
    gather : from what this rank has to a list of what all have
    folder : for files
    """

    rank: int
    size: int
    places: list[dict[str, Any]]
    gather: Callable[[Any], list[Any]]
    folder: Path


torch.manual_seed(0)
FIRST = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 16))


def net(dtype=torch.float32):
    return copy.deepcopy(FIRST).to(dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 64, generator=generator).to(dtype)
    return x, torch.randint(0, 16, (8,), generator=generator)


def backward(model, optimizer, step, rank):
    optimizer.zero_grad()
    x, y = batch(step, rank, next(model.parameters()).dtype)
    nn.functional.cross_entropy(model(x).float(), y).backward()


def run(world, model, optimizer, steps):
    for step in steps:
        backward(model, optimizer, step, world.rank)
        optimizer.step()


def trained(world, steps=STEPS, make=sgd, dtype=torch.float32, place=None, **settings):
    model = net(dtype)
    optimizer = GossipOptimizer(make(model), **(place or world.places[0]), **settings)
    run(world, model, optimizer, range(steps))
    return model, optimizer


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def everyone(world, model):
    """Weights of all ranks, [ranks, n]."""
    return torch.stack(world.gather(flat(model)))


def reference(graph, *, overlap, make=sgd, momentum=0):
    """Weights of all ranks after STEPS, [ranks, n]."""
    models = [net() for _ in range(graph.ranks)]
    optimizers = [make(model) for model in models]

    def mixed(vectors, meeting):
        """What mixing adds to each rank's vector."""
        return [
            w * (vectors[source] - v)
            for v, source, w in zip(vectors, meeting.sources, meeting.weights, strict=True)
        ]

    def add(tensors, delta):
        for tensor, part in zip(tensors, delta.split([t.numel() for t in tensors]), strict=True):
            tensor.data.add_(part.view_as(tensor))

    def each(what):
        return [torch.cat([t.detach().reshape(-1) for t in what(i)]) for i in range(graph.ranks)]

    def buffers(i):
        states = [optimizers[i].state.get(p, {}) for p in models[i].parameters()]
        return [s["momentum_buffer"] for s in states if "momentum_buffer" in s]

    for step in range(STEPS):
        meeting = graph.at(step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, optimizer, step, rank)
        turn = momentum and step % momentum == 0
        parts = [lambda i: list(models[i].parameters())] + [buffers] * bool(turn)
        before = [each(part) for part in parts if part(0)]
        for optimizer in optimizers:
            optimizer.step()
        if not overlap:
            before = [each(part) for part in parts]
        for part, vectors in zip(parts, before, strict=False):
            for i, delta in enumerate(mixed(vectors, meeting)):
                add(part(i), delta)
    return torch.stack([flat(model) for model in models])


def rules(world, **settings):
    """Both transports, both orders, every topology: the same bits as the reference."""
    names = ["dissemination", "exact"]
    if world.size in (2, 4):
        names += ["exponential", "hypercube", "ring"]
    for name in names[:1] if settings else names:
        for overlap in (True, False) if name == names[0] else (True,):
            expected = reference(topology(name, world.size), overlap=overlap, **settings)
            for place in world.places:
                model, _ = trained(world, topology=name, overlap=overlap, place=place, **settings)
                assert torch.equal(flat(model), expected[world.rank]), (name, overlap, place)
    assert not torch.equal(expected[0], expected[1]), "replicas were to differ"


def buckets(world):
    """Many small messages are as one."""
    whole, _ = trained(world)
    parts, optimizer = trained(world, bucket_bytes=1000)
    assert len(optimizer._sn.buckets) > 2
    assert torch.equal(flat(whole), flat(parts))


def kinds(world):
    """Other optimizers, half precision, a scheduler; the overlapped learning rate is the whole."""
    model, optimizer = trained(
        world, make=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), momentum=1
    )
    assert torch.isfinite(flat(model)).all()
    assert isinstance(optimizer, torch.optim.Optimizer)
    model, optimizer = trained(world, dtype=torch.bfloat16, limit=1e-9, every=2)
    assert flat(model).dtype == torch.bfloat16
    assert optimizer.report()["averages"] > 0
    # All ranks the same data: gossip must then change nothing at all.
    for schedule_first in (False, True):
        alone, model = net(), net()
        plain, mine = sgd(alone), sgd(model)
        schedules = [torch.optim.lr_scheduler.StepLR(plain, 3, 0.5)]
        if schedule_first:
            schedules.append(torch.optim.lr_scheduler.StepLR(mine, 3, 0.5))
        gossip = GossipOptimizer(mine, **world.places[0])
        if not schedule_first:
            schedules.append(torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5))
        for step in range(STEPS):
            for who, optimizer in ((alone, plain), (model, gossip)):
                backward(who, optimizer, step, 0)
                optimizer.step()
            for schedule in schedules:
                schedule.step()
        assert gossip.report()["steps"] == STEPS
        assert torch.equal(flat(alone), flat(model))


def consensus(world):
    """All ranks get the exact mean, buffers too, and go on from there."""
    for place in world.places:
        model, optimizer = trained(world, place=place)
        norm = nn.BatchNorm1d(4)
        norm.running_mean.fill_(world.rank)
        expected = everyone(world, model).double().mean(0)
        optimizer.consensus(also=norm.buffers())
        found = everyone(world, model)
        assert torch.equal(found, found[:1].expand_as(found))
        # A sum of up to four floats, and a division: an ulp each.
        torch.testing.assert_close(found[0].double(), expected, rtol=5e-7, atol=1e-7)
        assert torch.equal(norm.running_mean, torch.full((4,), (world.size - 1) / 2))
        momentum = optimizer.state[next(model.parameters())]["momentum_buffer"]
        momenta = torch.stack(world.gather(momentum))
        assert torch.equal(momenta, momenta[:1].expand_as(momenta))
        run(world, model, optimizer, [STEPS])
        assert optimizer.report()["averages"] == 1


def unequal_momenta(world):
    """Ranks have momentum of unlike parameters, one of as many as the mean: none is averaged."""
    model = net()
    optimizer = GossipOptimizer(sgd(model), **world.places[0])
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = torch.ones_like(parameter) if place < world.rank else None
    optimizer.step()
    optimizer.consensus()
    found = everyone(world, model)
    assert torch.equal(found, found[:1].expand_as(found))


def coded(world):
    """Differences by codec: few bytes, replicas stay together, both transports the same bits."""
    settings = {"codec": codec("topk", theta=0.9), "steps": 40}
    model, optimizer = trained(world, **settings)
    for place in world.places[1:]:
        assert torch.equal(flat(model), flat(trained(world, place=place, **settings)[0]))
    dense = 4 * flat(model).numel()
    assert optimizer.report()["bytes_per_step"] < dense / 4
    alone = net()
    run(world, alone, sgd(alone), range(40))
    apart, lonely = (consensus_distance(everyone(world, it)) for it in (model, alone))
    assert apart < 0.7 * lonely, (apart, lonely)
    optimizer.consensus()
    run(world, model, optimizer, [40])


def settles(world):
    """Few values a message: once nobody learns any more, ranks come together, not apart."""
    model, optimizer = trained(world, codec=codec("topk", theta=0.98), steps=30)
    start = consensus_distance(everyone(world, model))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    found = []
    for first in (30, 150, 270):
        run(world, model, optimizer, range(first, first + 120))
        found.append(consensus_distance(everyone(world, model)))
    assert found[-1] < 0.7 * start, (start, found)
    assert found == sorted(found, reverse=True), found


def resume(world):
    """A run saved and loaded in the middle has the bits of one that was not."""
    for settings in (
        {},
        {"overlap": False},
        {"momentum": 2},
        {"codec": codec("topk", theta=0.9)},
        {"codec": codec("topk", theta=0.9), "overlap": False},
    ):
        whole, _ = trained(world, **settings)
        model, optimizer = trained(world, steps=4, **settings)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        path = f"{world.folder}/rank{world.rank}.pt"
        torch.save(saved, path)
        saved = torch.load(path, weights_only=True)
        later = net()
        resumed = GossipOptimizer(sgd(later), **world.places[0], **settings)
        later.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for who, optimizer_ in ((later, resumed), (model, optimizer)):  # saving disturbs nothing
            run(world, who, optimizer_, range(4, STEPS))
            assert torch.equal(flat(who), flat(whole)), settings


def copies(world):
    """Plain optimizers with the same state; copy.deepcopy's had no partners, pickle refused."""
    model, optimizer = trained(world, steps=2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.SGD
        mine, others = optimizer.state.values(), other.state.values()
        for one, two in zip(mine, others, strict=True):
            assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
        other.step()
    run(world, model, optimizer, range(2, 4))


def limit(world):
    """The spread is measured; above the limit all ranks take the mean, at the same step."""
    _, optimizer = trained(world, every=2)
    assert optimizer.report()["averages"] == 0
    spreads = world.gather(optimizer.spread)
    assert spreads[0] > 0
    assert len(set(spreads)) == 1
    for overlap in (True, False):
        _, optimizer = trained(world, every=2, limit=spreads[0] / 3, overlap=overlap)
        counts = world.gather(optimizer.report()["averages"])
        # Two ranks that have just averaged what is after the step are one.
        assert (counts[0] > 0) == (overlap or world.size > 2)
        assert len(set(counts)) == 1


def spread(world):
    """What is measured is what there is, with a codec too; taken in a step later."""
    for settings in ({}, {"codec": codec("topk", theta=0.98), "pull": 0.5}):
        model, _ = trained(world, steps=STEPS - 1, **settings)
        replicas = everyone(world, model).double()
        apart = (replicas - replicas.mean(0)).square().sum() / replicas.square().sum()
        for most in (4 * 2**20, 5000):
            _, optimizer = trained(world, every=1, bucket_bytes=most, **settings)
            # The sketch's standard deviation is 4 % where rows deviate independently.
            assert optimizer.spread == pytest.approx(apart.sqrt().item(), rel=0.15), settings


def differ(world):
    """What differs among ranks is an error on all of them; what it says, can be done."""
    model = net()
    optimizer = GossipOptimizer(sgd(model), **world.places[0])
    with torch.no_grad():
        model[0].bias.add_(world.rank)
    backward(model, optimizer, 0, world.rank)
    with pytest.raises(CompressError, match="different weights"):
        optimizer.step()
    optimizer.consensus()
    optimizer.step()
    odd = world.rank == 1
    longer = nn.Sequential(*FIRST, nn.Linear(16, 16))
    for words, model, options in (
        ("setting overlap: False on rank 0, True on rank 1", net(), {"overlap": odd}),
        ("setting bucket_bytes: 4000 on rank 0", net(), {"bucket_bytes": 4000 - 3000 * odd}),
        ("setting pull", net(), {"pull": 0.5 if odd else 0.25, "codec": codec("fft", theta=0.5)}),
        ("tensor", longer if odd else net(), {}),
    ):
        with pytest.raises(CompressError, match="ranks have different settings") as raised:
            GossipOptimizer(sgd(model), **options, **world.places[0])
        every = world.gather(str(raised.value))
        assert len(set(every)) == 1, every
        assert words in every[0], every[0]


def grown(world):
    """What is trained and would not be averaged is an error: added, or unfrozen, later."""
    for unfreezes in (False, True):
        model, more = net(), nn.Linear(16, 16)
        more.requires_grad_(not unfreezes)
        optimizer = torch.optim.SGD(chain(model.parameters(), more.parameters()), lr=0.05)
        if not unfreezes:
            optimizer = sgd(model)
        optimizer = GossipOptimizer(optimizer, **world.places[0])
        run(world, model, optimizer, [0])
        if unfreezes:
            more.requires_grad_(True)
        else:
            optimizer.add_param_group({"params": more.parameters()})
        with pytest.raises(CompressError, match=r"\(16, 16\) was added to the optimizer"):
            optimizer.step()
        optimizer.consensus()


def counted(world):
    """Exact averages, and what ranks agree on, are in the report."""
    model, optimizer = trained(world)
    size = 4 * flat(model).numel()
    first = optimizer.report()
    assert first["average_bytes"] == 0
    optimizer.consensus()
    second = optimizer.report()
    assert second["average_bytes"] == 2 * size, "weights, and momenta of the same size"
    assert second["bytes_per_step"] == first["bytes_per_step"] == size
    start = size if world.rank == 0 else 0
    # To agree on settings and on weights, 17 words each, and once to measure: 258 numbers.
    assert first["other_bytes"] == start + 8 * (17 + 17 + 258), first


def scaler(world):
    """One rank finds Inf: it skips its own step, and its partner still gets its weights."""
    model = net()
    optimizer = GossipOptimizer(sgd(model), overlap=False, **world.places[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, world.rank)
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 4 and world.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(everyone(world, model)).all()
    assert scaler.get_scale() == (32 if world.rank == 1 else 64)
    expected, _ = trained(world, overlap=False)
    # The step that was lost was one of nine of one rank.
    assert 0 < (flat(model) - flat(expected)).norm() < 0.2 * flat(expected).norm()


def ring(world):
    """Samples go round while gossip does: none is lost, each is on every rank once."""
    counts = [10 + rank for rank in range(world.size)]
    start, everything = sum(counts[: world.rank]), list(range(sum(counts)))
    for place in world.places:
        x = torch.arange(start, start + counts[world.rank])
        stage = ring_shuffle(x, x.float() / 2, batch_size=4, **place)
        loader = torch.utils.data.DataLoader(stage, batch_size=None)
        assert len(loader) == -(-max(counts) // 4)
        model = net()
        optimizer = GossipOptimizer(sgd(model), **place)
        mine = []
        # An epoch that all give up is for threads: under Horovod it hung once, in some twenty runs,
        # whether by this epoch or by chance is open.
        threads = len(world.places) == 1
        for epoch in range(world.size + threads):
            if epoch == world.size:
                next(iter(loader))  # given up by all
                stage.load_state_dict(stage.state_dict())
                assert sorted(mine) == everything
            used = []
            for step, (numbers, halves) in enumerate(loader):
                assert torch.equal(numbers.float() / 2, halves)
                used += numbers.tolist()
                backward(model, optimizer, step, world.rank)
                optimizer.step()
            assert sorted(chain(*world.gather(used))) == everything
            mine += used
        assert set(mine) == set(everything)


CASES = {
    "weights": rules, "momentum": lambda world: rules(world, momentum=2),
    "buckets": buckets, "kinds": kinds, "consensus": consensus, "coded": coded, "settles": settles,
    "unequal-momenta": unequal_momenta,
    "resume": resume, "limit": limit, "spread": spread, "differ": differ, "counted": counted,
    "scaler": scaler, "ring": ring, "grown": grown, "copies": copies,
}  # fmt: skip
