"""One rank: AutoCompression; the clock says that compression pays, or that it does not."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from cases import RANK, RANKS, assert_equal, everyone, hooked, wrap
from rank_programs import Clock, tuner_lines
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sn_compress import AutoCompression
from sn_compress.prediction import tuning
from sn_compress.prediction.rates import FREE
from sn_compress.torch.fsdp import compress_replicas
from sn_compress.torch.layout import Names

STEPS = 40


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64), nn.Linear(64, 16))


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tuned(state, clock, **options):
    """A tuner with this clock, which lets the codec cost nothing."""
    return tuning.Tuner(
        state.settings, ranks=RANKS,
        total=partial(state._total, torch.device("cpu"), state.collectives),
        clock=clock, plain="DDP", **({"rates": FREE} | options),
    )  # fmt: skip


def train(trial_s, **tuner):
    """Gradients that are known: what went in and what came out over all steps is compared."""
    model, clock = net(), Clock(RANK)
    ddp, state = hooked(model, AutoCompression)
    if trial_s is not None:
        state.engine.tuner = tuned(state, clock, **tuner)
    seen, due, paid = set(), {}, {}
    for step in range(STEPS):
        ddp.zero_grad()
        wanted = {}
        for place, (name, p) in enumerate(model.named_parameters()):
            parts = [noise(9000 * r + 10 * step + place, *p.shape) for r in range(RANKS)]
            wanted[name] = parts[RANK]
            due[name] = due.get(name, 0) + sum(parts) / RANKS
        x = ddp(torch.zeros(1, 64)).sum() * 0  # every parameter takes part
        (x + sum((p * wanted[n]).sum() for n, p in model.named_parameters())).backward()
        for name, p in model.named_parameters():
            paid[name] = paid.get(name, 0) + p.grad
        chosen = state.engine.tuner.choice
        assert everyone(chosen) == [chosen] * RANKS, "ranks chose differently"
        seen.add(chosen)
        clock.now += trial_s if trial_s and chosen != "plain" else 1.0
    missing = {name: (paid[name] - due[name]).norm() / due[name].norm() for name in due}
    return state, seen, missing


def the_real_clock():
    """Nobody knows what it says, but it says it once, and alike."""
    with tuner_lines(None) as said:
        state, _, _ = train(None)
    assert len([line for line in said if "predicted" in line]) == 1, said
    assert state.report()["tuned"] == 1
    assert len(set(everyone(state.report()["trial_step_s"]))) == 1


def it_pays():
    with tuner_lines() as said:
        state, seen, missing = train(0.5)
    assert "shared" in seen
    report = state.report()
    assert report["tuned_tensors"] > 1, report
    assert report["trial_step_s"] < report["plain_step_s"], report
    assert max(missing.values()) > 0.01, "was it compressed?"
    first, line = said
    assert "measuring" in first
    assert "ms plain" in line, line


def casts_pay_where_low_rank_takes_too_long():
    """They are tried, and stay or go by the clock; nothing is remembered, so nothing is left."""
    for trial_s in (0.5, 2.0):
        with tuner_lines(None) as said:
            slow = replace(FREE, pass_s=1.0, whole_s=1.0)
            state, seen, missing = train(trial_s, casts=True, rates=slow)
        assert seen == {"plain", "cast"}, seen
        report, stays = state.report(), trial_s < 1
        assert (report["cast"] > 1) == stays, report
        assert (state.engine.tuner.choice == "cast") == stays
        assert ("cast to bf16" in said[1]) == stays, said
        assert not any(map(state.engine.exchange.remembers, missing))
        # A cast rounds by 2**-9 at most, each rank's gradient and the mean.
        assert max(missing.values()) < 2**-8, missing
        assert max(missing.values()) > 1e-6, "was it cast?"


def it_does_not_pay():
    """Then nothing is compressed any more, nothing is remembered, and nothing is lost."""
    with tuner_lines() as said:
        state, seen, missing = train(2.0)
    assert "shared" in seen
    assert "plain DDP is faster here" in said[1], said
    report = state.report()
    assert report["tuned_tensors"] == 0, report
    assert report["trial_step_s"] > report["plain_step_s"], report
    assert not any(map(state.engine.exchange.remembers, missing)), "what was left was to go along"
    # 40 sums of float32, and as many additions to a memory: far below one gradient in forty.
    assert max(missing.values()) < 1e-4, missing
    # From here on a bucket is one all-reduce, as without the hook.
    stock, ours = DistributedDataParallel(net()), wrap(net(), state, bucket_cap_mb=25)
    state.names = Names(ours.module.named_parameters())
    x, sums, all_reduce = noise(RANK, 8, 64), [], dist.all_reduce

    def counted(tensor, *args, **options):
        sums.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    stock(x).square().sum().backward()
    dist.all_reduce = counted
    ours(x).square().sum().backward()
    dist.all_reduce = all_reduce
    assert sums == [sum(p.numel() for p in stock.parameters())], sums
    assert_equal([p.grad for p in stock.parameters()], [p.grad for p in ours.parameters()])


def replicas_of_fsdp():
    """The hook of FSDP2 goes by the same tuner."""
    model, clock = net(), Clock(RANK)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh["shard"])
    with tuner_lines() as said:
        state = compress_replicas(model, AutoCompression.using(ratio=2), mesh["replicate"])
        state.engine.tuner = tuned(state, clock)
        for step in range(STEPS):
            model(noise(step, 8, 64)).sum().backward()
            clock.now += 2.0 if state.engine.tuner.choice != "plain" else 1.0
    assert "plain DDP is faster here" in said[1], said
    assert state.report()["tuned_tensors"] == 0
    assert not state.engine.exchange.remembers("0.weight")


CASES = [
    the_real_clock, it_pays, casts_pay_where_low_rank_takes_too_long, it_does_not_pay,
    replicas_of_fsdp,
]  # fmt: skip
