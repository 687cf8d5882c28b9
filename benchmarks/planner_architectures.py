"""Architectures from libraries under a plan: correct, or refused with a reason.

    OMP_NUM_THREADS=1 python -m benchmarks planner_architectures [--json FILE] [--only NAME ...]
        [--resume] [--quick]

Each network of architectures.py and architectures_more.py is planned by the back ends `graph` and
`modules`, and where it cannot be traced whole by `regions`. The budget is what the model's own step
takes with `torch.utils.checkpoint` around its blocks, as its library switches it on; as that drops
the cache of keys and values, so do the others. For a network without such a switch, and where it
saves nothing, the budget is parameters, gradients, buffers and input, and SHARE of what the step
holds beside them. Then it is trained one step, with the plan and without, from the same state on
other values than the sample's: loss and gradients are compared bit by bit. `sn_memory.torch.verify`
gives the peaks. `plan_s` and the `step_s` are CPU seconds on one thread, those of steps the median
of steps that take turns.

`chosen` is what carries the plan out; `refused` means that `plan` raised, and `reason` is what it
said; `crashed` that the process ended otherwise. `fake` counts the fake tensors that were left in
the model, its gradients and what it returned. `--quick` plans for a second, without timing ops.
With `--resume` rows that are in the file stay. Two processes at a time, each for an architecture.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import ARCHITECTURES, Sample, loss_of
from architectures_more import MORE
from machine import origin
from rows_file import flags, load, save
from tables import markdown, put_into
from timing import interleave
from torch._subclasses.fake_tensor import FakeTensor
from trials import fresh

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch.model.results import differences, tensors_of
from sn_memory.torch.model.snapshot import StateSnapshot, kept_by
from sn_memory.torch.model.step import restore_step, run_step

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch_memory_measured.md"
RESULTS = ROOT / "benchmarks" / "results" / "planner_architectures.json"
ALL = ARCHITECTURES | MORE
Around = Callable[[], AbstractContextManager[Any]]
BACKENDS = ("graph", "modules")
# In the order of the table; the second where the first refuses the model.
ROWS = ("graph", "regions", "modules")
SHARE = 0.7
STEPS = 9
LIMIT_S = 600


def seed(number: int) -> None:
    """Seed all that models draw from."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator that models of transformers draw from
    random.seed(number)


def trained(
    model: torch.nn.Module, sample: Sample, around: Around
) -> dict[str, torch.Tensor | None]:
    """Train one step as users do; return the loss, the gradients and the buffers."""
    model.zero_grad(set_to_none=True)
    seed(2)
    with around():
        loss = loss_of(model(**sample))
    loss.backward()
    values: dict[str, torch.Tensor | None] = {"loss": loss.detach()}
    values |= {
        f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()
    }
    return values | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def budget_of(
    model: torch.nn.Module, sample: Sample, share: float, around: Around
) -> tuple[int, int]:
    """Return the peak of the model's own step, and SHARE of its activations with all the rest."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for value in sample.values() if isinstance(value, torch.Tensor)]
    fixed = sum(tensor.nbytes for tensor in tensors)
    fixed += sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    with restore_step(model, sample), around():
        peak = run_step(model, model, ((), sample), loss=loss_of).peak_bytes
    return peak, fixed + int(share * (peak - fixed))


def built(name: str, *, cache: bool = True) -> torch.nn.Module:
    """Return an architecture, the same each time; without its cache of keys and values if asked."""
    seed(0)
    model = ALL[name].model()
    config = getattr(model, "config", None)
    if not cache and hasattr(config, "use_cache"):
        config.use_cache = False
    return model


def checkpointed(name: str) -> torch.nn.Module | None:
    """Return the architecture with its library's checkpointing; None if it has none."""
    model = built(name, cache=False)
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    elif getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    else:
        return None
    return model


def step_seconds(
    models: list[torch.nn.Module], sample: Sample, steps: int, around: Around
) -> list[float]:
    """CPU seconds of a training step of each model, the median of steps that take turns."""

    def step(model: torch.nn.Module) -> float:
        model.zero_grad(set_to_none=True)
        seed(2)
        began = time.process_time()
        with around():
            loss = loss_of(model(**sample))
        loss.backward()
        return time.process_time() - began

    # The first steps make what later ones have: buffers, functions, states of kernels.
    runs = {number: partial(step, model) for number, model in enumerate(models)}
    return [statistics.median(taken) for taken in interleave(runs, steps, settle=2).values()]


def fake_tensors(model: torch.nn.Module, results: Iterable[Any]) -> int:
    """Count the fake tensors in a model's modules and among the results of its steps."""
    held = [
        *StateSnapshot(tensor for module in model.modules() for tensor in kept_by(module)).tensors()
    ]
    held += [value for module in model.modules() for value in module.__dict__.values()]
    held += [*model.parameters(), *model.buffers(), *results]
    return sum(isinstance(tensor, FakeTensor) for tensor in held)


def row_of(
    name: str,
    backend: str = "auto",
    *,
    budget: int | None = None,
    cache: bool = True,
    steps: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Plan an architecture and train a step of it; return the row of the table.

    Parameters
    ----------
    name, backend
        Of the architecture, and how its plan is carried out.
    budget
        Bytes; without, SHARE of the activations.
    cache
        Whether it returns a cache of keys and values, as is the default of some.
    steps
        How many steps are timed.
    settings
        Of `plan`.
    """
    model, sample = built(name, cache=cache), ALL[name].sample()
    around = ALL[name].around
    plain_bytes, share = budget_of(model, sample, SHARE, around)
    budget = budget or share
    row = {
        "architecture": name,
        "backend": backend,
        "plain_bytes": plain_bytes,
        "budget_bytes": budget,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        began = time.process_time()
        try:
            with around():
                planned = sn_memory.torch.plan(model, sample, budget, backend=backend, **settings)
        except (BudgetError, sn_memory.torch.TraceError) as error:
            reasons = [*_plan_warnings(caught), f"{type(error).__name__}: {error}"]
            return row | {"chosen": "refused", "reason": _short(" ".join(reasons))}
        plan_s = time.process_time() - began
        with around():
            verified = sn_memory.torch.verify(planned, sample, loss=loss_of)
        other, state = ALL[name].sample(), copy.deepcopy(model.state_dict())
        expected = trained(model, other, around)
        model.load_state_dict(state)
        got = trained(planned, other, around)
        different = differences(expected, got)
        # With gradients in place another plan would be made.
        planned.zero_grad(set_to_none=True)
        with around():
            results = [*got.values(), *tensors_of(planned(**other), model)]
        fake = fake_tensors(planned, results)
        # What they hang on waits for a backward pass.
        del results
        row |= {
            "chosen": planned.sn_memory.backend,
            "plan_s": round(plan_s, 2),
            "predicted_bytes": verified.predicted_peak_bytes,
            "measured_bytes": verified.measured_peak_bytes,
            "different": len(different),
            "of": len(expected),
            "difference": max(different.values(), default=0.0),
            "fake": fake,
        }
        if steps:
            wrapped = checkpointed(name)
            models = [model, planned] if wrapped is None else [model, planned, wrapped]
            taken = step_seconds(models, sample, steps, around)
            names = ("plain", "planned", "checkpoint")
            row |= {
                f"{name}_step_s": round(seconds, 6)
                for name, seconds in zip(names, taken, strict=False)
            }
    return row | {"reason": _short(" ".join(_plan_warnings(caught)))}


def rows_of(name: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """Return the rows of an architecture, one for each back end, timed."""
    wrapped = checkpointed(name)
    least: int | None = None
    budget: int | None = None
    if wrapped is not None:
        sample = ALL[name].sample()
        around = ALL[name].around
        least, _ = budget_of(wrapped, sample, SHARE, around)
        own, _ = budget_of(built(name, cache=False), sample, SHARE, around)
        budget = least if least < own else None
    traces = True
    for backend in ROWS:
        if backend == "regions" and traces:
            continue
        try:
            row = row_of(name, backend, budget=budget, cache=False, steps=STEPS, **settings)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the row
            reason = _short(f"{type(error).__name__}: {error}")
            row = {"architecture": name, "backend": backend, "chosen": "crashed", "reason": reason}
        if backend == "graph":
            traces = row["chosen"] != "refused" or "BudgetError" in row["reason"]
        yield row | {"checkpoint_bytes": least}


def _plan_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if issubclass(warning.category, PlanWarning)]


def _short(text: str) -> str:
    """Leave out where libraries and this project are installed."""
    return re.sub(r"[^\s(]*site-packages/", "", " ".join(text.split()).replace(f"{ROOT}/", ""))


def in_a_process(name: str, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of an architecture, made in a process of its own."""
    words = ["--rows", name, *(["--quick"] if quick else [])]
    ended = "it was stopped after its time"
    try:
        done = fresh(__file__, *words, timeout_s=LIMIT_S)
        output = done.stdout
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        ended = f"the process ended with {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"arch')]
    measured = {row["backend"] for row in rows}
    return rows + [
        {"architecture": name, "backend": backend, "chosen": "crashed", "reason": ended}
        for backend in BACKENDS
        if backend not in measured
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    head = (
        "architecture", "by", "planned, s", "own, KiB", "budget", "predicted", "measured",
        "step / own", "step / checkpoint", "differ", "at most", "fake",
    )  # fmt: skip
    lines = []
    for row in rows:
        by = row["backend"] if row["chosen"] == row["backend"] else row["chosen"]
        if row["chosen"] in ("refused", "crashed"):
            by = f"{row['backend']}: {row['chosen']}"
        cells = [row["architecture"], by, f"{row['plan_s']:.1f}" if "plan_s" in row else ""]
        sizes = (row.get(f"{kind}_bytes") for kind in ("plain", "budget", "predicted", "measured"))
        cells += ["" if size is None else f"{size / 1024:,.0f}" for size in sizes]
        for than in ("plain", "checkpoint"):
            taken = row.get(f"{than}_step_s")
            cells.append(f"{row['planned_step_s'] / taken:.2f}" if taken else "")
        if row.get("checkpoint_bytes") is None:
            cells[-1] = "no blocks"
        elif cells[-1] and row["checkpoint_bytes"] != row["budget_bytes"]:
            cells[-1] += " (saves nothing)"
        cells.append(f"{row['different']} of {row['of']}" if "of" in row else "")
        cells.append(f"{row['difference']:.0e}" if row.get("different") else "")
        cells.append(str(row.get("fake", "")))
        lines.append(cells)
    return markdown(head, lines)


def main() -> None:
    """Read the command line; make the rows, or those of one architecture."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--only", nargs="+", choices=list(ALL), default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--rows", choices=list(ALL), help="only these, as JSON")
    args = parser.parse_args()
    if args.rows:
        for library in ("transformers", "diffusers"):
            logging.getLogger(library).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        quick = {"profile": False, "time_limit_s": 1.0} if args.quick else {"time_limit_s": 5.0}
        for row in rows_of(args.rows, **quick):
            print(json.dumps(row), flush=True)
        return
    about = origin() | {"torch": torch.__version__}
    kept = load(args.json) if args.resume else []
    by_key = {(row["architecture"], row["backend"]): row for row in kept}
    missing = [
        name
        for name in args.only or ALL
        if args.only or any((name, backend) not in by_key for backend in BACKENDS)
    ]
    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(lambda name: in_a_process(name, args.quick), missing):
            for row in rows:
                by_key[row["architecture"], row["backend"]] = row | about
                print(table([row]).splitlines()[-1], row["reason"][:300], flush=True)
            order = ((name, backend) for name in ALL for backend in ROWS)
            save(args.json, [by_key[key] for key in order if key in by_key])
    if args.json == RESULTS:
        put_into(PAGE, "architectures", table(load(RESULTS)))


if __name__ == "__main__":
    main()
