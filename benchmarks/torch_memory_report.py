"""Tables of docs/torch_memory_measured.md: planned and compiled steps, policies, state, copies.

    python -m benchmarks torch_memory_report [--check] [--settings]

Writes between the markers of the page, from the rows in benchmarks/results; `--check` says whether
the page is as they are. `--settings` prints what torch's seven settings take beside the planner of
kernels that decision 79 removed, of which the rows of compiled_peaks.json are. Nothing runs here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from machine import ROOT
from rows_file import load
from tables import between_markers, markdown

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "torch_memory_measured.md"
Row = dict[str, Any]
PLANNED_HEAD = (
    *("network, batch", "share", "torch's own, MiB", "budget", "predicted", "measured"),
    *("bit-equal", "op time predicted", "op time measured"),
)
SAYS = {
    "plain": "plain torch",
    "memmap": "by hand: memory maps, updates in hooks",
    "step": '`state=folder` (`update="step"`)',
    "backward": '`update="backward"`',
    "copied": '`update="backward"`, `in_place=False`',
    "disk": '`update="backward"`, page cache dropped',
}


def mib(size: int, digits: int = 2) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:.{digits}f}"


def longer(seconds: float, plain: float) -> str:
    """Seconds beside others', in percent."""
    return f"{100 * (seconds / plain - 1):+.1f} %"


def rival(rows: list[Row], budget: int) -> Row | None:
    """The quickest step of torch's own budgets that holds no more than was asked for."""
    kept = [
        row for row in rows if row["method"].startswith("torch ") and row["peak_bytes"] <= budget
    ]
    return min(kept, key=lambda row: row["step_s"], default=None)


def ratios(rows: list[Row], *, same_peak: bool = False) -> list[float]:
    """Ours over the quickest of torch's budgets, at the peaks that those have.

    same_peak : beside those of just that peak, and not those that hold less as well
    """
    quotients = []
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        torchs = [row for row in of_model if row["method"].startswith("torch ")]
        peaks = {row["peak_bytes"] for row in torchs}
        for row in of_model:
            if row["method"] == "sn_memory" and row["step_s"] and row["budget_bytes"] in peaks:
                at = row["budget_bytes"]
                others = [row for row in torchs if not same_peak or row["peak_bytes"] == at]
                other = rival(others, at)
                assert other is not None
                quotients.append(row["step_s"] / other["step_s"])
    return quotients


def compiled(rows: list[Row]) -> str:
    """Budgets of compiled steps: ours, and the quickest of torch's that holds no more."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        plain = next(row for row in of_model if row["method"] == "plain compile")
        first = [name.partition("/")[0], "none", mib(plain["peak_bytes"]), mib(plain["peak_bytes"])]
        lines.append([*first, "", "", ""])
        for row in of_model:
            if row["method"] != "sn_memory":
                continue
            budget = row["budget_bytes"]
            asked = f"{mib(budget)} ({row['setting']:.0%})" if row["setting"] else mib(budget)
            other = rival(of_model, budget)
            theirs = longer(other["step_s"], plain["step_s"]) if other else "not reached"
            if row["peak_bytes"] is None:
                least = f"refused: {mib(row['smallest_bytes'])} is the smallest found"
                lines.append(["", asked, least, "", "", theirs, ""])
                continue
            # Rows of another run have its plain step with them, and are beside nothing of this one.
            mine = longer(row["step_s"], row.get("plain_step_s") or plain["step_s"])
            same_run = other is not None and "plain_step_s" not in row
            ratio = f"{row['step_s'] / other['step_s']:.2f}" if other and same_run else ""
            held = [mib(row["predicted_bytes"]), mib(row["peak_bytes"])]
            lines.append(["", asked, *held, mine, theirs, ratio])
    same, overall = ratios(rows, same_peak=True), ratios(rows)
    text = markdown(
        ("network", "budget, MiB", "promised", "measured", "step", "torch's budget", "ours over"),
        lines,
    )
    return (
        f"{text}\n\nAt the peaks of torch's own budgets ours takes {min(same):.2f} to "
        f"{max(same):.2f} times the seconds of the quicker of its solvers there, in the median "
        f"{median(same):.2f}; beside the quickest of its settings that hold no more, "
        f"{min(overall):.2f} to {max(overall):.2f}, in the median {median(overall):.2f}."
    )


def settings_over_kernels(rows: list[Row]) -> str:
    """The quickest of torch's settings within each budget, over the planner of kernels."""
    lines, every, kept_by_planner = [], [], 0
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        plain = next(row for row in of_model if row["method"] == "plain compile")
        mine = [row for row in of_model if row["method"] == "sn_memory" and row["step_s"]]
        speedups = []
        for row in mine:
            quickest = rival(of_model, row["budget_bytes"])
            if plain["peak_bytes"] <= row["budget_bytes"]:
                speedups.append(1.0)  # both leave the step as it is
            elif quickest is not None:
                own = row["step_s"] * plain["step_s"] / row.get("plain_step_s", plain["step_s"])
                speedups.append(quickest["step_s"] / own)
        shown = [f"{ratio:.3f}" for ratio in (min(speedups), median(speedups), max(speedups))]
        lines.append([name.partition("/")[0], f"{len(speedups)} of {len(mine)}", *shown])
        every += speedups
        kept_by_planner += len(mine)
    shown = [f"{ratio:.3f}" for ratio in (min(every), median(every), max(every))]
    lines.append(["all", f"{len(every)} of {kept_by_planner}", *shown])
    return markdown(("network", "budgets kept", "least", "median", "most"), lines)


def policies(rows: list[Row]) -> str:
    """Promised and measured peaks of policies."""
    words = {"eager": "eager", "compiled": "torch.compile", "fsdp2": "FSDP2, 2 ranks"}
    lines = []
    for way, word in words.items():
        for row in (row for row in rows if row["way"] == way and row.get("peak_bytes")):
            over = 100 * (row["peak_bytes"] / row["predicted_bytes"] - 1)
            lines.append([
                word, row["model"].partition("/")[0], mib(row["budget_bytes"]),
                mib(row["predicted_bytes"]), mib(row["peak_bytes"]), f"{over:+.1f} %",
            ])  # fmt: skip
    return markdown(("step", "network", "budget, MiB", "promised", "measured", "over"), lines)


def percent(planned: float | None, plain: float | None) -> str:
    """Extra time, where there are figures."""
    return f"{100 * (planned / plain - 1):+.1f} %" if planned and plain else ""


def reached(row: Row) -> float:
    """The share of the activation memory that the smallest plan takes."""
    fixed = row["base_bytes"] + row["gradients_bytes"]
    return (row["smallest_bytes"] - fixed) / (row["baseline_measured_peak_bytes"] - fixed)


def planned_line(row: Row) -> list[str]:
    """One row of the table."""
    own = mib(row["baseline_measured_peak_bytes"], 1)
    first = [f"{row['model']}, {row['batch']}", f"{row['share']:.0%}", own]
    if not row["kept"] and row["share"]:
        return [*first, mib(row["budget_bytes"], 1), "refused", *[""] * 4]
    if not row["share"]:
        first[1], budget = f"smallest found: {reached(row):.0%}", mib(row["smallest_bytes"], 1)
    else:
        budget = mib(row["budget_bytes"], 1)
    return [
        *first,
        budget,
        mib(row["predicted_peak_bytes"], 1),
        mib(row["measured_peak_bytes"], 1),
        "yes" if row["equal"] else "no",
        percent(row["predicted_s"], row["baseline_predicted_s"]),
        percent(row.get("op_s"), row.get("baseline_op_s")),
    ]


def planned(rows: list[Row]) -> str:
    """Planned steps of the networks, at shares of their activation memory."""
    return markdown(PLANNED_HEAD, (planned_line(row) for row in rows if row["share"] is not None))


def source(row: Row) -> str:
    """The paragraph below a table: which command, commit and machine its rows are from."""
    return f"\n\n`{row['command']}`. Commit {row['commit']}; {row['machine']}."


def state_table(rows: list[Row]) -> str:
    """Ways to train under the limit."""
    lines = []
    for row in rows:
        limit = f"{row['limit_mib']} MiB" if row["limited"] else "none"
        if "step_s" not in row:
            lines.append([SAYS[row["way"]], limit, "refused memory", "", "", "", ""])
            continue
        lines.append(
            [
                SAYS[row["way"]], limit, "equal" if row["equal"] else "differ",
                f"{row['step_s']:.1f}", f"{row['of_plain']:.2f}",
                f"{row['anonymous_mib']:.0f}", f"{row['mapped_mib']:.0f}",
            ]
        )  # fmt: skip
    head = ("way", "limit", "losses", "s/step", "x plain", "anonymous, MiB", "mapped, MiB")
    return markdown(head, lines) + source(rows[0])


def hidden_table(rows: list[Row]) -> str:
    """What of the copies passed beside ops."""
    lines = []
    for row in rows:
        moved = "hidden" in row
        lines.append(
            [
                row["model"], f"{row['rate']:g}", f"{row['mib_per_s']:.1f}",
                f"{row['whole_mib']:.0f}", f"{row['budget_mib']:.0f}", f"{row['peak_mib']:.0f}",
                str(row["offloaded"]), str(row["recomputed"]),
                f"{row['moved_mib']:.0f}" if moved else "0",
                f"{row['copies_s']:.2f}" if moved else "",
                f"{100 * row['hidden']:.0f}" if moved else "",
                f"{row['step_s'] / row['plain_s']:.2f}" if moved else "",
            ]
        )  # fmt: skip
    head = ("network", "rate", "link, MiB/s", "unplanned, MiB", "budget", "peak", "offloaded",
            "recomputed", "moved, MiB", "copies, s", "hidden, %",
            "step, x plain")  # fmt: skip
    return markdown(head, lines) + source(rows[0])


PARTS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "compiled": ("compiled_peaks.json", compiled),
    "policies": ("policy_peaks.json", policies),
    "torch": ("planner_torch.json", planned),
    "state": ("state_offload.json", state_table),
    "hidden": ("offload_hidden.json", hidden_table),
}


def written(text: str) -> str:
    """The page with its tables."""
    for name, (file, make) in PARTS.items():
        rows = load(RESULTS / file)
        text = between_markers(text, name, make(rows))
    return text


def main(argv: list[str]) -> int:
    """Write the page, or say whether it is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--settings", action="store_true")
    args = parser.parse_args(argv)
    if args.settings:
        rows = load(RESULTS / "compiled_peaks.json")
        print(settings_over_kernels(rows))
        return 0
    text = PAGE.read_text(encoding="utf-8")
    new_text = written(text)
    if args.check:
        return int(new_text != text)
    PAGE.write_text(new_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
