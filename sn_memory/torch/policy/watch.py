"""Watch a model's blocks in one forward pass: their ops, and which results may be saved.

The pass runs on fake tensors. A result may be saved if it is not changed in place later (torch
would return the changed values), is not a view, and is not random: torch restores the generator at
the start of a rerun, and a skipped draw would shift those after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import TraceError
from ..model.signature import objects, tensors
from ..model.step import SideEffects, restore_model, restore_rng_state
from ..trace.capture import scopes
from ..trace.fake import FakeMode, fake_of, swapped
from ..trace.record import Recorder, Recording
from .predict import Numbers

# The reason why a block that writes into a cache may not be rerun.
OF_CACHE = "it changes an object it is given, as a cache of keys and values"


@dataclass(frozen=True)
class Result:
    """The result of an op that may be saved.

    op, number : torch's key for it: the op's name, and the number of the call among this op's calls
    call : the number of the call in the recording
    bytes : held by saving it, until the block is rerun
    beyond_bytes : the part of these that autograd does not save anyway, so that it is also held in
        the block's own backward pass
    """

    op: str
    number: int
    call: int
    bytes: int
    beyond_bytes: int


@dataclass
class Block:
    """What a block does in a forward pass.

    path : of the module
    results : those that may be saved, in order
    calls : numbers of the calls in a rerun if nothing is saved; torch ends it at the last tensor
        that autograd needs.
    saved_bytes : saved by autograd inside, except for parameters and the block's inputs
    reason : why it may not be rerun; empty if it may.
    times : how often it is called
    """

    path: str
    results: list[Result] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    saved_bytes: int = 0
    reason: str = ""
    times: int = 0


@dataclass
class _Run:
    """One call of a block.

    inputs : storages of its arguments
    effects : its side effects
    ops : name, number and call of each
    saved : storages that autograd saves
    last : number of ops that have run when autograd saves its last tensor, where a rerun ends
    saved_last : storages that are saved at that point
    """

    block: Block
    inputs: set[int]
    effects: SideEffects
    numbers: Numbers = field(default_factory=Numbers)
    ops: list[tuple[str, int | None, int]] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    last: int = 0
    saved_last: set[int] = field(default_factory=set)


class _Ops(TorchDispatchMode):
    """Numbers the ops of the running block as torch's own mode does, and records their calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.running: _Run | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        calls = self.recorder.recording.calls
        before = len(calls)
        result = func(*args, **(kwargs or {}))
        if self.running is not None:
            number = self.running.numbers.of(str(func))
            # Numbered even if the recorder skipped the call, as torch numbers it, too.
            if len(calls) > before:
                self.running.ops.append((str(func), number, before))
        return result


def watch(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    paths: Sequence[str],
) -> tuple[dict[str, Block], Recording]:
    """Run the forward pass on fake tensors; return its blocks by path, and its calls.

    Raises TraceError if the model cannot be run on fake tensors, and for nested blocks.
    """
    mode = FakeMode()
    recorder = Recorder()
    ops = _Ops(recorder)
    blocks = {path: Block(path) for path in paths}
    runs: list[_Run] = []
    modules = {model.get_submodule(path): blocks[path] for path in paths}
    arguments = tree_map_only(torch.Tensor, lambda tensor: fake_of(mode, tensor), arguments)

    def enter(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        block = modules[module]
        if ops.running is not None:
            raise TraceError(
                f"the block {block.path!r} runs within the block {ops.running.block.path!r}. Name "
                "one of them."
            )
        inputs = {recorder.meet(tensor).storage for tensor in tensors((args, kwargs))}
        ops.running = _Run(block, inputs, SideEffects((), objects(args, kwargs)))
        if any(isinstance(arg, torch.Tensor) and arg.is_inference() for arg in args):
            block.reason = "it is given a tensor made in inference mode, which no checkpoint saves"
        runs.append(ops.running)

    def leave(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        run, ops.running = ops.running, None
        assert run is not None
        if run.effects.objects_changed():
            run.block.reason = OF_CACHE

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        if ops.running is not None:
            run, storage = ops.running, recorder.meet(tensor).storage
            # One op may save several tensors.
            if run.last != len(run.ops):
                run.saved_last.clear()
            run.saved.add(storage)
            run.saved_last.add(storage)
            run.last = len(run.ops)
        return tensor

    with restore_model(model), restore_rng_state(), swapped(model, mode), torch.enable_grad(), mode:
        # Registered before the pass, so that blocks are not charged for saving them.
        resident = {
            recorder.give(param, "given").storage
            for param in (*model.parameters(), *model.buffers(), *tensors(arguments))
        }
        with (
            _hooked(modules, enter, leave),
            saved_tensors_hooks(saved, lambda value: value),
            recorder,
            ops,
            scopes(model, recorder),
        ):
            model.forward(*arguments[0], **arguments[1])
    changed = {write for call in recorder.recording.calls for write in call.writes}
    for run in runs:
        _finish(run, recorder.recording, resident, changed)
    return blocks, recorder.recording


def _finish(run: _Run, recording: Recording, resident: set[int], changed: set[int]) -> None:
    """Add a call to its block; the results are those of the first call."""
    block, is_rerun = run.block, run.block.times > 0
    block.times += 1
    calls = [recording.calls[at] for _, _, at in run.ops]
    if (run.inputs - resident) & {write for call in calls for write in call.writes}:
        block.reason = "it changes what it is given in place"
    following = run.ops[run.last :][:1]
    if any(run.saved_last & {*recording.calls[at].writes} for _, _, at in following):
        block.reason = (
            f"{following[0][0]}, its last op, writes what autograd saved before it ran, and torch "
            "ends a second run when the last tensor is saved; end the block with an op that saves "
            "something after it"
        )
    # A rerun ends when the last tensor is saved, so the ops after it are not rerun.
    block.calls += [at for _, _, at in run.ops[: run.last]]
    inside = run.saved - resident - run.inputs
    block.saved_bytes += sum(recording.nbytes[storage] for storage in inside)
    # Saved results are identified by numbers that are the same in each call.
    if is_rerun:
        return
    for op, number, at in run.ops[: run.last]:
        call = recording.calls[at]
        if number is None or call.random or not call.makes or changed & set(call.makes):
            continue
        nbytes = sum(recording.nbytes[make] for make in call.makes)
        held = sum(recording.nbytes[make] for make in call.makes if make not in inside)
        block.results.append(Result(op, number, at, nbytes, held))


@contextmanager
def _hooked(modules: Iterable[torch.nn.Module], enter: Any, leave: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            for hook in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ):
                stack.callback(hook.remove)
        yield
