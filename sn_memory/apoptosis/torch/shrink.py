"""`Apoptosis`: look at the model every so often, merge what may go, say what was done."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as tree

from ..batches import most_alike
from ..events import Merged, merged
from ..groups import Group
from ..merge import Choice
from ..pace import BATCHES, Paced
from ..patches import SAMPLES
from ..reader import Reader
from .agree import (
    fingerprint,
    largest_of_ranks,
    place,
    require_same,
    stack_over_ranks,
    sum_over_ranks,
)
from .export import write
from .groups import find_groups
from .heads import counts_in
from .plain import check_plain
from .state import CARRIED, unknown_state
from .statistics import measure
from .surgery import Patient, as_offsets, operate, reshape, shapes_of


class Apoptosis(Paced):
    """Merges neurons of a model while it trains, with all that its optimizer knows of them.

    Parameters
    ----------
    model
        The plain model: not wrapped by DistributedDataParallel, torch.compile or a memory plan.
        Wrap it again after each event that changed it.
    optimizer
        A torch.optim.Optimizer of its parameters, not wrapped by Horovod; the wrapper must share
        its state (`wrapped.state = optimizer.state`).
    tolerance
        The relative change of what each layer puts out that one event may cause, in (0, 1), at the
        largest learning rate there was. It falls as the rate does.
    every
        Steps from one look to the next; see `schedule`.
    min_width
        At least so many neurons are left in each group.
    round_to
        Widths that change become a multiple of this.
    schedule
        "quick", "adaptive" or "aggressive" (sn_memory.apoptosis.schedule).
    overhead
        The share of training time that looks may take, in (0, 1): gaps grow until it holds. They
        then depend on the clock (of the slowest rank), and two runs may differ. None: they do not.

    Notes
    -----
    The last eight batches that the model was trained on are kept, and decide. After an event that
    merged, all parameters are new objects without gradients: call `step` after `optimizer.step()`.

    `carry` may be set to a function that returns tensors like parameters, by their names: gradients
    that have not been applied yet, such as what a compressor has still to send. It is called when
    neurons are about to merge, and what it returned is the gradient of the new parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        tolerance: float = 0.02,
        every: int = 500,
        min_width: int = 8,
        round_to: int = 8,
        schedule: str = "adaptive",
        overhead: float | None = 0.02,
    ) -> None:
        check_plain(model, optimizer)
        super().__init__(
            tolerance=tolerance,
            every=every,
            min_width=min_width,
            round_to=round_to,
            schedule=schedule,
            overhead=overhead,
        )
        self.model, self.optimizer = model, optimizer
        self._refused: dict[str, str] = {}
        self._traced: tuple[Any, Any] | None = None
        self.carry: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._batches: deque[Any] = deque(maxlen=BATCHES)
        self._hook = model.register_forward_pre_hook(_keeper(self), with_kwargs=True)
        # The first trace imports the tracer: nothing that a look costs.
        torch.export.export(nn.Identity(), (torch.zeros(1),))

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the model is called with; only needed where torch.compile calls it."""
        batch = tree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        self._batches.append(batch)

    def close(self) -> None:
        """Stop keeping batches; `step` cannot look at anything any more."""
        self._hook.remove()
        self._batches.clear()

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the state_dict to `path`, and what was merged to the same name with .json."""
        write(self.model, self.events, path)

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, and the shapes of the model."""
        shapes, counts = shapes_of(self.model), counts_in(self.model)
        return {**super().state_dict(), "shapes": shapes, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the model gets the shapes that it had there.

        Load the model's state and the optimizer's after this: where a shape was another one,
        parameters are new and hold nothing. So a checkpoint of before an event can be loaded after
        it, and one of after it into the wide model of a rank that joins late.
        """
        reshape(self.model, state["shapes"], state["counts"], self.optimizer)
        super().load_state_dict(state)
        self._batches.clear()

    def _rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _largest_of_ranks(self, value: float) -> float:
        return largest_of_ranks([value])[0]

    def _look(self) -> tuple[tuple[Merged, ...], dict[str, str]]:
        device = next(self.model.parameters()).device
        # A rank that cannot look says so in the hash: the others would wait for it otherwise.
        program, groups, batches, failure = None, [], most_alike(self._batches, _shapes), ""
        if not batches:
            failure = "no batch was seen; call step() after training steps of this very model"
        else:
            program, failure = self._trace(batches[0])
        if program is not None:
            groups = self._groups(program)
        described = [f"{group.name}: {group.width} {group.reason or ''}" for group in groups]
        require_same("the model", failure + "; ".join(described), device)
        if failure:
            return (), {"the model": failure}
        able = [group for group in groups if group.reason is None]
        refused = {group.name: group.reason for group in groups if group.reason is not None}
        choices = self._decide(able, program, batches)
        weights = fingerprint(self.model.parameters())
        decided = [choice and choice.text() for choice in choices]
        require_same("weights or decision", f"{weights} {decided}", device)
        chosen = []
        for group, choice in zip(able, choices, strict=True):
            if choice is None:
                refused[group.name] = "its activations are not finite"
            elif choice.merges:
                chosen.append((group, choice))
        state = self.optimizer.state
        carried = self.carry() if chosen and self.carry is not None else {}
        for name, parameter in self.model.named_parameters():
            if name in carried:
                state[parameter][CARRIED] = carried[name].view_as(parameter)
        done, undone = self._operate(chosen, batches[0])
        self._refused |= undone
        if done:
            Patient(self.model, self.optimizer).renew()
        for parameter in self.model.parameters() if carried else ():
            left = state[parameter].pop(CARRIED, None)
            parameter.grad = left if done else parameter.grad
            if not state[parameter]:
                del state[parameter]
        return tuple(merged(group, choice) for group, choice in done), refused | undone

    def _groups(self, program: Any) -> list[Group]:
        groups = find_groups(program, self.model)
        patient = Patient(self.model, self.optimizer)
        for group in groups:
            if group.name in self._refused:
                group.refuse(self._refused[group.name])
            for name in [piece.name for piece in group.slices] + [s.weight for s in group.sites]:
                if key := unknown_state(patient.value(name), patient.state(name)):
                    group.refuse(f"the optimizer's {key!r} of {name} is not shaped like it")
        return groups

    def _decide(self, groups: list[Group], program: Any, batches: Any) -> list[Choice | None]:
        ranks, _ = place()
        found = measure(program, self.model, groups, batches, samples=SAMPLES // ranks)
        every = [own for row in found for own in row]
        if not every:
            return []
        # What each rank adds has to be of one size; rows of the last batch may be fewer on one.
        sizes = largest_of_ranks([-sum(map(len, own.squares)) for own in every])
        cuts = [int(-size) for size in sizes]
        cut = [torch.cat(own.samples)[:n] for own, n in zip(every, cuts, strict=True)]
        squares = [torch.cat(own.squares)[:n].sum() for own, n in zip(every, cuts, strict=True)]
        *fits, totals = sum_over_ranks([*(own.fit for own in every), torch.stack(squares)])
        told = zip(fits, stack_over_ranks(cut), totals.sqrt().tolist(), strict=True)
        patient = Patient(self.model, self.optimizer)
        choices: list[Choice | None] = []
        for group in groups:
            readers = []
            for site in group.sites:
                fit, seen, norm = next(told)
                seen = seen.float().cpu().numpy()
                weights, constant = (
                    as_offsets(patient.value(site.weight), site),
                    site.takes_constant,
                )
                readers.append(Reader(site.call, weights, fit.cpu().numpy(), seen, norm, constant))
            choices.append(self._choose(readers, group.block))
        return choices

    def _operate(
        self, chosen: list[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        """Shrink groups; return those that were, and why others had to be given back."""
        if not chosen:
            return [], {}
        patient = Patient(self.model, self.optimizer)
        for group, choice in chosen:
            operate(patient, group, choice)
        program, failure = self._trace(batch)
        failure = failure or self._misread(program, chosen)
        if not failure:
            return chosen, {}
        patient.undo()
        self._traced = None
        if len(chosen) == 1:
            # A width is written in the model's own code, in a view() for example.
            return [], {chosen[0][0].name: f"with fewer the model cannot run: {failure}"}
        done: list[tuple[Group, Choice]] = []
        undone: dict[str, str] = {}
        for one in chosen:
            fine, bad = self._operate([one], batch)
            done += fine
            undone |= bad
        return done, undone

    def _misread(self, program: Any, done: list[tuple[Group, Choice]]) -> str:
        """Say where a model runs, but takes fewer channels for as many smaller heads."""
        now = {group.name: group for group in find_groups(program, self.model)}
        for group, choice in done:
            found = now.get(group.name)
            if found is None or (found.width, found.block) != (len(choice.kept), group.block):
                return "it takes the same number of heads, and makes each smaller"
        return ""

    def _trace(self, batch: Any) -> tuple[Any, str]:
        """Return (program, "") or (None, why the model cannot be traced)."""
        named = self.model.state_dict(keep_vars=True).items()
        key = (
            self.model.training,
            _shapes(batch),
            tuple((name, tuple(value.shape)) for name, value in named),
        )
        if self._traced is not None and self._traced[0] == key:
            return self._traced[1], ""
        args, kwargs = batch
        try:
            program = torch.export.export(self.model, args, kwargs)
        except Exception as error:  # noqa: BLE001 - torch.export raises what the model raises
            said = str(error).strip().splitlines()
            return None, f"{type(error).__name__}: {said[0] if said else ''}"
        self._traced = key, program
        return program, ""


def _keeper(owner: Apoptosis) -> Any:
    """Return the hook: a function, as copies of the model must not copy what watches it."""
    watching = weakref.ref(owner)

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        # What torch.compile or torch.export records is no batch of data.
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return
        watcher = watching()
        if watcher is None or watcher.model is not module or not watcher.is_near:
            return
        # Nor is one what sn_memory.torch estimates or plans with.
        if any(isinstance(it, FakeTensor) for it in tree.tree_leaves((args, kwargs))):
            return
        if module.training and torch.is_grad_enabled():
            watcher.observe(*args, **kwargs)

    return keep


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    leaves = tree.tree_leaves(batch)
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
