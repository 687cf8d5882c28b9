"""torch DistributedDataParallel with compressed gradients; our lines are marked `# <- sn`.

torchrun --nproc-per-node 2 examples/ddp.py

The data are ten noisy patterns, generated here. On a machine with GPUs each rank uses its own
(NCCL); without them it runs on the CPU (Gloo).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression  # <- sn
from sn_compress.torch.ddp import CompressionState, compression_hook  # <- sn

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--theta", type=float, default=0.95, help="fraction of the spectrum dropped")
flags.add_argument("--steps", type=int, default=60)
flags.add_argument(
    "--checkpoint", type=Path, help="folder to resume from, and to save to at the end"
)
args = flags.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
patterns = torch.randn(10, 1, 16, 16)
layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
ddp = DistributedDataParallel(model)
fft = FFTCompression.using(theta=args.theta)  # <- sn
state = CompressionState(fft, named_parameters=model.named_parameters())  # <- sn
ddp.register_comm_hook(state, compression_hook)  # <- sn

mine = args.checkpoint and args.checkpoint / f"rank{rank}.pt"  # each rank has its own error memory
first = 0
if mine and mine.exists():
    saved = torch.load(mine, map_location=device)
    first = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["compression"])  # <- sn

for step in range(first, args.steps):
    torch.manual_seed(step * dist.get_world_size() + rank)
    labels = torch.randint(10, (32,))
    images = patterns[labels] + 2 * torch.randn(32, 1, 16, 16)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    if rank == 0 and (step % 10 == 9 or step == args.steps - 1):
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

report = state.report()  # <- sn
if rank == 0 and report["steps"]:
    print(f"sent {report['payload_bytes']:,} of {report['dense_bytes']:,} bytes a step")
if mine:
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"step": args.steps, "compression": state.state_dict(), **parts}, mine)  # <- sn
dist.destroy_process_group()
