"""The back end for models that cannot be traced: chosen modules run again in the backward pass.

torch.utils.checkpoint does the running again, with the state of chance of the first time. Left to
the user are: which modules, whether it fits then, and what a second run does to statistics. Here
the sample is run: each module's seconds and saved bytes are measured, modules are kept where a
byte saves most, and each choice is counted, so the budget is kept on the sample or refused.

Over 300 lines: the step and the search for it take each other's parts, and would be read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, fewest_again, measured_plan
from ..errors import TraceError
from ..model.step import Measured, put_back, run_step, tensors
from .probe import Probe

# Modules are cut into units no deeper than this: deeper ones are mostly single ops.
_DEPTH = 3


# A unit's name, a tensor it was given, and the tensor's version then.
_Input = tuple[str, torch.Tensor, int]


class _OverwrittenError(Exception):
    """A unit's input is not what it was when the unit ran; autograd would refuse to go on."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.unit = unit


class ModuleStep:
    """A model whose chosen modules run again in the backward pass.

    Parameters
    ----------
    model, args, kwargs
        The plain model and a real sample; it is run, and left as it was.
    budget
        As in `plan`.
    resident_bytes
        What counts beside the step: the optimizer's state.

    Raises
    ------
    TraceError
        If the sample has no memory.
    BudgetError
        If no choice of modules keeps the budget on the sample.
    """

    trace = None

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        budget: int | str,
        *,
        resident_bytes: int = 0,
    ) -> None:
        everything = (*tensors((args, kwargs)), *model.parameters())
        if any(it.is_meta for it in everything):
            raise TraceError(
                "planning by modules runs the model, and the model or the sample is on the meta "
                "device. Pass them with memory, or change the model so that it can be traced."
            )
        self.beside_bytes = resident_bytes
        # Of the plain class: the planned model's own would come back here.
        self._forward = type(model).forward
        self._again: dict[str, _Unit] = {}
        # While planning: what units were given, with its version then.
        self.inputs: list[_Input] | None = None
        search = _Search(self, model, (args, kwargs))
        self.plan = search.plan(budget)
        self.inputs = None

    @property
    def known(self) -> list[torch.Tensor]:
        """None: it holds nothing between steps."""
        return []

    @property
    def ignored(self) -> list[torch.Tensor]:
        """None: nothing is moved to the host."""
        return []

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward pass, with the chosen modules checkpointed."""
        modules = dict(model.named_modules())
        units = {modules[name]: unit for name, unit in self._again.items()}
        with _forwards(units, self.inputs):
            return self._forward(model, *args, **kwargs)

    def choose(self, units: Sequence[_Unit]) -> None:
        """Let these units run again, and no others."""
        self._again = {unit.name: unit for unit in units}


@dataclass
class _Unit:
    """A module that may be run again.

    Parameters
    ----------
    name
        Its path.
    changed
        Buffers that its forward pass changes, as (module, name).
    seconds
        Of all its calls in one forward pass.
    saved_bytes
        What it saves for the backward pass.
    """

    name: str
    changed: tuple[tuple[torch.nn.Module, str], ...]
    seconds: float
    saved_bytes: int

    def buffers(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self.changed]  # type: ignore[misc]


@contextmanager
def _forwards(units: dict[torch.nn.Module, _Unit], inputs: list[_Input] | None) -> Iterator[None]:
    """Put checkpointed forwards in the place of the modules' own for one forward pass."""
    before = {module: module.__dict__.get("forward") for module in units}
    for module, unit in units.items():
        module.__dict__["forward"] = _checkpointed(module.forward, unit, inputs)
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _checkpointed(
    forward: Callable[..., Any], unit: _Unit, inputs: list[_Input] | None
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        buffers = unit.buffers()
        earlier = [it.clone() for it in buffers]
        if inputs is not None:
            inputs.extend((unit.name, it, it._version) for it in tensors((args, kwargs)))
        first = True

        def once_more(*args: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return forward(*args, **kwargs)
            # It sees its statistics as they were, and leaves them as they are.
            now = [it.clone() for it in buffers]
            _fill(buffers, earlier)
            try:
                return forward(*args, **kwargs)
            finally:
                _fill(buffers, now)

        return checkpoint(once_more, *args, use_reentrant=False)

    return run


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        # Beside autograd, which would take it for a change of what it saved.
        buffer.data.copy_(value)


class _Search:
    """Looks for the modules to run again: probes once, then measures choices."""

    def __init__(self, step: ModuleStep, model: torch.nn.Module, arguments: Any) -> None:
        self.step, self.model, self.arguments = step, model, arguments
        self.probe = Probe(model, arguments)

    def plan(self, budget: int | str) -> MeasuredPlan:
        baseline = self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        units, best = self.cut(baseline, budget_bytes)
        again, best = fewest_again(
            units, best, self.measured, budget_bytes=budget_bytes, how="run again module by module"
        )
        self.step.choose(again)
        return measured_plan(
            units,
            again,
            best,
            baseline,
            budget_bytes=budget_bytes,
            baseline_seconds=baseline.seconds,
        )

    def cut(self, baseline: Measured, budget_bytes: int) -> tuple[list[_Unit], Measured]:
        """Return the units with the smallest peak when all run again, and that step."""
        best: tuple[list[_Unit], Measured] = ([], baseline)
        if baseline.peak_bytes <= budget_bytes:
            return best
        seen: set[tuple[str, ...]] = set()
        for depth in range(1, _DEPTH + 1):
            units, found = self.without_overwritten(list(self.units(depth)))
            names = tuple(unit.name for unit in units)
            if units and names not in seen:
                seen.add(names)
                if found.peak_bytes < best[1].peak_bytes:
                    best = (units, found)
        return best

    def without_overwritten(self, units: list[_Unit]) -> tuple[list[_Unit], Measured]:
        """Leave out units whose input is changed in place before they would run again."""
        while True:
            try:
                return units, self.measured(units)
            except _OverwrittenError as error:
                units = [it for it in units if it.name != error.unit]

    def units(self, depth: int) -> Iterator[_Unit]:
        """Cut the model into modules of a depth; what cannot be run again is cut further."""
        paths = {module: name for name, module in reversed(list(self.model.named_modules()))}

        def below(module: torch.nn.Module, depth: int) -> Iterator[torch.nn.Module]:
            for child in module.children():
                if child not in self.probe.behaviour:
                    # A list of modules is no call of its own, and no depth.
                    yield from below(child, depth)
                elif (depth > 1 and next(child.children(), None)) or self.probe.unrepeatable(child):
                    yield from below(child, depth - 1)
                else:
                    yield child

        for module in dict.fromkeys(below(self.model, depth)):
            does, inside = self.probe.behaviour[module], set(module.modules())
            if does.saved_bytes:
                changed = tuple(it for it in self.probe.changed if it[0] in inside)
                yield _Unit(paths[module], changed, does.seconds, does.saved_bytes)

    def measured(self, again: Sequence[_Unit]) -> Measured:
        """Run a step of the sample with units run again; put everything back."""
        self.step.choose(again)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.step.inputs = []
            outputs = self.step.run(self.model, args, kwargs)
            for unit, tensor, version in self.step.inputs:
                if tensor._version != version:
                    raise _OverwrittenError(unit)
            self.step.inputs = []
            return outputs

        with put_back(self.model, self.arguments):
            found = run_step(forward, self.model, self.arguments)
        return replace(found, results={}, peak_bytes=found.peak_bytes + self.step.beside_bytes)
