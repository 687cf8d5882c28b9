"""chunked_cross_entropy: the product with the vocabulary and its loss, some rows at a time.

The logits of a language model are the largest tensor of its step: [rows, vocabulary], and with them
their logarithms of probabilities and their gradient. The loss of a row needs no other row. So some
rows at a time are multiplied, their losses taken and, as the gradient of a sum or mean is known up
to one factor, their gradients too; then their logits are dropped. The backward pass multiplies by
the factor that arrives. Nothing runs twice; what is held is the logits of one chunk, the gradient
of the rows and that of the weight, which the step makes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from ..model.modes import transformed

REDUCTIONS: Final = ("mean", "sum", "none")
_aten = torch.ops.aten
_SUM = 2  # the number of this reduction in torch
# What is done to logits element by element between product and loss.
Elementwise = Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: int = 8,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
    elementwise: Elementwise | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), target)` without holding all logits.

    Parameters
    ----------
    hidden
        [..., h] floats; rows are all dimensions but the last.
    weight, bias
        [v, h] and [v], of the last product.
    target
        [...] int64, as many as there are rows, each in [0, v) or `ignore_index`.
    chunks
        Rows are split into so many equal parts, 1 or more; the last may be smaller.
    ignore_index, label_smoothing, reduction, class_weight
        As of `torch.nn.functional.cross_entropy`. With reduction `none`, [...] losses, the product
        is made a second time in the backward pass.
    softcap
        Logits are `softcap * tanh(logits / softcap)`, as Gemma has it.
    dtype
        The type the loss is computed in, as float32 for a model in bfloat16. None: that of the
        product.
    elementwise
        What else is done to logits, element by element, before the loss.

    Returns
    -------
    Tensor
        A scalar, or with `none` losses in the form of `target`; of the type it is computed in.

    Raises
    ------
    ValueError
        For sizes that do not belong together and values out of range.
    RuntimeError
        Where second derivatives are asked for, torch.func's transforms or forward-mode AD.

    Notes
    -----
    With one chunk the same kernels run as without; with more the losses of rows are summed in
    another order, and products of fewer rows may be rounded otherwise. Rows that are ignored have
    gradient 0.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch import chunked_cross_entropy
    >>> hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(1000, 16)
    >>> target = torch.randint(0, 1000, (64,))
    >>> loss = chunked_cross_entropy(hidden, weight, target, chunks=4)
    >>> plain = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
    >>> torch.allclose(loss, plain)
    True
    """
    _check(hidden, weight, target, chunks, reduction, label_smoothing, softcap)
    settings = _Settings(
        chunks, ignore_index, label_smoothing, reduction, class_weight, softcap, dtype, elementwise
    )
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if transformed():
        raise _first_derivatives_only()
    if reduction == "none":
        return _by_row(rows, weight, bias, wanted, settings).view(target.shape)
    found: Tensor = _Together.apply(rows, weight, bias, wanted, settings)
    return found


class _Settings:
    """What a loss is besides its tensors, and the loss of some rows."""

    def __init__(
        self,
        chunks: int,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
        class_weight: Tensor | None,
        softcap: float | None,
        dtype: torch.dtype | None,
        elementwise: Elementwise | None,
    ) -> None:
        self.chunks, self.reduction = chunks, reduction
        self.softcap, self.dtype, self.elementwise = softcap, dtype, elementwise
        self.class_weight = class_weight
        self.terms: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "weight": class_weight,
        }

    def shaped(self, logits: Tensor) -> Tensor:
        """Return logits as the loss reads them."""
        if self.dtype is not None:
            logits = logits.to(self.dtype)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.elementwise is None else self.elementwise(logits)

    @property
    def is_plain(self) -> bool:
        """Whether the loss reads logits as they are multiplied."""
        return self.softcap is None and self.elementwise is None

    def summed(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the losses of some rows."""
        return functional.cross_entropy(logits, target, reduction="sum", **self.terms)

    def divisor(self, target: Tensor) -> Tensor:
        """Return what the sum is divided by for a mean."""
        counted = target != self.terms["ignore_index"]
        if self.class_weight is None:
            return counted.sum()
        weights = self.class_weight[torch.where(counted, target, 0)]
        return torch.where(counted, weights, 0).sum()


def _by_row(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: _Settings
) -> Tensor:
    def part(some: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor) -> Tensor:
        logits = settings.shaped(functional.linear(some, weight, bias))
        return functional.cross_entropy(logits, wanted, reduction="none", **settings.terms)

    size = max(1, -(-rows.shape[0] // settings.chunks))
    found = [
        torch.utils.checkpoint.checkpoint(
            part, some, weight, bias, wanted, use_reentrant=False, preserve_rng_state=False
        )
        for some, wanted in zip(rows.split(size), target.split(size), strict=True)
    ]
    return torch.cat(found)


class _Together(torch.autograd.Function):
    """Sum or mean: losses and gradients of each chunk while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: _Settings,
    ) -> Tensor:
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grows = torch.empty_like(rows) if wants_rows else None
        gweight = torch.empty_like(weight) if wants_weight else None
        gbias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        size = max(1, -(-rows.shape[0] // settings.chunks))
        total: Tensor | None = None
        divisor = settings.divisor(target) if settings.reduction == "mean" else None
        for begin in range(0, rows.shape[0], size):
            some, wanted = rows[begin : begin + size], target[begin : begin + size]
            logits = functional.linear(some, weight, bias)
            if any(ctx.needs_input_grad[:3]):
                scale = 1 / divisor if divisor is not None else None
                loss, slope = _with_slope(logits, wanted, settings, scale)
                slope = slope.to(some.dtype)
            else:
                loss, slope = settings.summed(settings.shaped(logits), wanted), logits
            del logits
            total = loss if total is None else total + loss
            if grows is not None:
                torch.mm(slope, weight, out=grows[begin : begin + size])
            if gweight is not None and begin:
                gweight.addmm_(slope.t(), some)
            elif gweight is not None:
                torch.mm(slope.t(), some, out=gweight)
            if gbias is not None:
                gbias += slope.sum(0)
            del slope
        if total is None:
            total = rows.new_zeros((), dtype=settings.dtype or rows.dtype)
            if gweight is not None:
                gweight.zero_()
        ctx.save_for_backward(grows, gweight, gbias)
        return total if divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise _first_derivatives_only()
        made = ctx.saved_tensors
        return (*(None if it is None else it * arrived.to(it.dtype) for it in made), None, None)


def _first_derivatives_only() -> RuntimeError:
    return RuntimeError(
        "a loss in chunks computes its gradients in the forward pass and has no derivatives of "
        "these: create_graph=True, torch.func and forward-mode AD were asked of it. Compute "
        "cross_entropy(linear(hidden, weight, bias), target) there."
    )


def _with_slope(
    logits: Tensor, target: Tensor, settings: _Settings, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some rows, and its gradient by their logits, scaled."""
    if settings.is_plain and settings.class_weight is None:
        return _of_softmax(settings.shaped(logits), target, settings.terms, scale)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = settings.summed(settings.shaped(leaf), target)
        (slope,) = torch.autograd.grad(loss, leaf, None if scale is None else scale.to(loss.dtype))
    return loss.detach(), slope


def _of_softmax(
    logits: Tensor, target: Tensor, terms: dict[str, Any], scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in fewer blocks than autograd holds.

    Without smoothing by the kernels that autograd calls, so that the bits are the same; with it by
    the formula: probabilities less what is wanted, in the block of their logarithms.
    """
    ignored, smoothing = terms["ignore_index"], terms["label_smoothing"]
    logs = torch.log_softmax(logits, -1)
    del logits
    loss = functional.nll_loss(logs, target, reduction="sum", ignore_index=ignored)
    if not smoothing:
        one = torch.ones_like(loss) if scale is None else scale.to(loss.dtype)
        slope = _aten.nll_loss_backward(
            one, logs, target, None, _SUM, ignored, torch.zeros_like(loss)
        )
        if logs.device.type != "cpu":
            return loss, _aten._log_softmax_backward_data(slope, logs, -1, logs.dtype)
        # Row by row, each sum before its row is written: it may be written over.
        _aten._log_softmax_backward_data.out(slope, logs, -1, logs.dtype, out=slope)
        return loss, slope
    counted = target != ignored
    each = counted.to(logs.dtype)
    spread = -(logs.sum(-1) * each).sum() * (smoothing / logs.shape[-1])
    loss = (1 - smoothing) * loss + spread
    if scale is not None:
        each = each * scale
    each = each[:, None]
    slope = logs.exp_().mul_(each)
    slope -= each * (smoothing / slope.shape[-1])
    at_target = torch.where(counted, target, 0)[:, None]
    return loss, slope.scatter_add_(-1, at_target, each * (smoothing - 1))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    chunks: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"got reduction {reduction!r}, expected one of {', '.join(REDUCTIONS)}.")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"got chunks {chunks!r}, expected a whole number of 1 or more.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"got label_smoothing {label_smoothing!r}, expected 0 to 1.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"got softcap {softcap!r}, expected a number above 0, or None.")
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected "
            "[..., h] and [v, h]."
        )
    if target.shape != hidden.shape[:-1] and target.numel() * hidden.shape[-1] != hidden.numel():
        raise ValueError(
            f"got target {tuple(target.shape)} for hidden {tuple(hidden.shape)}, expected one "
            "class for each row."
        )
