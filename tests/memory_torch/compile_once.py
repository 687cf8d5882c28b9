"""Run by test_compiled_caches.py, twice: plan, compile, step; print what it found as JSON."""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

from sn_memory.torch import plan, verify
from sn_memory.torch.model.step import restore_step, run_step

torch.manual_seed(0)
torch.set_num_threads(1)


class Residual(nn.Module):
    """Blocks of one kind, so that their kernels are compiled once."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Sigmoid(), nn.Linear(128, 32)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def main() -> None:
    model, sample = Residual(), torch.randn(512, 32)
    planned = plan(model, sample, sys.argv[1], backend="compile", profile=False)
    found = verify(planned, sample)
    made = planned.sn_memory.plan
    plain = torch.compile(model, fullgraph=True, dynamic=False)
    for count in (False, True):
        with restore_step(model, sample):
            whole = run_step(plain, model, ((sample,), {}), count=count, by_allocator=True)
    print(
        json.dumps(
            {
                "budget": made.budget_bytes,
                "predicted": found.predicted_peak_bytes,
                "measured": found.measured_peak_bytes,
                "plain_predicted": made.baseline_peak_bytes,
                "plain_measured": whole.peak_bytes,
                "difference": found.difference,
                "recomputed": len(made.decided("recompute")),
                "inductor": dict(counters["inductor"]),
                "aot_autograd": dict(counters["aot_autograd"]),
            }
        )
    )


if __name__ == "__main__":
    main()
