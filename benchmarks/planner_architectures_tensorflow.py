"""Architectures of all kinds planned for 70 % of activation memory: correct, or refused.

    python -m benchmarks planner_architectures_tensorflow [--quick] [--json FILE]
                                                          [--models NAME ...]

For each model of architectures_tensorflow.py a step (forward, backward, random gradients of the
outputs) is measured as it is. The budget is variables, their gradients and the input, and 70 % of
what the step holds at its peak beyond these. Then it is planned with the default
back end, and verified:

- `chosen`: `graph`, `layers`, or `refused`, with the reason where it is not `graph`;
- `plain_bytes`, `budget_bytes`, `predicted_bytes`, `measured_bytes`: peaks;
- `equal`: bit-equal to the plain step; `error_relative`: see Verification.

A row `failed` is an exception that no page promises: there must be none. Rows already in FILE are
kept. `--quick` takes smaller sizes.
"""

from __future__ import annotations

import gc
import json
import logging
import time
import warnings
from typing import Any

import tensorflow as tf
from architectures_tensorflow import BUILDERS, build
from machine import origin
from rows_file import flags, save
from tables import markdown

import sn_memory.tensorflow
from sn_memory import BudgetError
from sn_memory.tensorflow import TraceError
from sn_memory.tensorflow.model import model_step

SHARE = 0.7


def plain_peak(model: Any, sample: Any) -> tuple[int, int]:
    """Return what is resident, and the measured peak of a plain step on top of that."""
    resident = sum(_bytes(variable) for variable in model.variables)
    resident += int(tf.size(sample)) * sample.dtype.size
    step = model_step(model)
    step(sample)
    with sn_memory.tensorflow.Allocations() as allocations:
        step(sample)
    return resident, allocations.peak_bytes


def row(
    name: str, scale: int, *, time_limit_s: float = 3.0, share: float = SHARE
) -> dict[str, Any]:
    """Plan one architecture and verify it."""
    case = build(name, scale)
    resident, needed = plain_peak(case.model, case.sample)
    gradients = sum(_bytes(variable) for variable in case.model.trainable_variables)
    fixed = resident + gradients
    budget = int(fixed + share * (resident + needed - fixed))
    entry: dict[str, Any] = {
        "architecture": name, "scale": scale, "share": share, "chosen": "", "reason": "",
        "plain_bytes": resident + needed, "budget_bytes": budget,
    }  # fmt: skip
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", sn_memory.tensorflow.PlanWarning)
            planned = sn_memory.tensorflow.plan(
                case.model, case.sample, budget, profile=False, time_limit_s=time_limit_s
            )
    except (BudgetError, TraceError) as error:
        return entry | {"chosen": "refused", "reason": _reason(error)}
    except Exception as error:  # noqa: BLE001 - what the table is there to find
        return entry | {"chosen": "failed", "reason": f"{type(error).__name__}: {error}"}
    result = sn_memory.tensorflow.verify(planned, case.sample)
    notes = [str(warning.message) for warning in caught if isinstance(warning.message, UserWarning)]
    return entry | {
        "chosen": planned.sn_memory.backend,
        "reason": " ".join(notes),
        "predicted_bytes": result.predicted_peak_bytes,
        "measured_bytes": result.measured_peak_bytes,
        "equal": result.equal,
        "error_relative": result.difference,
        "planning_s": round(time.perf_counter() - began, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    head = ("architecture", "by", "own, MiB", "budget", "predicted", "measured", "differ by")
    lines = []
    for row in rows:
        sizes = (row.get(f"{kind}_bytes") for kind in ("plain", "budget", "predicted", "measured"))
        cells = [row["architecture"], row["chosen"]]
        cells += ["" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        cells.append(f"{row['error_relative']:.0e}" if row.get("error_relative") else "")
        lines.append(cells)
    return markdown(head, lines)


def _bytes(variable: Any) -> int:
    return int(variable.value.shape.num_elements() * variable.value.dtype.size)


def _reason(error: Exception) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", [])])


def main() -> None:
    """Run the rows that were asked for."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the rows of FILE")
    parser.add_argument("--models", nargs="+", default=list(BUILDERS), choices=list(BUILDERS))
    args = parser.parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    rows = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    if args.table:
        print(table(rows))
        return
    for name in args.models:
        scale = 1 if args.quick else 2
        rows = [row for row in rows if (row["architecture"], row["scale"]) != (name, scale)]
        rows.append(row(name, scale) | origin())
        print(json.dumps(rows[-1]), flush=True)
        save(args.json, {"rows": rows})
        tf.keras.backend.clear_session()
        gc.collect()


if __name__ == "__main__":
    main()
