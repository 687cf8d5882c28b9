"""Checkpoint policies: predicted and measured peaks, eager, compiled and under FSDP2.

    python -m benchmarks policy_peaks [--json FILE] [--models NAME ...] [--ways NAME ...]
                                      [--shares SHARE ...]

`eager`: the policy as it is; `compiled`: planned for and run under torch.compile (Inductor);
`fsdp2`: two ranks over Gloo, each block and the rest sharded. The models are those of
compiled_peaks.py, with the mean square of their output as loss; budgets are shares of the way from
the least that the blocks can do to what a step without a policy holds. Peaks are those of live
storages (StorageTracker); of compiled steps what torch's CPU allocator gave out. Rows in FILE are
kept, so a run that was cut off goes on.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from compiled_peaks import MODELS, Step, by_inductor
from ddp_ranks import as_rank, run_ranks
from machine import origin
from rows_file import flags, load, save
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import SelectivePolicy, StorageTracker, checkpoint_policy
from sn_memory.torch.model.step import run_step

WAYS = ("eager", "compiled", "fsdp2")
SHARES = (0.25, 0.6)
RANKS = 2


class WithLoss(nn.Module):
    """A model whose output is made a loss.

    Parameters
    ----------
    net
        Returns a tensor, or an object with `logits`.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        outputs = self.net(x)
        return getattr(outputs, "logits", outputs).square().mean()


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model with its loss, and its input."""
    torch.manual_seed(0)
    make, sample = MODELS[name]
    return WithLoss(make()), sample()


def policy_of(
    model: nn.Module, sample: torch.Tensor, share: float, *, compiled: bool = False
) -> SelectivePolicy:
    """The policy for a budget that is this share of the way from the least to the whole."""
    settings: dict[str, Any] = {"profile": False, "compiled": compiled}
    least = 0
    try:
        checkpoint_policy(model, sample, 1, **settings)
    except BudgetError as refusal:
        least = refusal.percent or 100
    return checkpoint_policy(model, sample, f"{least + int(share * (100 - least))}%", **settings)


def here(name: str, share: float, *, compiled: bool) -> tuple[int, int, int]:
    """Budget, predicted and measured peak in this process."""
    model, sample = model_of(name)
    policy = policy_of(model, sample, share, compiled=compiled)
    model = policy.wrap(copy.deepcopy(model))
    if compiled:
        peak = Step(by_inductor(model), model, sample).peak_bytes
    else:
        peak = run_step(model, model, ((sample,), {})).peak_bytes
    return policy.budget_bytes, policy.peak_bytes, peak


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank of FSDP2: budget of the unsharded step, predicted and measured peak."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    model, sample = model_of(job["model"])
    policy = policy_of(model, sample, job["share"])
    expected = policy.sharded_peak_bytes(model, RANKS)
    blocks = [model.get_submodule(path) for path in (*policy.saved, *policy.kept)]
    policy.wrap(model)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    peak = 0
    for _ in range(2):
        model.zero_grad()
        tracker = StorageTracker([*model.parameters(), *model.buffers(), sample])
        with tracker:
            model(sample).backward()
        peak = tracker.peak_bytes
    return {"budget": policy.budget_bytes, "predicted": expected, "peak": peak}


def on_ranks(name: str, share: float) -> tuple[int, int, int]:
    """What the first of the ranks says."""
    job = {"model": name, "share": share}
    first = run_ranks(__file__, job, ranks=RANKS, timeout_s=3600)[0]
    return first["budget"], first["predicted"], first["peak"]


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000
    rows = load(args.json)
    done = {(row["model"], row["way"], row["share"]) for row in rows}
    for way in args.ways:
        for name in args.models:
            for share in args.shares:
                if (name, way, share) in done:
                    continue
                if way == "fsdp2":
                    budget, predicted, peak = on_ranks(name, share)
                else:
                    budget, predicted, peak = here(name, share, compiled=way == "compiled")
                rows.append(
                    {
                        "model": name, "way": way, "share": share, "budget_bytes": budget,
                        "predicted_bytes": predicted, "peak_bytes": peak, **origin(),
                    }
                )  # fmt: skip
                save(args.json, rows)
                print(
                    f"{way:9} {name:11} {share:4.2f} predicted {predicted:>10} measured {peak:>10} "
                    f"{peak / predicted - 1:+.2%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__" and not as_rank(work):
    sys.exit(main(sys.argv[1:]))
