"""Two ranks: one net shrinks, trains within a budget of memory, and sends compressed gradients.

After an event the optimizer is wrapped anew and the memory planned anew; what a rank had yet to
send goes on with it, cut as the parameters were.
"""

import horovod.torch as hvd
import torch
from torch import nn

import sn_memory.torch
from sn_compress import FFTCompression
from sn_memory.apoptosis.torch import Apoptosis

STEPS, BATCH, WIDTH, INPUTS = 12, 512, 64, 16
FFT = FFTCompression.using(theta=0.5, min_elements=1)


def wrap():
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=FFT
    )
    wrapped.state = optimizer.state
    apoptosis.carry = lambda: FFTCompression.residuals(wrapped)
    return wrapped, sn_memory.torch.plan(model, sample, "80%", profile=False)


def same_on_all(tensor):
    every = hvd.allgather(tensor.detach()[None])
    return all(torch.equal(every[0], other) for other in every)


def batch(step):
    random = torch.Generator().manual_seed(1000 * step + hvd.rank())
    x = torch.randn(BATCH, INPUTS, generator=random)
    return x, x[:, :1] * x[:, 1:2]


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
hidden = [nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
model = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))
with torch.no_grad():  # the upper half of the first layer repeats the lower
    model[0].weight[WIDTH // 2 :] = model[0].weight[: WIDTH // 2]
    model[0].bias[WIDTH // 2 :] = model[0].bias[: WIDTH // 2]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
settings = {"tolerance": 0.02, "every": 4, "round_to": 4, "schedule": "aggressive"}
apoptosis = Apoptosis(model, optimizer, overhead=None, **settings)
sample = batch(0)[0]
opt, planned = wrap()
peaks, events = [planned.sn_memory.plan.peak_bytes], 0
for step in range(STEPS):
    x, y = batch(step)
    apoptosis.observe(x)  # a planned model runs recorded calls
    nn.functional.mse_loss(planned(x), y).backward()
    opt.step()
    opt.zero_grad()
    before = FFTCompression.residuals(opt)
    if event := apoptosis.step():
        events += 1
        (one,) = [merged for merged in event.merged if merged.group == "0.weight"]
        left = model[0].weight.grad
        assert left.shape == model[0].weight.shape
        # Who took in nobody, and was not merged, has still to send what it had.
        survivors = {survivor for _, survivor in one.pairs}
        gone = {neuron for neuron, _ in one.pairs}
        kept = [i for i in range(one.before) if i not in gone]
        alone = [i for i in kept if i not in survivors]
        places = [kept.index(i) for i in alone]
        assert torch.equal(left[places], before["0.weight"][alone])
        assert left.abs().sum() > 0
        opt, planned = wrap()
        peaks.append(planned.sn_memory.plan.peak_bytes)
        for parameter in model.parameters():
            assert same_on_all(parameter)
    loss = nn.functional.mse_loss(model(x), y).item()
assert events
assert model[0].out_features <= WIDTH // 2
assert peaks == sorted(peaks, reverse=True)
assert peaks[-1] < peaks[0]
for parameter in model.parameters():
    assert same_on_all(parameter)
    assert same_on_all(opt.state[parameter]["exp_avg"])
assert FFTCompression.report(opt)["ratio"] > 1
print("ok", loss)
