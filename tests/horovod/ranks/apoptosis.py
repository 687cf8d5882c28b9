"""One rank of two: a net that shrinks, alone and within a plan of memory; all ranks alike."""

import horovod.torch as hvd
import torch
from cases import message_of
from nets import assert_alike, batch, same_on_all
from torch import nn

import sn_memory.torch
from sn_compress import FFTCompression
from sn_memory.apoptosis.torch import AgreementError, Apoptosis

CHOSEN = {"round_to": 4, "overhead": None, "schedule": "aggressive"}
FFT = FFTCompression.using(theta=0.5, min_elements=1)
STEPS, BATCH, WIDTH, INPUTS = 12, 512, 64, 16


def with_twins(model, width):
    """The neurons of the first layer repeat its first ones."""
    with torch.no_grad():
        for part in (model[0].weight, model[0].bias):
            part[width:] = part[:width].repeat(len(part) // width - 1, *[1] * (part.ndim - 1))
    return model


def ranks_that_differ_all_stop():
    torch.manual_seed(hvd.rank())
    model = with_twins(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)), 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    apoptosis = Apoptosis(model, optimizer, tolerance=0.05, every=2, min_width=4, **CHOSEN)
    model(torch.randn(64, 6))
    apoptosis.step()
    message_of(apoptosis.step, AgreementError)


def within_a_budget_and_compressed():
    """After an event the optimizer is wrapped anew and the memory planned anew.

    What a rank had yet to send goes on with it, cut as the parameters were.
    """
    torch.manual_seed(0)
    hidden = [nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = with_twins(nn.Sequential(*hidden, nn.Linear(WIDTH, 1)), WIDTH // 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    apoptosis = Apoptosis(model, optimizer, tolerance=0.02, every=4, **CHOSEN)

    def begin():
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=FFT
        )
        wrapped.state = optimizer.state
        apoptosis.carry = lambda: FFTCompression.residuals(wrapped)
        planned = sn_memory.torch.plan(model, batch(0, BATCH, INPUTS), "80%", profile=False)
        peaks.append(planned.sn_memory.plan.peak_bytes)
        return wrapped, planned

    peaks = []
    opt, planned = begin()
    for step in range(STEPS):
        x = batch(step, BATCH, INPUTS)
        apoptosis.observe(x)  # a planned model runs recorded calls
        nn.functional.mse_loss(planned(x), x[:, :1] * x[:, 1:2]).backward()
        opt.step()
        opt.zero_grad()
        before = FFTCompression.residuals(opt)
        if event := apoptosis.step():
            (one,) = [merged for merged in event.merged if merged.group == "0.weight"]
            check_cut(one, before["0.weight"], model[0].weight)
            opt, planned = begin()
            assert_alike(model)
    assert len(peaks) > 1
    assert model[0].out_features <= WIDTH // 2
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert_alike(model)
    for parameter in model.parameters():
        assert same_on_all(opt.state[parameter]["exp_avg"])
    assert FFTCompression.report(opt)["ratio"] > 1


def check_cut(one, before, weight):
    """Who took in nobody, and was not merged, has still to send what it had."""
    left = weight.grad
    assert left.shape == weight.shape
    survivors = {survivor for _, survivor in one.pairs}
    gone = {neuron for neuron, _ in one.pairs}
    kept = [i for i in range(one.before) if i not in gone]
    alone = [i for i in kept if i not in survivors]
    assert torch.equal(left[[kept.index(i) for i in alone]], before[alone])
    assert left.abs().sum() > 0


CASES = [ranks_that_differ_all_stop, within_a_budget_and_compressed]
