"""checkpoint_policy: choose what each block saves within a budget, for torch's checkpointing.

A plan of ops needs our executor. An alternative is torch's selective checkpointing: blocks are
recomputed in the backward pass, except for results that a policy names. It composes with eager
torch, torch.compile, FSDP2 and tensor parallelism. It cannot reorder, recompute a single value or
offload one, so its peak is not that of a plan of ops: it is predicted by running torch's own
executor on tensors without values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ...base.errors import PlanError
from ...base.sizes import parse_bytes, show_bytes
from ...graph.records import Device
from ...plan.plan import BudgetError, budget_line, percent_kept
from ..errors import TraceError
from ..model.step import device_of
from ..model.wrapping import check_model, check_optimizer
from ..trace.op_seconds import scratch_of_steps, timed
from ..trace.record import Recording
from ..trace.to_graph import flops
from ..trace.trace import call_arguments, resident_bytes
from .choose import Chooser, CompiledPeaks, Found
from .predict import Saved, Selection, Step, Stretch, context_fn, predicted, sharded_peak
from .watch import OF_CACHE, watch

_ROWS = (torch.nn.Sequential, torch.nn.ModuleList)
# They have no forward that could be rerun.
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def rows(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Return ways to cut a model into blocks, each as paths of modules, the coarsest first.

    A block is an item of a Sequential or ModuleList that has submodules; if these are nested, the
    outermost blocks make one cut and the innermost another. A model without any is cut into its
    own child modules.
    """
    names = {module: path for path, module in model.named_modules() if module is not model and path}
    paths = [
        names[module]
        for row in model.modules()
        if isinstance(row, _ROWS)
        for module in row.children()
        if module in names and next(module.children(), None) is not None
        if not isinstance(module, _LISTS)
    ]
    if not paths:
        paths = [name for name, child in model.named_children() if not isinstance(child, _LISTS)]
    outer = tuple(path for path in paths if not any(_inside(path, other) for other in paths))
    inner = tuple(path for path in paths if not any(_inside(other, path) for other in paths))
    return [outer] if outer == inner else [outer, inner]


def named(model: torch.nn.Module, blocks: Sequence[Any]) -> tuple[str, ...]:
    """Return the paths of the blocks that a user passes: paths, classes or modules.

    Raises TraceError if one is not part of the model, or is nested in another.
    """
    paths = {path: module for path, module in model.named_modules() if path}
    blocks_named: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            of_it = [block] if block in paths else []
        elif isinstance(block, type):
            of_it = [path for path, module in paths.items() if isinstance(module, block)]
        else:
            of_it = [path for path, module in paths.items() if module is block]
        if not of_it:
            raise TraceError(
                f"got block {block!r}, expected a path, a class or a module within the "
                f"{type(model).__name__}."
            )
        blocks_named += of_it
    for one in blocks_named:
        if around := next((path for path in blocks_named if _inside(one, path)), None):
            raise TraceError(
                f"the block {one!r} lies within the block {around!r}: what runs again as a part of "
                "one would run again within it once more. Name one of them."
            )
    return tuple(dict.fromkeys(blocks_named))


def _inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


@dataclass(frozen=True)
class SelectivePolicy:
    """What each block of a model saves; plain data, except `wrap` and `context_fn`.

    Attributes
    ----------
    saved
        Per recomputed block, by path: for each op, by name, the numbers of the calls whose results
        are saved. Calls count from 0 at the start of the block; ops of a dropout do not count.
    kept
        Blocks that are not recomputed.
    budget_bytes, peak_bytes
        The budget, and the peak of a step with this policy.
    baseline_peak_bytes
        The peak without the policy.
    smallest_peak_bytes
        The peak if nothing is saved: the smallest for these blocks, except for the generator states
        that reruns of dropout keep in a compiled step.
    rerun_s, forward_s
        Seconds of all recomputed ops, and of one forward pass, run eagerly.
    compiled
        Whether the peaks are of the step that torch.compile makes, or of the eager one.
    """

    saved: Mapping[str, Saved]
    kept: tuple[str, ...]
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    smallest_peak_bytes: int
    rerun_s: float
    forward_s: float
    compiled: bool = False
    stretches: tuple[Stretch, ...] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        """The policy's key in torch.compile's cache, the same in every process."""
        return _key(self.saved)

    def context_fn(self, block: str) -> Any:
        """Return the `context_fn` of `torch.utils.checkpoint.checkpoint` for a block, by path."""
        if block not in self.saved:
            raise PlanError(
                f"got block {block!r}, expected one that runs again: "
                f"{', '.join(self.saved) or 'there is none'}."
            )
        return context_fn(self.saved[block], f"{self.key}/{block}")

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put torch's checkpoint wrapper around each recomputed block; return the model.

        The model is changed; names of parameters and the state dict are not. Wrap before
        `fully_shard` and torch.compile.
        """
        return _wrapped(model, self.saved, self.key)

    def sharded_peak_bytes(self, model: torch.nn.Module, ranks: int) -> int:
        """Return the peak of a rank if FSDP2 shards each block, and the rest as one unit.

        model : not yet sharded, and not wrapped. Parameters, gradients and their reduction are of
        one type. The state of an optimizer is not in it.
        """
        return sharded_peak(model, (*self.saved, *self.kept), self.stretches, ranks)

    def __repr__(self) -> str:
        calls = sum(len(numbers) for saved in self.saved.values() for numbers in saved.values())
        return (
            f"SelectivePolicy: peak {show_bytes(self.baseline_peak_bytes)} -> "
            f"{show_bytes(self.peak_bytes)} of {show_bytes(self.budget_bytes)}; {len(self.saved)} "
            f"blocks run again, of which {calls} results are saved, {len(self.kept)} do not; "
            f"second runs take {self.rerun_s:.3g} s in addition to {self.forward_s:.3g} s of the "
            "forward pass"
        )


def _key(saved: Mapping[str, Saved]) -> str:
    # Another torch version may call other ops in a block, and results are known by call numbers.
    text = json.dumps([list(saved.items()), torch.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _wrapped(model: torch.nn.Module, saved: Mapping[str, Saved], key: str) -> torch.nn.Module:
    for path, results in saved.items():
        parent, _, name = path.rpartition(".")
        try:
            block = model.get_submodule(path)
        except AttributeError as error:
            raise PlanError(
                f"the {type(model).__name__} has no block {path!r}; expected a model like the one "
                "the policy was made for."
            ) from error
        # torch's wrapper leaves the names of parameters and the state dict unchanged.
        wrapped = checkpoint_wrapper(block, context_fn=context_fn(results, f"{key}/{path}"))
        setattr(model.get_submodule(parent), name, wrapped)
    return model


def _selected(model: torch.nn.Module, selection: Selection) -> torch.nn.Module:
    saved = {path: saved for path, saved in selection.items() if saved is not None}
    return _wrapped(model, saved, _key(saved))


# A model of transformers that caches keys and values passes the same cache to each layer.
_WITHOUT_CACHE = "For a cache, pass use_cache=False in the sample, or set it in the config. "


def checkpoint_policy(
    model: torch.nn.Module,
    sample: Any,
    budget: float | str,
    *,
    blocks: Sequence[str | type | torch.nn.Module] | None = None,
    profile: bool = True,
    device: Device | None = None,
    optimizer: Any = None,
    compiled: bool = False,
) -> SelectivePolicy:
    """Return the selective-checkpoint policy that keeps a budget and recomputes least.

    Parameters
    ----------
    model, sample
        As in `trace`; nothing is allocated except for timing ops. The model is left as it was.
    budget
        The most live bytes of a step: a number, "6GiB", or "60%" of the peak without a policy.
        Parameters, gradients, the input and kernels' scratch count, the latter measured with
        `profile` or `compiled`, else by an upper rule. The generator's state that torch
        keeps for each block does not count: 5 KB on the CPU.
    blocks
        Paths, classes or modules that may be recomputed, none within another. None takes the items
        of a Sequential or ModuleList that have modules themselves: the outermost and the innermost
        are tried.
    profile, device, optimizer
        As in `trace`.
    compiled
        The budget applies to the compiled step, which holds less than the eager one. It is compiled
        and run once for up to six choices.

    Raises
    ------
    TraceError
        For a model that cannot be run on tensors without values, or without a block that may be
        recomputed; with `compiled`, for one that torch.compile does not take as one graph.
    BudgetError
        If these blocks cannot keep the budget; carries the smallest peak found.

    Examples
    --------
    >>> import torch
    >>> import sn_memory.torch
    >>> layer = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    >>> model = torch.nn.Sequential(*(layer() for _ in range(8)))
    >>> sample = torch.randn(512, 64)
    >>> policy = sn_memory.torch.checkpoint_policy(model, sample, "75%", profile=False)
    >>> policy.peak_bytes <= 0.75 * policy.baseline_peak_bytes
    True
    >>> policy.wrap(model)(sample).sum().backward()
    """
    check_model(model)
    check_optimizer(optimizer)
    arguments = call_arguments(sample)
    held = resident_bytes(model, optimizer)
    known: list[torch.Tensor] = []
    scratch = scratch_of_steps(device_of(model), profile=profile)
    # The step without a policy, to which a percentage refers.
    plain = predicted(model, arguments, {}, known, scratch)
    peaks = CompiledPeaks(model, arguments, held, _selected) if compiled else None
    plain_bytes = held + (plain.peak_bytes if peaks is None else peaks.plain_bytes)
    budget_bytes = parse_bytes(budget, whole=plain_bytes)
    best: Found | None = None
    smallest: Found | None = None
    forward_s = 0.0
    reasons: dict[str, str] = {}
    # Each cut of the model into blocks has its own choices; the fastest of all is taken.
    for paths in [named(model, blocks)] if blocks is not None else rows(model):
        watched, recording = watch(model, arguments, paths)
        able = {path: block for path, block in watched.items() if block.times and not block.reason}
        reasons |= {path: block.reason for path, block in watched.items() if block.reason}
        if not able:
            continue
        seconds = _seconds(recording, model, profile=profile, device=device)

        def tried(selection: Selection) -> Step:
            return predicted(model, arguments, selection, known, scratch)

        chooser = Chooser(able, seconds, tried)
        nothing = chooser.nothing if peaks is None else peaks.outcome(chooser.nothing)
        if smallest is None or nothing.step.peak_bytes < smallest.step.peak_bytes:
            smallest = nothing
        room = budget_bytes - held
        choice = chooser.within(room) if peaks is None else peaks.within(chooser, nothing, room)
        if choice is not None and (best is None or choice.rerun_s < best.rerun_s):
            best, forward_s = choice, sum(seconds)
        # Everything fits without a policy, so no other cut can be better.
        if plain_bytes <= budget_bytes:
            break
    # No cut has a block that can be rerun: list the blocks for each reason.
    if smallest is None:
        paths_of: dict[str, list[str]] = {}
        for path, reason in reasons.items():
            paths_of.setdefault(reason, []).append(path)
        why = "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in paths_of.items())
        hint = _WITHOUT_CACHE if any(OF_CACHE in reason for reason in paths_of) else ""
        raise TraceError(
            f"the {type(model).__name__} has no block that may run again ({why or 'none runs'}). "
            f"{hint}Name others with blocks=."
        )
    if best is None:
        raise _refused(smallest, plain_bytes, held, budget_bytes)
    return SelectivePolicy(
        saved={path: saved for path, saved in best.selection.items() if saved is not None},
        kept=tuple(path for path, saved in best.selection.items() if saved is None),
        budget_bytes=budget_bytes,
        peak_bytes=best.step.peak_bytes + held,
        baseline_peak_bytes=plain_bytes,
        smallest_peak_bytes=smallest.step.peak_bytes + held,
        rerun_s=best.rerun_s,
        forward_s=forward_s,
        compiled=compiled,
        stretches=tuple(best.step.stretches),
    )


def _refused(smallest: Found, plain_bytes: int, held: int, budget_bytes: int) -> BudgetError:
    peak = smallest.step.peak_bytes + held
    percent = percent_kept(peak, plain_bytes)
    share = f', or "{percent}%" of the peak without a policy' if percent else ""
    return BudgetError(
        f"a step whose blocks all run again needs {show_bytes(peak)}, set by "
        f"{smallest.step.peak_op}. The {budget_line(budget_bytes, peak)}. The least that these "
        f"blocks can do is {peak} bytes{share}. Raise the budget, name other blocks, or plan with "
        "sn_memory.torch.plan, which also reorders and splits blocks.",
        peak_bytes=peak,
        budget_bytes=budget_bytes,
        op=smallest.step.peak_op,
        percent=percent,
    )


def _seconds(
    recording: Recording, model: torch.nn.Module, *, profile: bool, device: Device | None
) -> list[float]:
    """Return seconds per call: measured, else by a roofline model."""
    place = next(iter(model.parameters())).device
    speeds, costs = timed(recording, place, profile=profile, device=device)
    return [
        _roofline(recording, at, speeds) if cost is None else cost[0]
        for at, cost in enumerate(costs)
    ]


def _roofline(recording: Recording, at: int, device: Device) -> float:
    call = recording.calls[at]
    moved = sum(recording.nbytes[read] for read in {*call.reads, *call.makes, *call.writes})
    return max(
        flops(call) / (device.flops_per_s or float("inf")),
        moved / (device.bytes_per_s or float("inf")),
    )
