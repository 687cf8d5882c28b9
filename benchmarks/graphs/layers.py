"""Layers of convolutional networks: what each computes, and what it keeps for its backward pass.

Images are [batch, channels, height, width] in float32. What is kept follows the eager kernels of
PyTorch with cuDNN: a convolution its input and weight; batch norm its input and two numbers per
channel; ReLU its output; max pooling the positions of the maxima (int64); dropout its mask (one
byte); average pooling, addition and concatenation nothing. Running statistics of batch norm are
left out: two numbers per channel, changed once per step whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sn_memory import Workspace

from .convolution import ways
from .net import Tensor


def _window(size: int, kernel: int, stride: int, pad: int, ceil: bool = False) -> int:
    span = size + 2 * pad - kernel
    steps = -(-span // stride) if ceil else span // stride
    if span < 0:
        raise ValueError(f"a window of {kernel} does not fit {size} padded by {pad}")
    return steps + 1


def conv(
    x: Tensor,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    pad: int | tuple[int, int] = 0,
    groups: int = 1,
    bias: bool = False,
) -> Tensor:
    """Convolution; its backward pass is one op, or one call per gradient, the weight's first."""
    net, (batch, depth, height, width) = x.net, x.shape
    (kh, kw), (ph, pw) = ((v, v) if isinstance(v, int) else v for v in (kernel, pad))
    name = net.layer("conv")
    weight = net.parameter(name, "weight", channels, depth // groups, kh, kw)
    extra = [net.parameter(name, "bias", channels)] if bias else []
    out = net.new(
        name, batch, channels, _window(height, kh, stride, ph), _window(width, kw, stride, pw)
    )
    flops = 2 * out.size * (depth // groups) * kh * kw
    traffic = x.nbytes + weight.nbytes + out.nbytes
    spaces = ways(net.device, x.shape, out.shape, (kh, kw), stride, groups, flops, traffic)
    net.run(name, "conv", [x, weight, *extra], [out], flops=flops, workspaces=spaces)

    def spaces_for(passes: int) -> tuple[Workspace, ...]:
        return ways(
            net.device, x.shape, out.shape, (kh, kw), stride, groups, flops, traffic, passes
        )

    _weighted(x, weight, extra, out, name, "conv", flops, spaces_for)
    return out


def upconv(x: Tensor, channels: int) -> Tensor:
    """Transposed convolution, kernel 2 and stride 2, with bias: doubles height and width."""
    net, (batch, depth, height, width) = x.net, x.shape
    name = net.layer("upconv")
    weight = net.parameter(name, "weight", depth, channels, 2, 2)
    bias = net.parameter(name, "bias", channels)
    out = net.new(name, batch, channels, 2 * height, 2 * width)
    flops = 2 * out.size * depth
    net.run(name, "conv", [x, weight, bias], [out], flops=flops)
    _weighted(x, weight, [bias], out, name, "conv", flops)
    return out


def linear(x: Tensor, features: int, *, bias: bool = True) -> Tensor:
    """Matrix product over the last axis."""
    net, name = x.net, x.net.layer("linear")
    weight = net.parameter(name, "weight", features, x.shape[-1])
    extra = [net.parameter(name, "bias", features)] if bias else []
    out = net.new(name, *x.shape[:-1], features)
    flops = 2 * out.size * x.shape[-1]
    net.run(name, "linear", [x, weight, *extra], [out], flops=flops)
    _weighted(x, weight, extra, out, name, "linear", flops)
    return out


def norm(x: Tensor, *, kind: str = "bn") -> Tensor:
    """Batch norm over the channel axis ("bn"), or layer norm over the last ("ln"), with affine."""
    net, name = x.net, x.net.layer(kind)
    width = x.shape[1] if kind == "bn" else x.shape[-1]
    groups = width if kind == "bn" else x.size // width
    scale, shift = (net.parameter(name, p, width) for p in ("weight", "bias"))
    out = net.new(name, *x.shape)
    stats = net.new(f"{name}.stats", 2, groups, needs_grad=False)
    # Two passes over the input: one for the statistics, one to apply them. By call they are two
    # kernels, and the output is rebuilt from statistics that are still there.
    if net.by_call and kind == "bn":
        net.run(f"{name}.stats", f"{kind}_stats", [x], [stats], flops=4 * x.size)
        net.run(name, kind, [x, stats, scale, shift], [out], flops=4 * x.size)
    else:
        net.run(name, kind, [x, scale, shift], [out, stats], flops=8 * x.size, traffic=3 * x.nbytes)

    def backward(grad: str) -> None:
        net.back(f"{name}.back", f"{kind}_backward", [grad, x, stats, scale], (x, scale, shift),
                 flops=12 * x.size, traffic=5 * x.nbytes)  # fmt: skip

    net.record(out, backward)
    return out


def relu(x: Tensor) -> Tensor:
    """ReLU; over its input where the net says so (`inplace_relu`)."""
    net, name = x.net, x.net.layer("relu")
    if net.inplace_relu:
        out = Tensor(net, x.storage, x.shape)
        net.run(name, "relu", [x], changes=[x], flops=x.size)
    else:
        out = net.new(name, *x.shape)
        net.run(name, "relu", [x], [out], flops=x.size)

    def backward(grad: str) -> None:
        if not (net.by_call and net.owned(grad)):
            _back(x, out, name, "relu", [out], grad)
            return
        net.run(f"{name}.back", "relu_backward", [out], changes=[grad], flops=2 * x.size)
        net.send(x, grad)

    net.record(out, backward)
    return out


def lrn(x: Tensor) -> Tensor:
    """Local response normalisation across 5 channels; keeps input and output."""
    net, name = x.net, x.net.layer("lrn")
    out = net.new(name, *x.shape)
    net.run(name, "lrn", [x], [out], flops=15 * x.size)
    _simple(x, out, name, "lrn", [x, out])
    return out


def dropout(x: Tensor) -> Tensor:
    """Dropout as two ops, so that the output can be rebuilt without drawing the mask again."""
    net, name = x.net, x.net.layer("dropout")
    mask = net.new(f"{name}.mask", *x.shape, itemsize=1, needs_grad=False)
    out = net.new(name, *x.shape)
    net.run(f"{name}.mask", "dropout_mask", [], [mask], flops=x.size, random=True)
    net.run(name, "dropout", [x, mask], [out], flops=x.size)
    _simple(x, out, name, "dropout", [mask])
    return out


def max_pool(x: Tensor, kernel: int, stride: int, *, pad: int = 0, ceil: bool = False) -> Tensor:
    """Max pooling; the backward kernel reads the positions only, and so only they are kept."""
    net, name = x.net, x.net.layer("pool")
    out = net.new(name, *x.shape[:2], *(_window(s, kernel, stride, pad, ceil) for s in x.shape[2:]))
    index = net.new(f"{name}.index", *out.shape, itemsize=8, needs_grad=False)
    net.run(name, "max_pool", [x], [out, index], flops=out.size * kernel * kernel)
    _simple(x, out, name, "max_pool", [index])
    return out


def avg_pool(x: Tensor, kernel: int, stride: int, *, pad: int = 0) -> Tensor:
    """Average pooling."""
    net, name = x.net, x.net.layer("pool")
    out = net.new(name, *x.shape[:2], *(_window(s, kernel, stride, pad) for s in x.shape[2:]))
    net.run(name, "avg_pool", [x], [out], flops=out.size * kernel * kernel)
    _simple(x, out, name, "avg_pool", [])
    return out


def flatten(x: Tensor) -> Tensor:
    """[batch, ...] as [batch, features]: a view."""
    return x.net.view(x, x.shape[0], x.size // x.shape[0])


def shrink(x: Tensor, channels: int) -> Tensor:
    """Every second pixel, channels filled up with zeros: the shortcut without parameters."""
    net, name = x.net, x.net.layer("shrink")
    out = net.new(name, x.shape[0], channels, *((s + 1) // 2 for s in x.shape[2:]))
    net.run(name, "shrink", [x], [out], traffic=2 * out.nbytes)
    _simple(x, out, name, "shrink", [])
    return out


def add(a: Tensor, b: Tensor) -> Tensor:
    """The join of a residual block; both inputs get the very gradient of the sum."""
    net, name = a.net, a.net.layer("join")
    out = net.new(name, *a.shape)
    net.run(name, "join", [a, b], [out], flops=a.size)

    def backward(grad: str) -> None:
        net.send(a, grad)
        net.send(b, grad)

    net.record(out, backward)
    return out


def concat(parts: Sequence[Tensor], *, crop: bool = False) -> Tensor:
    """Channels side by side. `crop` cuts all to the size of the last (the original U-Net)."""
    # The caller's list may grow before the backward pass is written.
    parts = tuple(parts)
    net, name = parts[0].net, parts[0].net.layer("concat")
    last = parts[-1].shape
    if not crop and any(p.shape[2:] != last[2:] for p in parts):
        raise ValueError(f"concat of {[p.shape for p in parts]}: sizes differ; crop=True cuts")
    out = net.new(name, last[0], sum(p.shape[1] for p in parts), *last[2:])
    net.run(name, "concat", parts, [out], traffic=2 * out.nbytes)

    def backward(grad: str) -> None:
        layer = f"{name}.back"
        distinct = [p for p in dict.fromkeys(parts) if p.needs_grad]
        # By call, what was cut off is filled up with zeros by a kernel of its own.
        cut = [p for p in distinct if net.by_call and p.shape[2:] != last[2:]]
        gradients = {p: net.grad(p, layer) for p in distinct if p not in cut}
        small = {
            p: net.grad(replace(p, shape=(*p.shape[:2], *last[2:])), f"{layer}.cut") for p in cut
        }
        net.run(layer, "split", [grad], [*gradients.values(), *small.values()])
        for p in distinct:
            if p in small:
                gradients[p] = net.grad(p, layer)
                net.run(f"{layer}.pad({p.storage})", "pad", [small[p]], [gradients[p]])
            net.send(p, gradients[p])

    net.record(out, backward)
    return out


def classify(x: Tensor) -> Tensor:
    """Softmax cross-entropy over axis 1, averaged: the loss. Keeps the log-probabilities."""
    net = x.net
    labels = net.input(x.shape[0], *x.shape[2:], itemsize=8, name="labels")
    logp = net.new("softmax", *x.shape)
    net.run("softmax", "softmax", [x], [logp], flops=5 * x.size)
    loss = net.new("loss", 1)
    net.run("loss", "loss", [logp, labels], [loss], flops=logp.shape[0])

    def backward(grad: str) -> None:
        dx = net.grad(x, "softmax.back")
        net.run("softmax.back", "softmax_backward", [grad, logp, labels], [dx], flops=2 * x.size)
        net.send(x, dx)

    net.record(loss, backward)
    return loss


def _simple(x: Tensor, out: Tensor, name: str, kind: str, kept: Sequence[Tensor]) -> None:
    # One gradient in, what was kept, one gradient out.
    x.net.record(out, lambda grad: _back(x, out, name, kind, kept, grad))


def _back(x: Tensor, out: Tensor, name: str, kind: str, kept: Sequence[Tensor], grad: str) -> None:
    net, layer = x.net, f"{name}.back"
    dx = net.grad(x, layer)
    net.run(layer, f"{kind}_backward", [grad, *kept], [dx], flops=2 * max(x.size, out.size))
    net.send(x, dx)


def _weighted(
    x: Tensor,
    weight: Tensor,
    extra: Sequence[Tensor],
    out: Tensor,
    name: str,
    kind: str,
    flops: float,
    spaces: Callable[[int], tuple[Workspace, ...]] = lambda _: (),
) -> None:
    """Record the backward pass of a layer with a weight, each gradient as dear as the layer."""
    net, layer = x.net, f"{name}.back"
    traffic = x.nbytes + weight.nbytes + out.nbytes

    def backward(grad: str) -> None:
        def call(suffix: str, reads: Sequence[Tensor], wanted: Sequence[Tensor], n: int) -> None:
            net.back(f"{layer}{suffix}", f"{kind}_backward", [grad, *reads], wanted,
                     flops=n * flops, traffic=n * traffic, workspaces=spaces(n))  # fmt: skip

        inputs = [x] if x.needs_grad else []
        if not net.by_call:
            call("", [x, weight], [*inputs, weight, *extra], 1 + len(inputs))
            return
        # The input's buffer is read for the last time before its gradient's is made.
        call(".weight", [x], [weight, *extra], 1)
        if inputs:
            call(".input", [weight], inputs, 1)

    net.record(out, backward)
