"""What each part of a Keras model does in one forward pass: seconds, bytes it leaves, effects.

The sample runs once eagerly under a tape, for seconds and bytes; and once symbolically in Keras'
stateless scope, where its updates of variables show as such. What else has an effect (stateful
random ops, variables of TensorFlow's own, losses added inside, attributes set, Python's or NumPy's
random numbers) would not be the same when run again, and is told apart. So is what reads variables
where Keras does not see it, as a tf.function of a layer does: when it runs again, they may be
updated.
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

from ..guards import opaque, tensors_in
from ..memory import MARK, Allocations, bytes_of, has_statistics
from ..model import as_specs, variables_of
from ..trace import kernels
from .sections import Chain, Item, chains_of, crossing, watched


@dataclass
class Behaviour:
    """What an item did, in all its calls of one forward pass.

    Parameters
    ----------
    calls, seconds
        How often it was called, and what that took.
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
                inside = [item.operation for chain in self.chains[layer] for item in chain.items]
                layers += [it for it in inside if isinstance(it, keras.layers.Layer)]
        self._all = [chain for chains in self.chains.values() for chain in chains]
        self.behaviour = {item: Behaviour() for chain in self._all for item in chain.items}
        self.held: dict[Item, int] = {}
        # Once before: kernels are loaded, and what a layer sets once is set.
        model(*args, training=True)
        (self._measure if has_statistics(device) else self._by_results)(model, args, device)
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

        with watched(self._all, around), Allocations(device) as asked_for:
            with tf.GradientTape() as tape:
                results = model(*args, training=True)
            del tape, results
        for name, item in marks.items():
            begin, end = asked_for.held_bytes[f"{name} begins"], asked_for.held_bytes[name]
            behaviour = self.behaviour[item]
            behaviour.left_bytes += end - begin - sum(behaviour.result_bytes)
            self.held[item] = end

    def _called(self, item: Item, call: Callable[[], Any]) -> Any:
        """Call, and note what that took and what came of it."""
        began = time.perf_counter()
        results = call()
        behaviour = self.behaviour[item]
        behaviour.seconds += time.perf_counter() - began
        behaviour.calls += 1
        behaviour.result_bytes = tuple(map(bytes_of, tensors_in(results)))
        return results

    def _by_results(self, model: Any, args: tuple[Any, ...], _: str) -> None:
        """Take results for what items leave: nothing else is told where no allocator counts."""
        held = 0

        def around(item: Item, call: Callable[[], Any]) -> Any:
            nonlocal held
            results = self._called(item, call)
            size = sum(self.behaviour[item].result_bytes)
            self.behaviour[item].left_bytes += size
            # As much again is left beside the results.
            held += 2 * size
            self.held[item] = held
            return results

        with watched(self._all, around):
            model(*args, training=True)

    def _trace(self, model: Any, args: tuple[Any, ...]) -> None:
        """Find out which items can be run again, and what they change."""
        variables = {id(it): it for it in variables_of(model)}
        weights = {id(it) for it in model.trainable_variables}

        def around(item: Item, call: Callable[[], Any]) -> Any:
            graph = tf.compat.v1.get_default_graph()
            count, updates = len(graph.get_operations()), dict(scope.state_mapping)
            before, attributes = (len(scope.losses), _rng_state()), _attributes(item.operation)
            results = call()
            behaviour = self.behaviour[item]
            now = scope.state_mapping.items()
            changed = [key for key, value in now if updates.get(key) is not value]
            behaviour.changed += [variables[it] for it in changed if it in variables]
            ops = graph.get_operations()[count:]
            seen = {id(graph.capture(it._value.handle)) for it in scope.read.values()}
            behaviour.repeatable &= (
                # What is changed is known, and no weight: its gradient would be lost.
                all(it in variables and it not in weights for it in changed)
                and (len(scope.losses), _rng_state()) == before
                and _same(_attributes(item.operation), attributes)
                and not any(kernels.has_effect(it) or kernels.is_random(it) for it in ops)
                and all(id(it) in seen for op in ops for it in kernels.variables_read(op))
                # In the body of a loop, a gradient of ours would read variables that it cannot.
                and graph is top[-1]
                # Tensors inside of what cannot be opened would have no gradient.
                and opaque(results) is None
            )
            return results

        top: list[Any] = []

        def forward(*inputs: Any) -> None:
            top.append(tf.compat.v1.get_default_graph())
            model(*inputs, training=True)

        scope = _Watching(collect_losses=True)
        with watched(self._all, around), scope:
            tf.function(forward, autograph=False).get_concrete_function(*as_specs(args))
        for layer in self.chains:
            if isinstance(layer, keras.layers.Layer):
                layer._clear_losses()


class _Watching(keras.StatelessScope):  # type: ignore[misc]
    """Knows which variables of Keras were read in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


def _attributes(operation: Any) -> list[dict[str, Any]]:
    """What a layer and those in it have in their attributes."""
    inside = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [dict(layer.__dict__) for layer in inside]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        left.keys() == right.keys() and all(left[key] is right[key] for key in left)
        for left, right in zip(one, other, strict=True)
    )


def _rng_state() -> tuple[Any, str]:
    legacy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return random.getstate(), repr(legacy.get_state(legacy=False))
