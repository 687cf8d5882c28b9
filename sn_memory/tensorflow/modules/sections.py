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
from keras.src.models.functional import Functional  # keras.Model makes it; it has no public name

from ..guards import opaque, refilled, tensors_in


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

    @property
    def items(self) -> tuple[Item, ...]:
        """Itself, as a section has its items."""
        return (self,)


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

    `changed` are the Keras variables that they change.
    """

    chain: Chain
    items: tuple[Item, ...]
    changed: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The name of its item, or those of the first and the last."""
        first, last = self.items[0].name, self.items[-1].name
        return first if len(self.items) == 1 else f"{first} to {last}"


Function = Callable[[list[Any]], list[Any]]
# Runs something in place of the call of an item: gets the call, with its arguments bound.
Around = Callable[[Item, Callable[[], Any]], Any]
# Runs a section in place of its items: gets a function of tensors, and the tensors.
Rerun = Callable[[Section, Function, list[Any]], list[Any]]


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
        return [Chain((Item(name_of(inner), inner),)) for inner in layer._layers]
    items = tuple(
        Item(name_of(node.operation), node.operation, node)
        for depth in sorted(functional._nodes_by_depth, reverse=True)
        for node in functional._nodes_by_depth[depth]
        if node.operation and not node.is_input
    )
    return [Chain(items, functional)]


def crossing(chain: Chain) -> list[set[int]]:
    """Return, per item, the tensors that are made up to there and needed later, by their ids."""
    needed = [{id(it) for it in chain.functional.outputs}]
    for item in reversed(chain.items[1:]):
        needed.append(needed[-1] | {id(it) for it in item.node.input_tensors})
    made: set[int] = set()
    crossings = []
    for item, later in zip(chain.items, reversed(needed), strict=True):
        made |= {id(it) for it in item.node.outputs}
        crossings.append(made & later)
    return crossings


@contextmanager
def watched(chains: Sequence[Chain], around: Around) -> Iterator[None]:
    """Let each item's call go through `around`."""
    with ExitStack() as undo:
        for chain in chains:
            if chain.functional is not None:
                run = _runner(
                    chain, chain.items, around, lambda _, function, given: function(given)
                )
                undo.enter_context(_replaced(chain.functional, "_run_through_graph", run))
            else:
                (item,) = chain.items
                call = _around_call(item, around)
                undo.enter_context(_replaced(item.operation, "call", call))
        yield


@contextmanager
def run_in_sections(sections: Sequence[Section], rerun: Rerun, model: Any) -> Iterator[None]:
    """Let each section be run by `rerun`.

    model : a twin of the model whose sections they are, to be changed in its place
    """
    with ExitStack() as undo:
        for section in sections:
            if section.chain.functional is None:
                call = _around_section(section, rerun)
                undo.enter_context(_replaced(section.items[0].operation, "call", call))
        for chain in dict.fromkeys(it.chain for it in sections if it.chain.functional is not None):
            of = {item: it for it in sections if it.chain is chain for item in it.items}
            groups = list(dict.fromkeys(of.get(item, item) for item in chain.items))
            run = _runner(chain, groups, lambda _, call: call(), rerun)
            functional = chain.functional
            if functional._nodes_by_depth is model.__dict__.get("_nodes_by_depth"):
                functional = model
            undo.enter_context(_replaced(functional, "_run_through_graph", run))
        yield


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


def _runner(chain: Chain, groups: Sequence[Item | Section], around: Around, rerun: Rerun) -> Any:
    """Return what runs the calls of a functional model, in the place of Keras'."""
    functional = chain.functional
    plain = functional._run_through_graph
    # Per group, the tensors that are needed after it, by their ids.
    later = [{id(it) for it in functional.outputs}]
    for group in reversed(groups[1:]):
        later.append(later[-1] | {id(it) for item in group.items for it in item.node.input_tensors})
    later.reverse()

    def call(operation_fn: Any, item: Item, tensors: dict[int, Any]) -> None:
        args, kwargs = item.node.arguments.fill_in(tensors)
        operation = operation_fn(item.operation)
        results = around(item, lambda: operation(*args, **kwargs))
        made = zip(item.node.outputs, keras.tree.flatten(results), strict=True)
        tensors.update((id(it), value) for it, value in made)

    def run(inputs: Any, operation_fn: Any = lambda it: it, call_fn: Any = None) -> Any:
        if call_fn is not None:
            return plain(inputs, operation_fn, call_fn)
        given = keras.tree.flatten(inputs)
        tensors = {id(it): value for it, value in zip(functional.inputs, given, strict=True)}
        for group, wanted in zip(groups, later, strict=True):
            if isinstance(group, Item):
                call(operation_fn, group, tensors)
            else:
                _run_section(group, rerun, tensors, wanted, partial(call, operation_fn))
            # Keras holds all to the end; run eagerly, that is all the memory of the pass.
            tensors = {key: value for key, value in tensors.items() if key in wanted}
        outputs = [tensors[id(it)] for it in functional.outputs]
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)

    return run


def _run_section(
    section: Section, rerun: Rerun, tensors: dict[int, Any], wanted: set[int], call: Any
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

    results = rerun(section, function, [tensors[it] for it in enter])
    tensors.update(zip(leave, results, strict=True))


def _around_call(item: Item, around: Around) -> Any:
    plain = item.operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(item, lambda: plain(*args, **kwargs))

    return call


def _around_section(section: Section, rerun: Rerun) -> Any:
    """Return what runs the call of a layer as a function of the tensors among its arguments."""
    plain = section.items[0].operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if opaque((args, kwargs)) is not None:
            # Tensors inside of it would have no gradient.
            return plain(*args, **kwargs)
        structure: Any = None

        def function(given: list[Any]) -> list[Any]:
            nonlocal structure
            args_again, kwargs_again = refilled((args, kwargs), given)
            structure = plain(*args_again, **kwargs_again)
            return tensors_in(structure)

        results = rerun(section, function, tensors_in((args, kwargs)))
        return refilled(structure, results)

    return call
