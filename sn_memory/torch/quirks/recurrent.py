"""Recurrent layers: kernels whose fake rules are wrong, and modules with a second list of weights.

An LSTM layer on the CPU is one op of oneDNN. If gradients are wanted, its forward returns a
workspace for its backward, larger than all its other results; torch's rule for fake tensors returns
an empty one. Its backward returns the gradient of the bias twice, in two storages; the rule returns
one. A trace by these rules misses half the memory, and the backward kernel reads a workspace that
does not exist. On a GPU the layer is one op of cuDNN, and torch has no rule for its backward.

`torch.nn.RNNBase` keeps a list `_flat_weights` besides its parameters: code that swaps parameters
must refresh it, or the layer keeps using the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
CUDNN = torch.ops.aten._cudnn_rnn.default
CUDNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
OPS = (LAYER, LAYER_BACKWARD, CUDNN, CUDNN_BACKWARD)
# cuDNN's numbers for the kinds of layers.
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
ESTIMATED = "recurrent layers: what cuDNN reserves for the backward pass is estimated"
# Per mode, vectors of the hidden size that each time step of a layer keeps for the backward pass:
# gates and states. An estimate, as cuDNN does not document it.
_CUDNN_KEEPS = (2, 2, 6, 5)
# oneDNN rounds each part of a workspace up to whole pages, and accumulates in float32.
_PAGE = 4096
_FLOAT = 4


def refresh_flat_weights(modules: Iterable[torch.nn.Module]) -> None:
    """Let recurrent layers use their current parameters."""
    for module in modules:
        if isinstance(module, torch.nn.RNNBase):
            names = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]


@contextmanager
def no_flattening() -> Iterator[None]:
    """Keep layers from moving their weights, which they put into one buffer on a GPU."""
    before = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]


def layer_result(args: tuple[Any, ...], result: Any) -> Any:
    """Correct a fake result of oneDNN's layer: add the workspace if gradients are wanted."""
    *outputs, _ = result
    if not torch.is_grad_enabled():
        return (*outputs, None)
    x, cell, hidden = args[0], args[6], args[10]
    steps, batch, inputs = x.shape
    sizes = x.element_size(), cell.element_size()
    nbytes = workspace_bytes(steps, batch, inputs, hidden, *sizes)
    return (*outputs, torch.empty(nbytes, dtype=torch.uint8, device=x.device))


def layer_gradients(args: tuple[Any, ...], result: Any) -> Any:
    """Correct fake gradients of oneDNN's layer: the two biases have separate gradients."""
    gradients = list(result)
    gradients[4] = torch.empty_like(gradients[3])
    return tuple(gradients)


def cudnn_result(args: tuple[Any, ...], result: Any) -> Any:
    """Correct a fake result of cuDNN's layer: add its reserve space for the backward pass."""
    # Positions in the schema of `_cudnn_rnn`.
    mode, hidden, layers, train, both = args[6], args[7], args[9], args[12], args[13]
    output = result[0]
    steps = output.numel() // output.size(-1)
    count = steps * hidden * layers * (2 if both else 1) * _CUDNN_KEEPS[mode]
    nbytes = count * output.element_size() if train else 0
    reserve = torch.empty(nbytes, dtype=torch.uint8, device=output.device)
    return (*result[:3], reserve, result[4])


def cudnn_gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return fake gradients of input, states and weights, for which torch has no rule."""
    x, weights, hidden, cell, wanted = args[0], args[1], args[4], args[5], args[21]
    gradients = [
        torch.empty_like(tensor) if tensor is not None and want else None
        for tensor, want in zip((x, hidden, cell), wanted, strict=False)
    ]
    return (*gradients, [torch.empty_like(weight) for weight in weights] if wanted[3] else [])


# Functions that correct results of torch's fake rules, by op.
CORRECTIONS: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    LAYER: layer_result,
    LAYER_BACKWARD: layer_gradients,
    CUDNN: cudnn_result,
}


def workspace_bytes(
    steps: int, batch: int, inputs: int, hidden: int, itemsize: int, cell_itemsize: int
) -> int:
    """Return the workspace bytes of one direction of oneDNN's layer.

    Each part takes whole pages: the gates; the states of layer and cell, including those before the
    first step and below the first layer; gradients of both and of the iteration, always in float32;
    one more state per step.
    """
    states, wide = 2 * (steps + 1) * batch, max(inputs, hidden)
    parts = (
        steps * batch * _row(4 * hidden, itemsize),
        states * _row(wide, itemsize),
        states * hidden * cell_itemsize,
        states * _row(wide, _FLOAT),
        states * _row(wide, _FLOAT),
        states * hidden * _FLOAT,
        steps * batch * _row(hidden, itemsize),
    )
    return sum(-(-part // _PAGE) * _PAGE for part in parts)


def _row(n: int, itemsize: int) -> int:
    """Bytes of a matrix row: whole cache lines, and not a multiple of 256 elements."""
    line = 64 // itemsize
    n = -(-n // line) * line
    return (n + line if n % 256 == 0 else n) * itemsize


def flops(target: Any, sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the FLOPs of a layer or of its backward; `sizes` are those of its tensors, in order.

    One product per weight and input row; the backward pass computes two for each.
    """
    if target in (LAYER, LAYER_BACKWARD):
        (steps, batch, inputs), hidden = sizes[0], sizes[1][0] // 4
        forward = 2.0 * steps * batch * 4 * hidden * (inputs + hidden)
    else:
        weights = sum(math.prod(size) for size in sizes[1:] if len(size) == 2)
        forward = 2.0 * math.prod(sizes[0][:-1]) * weights
    return forward if target in (LAYER, CUDNN) else 2 * forward


def in_training(target: Any) -> Callable[..., Any]:
    """Return a layer's forward as it runs if gradients are wanted, whatever the grad mode is.

    The kernel checks the grad mode, although it runs below autograd.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return target(*args, **kwargs)

    return run


def packed_by_forward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of oneDNN's backward with the workspace that its forward produces.

    The kernel relies on the contents of the workspace: an arbitrary one would crash it.
    """
    inputs, gradients, settings = args[:7], args[10:13], args[13:22]
    reverse, mode, hidden, layers, biases, train, bidirectional, sizes, batch_first = settings
    with torch.enable_grad():
        *results, workspace = torch.ops.aten.mkldnn_rnn_layer(
            *inputs, reverse, sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
        )
    return (*inputs, *results, *gradients, *settings, workspace)


def by_cudnn(kind: str, args: tuple[Any, ...]) -> Any:
    """Run a layer of `torch._VF` by cuDNN's op; packed sequences pass batch sizes second."""
    packed = isinstance(args[3], list | tuple)
    x, states = (args[0], args[2]) if packed else (args[0], args[1])
    batch_sizes = args[1].tolist() if packed else []
    rest = args[3:] if packed else args[2:]
    weights, _, layers, dropout, train, both = rest[:6]
    batch_first = False if packed else bool(rest[6])
    hidden, cell = (states[0], states[1]) if kind == "lstm" else (states, None)
    # A layer has two weights, optionally two biases, and one more weight with a projection.
    per_layer = len(weights) // (layers * (2 if both else 1))
    projected = hidden.size(2) if per_layer in (3, 5) else 0
    size = cell.size(2) if cell is not None else hidden.size(2)
    outputs = torch.ops.aten._cudnn_rnn(
        x.to(weights[0].dtype),
        weights,
        per_layer,
        weights[0].detach(),  # on a GPU, the buffer of which all weights are views
        hidden,
        cell,
        MODES[kind],
        size,
        projected,
        layers,
        batch_first,
        float(dropout),
        train,
        both,
        batch_sizes,
        None,
    )
    return outputs[:3] if kind == "lstm" else outputs[:2]
