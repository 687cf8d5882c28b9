"""What each part of a Keras model does in one forward pass: seconds, bytes it leaves, marks.

The sample runs once eagerly under a tape, for seconds and bytes; and once symbolically in Keras'
stateless scope, where its updates of variables show as such. What else has an effect (stateful
random ops, variables of TensorFlow's own, losses added inside, attributes set, Python's or NumPy's
chance) would not be the same when run again, and is told apart. So is what reads variables where
Keras does not see it, as a tf.function of a layer does: when it runs again, they may be updated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..model.allocations import MARK, Allocations
from ..model.arguments import closed
from ..model.memory import has_statistics
from ..model.variables import variables_of
from ..trace import kernels
from .sections import Chain, Item, chains_of, crossing, watched


@dataclass
class Behaviour:
    """What an item did, in all its calls of one forward pass.

    Parameters
    ----------
    calls
        How often it was called.
    seconds
        Of its calls.
    left_bytes
        Asked for in its calls and held after them, beside its results.
    result_bytes
        Per result of its last call.
    changed
        Keras variables that it changes.
    repeatable
        Whether it can be run again.
    """

    calls: int = 0
    seconds: float = 0.0
    left_bytes: int = 0
    result_bytes: tuple[int, ...] = ()
    changed: list[Any] = field(default_factory=list)
    repeatable: bool = True


class Probe:
    """Watch a forward pass of a model on a sample. Variables and attributes are changed.

    Parameters
    ----------
    model
        Built.
    args
        Its arguments, with memory.
    device
        Whose allocator is watched.

    Attributes
    ----------
    chains
        All chains of the model, at any depth, per layer that they are right below.
    behaviour
        Per item.
    held
        Per item, bytes held when it has run, beyond what was there at the start.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], device: str) -> None:
        self.chains: dict[Any, list[Chain]] = {}
        layers = [model]
        while layers:
            layer = layers.pop()
            if layer not in self.chains:
                self.chains[layer] = chains_of(layer)
                inside = [it.operation for chain in self.chains[layer] for it in chain.items]
                layers += [it for it in inside if isinstance(it, keras.layers.Layer)]
        self._all = [chain for chains in self.chains.values() for chain in chains]
        self.behaviour = {item: Behaviour() for chain in self._all for item in chain.items}
        self.held: dict[Item, int] = {}
        self._variables = {id(it): it for it in variables_of(model)}
        self._trains = {id(it) for it in model.trainable_variables}
        self._measure(model, args, device)
        self._trace(model, args)

    def left_bytes(self, chain: Chain, items: tuple[Item, ...]) -> int:
        """What items next to each other leave beside results that are needed after them."""
        if chain.functional is None:
            (item,) = items
            return self.behaviour[item].left_bytes
        first, last = chain.items.index(items[0]), chain.items.index(items[-1])
        before = self.held[chain.items[first - 1]] if first else 0
        inside = {id(out) for item in items for out in item.node.outputs}
        leave = self.crossing_bytes(chain, last, only=inside)
        return self.held[items[-1]] - before - leave

    def crossing_bytes(self, chain: Chain, place: int, only: set[int] | None = None) -> int:
        """Bytes of what is made up to an item and needed after it."""
        sizes = {
            id(out): size
            for item in chain.items[: place + 1]
            for out, size in zip(item.node.outputs, self.behaviour[item].result_bytes, strict=True)
        }
        return sum(sizes[it] for it in crossing(chain)[place] if only is None or it in only)

    def _measure(self, model: Any, args: tuple[Any, ...], device: str) -> None:
        marks: dict[str, Item] = {}

        def around(item: Item, call: Callable[[], Any]) -> Any:
            name = f"{MARK}{len(marks)}"
            marks[name] = item
            with tf.profiler.experimental.Trace(f"{name} begins"):
                pass
            results = self._called(item, call)
            with tf.profiler.experimental.Trace(name):
                pass
            return results

        # Once before: kernels are loaded, and what a layer sets once is set.
        model(*args, training=True)
        if not has_statistics(device):
            self._by_results(model, args)
            return
        with watched(self._all, around), Allocations(device) as found:
            with tf.GradientTape() as tape:
                results = model(*args, training=True)
            del tape, results
        for name, item in marks.items():
            begin, end = found.held_bytes[f"{name} begins"], found.held_bytes[name]
            mine = self.behaviour[item]
            mine.left_bytes += end - begin - sum(mine.result_bytes)
            self.held[item] = end

    def _called(self, item: Item, call: Callable[[], Any]) -> Any:
        """Call, and note what that took and what came of it."""
        began = time.perf_counter()
        results = call()
        found = self.behaviour[item]
        found.seconds += time.perf_counter() - began
        found.calls += 1
        flat = [it for it in tf.nest.flatten(results) if isinstance(it, tf.Tensor)]
        found.result_bytes = tuple(bytes_of(it) for it in flat)
        return results

    def _by_results(self, model: Any, args: tuple[Any, ...]) -> None:
        """Take results for what items leave: nothing else is told where no allocator counts."""
        held = 0

        def around(item: Item, call: Callable[[], Any]) -> Any:
            nonlocal held
            results = self._called(item, call)
            found = self.behaviour[item]
            found.left_bytes += sum(found.result_bytes)
            # As much again is left beside the results.
            held += 2 * sum(found.result_bytes)
            self.held[item] = held
            return results

        with watched(self._all, around):
            model(*args, training=True)

    def _trace(self, model: Any, args: tuple[Any, ...]) -> None:
        layers = [it for it in self.chains if isinstance(it, keras.layers.Layer)]

        def around(item: Item, call: Callable[[], Any]) -> Any:
            graph = tf.compat.v1.get_default_graph()
            count, updates, chance = len(graph.get_operations()), _updates(scope), _chance()
            losses, attributes = len(scope.losses), _attributes(item.operation)
            results = call()
            found, now = self.behaviour[item], _updates(scope)
            changed = [key for key, value in now.items() if updates.get(key) is not value]
            found.changed += [self._variables[it] for it in changed if it in self._variables]
            ops = graph.get_operations()[count:]
            seen = {id(graph.capture(it._value.handle)) for it in scope.read.values()}
            found.repeatable &= (
                # What is changed is known, and no weight: its gradient would be lost.
                all(it in self._variables and it not in self._trains for it in changed)
                and len(scope.losses) == losses
                and not any(kernels.has_effect(it) or kernels.is_random(it) for it in ops)
                and all(id(it) in seen for op in ops for it in kernels.variables_read(op))
                and _chance() == chance
                # In the body of a loop, a gradient of ours would read variables that it cannot.
                and graph is top[-1]
                # Tensors inside of what cannot be opened would have no gradient.
                and closed(results) is None
                and _same(_attributes(item.operation), attributes)
            )
            return results

        top: list[Any] = []

        def forward(*inputs: Any) -> None:
            top.append(tf.compat.v1.get_default_graph())
            model(*inputs, training=True)

        scope = _Watching(collect_losses=True)
        specs = tf.nest.map_structure(lambda it: tf.TensorSpec(it.shape, it.dtype), args)
        with watched(self._all, around), scope:
            tf.function(forward, autograph=False).get_concrete_function(*specs)
        for layer in layers:
            layer._clear_losses()


class _Watching(keras.StatelessScope):  # type: ignore[misc]
    """Knows which variables of Keras were read in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


def _updates(scope: Any) -> dict[int, Any]:
    return dict(scope.state_mapping)


def bytes_of(value: Any) -> int:
    """Bytes of a tensor or variable."""
    count = tf.TensorShape(value.shape).num_elements() or 0
    return int(count) * int(tf.as_dtype(value.dtype).size)


def _attributes(operation: Any) -> list[dict[str, Any]]:
    inside = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [dict(it.__dict__) for it in inside]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        left.keys() == right.keys() and all(left[key] is right[key] for key in left)
        for left, right in zip(one, other, strict=True)
    )


def _chance() -> tuple[Any, str]:
    legacy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return random.getstate(), repr(legacy.get_state(legacy=False))
