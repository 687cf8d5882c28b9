"""Logits that are not multiplied before their loss is asked for.

Under `deferring` the last product of a model returns such logits. What models do to them on the way
to the loss is noted: views of the rows are taken of the rows that are multiplied instead, and what
is done element by element is done to each chunk. At `cross_entropy` the chunked loss runs. Anything
else that looks at them gets the product, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .function import chunked_cross_entropy

# Of its own name, as a method below is called float.
_Float = float
_NUMBERS: Final = (int, float)
_PRODUCTS: Final = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


@dataclass
class End:
    """What became of the product that was deferred.

    Parameters
    ----------
    losses
        How many losses were taken of it in chunks.
    multiplied
        Whether something else asked for the product.
    rows, columns
        Its size.
    """

    losses: int = 0
    multiplied: bool = False
    rows: int = 0
    columns: int = 0


@dataclass(eq=False)
class LazyLogits:
    """Logits [..., v] as the rows, the weight and what is done to the product."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunks: int
    end: End
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    dtype: torch.dtype = torch.float32
    _made: Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def tensor(self) -> Tensor:
        """Return the product, made now."""
        if self._made is None:
            self.end.multiplied = True
            made = functional.linear(self.hidden, self.weight, self.bias)
            for step in self.steps:
                made = step(made)
            self._made = made
        return self._made

    # What models do to logits before their loss.
    def to(self, *args: Any, **kwargs: Any) -> Any:
        kinds = [it for it in (*args, *kwargs.values()) if isinstance(it, torch.dtype)]
        others = [it for it in args if not isinstance(it, torch.dtype)]
        same = all(torch.device(it) == self.device for it in others if _is_device(it))
        if kinds == [self.dtype] and not others and len(kinds) == len(args) + len(kwargs):
            return self
        if kinds and len(kinds) + len(others) == len(args) + len(kwargs) and same:
            return self._then(lambda it: it.to(kinds[0]), kinds[0])
        if not kinds and others and same and all(map(_is_device, others)):
            return self
        return self.tensor().to(*args, **kwargs)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> LazyLogits:
        return self._of_rows(self.hidden.contiguous())

    def view(self, *shape: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        columns = self.weight.shape[0]
        if isinstance(sizes, torch.dtype) or not sizes or sizes[-1] not in (columns, -1):
            return self.tensor().view(*shape)
        if sizes[-1] == -1 and self.shape.numel() != columns * torch.Size(sizes[:-1]).numel():
            return self.tensor().view(*shape)
        return self._of_rows(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start: int = 0, end: int = -1) -> Any:
        if end % self.ndim == self.ndim - 1:
            return self.tensor().flatten(start, end)
        return self._of_rows(self.hidden.flatten(start, end))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        whole = all(it is Ellipsis or isinstance(it, slice | int) for it in keys)
        named = [it for it in keys if it is not Ellipsis]
        # Whether the last of them is said of the columns.
        last = len(named) == self.ndim or (len(named) < len(keys) and keys[-1] is not Ellipsis)
        if not whole or (last and keys[-1] != slice(None)):
            return self.tensor()[key]
        return self._of_rows(self.hidden[key])

    def __mul__(self, other: Any) -> Any:
        return self._scalar(other, lambda it: it * other, "__mul__")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._scalar(other, lambda it: it / other, "__truediv__")

    def tanh(self) -> LazyLogits:
        return self._then(torch.tanh)

    def __getattr__(self, name: str) -> Any:
        # Whatever else tensors have.
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy and isinstance(args[0], cls):
            found = args[0]._loss(*args[1:], **kwargs)
            if found is not None:
                return found
        own: dict[Any, Any] = {
            torch.tanh: cls.tanh,
            torch.mul: cls.__mul__,
            torch.div: cls.__truediv__,
        }
        if func in own and isinstance(args[0], cls) and not kwargs:
            return own[func](*args)
        return func(*_made(args), **{key: _made(it) for key, it in kwargs.items()})

    def _scalar(self, other: Any, step: Callable[[Tensor], Tensor], name: str) -> Any:
        if isinstance(other, _NUMBERS):
            return self._then(step)
        return getattr(self.tensor(), name)(_made(other))

    def _then(
        self, step: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> LazyLogits:
        return replace(self, steps=(*self.steps, step), dtype=dtype or self.dtype, _made=None)

    def _of_rows(self, hidden: Tensor) -> LazyLogits:
        return replace(self, hidden=hidden, _made=None)

    def _loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: _Float = 0.0,
    ) -> Tensor | None:
        """Return the loss in chunks; None where it is one of another kind."""
        classes = target.shape == self.shape[:-1] and not target.is_floating_point()
        if self.ndim > 2 or not classes or size_average is not None or reduce is not None:
            return None
        self.end.losses += 1
        self.end.rows, self.end.columns = self.hidden.shape[:-1].numel(), self.weight.shape[0]
        steps = self.steps

        def elementwise(logits: Tensor) -> Tensor:
            for step in steps:
                logits = step(logits)
            return logits

        # A change of type alone needs no gradient of its own.
        casts = len(steps) == 1 and self.dtype != self.hidden.dtype
        return chunked_cross_entropy(
            self.hidden,
            self.weight,
            target,
            bias=self.bias,
            chunks=self.chunks,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            class_weight=weight,
            dtype=self.dtype if casts else None,
            elementwise=elementwise if steps and not casts else None,
        )


class _Deferring(TorchFunctionMode):
    """Defers the product that makes logits: the one of this number among those of the forward."""

    def __init__(self, number: int, chunks: int) -> None:
        super().__init__()
        self.number, self.chunks, self.count, self.end = number, chunks, 0, End()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            at, self.count = self.count, self.count + 1
            if at == self.number:
                return self._deferred(func, args, kwargs)
        return func(*args, **kwargs)

    def _deferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        if func is functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        else:
            given = dict(zip(("input", "other"), args, strict=False)) | kwargs
            given["weight"] = given["other"].t()
        rows, weight, bias = given["input"], given["weight"], given.get("bias")
        kind = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            kind = torch.get_autocast_dtype(rows.device.type)
            rows, weight = rows.to(kind), weight.to(kind)
            bias = None if bias is None else bias.to(kind)
        return LazyLogits(rows, weight, bias, self.chunks, self.end, dtype=kind)


@contextmanager
def deferring(number: int, chunks: int) -> Iterator[End]:
    """Defer one product inside, for its loss in chunks; tells what became of it."""
    mode = _Deferring(number, chunks)
    with mode:
        yield mode.end


def products(run: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """Return (number, rows, columns) of the products with a matrix that a function makes."""
    found: list[tuple[int, int, int]] = []

    class Noting(TorchFunctionMode):
        count = 0

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in _PRODUCTS:
                other = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
                if isinstance(other, Tensor) and other.dim() == 2:
                    rows = result.shape[:-1].numel()
                    found.append((self.count, rows, result.shape[-1]))
                self.count += 1
            return result

    with Noting():
        run()
    return found


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str)


def _made(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.tensor()
    if isinstance(value, tuple | list):
        return type(value)(_made(it) for it in value)
    return value
