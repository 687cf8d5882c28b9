"""Choose what each block saves within a budget, by the seconds spared per saved byte.

Under torch's selective checkpointing a rerun computes every op whose result is not saved, so a
saved result spares the seconds of its op, whatever else is saved; it is held from its block's
forward pass until the block is rerun. So this is a knapsack with one bound for each stretch of a
step. The sum of bytes is a model: the executor is run on fake tensors to check it, and if it holds
more than predicted, the bound of that stretch is lowered by the difference.

Under torch.compile fused kernels write fewer values to memory than eager ops do, so the eager peak
is too high: each choice is compiled and run once, and if it holds more or less than the budget,
another choice is made for a budget corrected by the difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._functorch import config as functorch_config

from ...base.progress import report_progress
from ..errors import TraceError
from ..model.signature import tensors
from .predict import Saved, Selection, Step
from .watch import Block, Result

# A block that is not rerun at all.
KEPT = None
# What is saved: per block the numbers of its results, or KEPT.
Choice = dict[str, set[int] | None]
# Most rounds of `Chooser.within`; each runs a step of the executor on fake tensors.
_ROUNDS = 8


@dataclass
class Found:
    """A choice that was tried: the executor's step with it, and the seconds of reruns."""

    choice: Choice
    selection: Selection  # the choice in the form that the executor takes
    step: Step
    rerun_s: float


class Chooser:
    """Finds choices for the blocks of one cut; `tried` runs the executor on fake tensors."""

    def __init__(
        self,
        blocks: Mapping[str, Block],
        seconds: Sequence[float],
        tried: Callable[[Selection], Step],
    ) -> None:
        self.blocks, self.seconds, self.tried = blocks, seconds, tried
        self.nothing = self.outcome({path: set() for path in blocks})

    def rerun_s(self, choice: Choice) -> float:
        """Return the seconds of all reruns."""
        total = 0.0
        for path, chosen in choice.items():
            if chosen is not KEPT:
                block = self.blocks[path]
                total += sum(self.seconds[at] for at in block.calls)
                total -= block.times * sum(
                    self.seconds[block.results[result].call] for result in chosen
                )
        return total

    def outcome(self, choice: Choice) -> Found:
        """Try a choice."""
        selection = self.selection(choice)
        return Found(choice, selection, self.tried(selection), self.rerun_s(choice))

    def selection(self, choice: Choice) -> Selection:
        """Return a choice in the form that the executor takes."""
        return {
            path: KEPT
            if chosen is KEPT
            else saved_of(self.blocks[path].results[result] for result in sorted(chosen))
            for path, chosen in choice.items()
        }

    def within(self, budget_bytes: int) -> Found | None:
        """Return the fastest choice found within a budget; None if there is none."""
        if self.nothing.step.peak_bytes > budget_bytes:
            return None
        best: Found | None = None
        lowered: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        start = self.nothing
        for _ in range(_ROUNDS):
            rooms = _Rooms(start.step, budget_bytes, lowered)
            choice = self.filled(start.choice, rooms)
            if choice == start.choice:
                if _is_better(start, best):
                    best = start
                break
            tried = self.outcome(choice)
            if tried.step.peak_bytes <= budget_bytes:
                if not _is_better(tried, best):
                    break
                best = start = tried
                continue
            # If the executor held more than predicted, reduce the room by the difference.
            for key, peak in _peaks(tried.step).items():
                if peak > budget_bytes:
                    lowered[key] += peak - budget_bytes
            start = best or self.nothing
        return best

    def filled(self, start: Choice, rooms: _Rooms) -> Choice:
        """Return a choice extended as far as there is room: the faster of two orders."""
        # Single results may take the room of a whole block that would spare more, and vice versa.
        choices = [self._filled(start, rooms.copy(), blocks_first=first) for first in (False, True)]
        return min(choices, key=self.rerun_s)

    def _filled(self, start: Choice, rooms: _Rooms, *, blocks_first: bool) -> Choice:
        choice = deepcopy(start)
        if blocks_first:
            self._keep_whole(choice, rooms)
        items = []
        for path, chosen in choice.items():
            if chosen is KEPT:
                continue
            block = self.blocks[path]
            for number, result in enumerate(block.results):
                spared = self.seconds[result.call]
                if number not in chosen and spared > 0:
                    items.append((spared / max(1, result.bytes), rooms.first(path), path, number))
        # Among equals, later blocks come first, as their results are held for a shorter time.
        for _, _, path, number in sorted(items, reverse=True):
            result = self.blocks[path].results[number]
            if rooms.take(path, result.bytes, result.beyond_bytes):
                saved = choice[path]
                assert saved is not None
                saved.add(number)
        self._keep_whole(choice, rooms)
        return choice

    def _keep_whole(self, choice: Choice, rooms: _Rooms) -> None:
        """Keep whole blocks where there is room for all that autograd saves."""
        blocks = []
        for path, chosen in choice.items():
            if chosen is not KEPT:
                block = self.blocks[path]
                spared = sum(self.seconds[at] for at in block.calls)
                blocks.append((spared / max(1, block.saved_bytes), rooms.first(path), path))
        for _, _, path in sorted(blocks, reverse=True):
            block, chosen = self.blocks[path], choice[path]
            held = [block.results[result] for result in chosen or ()]
            more = block.saved_bytes - block.times * sum(result.bytes for result in held)
            if rooms.take(path, more, -sum(result.beyond_bytes for result in held)):
                choice[path] = KEPT


class _Rooms:
    """The bytes left in each stretch of a step."""

    def __init__(
        self, step: Step, budget_bytes: int, lowered: Mapping[tuple[str, str, int], int]
    ) -> None:
        peaks = _peaks(step)
        self.room = np.array(
            [budget_bytes - peak - lowered.get(key, 0) for key, peak in peaks.items()]
        )
        # Per block, the stretches that hold its saved results, and its rerun: one span per call.
        self._spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        backward: dict[str, list[int]] = defaultdict(list)
        for at, (path, phase, _) in enumerate(peaks):
            if phase == "backward":
                backward[path].append(at)
        for at, (path, phase, _) in enumerate(peaks):
            if path and phase == "forward":
                # Reruns come in reverse order: the first call has the last one.
                own = backward[path].pop() if backward[path] else -1
                self._spans[path].append((at, own if own >= 0 else len(peaks), own))

    def copy(self) -> _Rooms:
        rooms = copy(self)  # the spans do not change
        rooms.room = self.room.copy()
        return rooms

    def first(self, path: str) -> int:
        """Return the stretch in which a block is first called."""
        return self._spans[path][0][0] if path in self._spans else -1

    def take(self, path: str, held_bytes: int, beyond_bytes: int) -> bool:
        """Take bytes from the stretches that hold them, if there is room in all of them."""
        need = np.zeros_like(self.room)
        for begin, end, own in self._spans.get(path, ()):
            need[begin:end] += held_bytes
            if own >= 0:
                need[own] += beyond_bytes
        if (need > self.room)[need > 0].any():
            return False
        self.room -= need
        return True


def _is_better(one: Found, other: Found | None) -> bool:
    return other is None or (one.rerun_s, one.step.peak_bytes) < (
        other.rerun_s,
        other.step.peak_bytes,
    )


def _peaks(step: Step) -> dict[tuple[str, str, int], int]:
    """Return the peak of each stretch, by block, phase, and number among stretches of that kind."""
    peaks: dict[tuple[str, str, int], int] = {}
    numbers: Counter[tuple[str, str]] = Counter()
    for stretch in step.stretches:
        kind = stretch.path, stretch.phase
        peaks[*kind, numbers[kind]] = stretch.peak_bytes
        numbers[kind] += 1
    return peaks


def saved_of(results: Iterable[Result]) -> Saved:
    """Return results in a policy's form: per op the numbers of its calls."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for result in results:
        numbers[result.op].append(result.number)
    return {op: tuple(sorted(calls)) for op, calls in sorted(numbers.items())}


def compiled_peak(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the peak live bytes of a forward and backward pass of a model under torch.compile.

    model : compiled and run once, but not changed; its checkpoints stay in effect
    arguments : positional and by keyword, with real tensors

    Raises TraceError if torch.compile breaks the model into several graphs, or if no gradient is
    wanted.
    """
    args, kwargs = arguments
    known = [*model.parameters(), *model.buffers(), *tensors(arguments)]
    # Imported here: it needs hooks of torch 2.13, and torch.compile takes seconds to import.
    from ..compile.backend import Ready, Settings, of_fixed_sizes, storage_bytes, until_ready
    from ..compile.search import Search

    peaks: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        inputs = list(inputs)
        unused = storage_bytes(known) - storage_bytes(tensors(inputs))
        # A budget above any peak, so that only what the policy says is recomputed.
        request = Settings(1 << 62, False, False, resident_bytes=max(0, unused))
        # The backward pass is traced outside of autocast, as users call it.
        with functorch_config.patch(backward_pass_autocast="off"):
            compiled_search = Search(module, inputs, request)
        if compiled_search.plain is not None:
            peaks.append(compiled_search.peak_bytes(compiled_search.plain))

        def ready(*_: Any) -> Any:
            raise Ready

        return ready

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    # Each try compiles the same forward again, and Dynamo's limit is eight.
    patched = torch._dynamo.config.patch(recompile_limit=1 << 20)
    with until_ready(), patched, of_fixed_sizes(arguments):
        compiled(*args, **kwargs)
    if not peaks:
        raise TraceError("torch.compile found nothing to differentiate in the model.")
    return peaks[0]


# Most choices that are measured for one budget and one cut.
_TRIES = 4
# A choice is good enough if it leaves at most this share of the budget unused.
_NEAR = 0.01


def shell(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the model's modules that shares its parameters and buffers."""
    known: dict[int, torch.nn.Module] = {}

    def copied(module: torch.nn.Module) -> torch.nn.Module:
        # A module used in two places is one module in the copy, too.
        if id(module) not in known:
            copy = known[id(module)] = object.__new__(type(module))
            copy.__dict__.update(module.__dict__)
            copy.__dict__["_modules"] = {
                name: child and copied(child) for name, child in module._modules.items()
            }
        return known[id(module)]

    return copied(model)


class CompiledPeaks:
    """Peaks of a model under torch.compile, by what its blocks save.

    model, arguments : as in `compiled_peak`
    held : bytes held in addition to the step's
    wrapped : wraps blocks of a model in checkpoints
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        held: int,
        wrapped: Callable[[torch.nn.Module, Selection], torch.nn.Module],
    ) -> None:
        self.model, self.arguments, self.held, self.wrapped = model, arguments, held, wrapped
        self.measured = 0
        self.plain_bytes = self.of({}) - held

    def of(self, selection: Selection) -> int:
        """Return the peak with a selection, measured by compiling and running the model."""
        self.measured += 1
        report_progress("compile", self.measured, self.measured + 1)
        wrapped = self.wrapped(shell(self.model), selection)
        return compiled_peak(wrapped, self.arguments) + self.held

    def outcome(self, chosen: Found) -> Found:
        """Return a choice with its peak when compiled."""
        peak = self.of(chosen.selection) - self.held
        return replace(chosen, step=replace(chosen.step, peak_bytes=peak))

    def within(self, chooser: Chooser, nothing: Found, budget_bytes: int) -> Found | None:
        """Return the fastest choice found whose compiled step keeps a budget.

        nothing : the choice that saves nothing, as measured
        budget_bytes : excluding `held`
        """
        if nothing.step.peak_bytes > budget_bytes:
            return None
        best = nothing
        if self.plain_bytes <= budget_bytes:
            # Everything fits, so this is the step without a policy.
            everything = chooser.within(1 << 62)
            assert everything is not None
            return replace(everything, step=replace(everything.step, peak_bytes=self.plain_bytes))
        # Saved results take the same bytes in eager and compiled steps, so both peaks grow alike.
        asked = budget_bytes + chooser.nothing.step.peak_bytes - nothing.step.peak_bytes
        low, high = chooser.nothing.step.peak_bytes, 1 << 62
        for _ in range(_TRIES):
            eager = chooser.within(asked)
            if eager is None:
                break
            measured = self.outcome(eager)
            over = measured.step.peak_bytes - budget_bytes
            if over <= 0:
                low = max(low, asked)
                if measured.rerun_s < best.rerun_s:
                    best = measured
                if -over <= _NEAR * budget_bytes or not measured.rerun_s:
                    break
            else:
                high = min(high, asked)
            # Assumes that a byte more in eager is a byte more when compiled; clamped between what
            # kept the budget and what did not, so that no amount is tried twice.
            asked = min(max(asked - over, low + 1), high - 1)
            if asked <= low or asked >= high:
                break
        return best
