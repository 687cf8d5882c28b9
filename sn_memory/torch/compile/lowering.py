"""A forward or backward graph as Inductor would compile it, without compiling a kernel.

Fusion, order and reuse of buffers are decided in Inductor's scheduler and wrapper, and what they
decide stands in the Python text it writes. That text costs a second or two; the compilers of its
kernels, a minute, are not called. All of Inductor's own passes run, as in a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .torch_inductor import (
    DebugContext,
    GraphLowering,
    V,
    _InProcessFxCompile,
    get_input_idxs_to_check,
    inductor_config,
    init_backend_registration,
)


@dataclass(frozen=True)
class Lowered:
    """What Inductor makes of a graph.

    Parameters
    ----------
    text
        The Python module that allocates, calls kernels and frees.
    origins
        Per buffer in that text, the name of the graph's node whose value it holds; buffers that
        hold the value of no single node are left out.
    strides
        Per output, how it is laid out; None for what is no tensor.
    inputs
        The fake tensors that it was lowered for.
    """

    text: str
    origins: dict[str, str]
    strides: tuple[tuple[int, ...] | None, ...]
    inputs: tuple[Any, ...]


class _Written(Exception):  # noqa: N818 - says that the text is there, and ends the compilation
    """The text is written; raised where its kernels would be compiled."""


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of its own; fake tensors stay the same, or two copies were two storages."""
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made = here[node] = graph.node_copy(node, here.__getitem__)
        made.meta = dict(node.meta)
        if hasattr(node, "_dynamo_source"):
            made._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    # By these AOTAutograd knows parameters from inputs, which torch's partition depends on.
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    return copy


def lowered(module: fx.GraphModule, inputs: Sequence[Any], told: dict[str, Any]) -> Lowered:
    """Lower a graph as Inductor's inner compiler would; the graph stays as it is.

    Parameters
    ----------
    module
        Forward or backward graph, its output marked as Inductor does (`user_visible_output_idxs`).
    inputs
        Fake tensors for its placeholders.
    told
        What the inner compiler was told beside: `is_backward`, `static_input_idxs` and so on.
    """
    own = copied(module)
    found: dict[str, Any] = {}

    def write(graph: GraphLowering, code: Any) -> Any:
        found["graph"], found["text"] = graph, code.value
        raise _Written

    told = {key: value for key, value in told.items() if key != "compile_region_name"}
    checked = get_input_idxs_to_check(inputs, told.get("static_input_idxs", ()))
    # As in Inductor's own compilation: real tensors, as a generator's state, are met on the way.
    with _replaced(GraphLowering, "_compile_to_module_lines", write), _disable_current_modes():
        try:
            init_backend_registration()
            with inductor_config.patch(force_disable_caches=True), DebugContext():
                _InProcessFxCompile().codegen_and_compile(own, list(inputs), checked, told)  # type: ignore[arg-type]
        except _Written:
            pass
    graph = found["graph"]
    origins = {}
    for name, buffer in graph.name_to_buffer.items():
        node = getattr(buffer, "origin_node", None)
        if node is None:
            node = getattr(getattr(buffer, "data", None), "origin_node", None)
        if node is not None:
            origins[name] = node.name
    with V.set_graph_handler(graph):
        strides = tuple(_strides(it) for it in graph.graph_outputs)
    return Lowered(found["text"], origins, strides, tuple(inputs))


def _strides(output: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(it) for it in output.get_layout().stride)
    except (AttributeError, NotImplementedError, TypeError):
        return None


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
