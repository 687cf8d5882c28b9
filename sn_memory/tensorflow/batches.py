"""The training function of a planned model: one of Keras' own for each kind of batch.

Keras traces one function for all batches. Where a dataset does not promise their sizes, as with a
last batch that is smaller, the function is traced with sizes left open from the first step on, and
no plan of bytes can be made for it. So batches are taken from the iterator here, and each kind goes
to a function that has seen no other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any

import tensorflow as tf

from .planned import KINDS, RECORD, Planned


class ByKind:
    """What `fit` and `train_on_batch` call with an iterator of batches.

    Parameters
    ----------
    model
        The planned model.
    made
        Makes a training function of Keras, each time a new one.

    Attributes
    ----------
    functions
        Those made so far, per kind of batch; of more than KINDS, that which was not used for
        longest goes.
    """

    def __init__(self, model: Any, made: Callable[[], Any]) -> None:
        self.model, self.made = model, made
        self.functions: dict[Hashable, Any] = {}
        # For any batch: what Keras would use.
        self.any = made()

    def __call__(self, iterator: Any) -> Any:
        """Run as many steps as Keras would at a time; return the logs of the last.

        Raises StopIteration if there is no batch.
        """
        if not self.are_told_apart(iterator):
            return self.any(iterator)
        logs = None
        for batch in islice(iterator, self.model.steps_per_execution):
            logs = self.function_for(batch)(iter([batch]))
        if logs is None:
            raise StopIteration
        return logs

    def are_told_apart(self, iterator: Any) -> bool:
        """Whether batches may differ in kind, and a plan of ops depends on it."""
        record: Planned = self.model.__dict__[RECORD]
        if record.backend != "graph" or self.model.jit_compile or self.model.run_eagerly:
            return False
        if isinstance(iterator, tf.data.Iterator):
            specs = tf.nest.flatten(iterator.element_spec)
            return not all(_is_whole(it) for it in specs)
        # Of `train_on_batch`, a generator; what a strategy distributes is its own business.
        return isinstance(iterator, Iterator) and not isinstance(
            iterator, tf.distribute.DistributedIterator
        )

    def function_for(self, batch: Any) -> Any:
        """Return the function of a kind of batch."""
        kind = tuple(_kind(it) for it in tf.nest.flatten(batch))
        function = self.functions.pop(kind, None)
        if function is None:
            record: Planned = self.model.__dict__[RECORD]
            strict = record.planning is not None and record.planning.strict
            if not strict and not record.time.left():
                return self.any
            function = self.made()
            self.model.train_function = self
        self.functions[kind] = function
        while len(self.functions) > KINDS:
            del self.functions[next(iter(self.functions))]
        return function


def _is_whole(spec: Any) -> bool:
    return not isinstance(spec, tf.TensorSpec) or spec.shape.is_fully_defined()


def _kind(leaf: Any) -> Hashable:
    """What tells a batch from others that a function would be traced again for."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
