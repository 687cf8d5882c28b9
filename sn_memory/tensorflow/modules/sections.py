"""Parts of a Keras model that can be run again: calls of layers, stretches of functional models.

A functional model is a list of calls in a fixed order. Any stretch of it can be run again from the
tensors that enter it; what is inside need not be kept. In other models nobody knows what happens
between the calls of two layers, so there a part is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional  # keras.Model makes it; it has no public name

from ..model.arguments import closed


@dataclass(frozen=True, eq=False)
class Item:
    """A call that may be in a part: of a node in a functional model, or any of a layer's own.

    Parameters
    ----------
    name
        The layer's path, or the operation's name.
    operation
        What is called.
    node
        Its place in a functional model.
    """

    name: str
    operation: Any
    node: Any = None


@dataclass(frozen=True, eq=False)
class Chain:
    """Items that are run one after the other, and the functional model that does so.

    Without one, there is one item.
    """

    items: tuple[Item, ...]
    functional: Any = None


@dataclass(frozen=True, eq=False)
class Section:
    """Items next to each other in a chain, to be run again together.

    Parameters
    ----------
    chain, items
        Where, and which.
    changed
        Keras variables that they change.
    """

    chain: Chain
    items: tuple[Item, ...]
    changed: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The name of its item, or those of the first and the last."""
        names = [it.name for it in self.items]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


# Runs something in place of the call of an item: gets the call, with its arguments bound.
Around = Callable[[Item, Callable[[], Any]], Any]
# Runs a section in place of its items: gets a function of tensors, and the tensors.
Again = Callable[[Section, Callable[[list[Any]], list[Any]], list[Any]], list[Any]]


def functional_of(layer: Any) -> Any:
    """Return the functional model that a layer runs as its call; None if it runs code."""
    if type(layer).call is keras.Sequential.call:
        layer = layer._functional
    return layer if layer is not None and type(layer).call is Functional.call else None


def name_of(operation: Any) -> str:
    """The path of a layer, if it has one: without weights, or before it is built, it has none."""
    return str(getattr(operation, "path", None) or operation.name)


def chains_of(layer: Any) -> list[Chain]:
    """Return the parts right below a layer."""
    functional = functional_of(layer)
    if functional is None:
        return [Chain((Item(name_of(it), it),)) for it in layer._layers]
    items = tuple(
        Item(name_of(node.operation), node.operation, node)
        for depth in sorted(functional._nodes_by_depth, reverse=True)
        for node in functional._nodes_by_depth[depth]
        if node.operation and not node.is_input
    )
    return [Chain(items, functional)]


@contextmanager
def watched(chains: Sequence[Chain], around: Around) -> Iterator[None]:
    """Let each item's call go through `around`."""
    with ExitStack() as undo:
        for chain in chains:
            if chain.functional is not None:
                groups = [(None, (item,)) for item in chain.items]
                run = _runner(chain, groups, around, _at_once)
                undo.enter_context(_replaced(chain.functional, "_run_through_graph", run))
            else:
                (item,) = chain.items
                call = _around_call(item, around)
                undo.enter_context(_replaced(item.operation, "call", call))
        yield


@contextmanager
def run_in_sections(sections: Sequence[Section], again: Again, model: Any) -> Iterator[None]:
    """Let each section be run by `again`.

    Parameters
    ----------
    model
        A twin of the model whose sections they are, to be changed in its place.
    """
    with ExitStack() as undo:
        for section in (it for it in sections if it.chain.functional is None):
            (item,) = section.items
            call = _around_section(section, again)
            undo.enter_context(_replaced(item.operation, "call", call))
        for chain in dict.fromkeys(it.chain for it in sections if it.chain.functional is not None):
            groups: list[tuple[Section | None, tuple[Item, ...]]] = []
            of = {item: it for it in sections if it.chain is chain for item in it.items}
            for item in chain.items:
                mine = of.get(item)
                if mine is None:
                    groups.append((None, (item,)))
                elif item is mine.items[0]:
                    groups.append((mine, mine.items))
            run = _runner(chain, groups, _plainly, again)
            functional = chain.functional
            if functional._nodes_by_depth is model.__dict__.get("_nodes_by_depth"):
                functional = model
            undo.enter_context(_replaced(functional, "_run_through_graph", run))
        yield


def crossing(chain: Chain) -> list[set[int]]:
    """Return, per item, the tensors that are made up to there and needed later, by their ids."""
    needed = [{id(it) for it in chain.functional.outputs}]
    for item in reversed(chain.items[1:]):
        needed.append(needed[-1] | {id(it) for it in item.node.input_tensors})
    made: set[int] = set()
    found = []
    for item, later in zip(chain.items, reversed(needed), strict=True):
        made |= {id(it) for it in item.node.outputs}
        found.append(made & later)
    return found


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Put a method on one object, beside Keras' tracking of attributes."""
    before = thing.__dict__.get(name)
    thing.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            thing.__dict__.pop(name, None)
        else:
            thing.__dict__[name] = before


def _plainly(_: Item, call: Callable[[], Any]) -> Any:
    return call()


def _at_once(_: Section, function: Callable[[list[Any]], list[Any]], given: list[Any]) -> list[Any]:
    return function(given)


def _runner(chain: Chain, groups: Sequence[Any], around: Around, again: Again) -> Any:
    """Return what runs the calls of a functional model, in the place of Keras'."""
    functional = chain.functional
    plain = functional._run_through_graph
    results = {id(it) for it in functional.outputs}
    needs = [{id(it) for item in items for it in item.node.input_tensors} for _, items in groups]
    later = [results] * len(groups)
    for place in reversed(range(len(groups) - 1)):
        later[place] = later[place + 1] | needs[place + 1]

    def call(operation_fn: Any, item: Item, tensors: dict[int, Any]) -> None:
        args, kwargs = item.node.arguments.fill_in(tensors)
        operation = operation_fn(item.operation)
        found = around(item, lambda: operation(*args, **kwargs))
        made = zip(item.node.outputs, keras.tree.flatten(found), strict=True)
        tensors.update((id(it), value) for it, value in made)

    def run(inputs: Any, operation_fn: Any = lambda it: it, call_fn: Any = None) -> Any:
        if call_fn is not None:
            return plain(inputs, operation_fn, call_fn)
        given = keras.tree.flatten(inputs)
        tensors = {id(it): value for it, value in zip(functional.inputs, given, strict=True)}
        for (section, items), wanted in zip(groups, later, strict=True):
            if section is None:
                call(operation_fn, items[0], tensors)
            else:
                _run_section(section, again, tensors, wanted, partial(call, operation_fn))
            # Keras holds all to the end; run eagerly, that is all the memory of the pass.
            tensors = {key: value for key, value in tensors.items() if key in wanted}
        found = [tensors[id(it)] for it in functional.outputs]
        return keras.tree.pack_sequence_as(functional._outputs_struct, found)

    return run


def _run_section(
    section: Section, again: Again, tensors: dict[int, Any], wanted: set[int], call: Any
) -> None:
    """Run items of a functional model as one function of the tensors that enter."""
    made = [id(it) for item in section.items for it in item.node.outputs]
    used = [id(it) for item in section.items for it in item.node.input_tensors]
    enter = [it for it in dict.fromkeys(used) if it not in made]
    leave = [it for it in made if it in wanted]

    def function(given: list[Any]) -> list[Any]:
        inside = dict(zip(enter, given, strict=True))
        for item in section.items:
            call(item, inside)
        return [inside[it] for it in leave]

    results = again(section, function, [tensors[it] for it in enter])
    tensors.update(zip(leave, results, strict=True))


def _around_call(item: Item, around: Around) -> Any:
    plain = item.operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(item, lambda: plain(*args, **kwargs))

    return call


def _around_section(section: Section, again: Again) -> Any:
    """Return what runs the call of a layer as a function of the tensors among its arguments."""
    plain = section.items[0].operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if closed((args, kwargs)) is not None:
            # Tensors inside of it would have no gradient.
            return plain(*args, **kwargs)
        leaves = tf.nest.flatten((args, kwargs))
        places = [at for at, it in enumerate(leaves) if isinstance(it, tf.Tensor)]
        structure: list[Any] = []

        def function(given: list[Any]) -> list[Any]:
            filled = list(leaves)
            for at, value in zip(places, given, strict=True):
                filled[at] = value
            args_again, kwargs_again = tf.nest.pack_sequence_as((args, kwargs), filled)
            found = plain(*args_again, **kwargs_again)
            structure[:] = [found]
            return [it for it in tf.nest.flatten(found) if isinstance(it, tf.Tensor)]

        results = iter(again(section, function, [leaves[at] for at in places]))
        (found,) = structure
        return tf.nest.map_structure(
            lambda it: next(results) if isinstance(it, tf.Tensor) else it, found
        )

    return call
