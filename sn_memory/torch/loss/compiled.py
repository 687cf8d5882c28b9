"""The loss in chunks under torch.compile: a back end that rewrites the graph it is given.

What Dynamo hands over still has the model's own calls: the last product, what is done to logits,
the cross entropy. They become one call that does it in chunks, and the rest is up to the back end
asked for.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .lazy import End, LazyLogits

log = logging.getLogger(__name__)

_PRODUCTS = (torch._C._nn.linear, functional.linear, torch.matmul, operator.matmul)
_FUNCTIONS = (torch.tanh, operator.getitem)
_SCALED = (torch.mul, torch.div, operator.mul, operator.truediv)
_METHODS = ("float", "to", "view", "reshape", "contiguous", "flatten", "tanh")


class ChunkedLossBackend:
    """A back end for torch.compile that makes the last product and its loss in chunks of rows.

    Parameters
    ----------
    chunks
        As in `chunked_cross_entropy`.
    backend
        The back end that compiles the graph then: a name that torch.compile knows, or a function.

    Attributes
    ----------
    found
        How many losses were rewritten so far.

    Notes
    -----
    Logits that leave the compiled function are made in any case, and then nothing is won: compile a
    function that returns the loss alone, as `lambda batch: model(**batch).loss`.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch import ChunkedLossBackend
    >>> backend = ChunkedLossBackend(4, "eager")
    >>> @torch.compile(backend=backend)
    ... def loss(x, weight, target):
    ...     return torch.nn.functional.cross_entropy(x @ weight.T, target)
    >>> x, weight = torch.randn(32, 8, requires_grad=True), torch.randn(500, 8)
    >>> loss(x, weight, torch.randint(0, 500, (32,))).backward()
    >>> backend.found
    1
    """

    def __init__(self, chunks: int, backend: str | Callable[..., Any] = "inductor") -> None:
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"got chunks {chunks!r}, expected a whole number of 1 or more.")
        self.chunks, self.found = chunks, 0
        named = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        self._compile = named

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        self.found += chunk_graph(graph, self.chunks)
        return self._compile(graph, inputs, **kwargs)


def chunk_graph(module: fx.GraphModule, chunks: int) -> int:
    """Rewrite the losses of a graph of Dynamo's; return how many."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not functional.cross_entropy:
            continue
        chain = _chain(node.args[0] if node.args else node.kwargs.get("input"), node)
        if chain is None:
            continue
        product, steps = chain
        with module.graph.inserting_before(node):
            made = module.graph.call_function(
                _chained,
                (
                    _argument(product, 0, "input"),
                    _argument(product, 1, "weight", "other"),
                    _argument(product, 2, "bias"),
                    product.target is not torch._C._nn.linear
                    and product.target is not functional.linear,
                    chunks,
                    [_step(it) for it in steps],
                    node.args[1:],
                    {key: it for key, it in node.kwargs.items() if key != "input"},
                ),
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        for it in (node, *reversed(steps), product):
            module.graph.erase_node(it)
        found += 1
    if found:
        module.graph.lint()
        module.recompile()
        log.info("%d losses in %d chunks each", found, chunks)
    return found


def _chain(node: Any, user: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the product behind a loss and what is done to it, if nobody else sees it."""
    steps: list[fx.Node] = []
    while isinstance(node, fx.Node) and list(node.users) == [user]:
        if node.op == "call_function" and node.target in _PRODUCTS:
            return node, steps[::-1]
        scaled = node.target in _SCALED and not isinstance(node.args[1], fx.Node)
        known = node.op == "call_method" and node.target in _METHODS
        known |= node.op == "call_function" and (node.target in _FUNCTIONS or scaled)
        if not known:
            return None
        steps.append(node)
        user, node = node, node.args[0]
    return None


def _argument(node: fx.Node, place: int, *names: str) -> Any:
    if place < len(node.args):
        return node.args[place]
    return next((node.kwargs[it] for it in names if it in node.kwargs), None)


def _step(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, node.args[1:], dict(node.kwargs)


def _chained(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_matmul: bool,
    chunks: int,
    steps: list[tuple[Any, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Do to deferred logits what was done to the product, and take their loss in chunks."""
    weight = weight.t() if is_matmul else weight
    logits: Any = LazyLogits(hidden, weight, bias, chunks, End(), dtype=hidden.dtype)
    for op, target, others, named in steps:
        call = getattr(type(logits), target) if op == "call_method" else target
        logits = call(logits, *others, **named)
    found: torch.Tensor = functional.cross_entropy(logits, *args, **kwargs)
    return found
