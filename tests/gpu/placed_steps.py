"""A planned model under the placing allocator, in a process of its own; prints a line of JSON.

What it is compared with, the plain step's gradients, is computed first, in the same process: what
that leaves in classes is given back by `torch.cuda.empty_cache()`, as by torch's own allocator.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "memory_torch"))
from small_models import mlp

from sn_memory.torch import placing_statistics, plan, use_placing_allocator
from sn_memory.torch.target import allocator as placing

use_placing_allocator()
torch.manual_seed(0)
one = torch.ones(1, 1, device="cuda", requires_grad=True)
(one @ one).backward()
kept = placing_statistics().allocated_bytes  # by libraries, from their first product on
model = mlp(8, 1024).cuda()
sample = torch.randn(1 << 13, 1024, device="cuda")


def gradients(network):
    network.zero_grad(set_to_none=True)
    network(sample).sum().backward()
    return [it.grad.cpu() for it in network.parameters()]


expected = gradients(model)
model.zero_grad(set_to_none=True)
planned = plan(model, sample, "75%", profile=False)
torch.cuda.empty_cache()
steps = [all(map(torch.equal, gradients(planned), expected)) for _ in range(2)]
memory = placing.active()
memory.reset_peaks(0)
steps += [all(map(torch.equal, gradients(planned), expected)) for _ in range(3)]
held = placing_statistics()
last = memory.step_statistics(planned.sn_memory.pool._arena, planned.sn_memory.latest.number)


def raises(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def enter_pool():
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        pass


planned.zero_grad(set_to_none=True)
refused = {"memory_stats": raises(torch.cuda.memory_stats), "pool": raises(enter_pool)}
refused["too much"] = raises(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"))
planned.sn_memory.release()
print(
    json.dumps(
        {
            "equal": steps,
            "kept": kept,
            "held": dataclasses.asdict(held),
            "step": dataclasses.asdict(last),
            "budget": planned.sn_memory.budget_bytes,
            "simulated": planned.sn_memory.reserved_peak_bytes,
            "refused": refused,
            "arena_after": placing_statistics().arena_bytes,
        }
    )
)
