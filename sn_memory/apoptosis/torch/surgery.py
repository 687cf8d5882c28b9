"""Shrink one group: weights, biases, norms, and their optimizer state, all at once.

New tensors are new Parameters, at the same places in modules and in the optimizer's groups. A
Parameter whose data changes shape would keep its old autograd node, and the next backward pass
would raise if the last loss is still held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..groups import Group, Site, Slice
from ..merge import Choice, Scale, add_up, fold, scales
from ..pace import unknown_state
from .groups import counts_of

# Key of gradients that are still to be applied, while neurons merge.
CARRIED: Final = "sn_memory.carried"
_KINDS: Final[Mapping[str, Literal["mean", "square"]]] = {
    CARRIED: "mean",
    "momentum_buffer": "mean",
    "exp_avg": "mean",
    "exp_avg_sq": "square",
    "max_exp_avg_sq": "square",
    "square_avg": "square",
    "sum": "square",
}


class Pruner:
    """A model and its optimizer that is being pruned."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def value(self, name: str) -> torch.Tensor:
        owner, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.model.get_submodule(owner), last)
        return tensor

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the current tensors, sizes and optimizer state."""
        modules = [
            (module, vars(module).copy(), module._parameters.copy(), module._buffers.copy())
            for module in self.model.modules()
        ]
        groups = [(group, list(group["params"])) for group in self.optimizer.param_groups]
        states = dict(self.optimizer.state)

        def give_back() -> None:
            for module, attributes, parameters, buffers in modules:
                vars(module).update(attributes)
                module._parameters.update(parameters)
                module._buffers.update(buffers)
            for group, held in groups:
                group["params"][:] = held
            self.optimizer.state.clear()
            self.optimizer.state.update(states)

        return give_back

    def replace(self, name: str, value: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace the tensor and the optimizer state of `name`."""
        owner, _, last = name.rpartition(".")
        module, old = self.model.get_submodule(owner), self.value(name)
        if not isinstance(old, nn.Parameter):
            module._buffers[last] = value
        else:
            new = module._parameters[last] = nn.Parameter(value, requires_grad=old.requires_grad)
            for group in self.optimizer.param_groups:
                group["params"][:] = [new if held is old else held for held in group["params"]]
            # Keyed by the parameter object: state under the old one would be lost to the optimizer.
            if self.optimizer.state.pop(old, None) is not None:
                self.optimizer.state[new] = state
        # Update the attributes that state a module's size.
        for attribute, size in sizes(module).items():
            setattr(module, attribute, size)

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer has a parameter."""
        groups = self.optimizer.param_groups
        return any(held is parameter for group in groups for held in group["params"])

    def renew(self) -> None:
        """Replace every parameter of the optimizer by a new object that shares its memory.

        Hooks of old wrappers stay on the old parameters: Horovod's cannot be removed, and would
        send the gradient of a parameter that did not shrink a second time.
        """
        for old in list(self.model.parameters()):
            # A subclass may have data that a plain parameter would lose; groups with one are
            # refused. A parameter that this optimizer does not have may be in another one.
            if type(old) is not nn.Parameter or not self.trains(old):
                continue
            # Views share memory, so nothing is copied.
            new = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
            for module in self.model.modules():
                for name, held in module._parameters.items():
                    if held is old:
                        module._parameters[name] = new
            for group in self.optimizer.param_groups:
                group["params"][:] = [new if held is old else held for held in group["params"]]
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)

    def state(self, name: str) -> dict[str, Any]:
        value = self.value(name)
        return dict(self.optimizer.state[value]) if value in self.optimizer.state else {}


def sizes(module: nn.Module) -> dict[str, int]:
    """Return the attributes of torch's layers that repeat the shape of their weights."""
    if isinstance(module, nn.Linear):
        return {"out_features": module.weight.shape[0], "in_features": module.weight.shape[1]}
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        out, inputs = module.weight.shape[:2]
        if module.groups > 1:  # depthwise: as many groups as channels
            return {"out_channels": out, "in_channels": out, "groups": out}
        return {"out_channels": out, "in_channels": inputs}
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        held = next((v for v in (module.weight, module.running_mean) if v is not None), None)
        return {} if held is None else {"num_features": len(held)}
    return {}


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of all parameters and persistent buffers."""
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def reshape(
    model: nn.Module,
    shapes: dict[str, list[int]],
    counts: dict[str, int],
    optimizer: Any = None,
) -> None:
    """Give a model tensors of these shapes; those whose shape changes are uninitialized.

    `counts` are numbers of heads, by the attributes that state them.
    The optimizer, if given, gets the new parameters and drops the state of the old ones.
    """
    here = model.state_dict(keep_vars=True)
    if set(here) != set(shapes):
        odd = sorted(set(here) ^ set(shapes))[0]
        raise ValueError(
            f"{odd!r} is only in one of the model and its saved state; expected the same names. "
            "Make the model with the code that was trained."
        )
    # `Pruner` needs an optimizer; this one has none of the parameters.
    pruner = Pruner(model, torch.optim.SGD([torch.zeros(1)]) if optimizer is None else optimizer)
    for name, shape in shapes.items():
        if list(here[name].shape) != list(shape):
            new, state = here[name].detach().new_empty(shape), pruner.state(name)
            # State of another shape is from before; with this shape, it was already loaded.
            states = [(key, held.shape) for key, held in state.items() if torch.is_tensor(held)]
            pruner.replace(name, new, {} if unknown_state(new.shape, states) else state)
    for name, value in counts.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, value)
    if optimizer is not None:
        pruner.renew()


def merge_group(pruner: Pruner, group: Group, choice: Choice) -> None:
    """Shrink one group as chosen."""
    kept = torch.as_tensor(choice.kept, device="cpu")  # whatever the default device is
    for place, site in enumerate(group.sites):
        _read_less(pruner, site, choice, place, kept)
    calls: dict[tuple[str, int], list[Slice]] = {}
    # The last rows first, so that the indices of the other rows stay valid.
    for piece in sorted(group.slices, key=lambda piece: -piece.start):
        calls.setdefault((piece.call, piece.start), []).append(piece)
    for pieces in calls.values():
        _make_less(pruner, pieces, choice, kept)
    for owner, name, channels in list(counts_of(pruner.model, group)):
        setattr(pruner.model.get_submodule(owner), name, channels * len(kept))


def _make_less(pruner: Pruner, pieces: list[Slice], choice: Choice, kept: torch.Tensor) -> None:
    """Shrink the parameters of one call that produce a group: weight and bias, or a norm's."""
    width = choice.width
    held = [pruner.value(piece.name) for piece in pieces]
    spans = [slice(piece.start, piece.start + width * piece.places) for piece in pieces]
    trained = [
        value[span]
        for value, span in zip(held, spans, strict=True)
        if isinstance(value, nn.Parameter)
    ]
    merges = scales(_incoming(trained, width), choice.merges) if trained else []
    for piece, value, span in zip(pieces, held, spans, strict=True):
        mine = span.start + _rows(kept, piece.places)
        every = torch.arange(len(value), device="cpu")
        rows = torch.cat([every[: span.start], mine, every[span.stop :]]).to(value.device)
        state = {
            key: _remembered(key, before, merges, width, span).index_select(0, rows)
            if isinstance(before, torch.Tensor) and before.shape == value.shape
            else before
            for key, before in pruner.state(piece.name).items()
        }
        pruner.replace(piece.name, value.detach().index_select(0, rows), state)


def _rows(kept: torch.Tensor, places: int) -> torch.Tensor:
    """Return the rows of neurons that have several consecutive rows each."""
    return (torch.arange(places, device=kept.device) + kept[:, None] * places).reshape(-1)


def _incoming(trained: list[torch.Tensor], width: int) -> NDArray[np.float64]:
    rows = [value.detach().double().reshape(width, -1) for value in trained]
    return np.asarray(torch.cat(rows, dim=1).cpu().numpy(), np.float64)


def _remembered(
    key: str, held: torch.Tensor, merges: list[Scale], width: int, span: slice
) -> torch.Tensor:
    """Return the survivors' optimizer state; only known kinds of state are merged."""
    if key not in _KINDS:
        return held
    # Not in place: `undo` restores the old state.
    held = held.clone()
    add_up(_KINDS[key], held[span].view(width, -1), merges)
    return held


def as_offsets(weight: torch.Tensor, site: Site) -> NDArray[np.float64]:
    """Return a reader's weight as [offsets, outputs, n]."""
    flat = weight.detach().double().cpu()
    if site.places > 1:
        flat = flat.reshape(len(flat), -1, site.places)
    return np.asarray(flat.reshape(*flat.shape[:2], -1).permute(2, 0, 1).numpy(), np.float64)


def _read_less(pruner: Pruner, site: Site, choice: Choice, place: int, kept: torch.Tensor) -> None:
    weight = pruner.value(site.weight)
    bias = None if site.bias is None else pruner.value(site.bias)
    plain = None if bias is None else bias.detach().double().cpu().numpy()
    folded, moved = fold(as_offsets(weight, site), plain, choice, place)
    # A flattened channel is read at all of its positions.
    inputs = _rows(kept, site.places)
    shape = (len(weight), len(inputs), *weight.shape[2:])
    # Horovod sends no gradient of a parameter that is not contiguous.
    new = torch.from_numpy(folded).permute(1, 2, 0).reshape(shape).to(weight).contiguous()
    columns = inputs.to(weight.device)
    state = {
        key: held.index_select(1, columns)
        if isinstance(held, torch.Tensor) and held.shape == weight.shape
        else held
        for key, held in pruner.state(site.weight).items()
    }
    pruner.replace(site.weight, new, state)
    if site.bias is not None and bias is not None and moved is not None:
        pruner.replace(site.bias, torch.from_numpy(moved).to(bias), pruner.state(site.bias))
