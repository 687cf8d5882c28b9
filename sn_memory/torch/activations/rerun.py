"""Reruns in the backward pass: whole modules, and layers that process a few images at a time.

The gradients of a layer's output and input are held in full at the same time, however little is
saved for them. Layers that treat the images of a batch independently need not process the whole
batch at once: a few images pass through all of them, forward and again in the backward pass, before
the next (Lym et al., Mini-batch Serialization, MLSys 2019; micro-batches of one convolution: Oyama
et al., mu-cuDNN, 2018). Only the input of the first layer is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..model.modes import is_batched
from ..model.snapshot import GLOBAL_HOOKS, HOOKS
from ..modules.state import RunState
from .treatments import in_memory, parts_of

# Ops whose values affect control flow, which elements are read, or how many results there are.
_DECIDES = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "equal"),
        *("allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
        *("argmax", "argmin", "argsort", "sort", "topk", "kthvalue", "bucketize", "searchsorted"),
        *("multinomial", "bincount", "repeat_interleave"),
    )
)


def decides(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a rerun could differ because of rounded values or other random numbers."""
    if name == "__getitem__":
        places = (place for place in tree_leaves(args[1:]) if isinstance(place, torch.Tensor))
        return any(place.dtype == torch.bool for place in places)
    return name in _DECIDES or kwargs.get("generator") is not None


_PACKAGE: Final = __name__.rpartition(".")[0]
# By class, the number of axes of its input if it is a batch; 0: any number.
_CONVOLUTIONS: Final = {getattr(nn, f"Conv{n}d"): n + 2 for n in (1, 2, 3)}
_POOLS: Final = ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
# Layers that return a new tensor, so that no later layer writes into their input. The first layer
# of a run is one of these, as its input is all that the run keeps.
_NEW: Final = {
    **_CONVOLUTIONS,
    **{getattr(nn, f"{kind}{n}d"): n + 2 for kind in _POOLS for n in (1, 2, 3)},
    **dict.fromkeys((nn.LocalResponseNorm, nn.GroupNorm), 0),
}
_AXES: Final = _NEW | dict.fromkeys(
    (
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
        *(nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Identity),
    ),
    0,
)


@dataclass(frozen=True)
class Layer:
    """Input and output, without values, of a layer that treats images of a batch independently.

    saved : whether the output was saved, by it or by an earlier layer
    """

    x: torch.Tensor
    y: torch.Tensor
    saved: bool

    @property
    def gradients_bytes(self) -> int:
        return self.x.nbytes + self.y.nbytes


def layer_of(
    module: nn.Module, args: tuple[Any, ...], y: Any, saved: Callable[[Any], bool]
) -> Layer | None:
    """Return input and output of a suitable layer that was called; None for any other module.

    With random numbers, or a batch norm in training, images depend on each other; user-defined
    classes may do anything.
    """
    axes = _AXES.get(type(module))
    x: Any = args[0] if args else None
    if axes is None or not _is_plain(module) or not _is_batch(x) or not _is_batch(y):
        return None
    if not y.requires_grad or len(x) != len(y) or x.dim() != (axes or x.dim()):
        return None
    # An expanded scalar has their shape and `nbytes`, but almost no memory.
    empty = [tensor.detach().new_empty(()).expand(tensor.shape) for tensor in (x, y)]
    return Layer(empty[0], empty[1], saved(y))


def runs_of(
    layers: Iterable[nn.Module], seen: Mapping[nn.Module, Layer | None], least_bytes: float
) -> list[list[nn.Module]]:
    """Return runs of layers in which the gradients of some layer exceed a number of bytes.

    A convolution with smaller gradients ends the run before it, and may start the next. Layers
    without products stay in the run: they take little time, and often have a smaller output.
    """
    runs: list[list[nn.Module]] = [[]]
    large = {name for name, layer in seen.items() if layer and layer.gradients_bytes > least_bytes}
    for module in layers:
        if seen.get(module) is None or (type(module) in _CONVOLUTIONS and module not in large):
            runs.append([])
        if seen.get(module) is not None and (runs[-1] or type(module) in _NEW):
            runs[-1].append(module)
    return [run for run in runs if not large.isdisjoint(run)]


@dataclass(frozen=True)
class Run:
    """Consecutive layers of a Sequential that process a few images at a time.

    layers, names : the layers and their paths
    dim : number of axes of their input
    growth : elements of the largest tensor per element of the input
    plain_bytes : bytes that autograd would save per element of the input
    """

    layers: list[nn.Module]
    names: list[str]
    dim: int
    growth: float
    plain_bytes: float

    def parts(self, x: torch.Tensor) -> list[slice]:
        """Return slices of the images that are processed at a time."""
        return parts_of(x, self.growth)

    def takes(self, x: Any) -> bool:
        """Whether a batch can pass through these layers a few images at a time."""
        return (
            _is_batch(x)
            and x.dim() == self.dim
            and len(self.parts(x)) > 1
            and any(tensor.requires_grad for tensor in (x, *self.weights()))
            and all(map(_is_plain, self.layers))
        )

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters, each once."""
        return list(dict.fromkeys(weight for layer in self.layers for weight in layer.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers; none has hooks other than ours."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers so that autograd saves only their input."""
        return torch.as_tensor(_ByImages.apply(self, x, *self.weights()))


class _ByImages(torch.autograd.Function):
    """A run of layers. Weights are inputs, so that hooks on their gradients run."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Return the layers' output."""
        ctx.run = run
        ctx.layers = RunState(dict(zip(run.names, run.layers, strict=True)))
        ctx.casting = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", x.device.type}
        }
        ctx.save_for_backward(x)
        y: Any = None
        with _casting(ctx.casting):
            for part in run.parts(x):
                piece = run.forward(x[part])
                y = _of_images(piece, len(x)) if y is None else y
                y[part] = piece
                del piece  # freed before the next images
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and of the weights."""
        (x,), run, wanted = ctx.saved_tensors, ctx.run, ctx.needs_input_grad[1:]
        # Higher-order gradients need the whole batch in the graph, and slices of a batched gradient
        # (`is_grads_batched`) cannot be written into one tensor.
        again = torch.is_grad_enabled()
        at_once = again or is_batched(gradient)
        sums: list[Any] = [None] * len(wanted)
        # Inside, the layers have their state from the forward pass, with leaves as weights.
        with ctx.layers:
            leaves = _put_leaves(run, wanted[1:], linked=again)
            for part in [slice(None)] if at_once else run.parts(x):
                with torch.enable_grad(), _casting(ctx.casting):
                    piece = _leaf(x[part], wanted[0], linked=again)
                    y = run.forward(piece)
                pairs = zip([piece, *leaves], wanted, strict=True)
                inputs = [tensor for tensor, want in pairs if want]
                gradients = iter(torch.autograd.grad(y, inputs, gradient[part], create_graph=again))
                for slot in (slot for slot, want in enumerate(wanted) if want):
                    part_gradient = next(gradients)
                    if at_once:
                        sums[slot] = part_gradient
                    elif slot == 0:
                        sums[0] = torch.empty_like(x) if sums[0] is None else sums[0]
                        sums[0][part] = part_gradient
                    else:
                        # 16-bit sums would be rounded for each part; torch rounds once.
                        narrow = part_gradient.element_size() < 4
                        wide = part_gradient.float() if narrow else part_gradient
                        sums[slot] = wide if sums[slot] is None else sums[slot].add_(wide)
                del piece, y, inputs, gradients
            dtypes = [tensor.dtype for tensor in (x, *leaves)]
        pairs = zip(sums, dtypes, strict=True)
        cast = (total if total is None else total.to(dtype) for total, dtype in pairs)
        return None, *cast


def _leaf(tensor: torch.Tensor, wanted: bool, *, linked: bool) -> torch.Tensor:
    """Return a tensor to differentiate with respect to, without hooks; if linked, in the graph."""
    if linked:
        with torch.enable_grad():
            return tensor.view_as(tensor)
    return tensor.detach().requires_grad_(wanted)


def _put_leaves(run: Run, wanted: Sequence[bool], *, linked: bool) -> list[torch.Tensor]:
    """Replace the weights of restored layers by leaves; return the leaves."""
    weights = run.weights()
    pairs = zip(weights, wanted, strict=True)
    leaves = {weight: _leaf(weight, want, linked=linked) for weight, want in pairs}
    for layer in run.layers:
        held = vars(layer)["_parameters"]
        held |= {name: leaves[weight] for name, weight in held.items() if weight is not None}
    return list(leaves.values())


@contextmanager
def _casting(casts: Mapping[str, tuple[bool, torch.dtype]]) -> Iterator[None]:
    """Use the forward pass's autocast; a cache would give casts without a graph to other layers."""
    with ExitStack() as stack:
        for kind, (enabled, dtype) in casts.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        yield


def _of_images(piece: torch.Tensor, count: int) -> torch.Tensor:
    """Return an empty tensor of `count` images with the memory order of a piece of the batch."""
    order = [0, *(axis + 1 for axis in in_memory(piece[0]))]
    shape = [count, *(piece.shape[axis] for axis in order[1:])]
    return piece.new_empty(shape).permute([order.index(axis) for axis in range(len(order))])


def _is_batch(value: Any) -> bool:
    """Whether a value is a plain batch of floats; subclasses of Tensor have ops of their own."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.is_floating_point()
    return plain and value.dim() > 1 and value.numel() > 0


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has its class's forward and no hooks, except those of this package."""
    hooks = [hook for slot in HOOKS for hook in getattr(module, slot).values()]
    return _runs(type(module), module) and all(map(_is_ours, hooks)) and not any(GLOBAL_HOOKS)


def is_sequential(module: nn.Module) -> bool:
    """Whether a module only calls its layers one after the other."""
    return _runs(nn.Sequential, module)


def _runs(kind: type[nn.Module], module: nn.Module) -> bool:
    own = vars(module).get("forward")
    ours = own is None or _is_ours(getattr(own, "func", own))
    return ours and type(module).forward is kind.forward


def _is_ours(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_PACKAGE)
