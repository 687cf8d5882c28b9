"""`estimate` on architectures from libraries, compared with what a step really holds.

    python -m benchmarks estimated --json benchmarks/results/estimated.json

On the CPU; storages counted by the project's own tracker, in a plain step with its loss, on values
that are there. Each network is tried in its tiny configuration and, where its sample has a batch,
at one four times as large. What cannot be estimated says why.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch
from architectures import ARCHITECTURES, Sample
from machine import origin
from rows_file import flags, save
from tables import markdown
from torch.utils._pytree import tree_map_only

from sn_memory.torch import TraceError, estimate
from sn_memory.torch.model.step import restore_step, run_step

WITHIN = 0.02


def larger(sample: Sample, times: int) -> Sample:
    """Return a sample of so many times the rows, the rows repeated."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: (
            tensor.repeat(times, *(1 for _ in tensor.shape[1:])) if tensor.dim() else tensor
        ),
        sample,
    )


def row_of(name: str, times: int = 1) -> dict[str, Any]:
    """Return what is estimated and measured of one network.

    times : how many times the rows of its own sample
    """
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model, sample = architecture.model(), architecture.sample()
    if times > 1:
        sample = larger(sample, times)
    row: dict[str, Any] = {"architecture": name, "times": times}
    with restore_step(model, sample):
        run_step(model, model, ((), sample))  # what a first step keeps for later ones
        row["measured_bytes"] = run_step(model, model, ((), sample)).peak_bytes
    try:
        row["estimated_bytes"] = estimate(model, sample).step_bytes
    except TraceError as error:
        # Without the folder that packages are in: it is this machine's.
        row["refused"] = re.sub(r"[^ (]*/site-packages/", "", str(error).split("\n")[0])
        return row
    row["over"] = row["estimated_bytes"] / row["measured_bytes"] - 1
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table for the docs."""
    lines = []
    for row in rows:
        times = f", {row['times']} times the batch" if row["times"] > 1 else ""
        line = [row["architecture"] + times, f"{row['measured_bytes'] / 1024:,.0f}"]
        if "refused" in row:
            line += ["refused", ""]
        else:
            line += [f"{row['estimated_bytes'] / 1024:,.0f}", f"{row['over'] * 100:+.2f}"]
        lines.append(line)
    return markdown(("network", "measured, KiB", "estimated, KiB", "difference, %"), lines)


def main() -> None:
    """Measure all and write them."""
    parser = flags(__doc__)
    parser.add_argument("--only", nargs="*", default=list(ARCHITECTURES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = []
    for name in options.only:
        for times in (1, 4):
            # Edges of a graph name its nodes: rows of it are no batch.
            if times > 1 and name in ("GraphSAGE", "GAT", "GCN"):
                continue
            rows.append(row_of(name, times))
            print(rows[-1], flush=True)
    print(table(rows))
    save(options.json, origin() | {"rows": rows})


if __name__ == "__main__":
    main()
