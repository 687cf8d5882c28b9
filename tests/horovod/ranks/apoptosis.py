"""Two ranks under Horovod train a net that shrinks; both end with the same bits."""

import horovod.torch as hvd
import torch
from torch import nn

from sn_memory.apoptosis.torch import AgreementError, Apoptosis

hvd.init()
torch.set_num_threads(1)


def setup(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    with torch.no_grad():
        for one in range(8, 24):
            model[0].weight[one] = model[0].weight[one % 8]
            model[0].bias[one] = model[0].bias[one % 8]
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"tolerance": 0.05, "every": 2, "min_width": 4, "round_to": 4, "overhead": None}
    return model, plain, Apoptosis(model, plain, schedule="aggressive", **settings)


def wrap():
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    wrapped.state = optimizer.state
    return wrapped


def same_on_all(tensor):
    every = hvd.allgather(tensor.detach()[None])
    return all(torch.equal(every[0], other) for other in every)


model, optimizer, apoptosis = setup()
opt, changed = wrap(), 0
for step in range(8):
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    opt.zero_grad()
    model(torch.randn(64, 6, generator=generator)).square().mean().backward()
    opt.step()
    if apoptosis.step():
        opt = wrap()
        changed += 1
assert changed
assert model[0].out_features < 24
for parameter in model.parameters():
    assert same_on_all(parameter)
    assert same_on_all(opt.state[parameter]["momentum_buffer"])

model, optimizer, apoptosis = setup(seed=hvd.rank())
model(torch.randn(64, 6))
apoptosis.step()
try:
    apoptosis.step()
except AgreementError:
    print("both stopped")
else:
    raise AssertionError("ranks differ, and none said so")
