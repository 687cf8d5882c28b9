"""One rank of a device: `gpu.py RANK RANKS FILE DEVICE BACKEND`, "cuda" or "cpu", "nccl" or "gloo".

Over NCCL each rank has a GPU of its own; over Gloo all share the first.
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
DEVICE, BACKEND = sys.argv[4:6]
device, given = torch.device(DEVICE), {}
if DEVICE == "cuda":
    device = torch.device("cuda", RANK if BACKEND == "nccl" else 0)
    torch.cuda.set_device(device)
    given = {"device_id": device} if BACKEND == "nccl" else {}
dist.init_process_group(
    BACKEND, init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS,
    timeout=datetime.timedelta(seconds=60), **given,
)  # fmt: skip


def net(dtype):
    torch.manual_seed(0)
    width = 512 if DEVICE == "cuda" else 64
    layers = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 16)]
    return nn.Sequential(*layers).to(device, dtype)


def mean(tensor):
    total = tensor.detach().double()
    dist.all_reduce(total)
    return total / RANKS


FFT = FFTCompression.using(theta=0.9)
LOW = LowRankCompression.using(ratio=20, warmup=1)
CASES = [(FFT, {}), (LOW, {})]
if DEVICE == "cuda":  # on the CPU it is always on
    CASES.append((FFT, {"find_unused_parameters": True}))
for compression, settings in CASES:
    for dtype in (torch.float32, torch.bfloat16):
        model = net(dtype)
        state = CompressionState(compression, named_parameters=model.named_parameters(), **settings)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        ddp.register_comm_hook(state, compression_hook)
        names = [name for name, p in model.named_parameters() if p.numel() >= 1024]
        parameters = dict(model.named_parameters())
        due = {name: torch.zeros_like(parameters[name], dtype=torch.float64) for name in names}
        paid = {name: tensor.clone() for name, tensor in due.items()}
        for step in range(6):
            torch.manual_seed(1000 * step + RANK)
            x = torch.randn(32, 512).to(device, dtype)
            own = torch.autograd.grad(model(x).float().square().mean(), list(parameters.values()))
            for name, gradient in zip(parameters, own, strict=True):
                if name in due:
                    due[name] += mean(gradient)
            model.zero_grad()
            ddp(x).float().square().mean().backward()
            for name in names:
                paid[name] += parameters[name].grad.double()
                first = parameters[name].grad.clone()
                dist.broadcast(first, src=0)
                assert torch.equal(first, parameters[name].grad), name
        for name in names:
            kept = torch.as_tensor(state.exchange.residual(name)).to(device).view_as(due[name])
            lost = (paid[name] + mean(kept) - due[name]).norm() / due[name].norm()
            # Rounding of the mean to bfloat16 is not remembered: 2**-9 of each of six steps.
            assert lost <= (1e-4 if dtype == torch.float32 else 6 * 2**-9), (name, lost)
        total = sum((paid[name] - due[name]).norm() / due[name].norm() for name in names)
        assert total > 1e-3, "was it compressed?"
        again = CompressionState(compression, named_parameters=model.named_parameters(), **settings)
        again.load_state_dict(state.state_dict())
print("ok", flush=True)
time.sleep(0.2)  # docs/ddp.md says why
dist.destroy_process_group()
