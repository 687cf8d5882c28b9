"""chunk_loss: a model that returns its loss, with the last product and the loss in chunks.

The model's own forward runs; its last product is deferred (lazy.py). Which of its products that is
is found by running it on tensors without values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import TraceError
from ..model.restore import restore_model
from ..model.step import restore_rng_state
from ..model.wrapping import bare, dressed
from ..trace.fake_step import on_fakes
from ..trace.trace import call_arguments
from .lazy import LazyLogits, deferring, products

_SETTINGS = "_sn_memory_chunks"
_PLAIN = "_sn_memory_unchunked_class"
# Products looked at, the largest first.
_TRIED = 8


def chunk_loss(model: torch.nn.Module, sample: Any, chunks: int) -> torch.nn.Module:
    """Return the model as one that makes its logits and their loss in chunks of rows.

    Parameters
    ----------
    model
        One whose forward takes `torch.nn.functional.cross_entropy` of its last product and returns
        the loss, as causal language models of transformers do when given labels. It stays as it is.
    sample
        As in `plan`; no memory is taken.
    chunks
        As in `chunked_cross_entropy`.

    Returns
    -------
    A module of a class of the same name that shares parameters, buffers and modules. In a step that
    takes gradients, None stands in the place of the logits it returned beside the loss; without
    gradients, or where no loss is taken, it is the model's own forward.

    Raises
    ------
    TraceError
        For a model without such an end.

    Examples
    --------
    >>> import torch
    >>> import sn_memory.torch
    >>> class WithLoss(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 500)
    ...     def forward(self, x, target):
    ...         return torch.nn.functional.cross_entropy(self.head(self.body(x)), target)
    >>> sample = torch.randn(32, 8), torch.randint(0, 500, (32,))
    >>> model = WithLoss()
    >>> torch.allclose(sn_memory.torch.chunk_loss(model, sample, 4)(*sample), model(*sample))
    True
    """
    plain = unchunked(model)
    number = last_product(plain, sample)
    if number is None:
        raise TraceError(
            f"the {type(plain).__name__} takes no cross entropy of a product of its own, or looks "
            "at the logits otherwise as well. Let its forward return the loss, or call "
            "chunked_cross_entropy in its place."
        )
    return _chunked(plain, number, chunks)


def last_product(model: torch.nn.Module, sample: Any) -> int | None:
    """Return which of the products of a forward pass makes the logits of its loss; None if none."""
    given = call_arguments(sample)
    forward = type(model).forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(model, *args, **kwargs)

    def searched(args: Any, kwargs: Any) -> int | None:
        found = sorted(products(lambda: run(*args, **kwargs)), key=lambda it: -it[1] * it[2])
        for number, _, _ in found[:_TRIED]:
            with deferring(number, 2) as end:
                run(*args, **kwargs)
            if end.losses and not end.multiplied:
                return number
        return None

    with restore_model(model), restore_rng_state(), on_fakes(model, given) as (args, kwargs):
        return searched(args, kwargs)


def unchunked(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model as it was before `chunk_loss`."""
    kind = getattr(type(model), _PLAIN, None)
    if kind is None:
        return model
    plain = bare(kind)
    plain.__dict__.update({key: it for key, it in model.__dict__.items() if key != _SETTINGS})
    return plain


class ChunkedForward:
    """Stands before the class of the model."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = unchunked(self)  # type: ignore[arg-type]
        return bare, (type(plain),), dict(plain.__dict__)


def _chunked(model: torch.nn.Module, number: int, chunks: int) -> torch.nn.Module:
    kind = type(model)

    def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = model.__dict__.get(_SETTINGS)
        if settings is None or not torch.is_grad_enabled():
            return kind.forward(model, *args, **kwargs)
        with deferring(*settings) as end:
            returned = kind.forward(model, *args, **kwargs)

        def left(logits: LazyLogits) -> torch.Tensor | None:
            return None if end.losses else logits.tensor()

        return tree_map_only(LazyLogits, left, returned)

    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "forward": dressed(run, kind.forward),
        _PLAIN: kind,
    }
    made = bare(type(kind.__name__, (ChunkedForward, kind), members))
    made.__dict__.update(model.__dict__)
    made.__dict__[_SETTINGS] = (number, chunks)
    return made
