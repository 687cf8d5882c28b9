"""One rank of a device: `gpu.py RANK RANKS FILE BACKEND` with "nccl" or "gloo".

Over NCCL each rank has a GPU of its own; over Gloo all share the first. `several.py` runs the same
on the CPU, so that it stays whole where there is no GPU.
"""

import sys

import torch
import torch.distributed as dist
from cases import RANK, RANKS, process_group, same_on_all, state_of, wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression

FFT = FFTCompression.using(theta=0.9)
LOW = LowRankCompression.using(ratio=20, warmup=1)


def net(device, dtype):
    torch.manual_seed(0)
    width = 512 if device.type == "cuda" else 64
    layers = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 16)]
    return nn.Sequential(*layers).to(device, dtype)


def mean(tensor):
    total = tensor.detach().double()
    dist.all_reduce(total)
    return total / RANKS


def nothing_is_lost_and_ranks_end_equal(device="cpu"):
    device, cases = torch.device(device), [(FFT, {}), (LOW, {})]
    if device.type == "cuda":  # on the CPU it is always on
        cases.append((FFT, {"find_unused_parameters": True}))
    for compression, settings in cases:
        for dtype in (torch.float32, torch.bfloat16):
            loses_nothing(net(device, dtype), compression, settings)


def loses_nothing(model, compression, settings):
    parameters = dict(model.named_parameters())
    some = next(iter(parameters.values()))
    state = state_of(compression, model, **settings)
    ddp = wrap(model, state, bucket_cap_mb=1)
    due = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    due = {name: total for name, total in due.items() if total.numel() >= 1024}
    paid = {name: total.clone() for name, total in due.items()}
    for step in range(6):
        torch.manual_seed(1000 * step + RANK)
        x = torch.randn(32, 512).to(some)
        own = torch.autograd.grad(model(x).float().square().mean(), list(parameters.values()))
        for name, gradient in zip(parameters, own, strict=True):
            if name in due:
                due[name] += mean(gradient)
        model.zero_grad()
        ddp(x).float().square().mean().backward()
        for name in paid:
            paid[name] += parameters[name].grad.double()
            assert same_on_all(parameters[name].grad), name
    total = 0.0
    for name, wanted in due.items():
        kept = torch.as_tensor(state.engine.exchange.residual(name)).to(wanted).view_as(wanted)
        lost = (paid[name] + mean(kept) - wanted).norm() / wanted.norm()
        # Rounding of the mean to bfloat16 is not remembered: 2**-9 of each of six steps.
        assert lost <= (1e-4 if some.dtype == torch.float32 else 6 * 2**-9), (name, lost)
        total += (paid[name] - wanted).norm() / wanted.norm()
    assert total > 1e-3, "was it compressed?"
    state_of(compression, model, **settings).load_state_dict(state.state_dict())


CASES = [nothing_is_lost_and_ranks_end_equal]

if __name__ == "__main__":
    device = torch.device("cuda", RANK if sys.argv[4] == "nccl" else 0)
    torch.cuda.set_device(device)
    given = {"device_id": device} if sys.argv[4] == "nccl" else {}
    with process_group(60, sys.argv[4], **given):
        nothing_is_lost_and_ranks_end_equal(device)
        print("ok", flush=True)
