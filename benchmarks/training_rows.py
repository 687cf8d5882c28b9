"""Rows of benchmarks/training.py: made, kept in a file that resumes, shown."""

from __future__ import annotations

import os
import statistics
from typing import Any

from machine import commit, machine
from nets import NETS

from sn_compress.prediction.cost import layers
from sn_compress.text_table import text_table

# A virtual cable takes segments of up to 64 KiB at once (GSO) and counts one header for each:
# Ethernet 14, IPv4 20, TCP 20 and its time stamp 12 bytes. The other side acknowledges every one.
SEGMENT, HEADERS = 65483, 66


def header_bytes(payload: float) -> float:
    """Headers of what a rank sends, and of its acknowledgements of as much that it receives."""
    return 2 * HEADERS * payload / SEGMENT


def predicted_bytes(
    reported: float, *, idle_bytes_per_s: float, step_s: float, gbit: float
) -> float:
    """Bytes a rank's interface should count in a step.

    Horovod's background thread asks all ranks in every cycle, a millisecond by default, what is
    ready. While it moves a payload it does not ask. So of a step it asks for as long as the link is
    free, at the rate that is measured while nothing is to be sent.

    reported : bytes of its collectives that leave it in a step
    idle_bytes_per_s : what leaves it while there is nothing to do
    step_s : seconds of a step
    gbit : of the link
    """
    free_s = max(step_s - reported / (gbit * 1e9 / 8), 0.0)
    return reported + header_bytes(reported) + idle_bytes_per_s * free_s


KEYS = ("model", "method", "ranks", "gbit", "replayed", "codec", "overlap", "gpu", "link")
SETTINGS = ("compute_s", "ratio_asked", "steps", "batch", "target", "warmup", "seed")
_MEASURED = (
    "step_s", "ratio", "bytes_per_step", "predicted_wire_bytes_per_step", "accuracy",
    "seconds_to_target",
)  # fmt: skip
_COMMIT = commit()  # what runs: a run takes an hour, in which the tree may change
_HEAD = (
    "method", "codec", "s/step", "x plain", "ratio", "MB/step", "predicted", "accuracy",
    "s to target", "seeds",
)  # fmt: skip
_FORMATS = ("", "", ".3f", ".2f", ".1f", ".2f", ".2f", ".1f", ".1f", "")


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells runs, and their rows, apart."""
    return tuple(row.get(name) for name in KEYS + SETTINGS)


def row_of(run: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A flat row from what all ranks of a run found."""
    if run["replayed"]:
        elements = sum(layer.elements for layer in layers(run["model"]))
    else:
        elements = sum(p.numel() for p in NETS[run["model"]]().parameters())
    first = results[0]

    def mean(name: str) -> float:
        return statistics.fmean(result[name] for result in results)

    step_s = max(result["step_s"] for result in results)
    predicted = predicted_bytes(
        mean("reported_bytes_per_step"),
        idle_bytes_per_s=mean("idle_bytes_per_s"),
        step_s=step_s,
        gbit=run["gbit"],
    )
    return {
        **{name: run.get(name) for name in KEYS + SETTINGS},
        "slow": run.get("slow"),
        "codec_s": run.get("codec_s"),
        "ratio": 4 * elements / first["sent_bytes"],
        "sent_bytes": round(first["sent_bytes"]),
        "bytes_per_step": round(mean("bytes_per_step")),
        "reported_bytes_per_step": round(mean("reported_bytes_per_step")),
        "predicted_wire_bytes_per_step": round(predicted),
        "idle_bytes_per_s": round(mean("idle_bytes_per_s")),
        "step_s": step_s,
        "steps_s": first.get("steps_s"),
        "accuracy": first.get("accuracy"),
        "seconds_to_target": first.get("seconds_to_target"),
        "load": os.getloadavg()[0],
        "commit": _COMMIT,
        "machine": machine(),
    }


def averaged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all seeds of a run, with the means of what was measured.

    Seconds to the target are None where a seed never reached it.
    """
    seeds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        seeds.setdefault(key_of(row | {"seed": None}), []).append(row)
    averages = []
    for same in seeds.values():
        means = {}
        for name in _MEASURED:
            values = [row[name] for row in same]
            means[name] = None if None in values else statistics.fmean(values)
        averages.append(same[0] | means | {"seed": len(same)})
    return averages


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, means over seeds, with what each is to plain."""
    rows, lines = averaged(rows), []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        keys = ("model", "ranks", "gbit", "overlap", "gpu", "link")
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    for (model, ranks, gbit, overlap, gpu, link), group in groups.items():
        slow = group[0].get("slow")
        kind = f"replayed {slow:.0f} times as slow: {gpu}, {link}" if slow else "trained"
        lines += [
            f"\n{model}, {ranks} ranks, {gbit:g} Gbit/s, {kind}"
            f"{', exchange beside the backward pass' if overlap else ''}",
        ]
        cells = []
        plain = [row["step_s"] for row in rows if row["method"] == "plain" and _same(row, group[0])]
        for row in group:
            faster = plain[0] / row["step_s"] if plain else None
            predicted_mb = row["predicted_wire_bytes_per_step"] / 1e6
            sent = row["bytes_per_step"] / 1e6
            cells.append(
                [
                    row["method"], row["codec"], row["step_s"], faster, row["ratio"], sent,
                    predicted_mb, row["accuracy"], row["seconds_to_target"], row["seed"],
                ]
            )  # fmt: skip
        lines.append(text_table(_HEAD, cells, _FORMATS))
    return "\n".join(lines)


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ["model", "ranks", "gbit", "replayed", "gpu", "link"]
    keys += ["overlap"] if row["replayed"] else []
    return all(row.get(key) == other.get(key) for key in keys)
