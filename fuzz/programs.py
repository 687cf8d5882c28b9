"""Random training programs of torch, planned: as without a plan to the bit, or refused in words.

A seed draws a network of modules.py, a loop, a back end and a budget. The loop runs on a plain copy
and on a planned one; every loss, gradient, buffer, parameter and random number that a user could
see is compared. What a program may do else: raise one of this package's own errors before anything
that differs is handed out; or differ by rounding where the documentation or a warning has it so.
A program that differs is cut to the layers it needs before it is shown. `compile` takes kernels
seconds each to compile, and is left out.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from modules import LAYERS, LENGTH, WIDTH, Net, fewest_layers, loss_of
from runner import Target, main
from torch import nn
from torch.utils.checkpoint import checkpoint

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import ReplayError, TraceError

BATCH = 64
STEPS = 2
FORMS = ("tensor", "loss", "pair", "view", "mapping")
# Sums in another order; the trial may warn of as much.
ROUNDING = 1e-4
HALF_ROUNDING = 2.0**-7
# Loops that write, between the passes, what a backward pass may read.
WRITTEN_BETWEEN = ("input_written_between", "biases_changed_between", "buffers_changed_between")


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
    names = tuple(str(it) for it in rng.choice(sorted(LAYERS), count))
    frozen = tuple(at for at in range(count) if rng.random() < 0.12)
    return Program(
        layers=names,
        numbers=tuple(int(it) for it in rng.integers(2**31, size=count)),
        form=str(rng.choice(FORMS)),
        loop=str(rng.choice(sorted(LOOPS))),
        backend=str(rng.choice(["graph", "modules"], p=[0.6, 0.4])),
        percent=int(rng.choice([60, 75, 90, 100])),
        frozen=frozen,
    )


class Log:
    """All that a user of a loop could see, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[tuple[str, Any]] = []

    def add(self, name: str, value: Any) -> None:
        self.seen.append((name, value.detach().clone() if torch.is_tensor(value) else value))

    def state(self, at: object) -> None:
        """Note gradients, buffers, parameters, counters and what is drawn next."""
        for name, it in self.model.named_parameters():
            self.add(f"{at}: gradient of {name}", it.grad)
            self.add(f"{at}: parameter {name}", it)
        for name, it in self.model.named_buffers():
            self.add(f"{at}: buffer {name}", it)
        for name, it in self.model.named_modules():
            if hasattr(it, "calls"):
                self.add(f"{at}: calls of {name}", it.calls)
        self.add(f"{at}: random", torch.rand(()))


def batch(at: int, size: int = BATCH) -> torch.Tensor:
    """Return the input of a step."""
    generator = torch.Generator().manual_seed(1000 + at)
    return torch.randn(size, LENGTH, WIDTH, generator=generator)


def forward(model: nn.Module, log: Log, at: int, **more: Any) -> torch.Tensor:
    """Return the loss of a step, its dropout drawn alike for both models."""
    torch.manual_seed(at)
    loss = loss_of(model(batch(at, **more)))
    log.add(f"{at}: loss", loss)
    return loss


def update(model: nn.Module) -> None:
    """Take a step of gradient descent."""
    with torch.no_grad():
        for it in model.parameters():
            if it.grad is not None:
                it.sub_(it.grad, alpha=0.05)


LOOPS: dict[str, Callable[[nn.Module, Log], None]] = {}


def loop(run: Callable[[nn.Module, Log], None]) -> Callable[[nn.Module, Log], None]:
    """Register a loop by its name."""
    LOOPS[run.__name__] = run
    return run


@loop
def plain_steps(model: nn.Module, log: Log) -> None:
    for at in range(STEPS + 1):
        model.zero_grad()
        forward(model, log, at).backward()
        log.state(at)
        update(model)


@loop
def thrown_away(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        forward(model, log, at)
        log.state("thrown away")
        forward(model, log, at + 10).backward()
        log.state(at)


@loop
def evaluated(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        forward(model, log, at).backward()
        with torch.no_grad():
            forward(model, log, at + 10)
        model.eval()
        with torch.no_grad():
            forward(model, log, at + 20)
        forward(model, log, at + 30).backward()
        log.state(at)
        model.train()


@loop
def two_forwards(model: nn.Module, log: Log) -> None:
    (forward(model, log, 0) + forward(model, log, 1)).backward()
    log.state(0)
    first, second = forward(model, log, 2), forward(model, log, 3)
    first.backward()
    log.state(1)
    second.backward()
    log.state(2)


@loop
def accumulated(model: nn.Module, log: Log) -> None:
    for at in range(4):
        forward(model, log, at).backward()
        log.state(at)
        if at % 2:
            update(model)
            model.zero_grad(set_to_none=at == 1)


@loop
def retained(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    loss.backward(retain_graph=True)
    log.state("first")
    loss.backward()
    log.state("second")


@loop
def retained_for_parts(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    wanted = [it for it in model.parameters() if it.requires_grad]
    for part in (wanted[::2], wanted[1::2]):
        for it in torch.autograd.grad(loss, part, retain_graph=True, allow_unused=True):
            log.add("part", it)
    loss.backward()
    log.state(0)


@loop
def of_the_input(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        x = batch(at).requires_grad_()
        torch.manual_seed(at)
        loss_of(model(x)).backward()
        log.add("input", x.grad)
        log.state(at)


@loop
def penalty(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        x = batch(at).requires_grad_()
        torch.manual_seed(at)
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        log.add("first", gradient)
        (loss + gradient.square().sum()).backward()
        log.state(at)


@loop
def hessian_vector(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    wanted = [it for it in model.parameters() if it.requires_grad]
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    total = sum(it.abs().square().sum() for it in first if it is not None)
    log.add("total", total)
    for it in torch.autograd.grad(total, wanted, allow_unused=True):
        log.add("second", it)


@loop
def parameters_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    with torch.no_grad():
        for it in model.parameters():
            it.mul_(1.5)
    loss.backward()
    log.state(0)


@loop
def swapped_and_back_between(model: nn.Module, log: Log) -> None:
    # As an average of weights is evaluated. Left swapped, torch itself takes these for the step's.
    loss = forward(model, log, 0)
    own = [it.data for it in model.parameters()]
    for it in model.parameters():
        it.data = it.data * 1.5
    with torch.no_grad():
        forward(model, log, 1)
    for it, data in zip(model.parameters(), own, strict=True):
        it.data = data
    loss.backward()
    log.state(0)


@loop
def biases_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    with torch.no_grad():
        for name, it in model.named_parameters():
            if name.endswith("bias"):
                it.add_(1.0)
    loss.backward()
    log.state(0)


@loop
def buffers_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    for it in model.buffers():
        if it.is_floating_point():
            it.mul_(2)
    loss.backward()
    log.state(0)


@loop
def other_parameters(model: nn.Module, log: Log) -> None:
    others = {name: it.detach() * 1.5 for name, it in model.named_parameters()}
    for it in others.values():
        it.requires_grad_()
    torch.manual_seed(0)
    loss = loss_of(torch.func.functional_call(model, others, (batch(0),)))
    log.add("loss", loss)
    for it in torch.autograd.grad(loss, list(others.values()), allow_unused=True):
        log.add("other", it)
    log.state(0)


@loop
def frozen_later(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    for at, it in enumerate(model.parameters()):
        if at % 3 == 0:
            it.requires_grad_(not it.requires_grad)
    forward(model, log, 1).backward()
    log.state(1)


@loop
def frozen_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    for at, it in enumerate(model.parameters()):
        if at % 3 == 0:
            it.requires_grad_(False)
    loss.backward()
    log.state(0)


@loop
def hooks_of_modules(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    inner = [it for it in model.modules() if it is not model]
    for it in (inner[0], inner[-1]):
        it.register_forward_hook(
            lambda module, args, out: out * 2 if torch.is_tensor(out) else None
        )
    forward(model, log, 1).backward()
    log.state(1)


@loop
def hooks_of_the_model(model: nn.Module, log: Log) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    forward(model, log, 0).backward()
    log.state(0)
    model.register_forward_hook(lambda module, args, out: log.add("called", True))
    forward(model, log, 1).backward()
    log.state(1)


@loop
def hooks_of_gradients(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    model.head.weight.register_post_accumulate_grad_hook(lambda it: log.add("ready", it.grad))
    model.head.register_full_backward_hook(lambda module, into, out: log.add("head", out[0]))
    forward(model, log, 1).backward()
    log.state(1)


@loop
def smaller_batches(model: nn.Module, log: Log) -> None:
    for at, size in enumerate((BATCH, 13, BATCH, 1)):
        model.zero_grad()
        forward(model, log, at, size=size).backward()
        log.state(at)


@loop
def autocast_around(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(model, log, at)
        loss.backward()
        log.state(at)


@loop
def loaded(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    state = {name: it * 0.5 for name, it in model.state_dict().items()}
    model.load_state_dict(state)
    forward(model, log, 1).backward()
    log.state(1)


@loop
def copied(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    other = copy.deepcopy(model)
    log.model = other
    forward(other, log, 1).backward()
    log.state("copy")
    log.model = model
    log.state("own")


@loop
def checkpointed_as_a_whole(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        torch.manual_seed(at)
        x = batch(at).requires_grad_()
        loss_of(checkpoint(model, x, use_reentrant=False)).backward()
        log.add("input", x.grad)
        log.state(at)


@loop
def saved_on_the_host(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            loss = forward(model, log, at)
        loss.backward()
        log.state(at)


@loop
def input_written_between(model: nn.Module, log: Log) -> None:
    x = batch(0)
    torch.manual_seed(0)
    loss = loss_of(model(x))
    x.mul_(2)
    loss.backward()
    log.state(0)


@loop
def output_written(model: nn.Module, log: Log) -> None:
    torch.manual_seed(0)
    out = model(batch(0))
    out = out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    out.mul_(2)
    log.add("out", out)
    out.square().mean().backward()
    log.state(0)


@loop
def part_of_the_output(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        torch.manual_seed(at)
        out = model(batch(at))
        used = (
            out["hidden"] if isinstance(out, dict) else out[-1] if isinstance(out, tuple) else out
        )
        used.sum().backward()
        log.state(at)


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
    told = any("rounding" in it or "round otherwise" in it for it in words)
    told |= any("differentiated itself" in it for it in words)
    return told or (program.backend == "graph" and several | unused)


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
    words = [str(it.message) for it in heard if issubclass(it.category, PlanWarning)]
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
        if written(program) and any("hooks for saved tensors" in it for it in words):
            return "warned that hooks for saved tensors do not see what the plan keeps"
        rounded = True
        if not (may_round(program, words) and near(first, second, rounding)):
            raise AssertionError(f"{name} differs: {apart(first, second)}; warnings: {words}")
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
            raise AssertionError(f"{name} differs: {apart(expected, seen.get(name))}")


def apart(first: Any, second: Any) -> str:
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
    program = fewest_layers(program, lambda it: fault_of(it) == fault)
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
        whole = "".join(traceback.format_exception(error.__cause__ or error)[-6:])
        text = f"{cut(program, kind(error))}\n  was {program}\n  {error}\n{whole}"
        raise AssertionError(text) from None


TARGETS = {"programs": Target(case, full=2000, limit_s=60.0)}

if __name__ == "__main__":
    main(TARGETS)
