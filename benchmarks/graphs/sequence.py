"""Layers of transformers, and a decoder of any depth.

Tokens are [batch, length, width] in float32. What is kept follows eager PyTorch without fused
attention: matrix products their two inputs, softmax its output, GELU and layer norm their input,
an embedding the token numbers.
"""

from __future__ import annotations

from typing import Any

from .layers import add, classify, dropout, linear, norm
from .net import Net, Tensor


def embedding(tokens: Tensor, words: int, width: int) -> Tensor:
    """Rows of a table; the table's gradient is dense, as frameworks make it by default."""
    net, name = tokens.net, tokens.net.layer("embedding")
    table = net.parameter(name, "weight", words, width)
    out = net.new(name, *tokens.shape, width)
    net.run(name, "embedding", [tokens, table], [out], traffic=2 * out.nbytes)

    def backward(grad: str) -> None:
        net.back(f"{name}.back", "embedding_backward", [grad, tokens], [table], flops=0,
                 traffic=2 * out.nbytes + table.nbytes)  # fmt: skip

    net.record(out, backward)
    return out


def gelu(x: Tensor) -> Tensor:
    """GELU; keeps its input."""
    net, name = x.net, x.net.layer("gelu")
    out = net.new(name, *x.shape)
    net.run(name, "gelu", [x], [out], flops=10 * x.size)

    def backward(grad: str) -> None:
        dx = net.grad(x, f"{name}.back")
        net.run(f"{name}.back", "gelu_backward", [grad, x], [dx], flops=15 * x.size)
        net.send(x, dx)

    net.record(out, backward)
    return out


def attention(qkv: Tensor, heads: int, *, drop: bool = False) -> Tensor:
    """Multi-head attention on [batch, length, 3 * width]; the scores are written to memory."""
    net, (batch, length, triple) = qkv.net, qkv.shape
    name = net.layer("attention")
    scores = net.new(f"{name}.scores", batch, heads, length, length)
    flops = 2 * batch * length * length * triple // 3
    net.run(f"{name}.scores", "matmul", [qkv], [scores], flops=flops,
            traffic=2 * qkv.nbytes // 3 + scores.nbytes)  # fmt: skip
    chance = net.new(f"{name}.softmax", *scores.shape)
    net.run(f"{name}.softmax", "softmax", [scores], [chance], flops=5 * scores.size)
    # Each of the three slices of the gradient is written by its own product, into one storage.
    slices: list[str] = []

    def softmax_backward(grad: str) -> None:
        gradient = net.grad(scores, f"{name}.softmax.back")
        net.run(f"{name}.softmax.back", "softmax_backward", [grad, chance], [gradient],
                flops=4 * scores.size)  # fmt: skip
        net.send(scores, gradient)

    def scores_backward(grad: str) -> None:
        net.run(f"{name}.scores.back", "matmul_backward", [grad, qkv], changes=slices,
                flops=2 * flops, traffic=scores.nbytes + 4 * qkv.nbytes // 3)  # fmt: skip
        net.send(qkv, slices[0])

    net.record(scores, scores_backward)
    net.record(chance, softmax_backward)
    kept = dropout(chance) if drop else chance
    out = net.new(f"{name}.out", batch, length, triple // 3)
    net.run(f"{name}.out", "matmul", [kept, qkv], [out], flops=flops,
            traffic=scores.nbytes + qkv.nbytes // 3 + out.nbytes)  # fmt: skip

    def out_backward(grad: str) -> None:
        layer = f"{name}.out.back"
        dscores, dqkv = net.grad(kept, layer), net.grad(qkv, layer)
        net.run(layer, "matmul_backward", [grad, kept, qkv], [dscores, dqkv], flops=2 * flops,
                traffic=2 * scores.nbytes + 2 * out.nbytes + 2 * qkv.nbytes // 3)  # fmt: skip
        slices.append(dqkv)
        net.send(kept, dscores)

    net.record(out, out_backward)
    return out


def transformer(
    batch: int,
    layers: int = 12,
    *,
    width: int = 768,
    heads: int = 12,
    length: int = 1024,
    words: int = 50257,
    drop: bool = False,
    optimizer: str = "sgd",
    **settings: Any,
) -> Net:
    """Decoder in the manner of GPT-2 (Radford et al., 2019): norm first, GELU, learned positions.

    The output matrix is not tied to the embedding.
    """
    net = Net(f"Transformer-{layers}", batch, **settings)
    tokens = net.input(batch, length, itemsize=8, name="tokens")
    places = net.input(length, itemsize=8, name="places")
    x = add(embedding(tokens, words, width), _spread(embedding(places, length, width), batch))
    for _ in range(layers):
        y = linear(attention(linear(norm(x, kind="ln"), 3 * width), heads, drop=drop), width)
        x = add(dropout(y) if drop else y, x)
        y = linear(gelu(linear(norm(x, kind="ln"), 4 * width)), width)
        x = add(dropout(y) if drop else y, x)
    logits = linear(norm(x, kind="ln"), words, bias=False)
    return net.finish(classify(net.view(logits, batch * length, words)), optimizer)


def layers_for_ops(ops: int) -> int:
    """Return the least depth whose graph, update included, has at least this many ops."""
    one, two = (len(transformer(1, n, width=8, heads=1, length=2, words=2).ops) for n in (1, 2))
    return max(1, -(-(ops - one) // (two - one)) + 1)


def _spread(x: Tensor, batch: int) -> Tensor:
    # Positions are the same for every sample; their gradient is a sum over the batch.
    net, name = x.net, x.net.layer("spread")
    out = net.new(name, batch, *x.shape)
    net.run(name, "expand", [x], [out])

    def backward(grad: str) -> None:
        gradient = net.grad(x, f"{name}.back")
        net.run(f"{name}.back", "reduce", [grad], [gradient], flops=out.size)
        net.send(x, gradient)

    net.record(out, backward)
    return out
