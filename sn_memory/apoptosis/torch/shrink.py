"""`Apoptosis` for torch: measure the model periodically, merge neurons, report the merges."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as tree

from ..groups import FITTED, Group, Seen, Site, empty_statistics, held_out, patches, same_padding
from ..merge import Choice
from ..pace import FORMAT, BaseApoptosis, Ranks, StateShapes, horovod_ranks
from .groups import counts_in, find_groups
from .surgery import CARRIED, Pruner, as_offsets, merge_group, reshape, shapes_of


class _Run(fx.Interpreter):  # type: ignore[misc,unused-ignore]  # torch is Any to the checker
    """Runs the traced calls again, without dropout, and records inputs and outputs of sites."""

    def __init__(
        self, graph: fx.GraphModule, sites: dict[str, tuple[Site, Seen]], share: int
    ) -> None:
        super().__init__(graph)
        self.sites, self.share = sites, share

    def run_node(self, n: fx.Node) -> Any:
        if "dropout" in str(n.target):
            return self.env[n.args[0]]
        if "scaled_dot_product_attention" in str(n.target) and len(n.args) > 4:
            # The fifth argument is the chance of dropout.
            fetched = self.fetch_args_kwargs_from_env(n)
            return n.target(*fetched[0][:4], 0.0, *fetched[0][5:], **fetched[1])
        if n.name not in self.sites:
            return super().run_node(n)
        site, own = self.sites[n.name]
        seen = self.env[n.args[0]]
        out = super().run_node(n)
        _add_fit(own.fit, site, seen[FITTED])
        rows = held_out(len(seen))
        if "conv" in str(n.target):
            parts, outputs = self._patches(n.args, seen[rows], out[rows])
            samples = torch.stack(parts, 1)
        else:
            samples = seen[rows].reshape(-1, len(own.fit) - 1, site.places).transpose(1, 2)
            outputs = out[rows].reshape(len(samples), -1)
            some = slice(None, None, -(-len(samples) // self.share))
            samples, outputs = samples[some], outputs[some]
        own.add(samples.float().cpu().numpy(), outputs.double().cpu().numpy())
        return out

    def _patches(
        self, arguments: Any, seen: torch.Tensor, out: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return inputs and outputs of a convolution as `patches` does."""
        spatial = seen.dim() - 2
        kernel = self.env[arguments[1]].shape[2:]
        stride, padding, dilation = (
            _each(arguments[place] if len(arguments) > place else default, spatial)
            for place, default in ((3, 1), (4, 0), (5, 1))
        )
        # Padding as a string is "same" or "valid": see `torch.nn.functional.conv2d`.
        if padding == "same":
            sides = same_padding(kernel, stride, dilation, seen.shape[2:])
        else:
            widths = [0] * spatial if isinstance(padding, str) else padding
            sides = [(width, width) for width in widths]
        # `pad` begins with the last axis.
        flat = [side for pair in reversed(sides) for side in pair]
        padded = torch.nn.functional.pad(seen, flat).movedim(1, -1)
        outputs = out.movedim(1, -1)
        return patches(padded, outputs, self.share, kernel=kernel, stride=stride, dilation=dilation)


def _add_fit(fit: torch.Tensor, site: Site, rows: torch.Tensor) -> None:
    channels = len(fit) - 1
    # [rows, others, channels, places] -> [rows and others and places, channels]
    rows = rows.movedim(site.axis, -1).reshape(-1, channels, site.places).transpose(1, 2)
    flat = rows.reshape(-1, channels).double()
    ones = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
    fit += ones.T @ ones


def _each(value: Any, spatial: int) -> Any:
    if isinstance(value, str):
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def measure(
    program: Any,
    model: torch.nn.Module,
    groups: Sequence[Group],
    batches: Sequence[Any],
    samples: int,
) -> list[list[Seen]]:
    """Return statistics of each reader of each group in batches of (args, kwargs).

    The traced graph is run again on them, without gradients. Dropout is left out, so that
    randomness is not taken for a difference, and running statistics are copies, so that the model
    does not change.

    About `samples` outputs of each reader are kept in total.
    """
    device = next(model.parameters()).device

    # Where the model is: a sum of products of many rows.
    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, size, dtype=torch.float64, device=device)

    seen_by_group, sites = empty_statistics(groups, zeros)
    signature = program.graph_signature
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    # The program takes these before the user's inputs, which have no target.
    targets = [spec.target for spec in signature.input_specs if spec.target is not None]
    share = math.ceil(samples / len(batches))
    with torch.no_grad():
        for args, kwargs in batches:
            lifted = [state[name] if name in state else program.constants[name] for name in targets]
            # Calls of a batch norm write into its buffers; parameters are only read.
            copies = [
                value if isinstance(value, torch.nn.Parameter) else value.clone()
                for value in lifted
            ]
            inputs = tree.tree_leaves((args, kwargs))
            _Run(program.graph_module, sites, share).run(*copies, *inputs)
    for _, seen in sites.values():
        seen.fit = seen.fit.cpu().numpy()
    return seen_by_group


def check_plain(model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError for wrappers that keep references to parameters that will be replaced."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod")
    if wrapped:
        raise ValueError(
            f"Apoptosis: got a {type(model).__name__}, expected the model inside it: parameters "
            "are replaced, and a wrapper keeps the old ones. Give the plain model, and wrap it "
            "again when step() returns true."
        )
    if hasattr(model, "sn_memory"):
        raise ValueError(
            f"Apoptosis: got a planned {type(model).__name__}, expected the one that was given to "
            "plan(): recorded calls keep no batches. Give the plain model, and call "
            "observe(inputs) each step."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Apoptosis: got LBFGS, whose state is of all parameters together, expected an "
            "optimizer that keeps its state parameter by parameter, such as Adam or SGD."
        )
    if hasattr(optimizer, "_allreduce_delay"):
        raise ValueError(
            "Apoptosis: got an optimizer wrapped by Horovod, expected the one inside it: the "
            "wrapper keeps tables of the old parameters. Give the plain optimizer."
        )


def rebuild(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Shrink a freshly made model to what `Apoptosis.export` wrote, and load its weights.

    Parameters
    ----------
    model
        Constructed as before training, at full width; changed in place.
    path
        The file of the state_dict, with its JSON next to it.

    Returns
    -------
    nn.Module
        The model. Make its optimizer after this call: parameters are new ones.
    """
    path = Path(path)
    record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    if record.get("format") != FORMAT or record.get("version") != 2:
        raise ValueError(
            f"rebuild: {path.with_suffix('.json')} says format {record.get('format')!r}, version "
            f"{record.get('version')!r}; expected {FORMAT!r}, 2. Export it again."
        )
    values = torch.load(path, weights_only=True, map_location="cpu")
    reshape(model, record["shapes"], record["counts"])
    model.load_state_dict(values)
    return model


class DistributedRanks(Ranks):
    """The ranks of torch.distributed's default group."""

    def __init__(self) -> None:
        dist = torch.distributed
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        # NCCL takes tensors of the GPU only.
        self._device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        every = torch.from_numpy(flat).to(self._device)
        torch.distributed.all_reduce(every)
        return np.asarray(every.cpu().numpy())

    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        mine = torch.from_numpy(row.copy()).to(self._device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(every, mine)
        return [one.cpu().numpy() for one in every]


def ranks_now() -> Ranks:
    """Return the ranks of torch.distributed if it is initialised, else Horovod's if it is."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DistributedRanks()
    return horovod_ranks("horovod.torch", torch.from_numpy)


class Apoptosis(BaseApoptosis):
    """Merges neurons of a model while it trains, together with their optimizer state.

    The model is the plain one: not wrapped by DistributedDataParallel, torch.compile or a memory
    plan; wrap it again after each event that changed it. The optimizer is a torch.optim.Optimizer
    of its parameters, not wrapped by Horovod; the wrapper must share its state
    (`wrapped.state = optimizer.state`). Settings: see `__init__`.

    Notes
    -----
    Decisions are based on the last eight training batches, which are kept. After an event that
    merged, all parameters of the optimizer are new objects. Gradients are merged like momentum, so
    `step` may be called between the micro-batches of a step.

    `carry` may be set to a function that returns tensors shaped like parameters, by their names:
    gradients that have not been applied yet, such as the residuals of a compressor. It is called
    before neurons merge, and its results are added to the gradients.
    """

    _no_batch = "no batch was seen; call step() after training steps of this model"

    def _begin(self) -> None:
        check_plain(self.model, self.optimizer)
        self._refused: dict[str, str] = {}
        self._traced: tuple[Any, Any] | None = None
        self.carry: Callable[[], Mapping[str, torch.Tensor]] | None = None
        # Whether parameters were replaced and no training step has run since.
        self._replaced = False
        self._hook = self.model.register_forward_pre_hook(_keeper(self), with_kwargs=True)
        # The first trace imports the tracer; its time must not count as that of a look.
        torch.export.export(nn.Identity(), (torch.zeros(1),))

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Keep a batch that the model is called with; only needed under torch.compile."""
        batch = tree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        self._batches.append(batch)

    def close(self) -> None:
        """Stop keeping batches; `step` can no longer look."""
        self._hook.remove()
        self._batches.clear()

    def _write(self, path: Path) -> dict[str, Any]:
        torch.save(self.model.state_dict(), path)
        return {"version": 2, "shapes": shapes_of(self.model), "counts": counts_in(self.model)}

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, and the shapes of the model."""
        shapes, counts = shapes_of(self.model), counts_in(self.model)
        return {**super().state_dict(), "shapes": shapes, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was taken: the model gets the shapes it had then.

        Load the model's state and the optimizer's afterwards: parameters whose shape changed are
        new and uninitialized. So a checkpoint from before an event can be loaded after it, and one
        from after it into the wide model of a rank that joins late.
        """
        reshape(self.model, state["shapes"], state["counts"], self.optimizer)
        self._replaced = True
        super().load_state_dict(state)
        self._batches.clear()

    def _rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _ranks(self) -> Ranks:
        return ranks_now()

    def _shapes(self, batch: Any) -> tuple[tuple[int, ...], ...]:
        leaves = tree.tree_leaves(batch)
        return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _groups(self, batch: Any) -> tuple[list[Group], str]:
        program, failure = self._trace(batch)
        if failure:
            return [], failure
        groups, pruner = find_groups(program, self.model), Pruner(self.model, self.optimizer)
        for group in groups:
            if group.name in self._refused:
                group.refuse(self._refused[group.name])
            for name in group.parameters:
                # Another optimizer would keep the old parameter, and nothing would train the new.
                value = pruner.value(name)
                if value.requires_grad and not pruner.trains(value):
                    group.refuse(f"{name} requires gradients, and is not in the optimizer")
        return groups, ""

    def _state_shapes(self, name: str) -> tuple[Sequence[int], StateShapes]:
        pruner = Pruner(self.model, self.optimizer)
        states = pruner.state(name).items()
        tensors = [(key, held.shape) for key, held in states if isinstance(held, torch.Tensor)]
        return pruner.value(name).shape, tensors

    def _measure(
        self, groups: Sequence[Group], batches: Sequence[Any], samples: int
    ) -> list[list[Seen]]:
        program, _ = self._trace(batches[0])
        return measure(program, self.model, groups, batches, samples)

    def _offsets(self, site: Site, group: Group) -> NDArray[np.float64]:
        return as_offsets(Pruner(self.model, self.optimizer).value(site.weight), site)

    def _weights(self) -> Iterator[NDArray[Any]]:
        for value in self.model.parameters():
            # As bytes: NumPy has no bfloat16.
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    def _merge(
        self, chosen: Sequence[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        state = self.optimizer.state
        carried = self.carry() if self.carry is not None else {}
        # As entries of the optimizer's state they are merged like a mean of gradients.
        for name, parameter in self.model.named_parameters():
            left = parameter.grad
            if name in carried:
                more = carried[name].view_as(parameter)
                left = more if left is None else left + more
            if left is not None:
                state[parameter][CARRIED] = left
        done, undone = self._shrink(chosen, batch)
        self._refused |= undone
        if done:
            Pruner(self.model, self.optimizer).renew()
            self._replaced = True
        for parameter in self.model.parameters():
            if parameter not in state:
                continue
            left = state[parameter].pop(CARRIED, None)
            parameter.grad = left if done else parameter.grad
            # For an optimizer without state, only the gradient created the entry.
            if not state[parameter]:
                del state[parameter]
        return done, undone

    def _shrink(
        self, chosen: Sequence[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        """Shrink groups; if the model cannot run then, undo, and try them one by one."""
        pruner = Pruner(self.model, self.optimizer)
        undo = pruner.undo()
        for group, choice in chosen:
            merge_group(pruner, group, choice)
        program, failure = self._trace(batch)
        failure = failure or self._misread(program, chosen)
        if not failure:
            return list(chosen), {}
        undo()
        # The kept trace is of the smaller model.
        self._traced = None
        if len(chosen) == 1:
            # A width is hard-coded in the model, in a view() for example.
            return [], {chosen[0][0].name: f"with fewer the model cannot run: {failure}"}
        done: list[tuple[Group, Choice]] = []
        undone: dict[str, str] = {}
        # It is unknown which one failed, so try each alone.
        for one in chosen:
            fine, bad = self._shrink([one], batch)
            done += fine
            undone |= bad
        return done, undone

    def _misread(self, program: Any, done: Sequence[tuple[Group, Choice]]) -> str:
        """Return why a model misreads its channels: as many heads as before, but smaller ones."""
        now = {group.name: group for group in find_groups(program, self.model)}
        for group, choice in done:
            current = now.get(group.name)
            expected = len(choice.kept), group.block
            if current is None or (current.width, current.block) != expected:
                return "it takes the same number of heads, and makes each smaller"
        return ""

    def _trace(self, batch: Any) -> tuple[Any, str]:
        """Return (program, "") or (None, why the model cannot be traced)."""
        named = self.model.state_dict(keep_vars=True).items()
        # What a trace depends on: the mode, and all shapes.
        key = (
            self.model.training,
            self._shapes(batch),
            tuple((name, tuple(value.shape)) for name, value in named),
        )
        if self._traced is not None and self._traced[0] == key:
            return self._traced[1], ""
        args, kwargs = batch
        try:
            program = torch.export.export(self.model, args, kwargs)
        except Exception as error:  # noqa: BLE001 - torch.export raises what the model raises
            lines = str(error).strip().splitlines()
            return None, f"{type(error).__name__}: {lines[0] if lines else ''}"
        self._traced = key, program
        return program, ""


def _check_wrapper() -> None:
    """Raise if an old DistributedDataParallel calls the model: it misses the new parameters."""
    wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    now = set() if wrapper is None else set(wrapper.module.parameters())
    if wrapper is not None and not now.issuperset(wrapper._module_parameters):
        raise RuntimeError(
            "Apoptosis: the model is called by a DistributedDataParallel that was made before "
            "neurons merged, or before a state was loaded. Since then its parameters are new "
            "objects, whose gradients that wrapper does not exchange. Wrap the model again when "
            "step() returns true: model = DistributedDataParallel(model.module)."
        )


def _keeper(owner: Apoptosis) -> Any:
    """Return the hook as a function: copies of the model must not copy the `Apoptosis`."""
    watching = weakref.ref(owner)

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        # Calls recorded by torch.compile or torch.export have no real batch.
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return
        watcher = watching()
        if watcher is None or watcher.model is not module:
            return
        if watcher._replaced and module.training and torch.is_grad_enabled():
            _check_wrapper()
            watcher._replaced = False
        if not watcher.is_near:
            return
        # Neither have those by which sn_memory.torch estimates or plans.
        if any(isinstance(leaf, FakeTensor) for leaf in tree.tree_leaves((args, kwargs))):
            return
        if module.training and torch.is_grad_enabled():
            watcher.observe(*args, **kwargs)

    return keep
