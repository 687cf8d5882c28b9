"""Random training programs of torch, planned: as without a plan to the bit, or refused in words.

A seed draws a network of modules.py, a loop, a back end and a budget. The loop runs on a plain copy
and on a planned one; every loss, gradient, buffer, parameter and random number that a user could
see is compared. What a program may do else: raise one of this package's own errors before anything
that differs is handed out; or differ by rounding where the documentation or a warning has it so.
A program that differs is cut to the layers it needs before it is shown. `compile` takes kernels
seconds each to compile, and is left out.
"""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from loops import LOOPS, WRITTEN_BETWEEN, Log, batch, forward
from modules import LAYERS, Net, fewest_layers
from runner import Target, main
from torch import nn

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import ReplayError, TraceError

FORMS = ("tensor", "loss", "pair", "view", "mapping")
# Sums in another order; the trial may warn of as much.
ROUNDING = 1e-4
HALF_ROUNDING = 2.0**-7


@dataclass(frozen=True)
class Program:
    """What a seed draws."""

    layers: tuple[str, ...]
    numbers: tuple[int, ...]
    form: str
    loop: str
    backend: str
    percent: int
    frozen: tuple[int, ...]


def drawn(seed: int) -> Program:
    """Return the program of a seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    names = tuple(str(namember) for namember in rng.choice(sorted(LAYERS), count))
    frozen = tuple(at for at in range(count) if rng.random() < 0.12)
    return Program(
        layers=names,
        numbers=tuple(int(number) for number in rng.integers(2**31, size=count)),
        form=str(rng.choice(FORMS)),
        loop=str(rng.choice(sorted(LOOPS))),
        backend=str(rng.choice(["graph", "modules"], p=[0.6, 0.4])),
        percent=int(rng.choice([60, 75, 90, 100])),
        frozen=frozen,
    )


def model_of(program: Program) -> nn.Module:
    """Return the network of a program, the same each time."""
    model = Net(program.layers, program.numbers, program.form)
    for at in program.frozen:
        model.layers[at].requires_grad_(False)
    return model


def carried_out(program: Program, model: nn.Module) -> tuple[Log, Exception | None]:
    """Run the loop; return what was seen, and the error it ended with."""
    log = Log(model)
    try:
        LOOPS[program.loop](model, log)
    except Exception as error:  # noqa: BLE001 - compared with the other model's
        return log, error
    return log, None


def planned(program: Program, model: nn.Module) -> nn.Module:
    """Return the planned model; where the budget is too small, at the smallest that is named."""
    settings: dict[str, Any] = {"profile": False, "backend": program.backend, "time_limit_s": 5.0}
    sn_memory.settings.deterministic = program.backend != "modules"
    try:
        return sn_memory.torch.plan(model, batch(99), f"{program.percent}%", **settings)
    except BudgetError as error:
        if error.percent is None or error.percent > 100:
            raise
        return sn_memory.torch.plan(model, batch(99), f"{error.percent}%", **settings)


def same(first: Any, second: Any) -> bool:
    """Whether two things seen are equal, tensors to the bit."""
    if torch.is_tensor(first) and torch.is_tensor(second):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.equal(first, second) or torch.allclose(
            first, second, rtol=0, atol=0, equal_nan=True
        )
    return type(first) is type(second) and first == second


def near(first: Any, second: Any, rounding: float) -> bool:
    """Whether two tensors differ by rounding."""
    if not (torch.is_tensor(first) and torch.is_tensor(second)) or first.shape != second.shape:
        return False
    size = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=rounding, atol=rounding * max(size, 1e-3))


def written(program: Program) -> bool:
    """Whether a second forward pass, as checkpoints make it, computes or writes something else."""
    names = (
        "Average Replaced Momentum FrozenPart batch_norm batch_norm_cumulative "
        "instance_norm_tracked spectral_norm spectral_norm_old"
    )
    return not set(program.layers).isdisjoint(names.split())


def may_round(program: Program, words: list[str]) -> bool:
    """Whether docs/torch_memory.md, or a warning, has sums taken in another order here."""
    several = program.loop == "two_forwards"
    unused = program.form == "mapping" or program.loop == "part_of_the_output"
    warned = any("rounding" in text or "round otherwise" in text for text in words)
    warned |= any("differentiated itself" in text for text in words)
    return warned or (program.backend == "graph" and several | unused)


def outcome(program: Program) -> str:
    """Run a program with a plan and without; return what came of it, or raise."""
    expected, plains = carried_out(program, model_of(program))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.manual_seed(5)
        try:
            model = planned(program, model_of(program))
        except (BudgetError, TraceError) as error:
            return f"{program.backend}: refused, {type(error).__name__}"
        got, error = carried_out(program, model)
    words = [str(warning.message) for warning in heard if issubclass(warning.category, PlanWarning)]
    return f"{program.backend}: {compared(program, (expected, plains), (got, error), words)}"


def compared(
    program: Program,
    expected: tuple[Log, Exception | None],
    got: tuple[Log, Exception | None],
    words: list[str],
) -> str:
    """Compare what was seen, and the errors that loops ended with; raise where they differ."""
    half = program.loop == "autocast_around" or "autocast_inside" in program.layers
    rounded, rounding = False, HALF_ROUNDING if half else ROUNDING
    for (name, first), (other, second) in zip(expected[0].seen, got[0].seen, strict=False):
        if name.replace("_orig_mod.", "") != other:
            raise AssertionError(f"{name} is expected, {other} seen")
        if same(first, second):
            continue
        if written(program) and any("hooks for saved tensors" in text for text in words):
            return "warned that hooks for saved tensors do not see what the plan keeps"
        rounded = True
        if not (may_round(program, words) and near(first, second, rounding)):
            raise AssertionError(f"{name} differs: {difference(first, second)}; warnings: {words}")
    plains, error = expected[1], got[1]
    less = len(got[0].seen) < len(expected[0].seen)
    between = program.loop in WRITTEN_BETWEEN
    if error is None:
        if between and "modified by an inplace" in str(plains):
            as_if_unchanged(program, got[0])
            return "the unchanged step's gradients where plain has an error"
        if plains is not None or less:
            raise AssertionError(f"no error where plain has one: {plains}")
        return "rounding, as documented" if rounded else "equal"
    if isinstance(error, (ReplayError, BudgetError, TraceError)):
        return f"{type(error).__name__}, {str(error)[:60]}"
    # Documented: an error, as in torch, though this network may save none of it without a plan.
    if between and "modified by an inplace" in str(error):
        return "torch's error, as documented"
    if type(error) is not type(plains) or less:
        raise AssertionError("an error of its own where plain has none") from error
    return "plain's error"


def as_if_unchanged(program: Program, got: Log) -> None:
    """Compare gradients with those of a plain step that nobody disturbed."""
    log = Log(model_of(program))
    forward(log.model, log, 0).backward()
    log.state(0)
    seen = dict(got.seen)
    for name, expected in log.seen:
        if "gradient of" in name and not same(expected, seen.get(name)):
            raise AssertionError(f"{name} differs: {difference(expected, seen.get(name))}")


def difference(first: Any, second: Any) -> str:
    if not (torch.is_tensor(first) and torch.is_tensor(second)):
        return f"{str(first)[:60]} and {str(second)[:60]}"
    if first.shape != second.shape:
        return f"{tuple(first.shape)} and {tuple(second.shape)}"
    return f"by {float((first - second).abs().max()):.2e} of {float(first.abs().max()):.2e}"


def fault_of(program: Program) -> str | None:
    """Return the kind of a program's fault, if it has one."""
    try:
        outcome(program)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return kind(error)
    return None


def kind(error: Exception) -> str:
    """Return what is alike in faults of one cause: its type, or that values differ."""
    if error.__cause__ is not None:
        return f"{type(error.__cause__).__name__}"
    return "differs" if " differs: " in str(error) else f"{type(error).__name__}"


def cut(program: Program, fault: str) -> Program:
    """Leave out the layers and settings without which a program still has its fault."""
    program = fewest_layers(program, lambda smaller: fault_of(smaller) == fault)
    for change in ({"frozen": ()}, {"form": "tensor"}, {"loop": "plain_steps"}, {"percent": 100}):
        less = replace(program, **change)
        if less != program and fault_of(less) == fault:
            program = less
    return program


def case(seed: int) -> str:
    """One program."""
    torch.set_num_threads(1)
    program = drawn(seed)
    try:
        return outcome(program)
    except Exception as error:  # noqa: BLE001 - the fault is what is looked for
        trace = "".join(traceback.format_exception(error.__cause__ or error)[-6:])
        text = f"{cut(program, kind(error))}\n  was {program}\n  {error}\n{trace}"
        raise AssertionError(text) from None


TARGETS = {"programs": Target(case, full=2000, limit_s=60.0)}

if __name__ == "__main__":
    main(TARGETS)
