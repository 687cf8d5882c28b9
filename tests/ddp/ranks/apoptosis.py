"""One rank: all shrink alike, or all stop and nothing is changed.

Run as `apoptosis.py RANK RANKS FILE`; prints "ok CASE" for each.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_memory.apoptosis.torch import AgreementError, Apoptosis

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


def setup(seed=0, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    with torch.no_grad():
        for one in range(8, 24):
            model[0].weight[one] = model[0].weight[one % 8]
            model[0].bias[one] = model[0].bias[one % 8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    chosen = {
        "tolerance": 0.05,
        "every": 2,
        "min_width": 4,
        "round_to": 4,
        "overhead": None,
    } | settings
    return model, optimizer, Apoptosis(model, optimizer, schedule="aggressive", **chosen)


def batch(step):
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(1000 * step + RANK))


def same_on_all(tensor):
    every = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(every, tensor.detach().contiguous())
    return all(torch.equal(every[0], other) for other in every)


def shrinks_under_ddp():
    model, optimizer, shrink = setup()
    ddp, changed = DistributedDataParallel(model), 0
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
        if shrink.step():
            ddp = DistributedDataParallel(model)
            changed += 1
    assert changed, "nothing was merged"
    assert model[0].out_features < 24
    for parameter in model.parameters():
        assert same_on_all(parameter)
        assert same_on_all(optimizer.state[parameter]["momentum_buffer"])


def fails(prepare, seed=0, **settings):
    model, _, shrink = setup(seed, **settings)
    before = [parameter.clone() for parameter in model.parameters()]
    prepare(model)
    shrink.step()
    try:
        shrink.step()
    except AgreementError as error:
        said = str(error)
    else:
        raise AssertionError("ranks differ, and none said so")
    assert "different on ranks" in said
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def weights_differ():
    fails(lambda model: model(batch(0)), seed=RANK)


def settings_differ():
    fails(lambda model: model(batch(0)), tolerance=0.05 if RANK else 1e-6, min_width=4 + 8 * RANK)


def one_saw_no_batch():
    fails(lambda model: model(batch(0)) if RANK else None)


torch.set_num_threads(1)
wait = datetime.timedelta(seconds=90)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS, timeout=wait
)
for case in (shrinks_under_ddp, weights_differ, settings_differ, one_saw_no_batch):
    case()
    dist.barrier()
    print("ok", case.__name__, flush=True)
time.sleep(0.2)  # docs/ddp.md says why
dist.destroy_process_group()
