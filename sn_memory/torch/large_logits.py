"""The note of a plan that suggests torch's chunked loss where logits set the peak.

The logits of a language model, their log-softmax and its gradient are all live at one op, so no
plan of ops can reduce them. `torch.nn.functional.linear_cross_entropy` (torch 2.13) computes
product, loss and gradients some rows at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from ..base.sizes import show_bytes
from ..check import carry_out
from ..graph.graph import Graph
from ..plan.plan import Plan

_PRODUCTS: Final = ("mm", "addmm")
# Between product and loss: casts, copies of shifted rows, a scale or a soft cap.
_BETWEEN: Final = ("_to_copy", "clone", "mul", "div", "tanh")
_GRADIENTS: Final = ("nll_loss_backward", "_log_softmax_backward_data")
# The share of the peak that a chunked loss must save before the note suggests it: a smaller saving
# is not worth changing the model.
_PART: Final = 0.1


def logits_note(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Return a note that suggests `linear_cross_entropy` where logits set the peak of a plan.

    They do if the peak would be a tenth lower without them. Empty where torch has no such function,
    or the logits are not a product with a matrix.
    """
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return ()
    logits = _logits(graph)
    sizes = {logit: graph.storages[graph.storage_index[logit]].bytes for logit in logits}
    # Checked first, as it is cheaper than the replay: even all of them together are not enough.
    if sum(sizes.values()) < _PART * plan.peak_bytes:
        return ()
    live = carry_out(graph, plan).live_bytes
    present: set[str] = set()
    of_logits = np.zeros_like(live)
    for i, (kind, target, _) in enumerate(plan.actions):
        if kind == "run":
            present |= logits.intersection(graph.ops[graph.op_index[target]].outputs)
        elif kind == "prefetch":
            present |= logits & {target}
        of_logits[i] = sum(sizes[logit] for logit in present)
        if kind == "free":
            present.discard(target)
    peak, without = int(live.max()), int((live - of_logits).max())
    if peak - without < _PART * peak:
        return ()
    return (
        f"logits, their log-softmax and its gradient set the peak: {show_bytes(without)} without "
        "them. torch.nn.functional.linear_cross_entropy, given the hidden states and the weight "
        "of the last layer, computes the loss some rows at a time "
        "(docs/torch_memory.md, Large logits)",
    )


def _logits(graph: Graph) -> set[str]:
    """Return the storages as wide as the vocabulary, from the last product to the logits' gradient.

    Empty if the logits are not a product with a matrix.
    """
    makers = {name: op for op in graph.ops for name in op.outputs}
    logits: set[str] = set()
    for loss in (op for op in graph.ops if op.kind == "_log_softmax"):
        name, chain = loss.inputs[0], {*loss.inputs, *loss.outputs}
        while (maker := makers.get(name)) is not None and maker.kind in _BETWEEN:
            name = maker.inputs[0]
            chain.add(name)
        if maker is not None and maker.kind in _PRODUCTS:
            logits |= chain
    for op in graph.ops:
        if op.kind in _GRADIENTS and logits.intersection(op.inputs):
            logits.update(op.outputs)
    return logits
