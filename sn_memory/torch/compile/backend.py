"""The back end for torch.compile: its joint graph, planned, and cut where the plan says.

`activation_memory_budget` with any knapsack solver caps the bytes that are saved, not those that
are live. So this takes the other hook, the partition function, and writes forward and backward
graph in the order of a plan. With `compiler="eager"` they run call by call. Inductor fuses and
reorders what they hold; there the plan is one of its fused kernels (fused.py), and its peak that of
what Inductor makes of it.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...check.replay import check_plan
from ...graph.graph import Graph
from ...graph.records import Storage
from ...plan.plan import BudgetError, Plan
from ..errors import ReplayError, TraceError
from ..model.modes import is_batched, other_layout, transformed, warn
from ..model.step import tensors
from ..trace.captured import Captured
from ..trace.fake_rules import quiet
from ..trace.op_seconds import while_training
from ..trace.record import Recording
from ..trace.to_graph import Named, main_device, to_graph
from ..trace.trace import Trace, operations, scratch_of_calls
from .joint_graph import copy_statistics, joint_of
from .partition import partitioned

# What a forward pass calls of a logger; names of libraries' own go on, as `warning_once`.
_LOGS = ("debug", "info", "warn", "error", "exception", "critical", "log")
COMPILERS = ("inductor", "eager")
_HOOKS = {
    "eager": (
        ("torch._dynamo.backends.common", "aot_autograd"),
        ("torch._dynamo.backends.debugging", "boxed_nop"),
    ),
    "inductor": (
        ("torch._inductor.compile_fx", "compile_fx"),
        ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
        ("torch._inductor.graph", "GraphLowering"),
        ("torch._functorch.config", "force_non_lazy_backward_lowering"),
        ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    ),
}


class Ready(Exception):  # noqa: N818 - says that the compiled step is there and was not run
    """Compiled; raised in place of the first run."""


@dataclass(frozen=True)
class Settings:
    """What a plan is made with.

    `make` turns a graph and a budget into a plan, `budget` is the whole step's, and `words` are all
    that `make` depends on, as text; None where it depends on more.
    """

    make: Callable[[Graph, float | str], Plan]
    budget: float | str
    profile: bool
    device: Any
    extra: tuple[Storage, ...]
    compiler: str
    words: str | None = None


class CompiledStep:
    """A model under torch.compile, partitioned by a plan.

    Parameters
    ----------
    model
        The plain model.
    args, kwargs
        A real input; the compiler wants tensors with memory. The model is not run on them.
    settings
        How to plan.

    Raises
    ------
    TraceError
        If torch.compile breaks the model into several graphs, or no gradient is wanted.
    BudgetError
        If no plan keeps the budget.
    """

    name = "compile"

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
    ) -> None:
        hooks = {name: _hook(module, name) for module, name in _HOOKS[settings.compiler]}
        self.settings = settings
        self.name_of_model = type(model).__name__
        self.made: tuple[Trace, Plan] | None = None
        self.dry, self.warned = True, False
        known = [*model.parameters(), *model.buffers(), *tensors((args, kwargs))]
        self.known_bytes = storage_bytes(known)
        self.on_cpu = all(it.device.type == "cpu" for it in known)
        # Of the plain class: that of a planned model would come back here.
        kind = type(model)
        plain_forward = kind.forward

        # Not the module, whose call runs its hooks: they run around the planned one already.
        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return plain_forward(module, *args, **kwargs)

        # Dynamo keeps what it compiles with the code object, eight times at most, however many
        # plans share it; so each has one of its own.
        forward.__code__ = forward.__code__.replace()
        self.kind = kind
        self.compiled = torch.compile(
            forward, backend=self._backend(hooks), fullgraph=True, dynamic=False
        )
        with quiet():
            self._prepare(model, args, kwargs)

    @property
    def trace(self) -> Trace:
        """The joint graph as planned last."""
        return self._latest()[0]

    @property
    def plan(self) -> Plan:
        """The plan made last; torch.compile compiles again when what it relied on has changed."""
        return self._latest()[1]

    @property
    def known(self) -> list[torch.Tensor]:
        """None: constants are in the compiled code."""
        return []

    @property
    def ignored(self) -> list[torch.Tensor]:
        """None: nothing is moved to the host."""
        return []

    @property
    def by_allocator(self) -> bool:
        """Whether only the allocator sees its buffers: kernels of Inductor on the CPU."""
        return self.settings.compiler == "inductor" and self.on_cpu

    @property
    def beside_bytes(self) -> int:
        """The optimizer's state."""
        return self.trace.beside_bytes

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass of the model this was made for."""
        twin: torch.nn.Module = object.__new__(self.kind)
        # The same dictionary: what the forward pass sets is set on the model.
        object.__setattr__(twin, "__dict__", model.__dict__)
        returned = self.compiled(twin, *args, **kwargs)
        given = {id(it) for it in tensors((args, kwargs))}
        for out in tensors(returned):
            if out.grad_fn is not None and id(out) not in given:
                out.register_hook(partial(self._arrived, out.stride()))
        return returned

    def _arrived(self, planned: tuple[int, ...], gradient: torch.Tensor | None) -> None:
        """Refuse what a compiled backward graph cannot do; say where it may round otherwise."""
        if gradient is None:
            return  # an output that the loss does not use
        if torch.is_grad_enabled() or is_batched(gradient) or transformed():
            raise ReplayError(
                "gradients of gradients or several at a time (create_graph=True, vmap, "
                "forward-mode AD) are asked for of a model planned with backend='compile', whose "
                "compiled backward pass computes one gradient. Plan with backend='graph' or "
                "'modules'."
            )
        if not self.warned and (text := other_layout(gradient, planned)):
            self.warned = True
            warn(text)

    def _latest(self) -> tuple[Trace, Plan]:
        if self.made is None:
            raise TraceError(
                "torch.compile found nothing to differentiate in the model, so there is no "
                "backward pass to plan. Pass a model in training, with parameters that require "
                "gradients."
            )
        return self.made

    def _prepare(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Compile now, so that what cannot be planned or does not fit is told now."""
        try:
            with until_ready():
                self.run(model, args, kwargs)
            self._latest()
        finally:
            self.dry = False

    def _backend(self, hooks: dict[str, Any]) -> Callable[..., Any]:
        def partition(module: fx.GraphModule, joint_inputs: Any, **told: Any) -> Any:
            return self._partition(module, **told)

        if self.settings.compiler == "eager":
            inner = hooks["aot_autograd"](
                fw_compiler=hooks["boxed_nop"],
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )
        else:
            inner = self._by_inductor

        def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            # As users call backward: outside of the `with torch.autocast` of the forward pass.
            again = nullcontext() if self.dry else while_training()
            with functorch_config.patch(backward_pass_autocast="off"), again:
                run = inner(module, inputs)

            def ready(*args: Any) -> Any:
                if self.dry:
                    raise Ready
                return run(*args)

            return ready

        return backend

    def _by_inductor(self, module: fx.GraphModule, inputs: Any) -> Any:
        if not self.on_cpu:
            raise TraceError(
                "compiler='inductor' plans steps on the CPU: what a kernel reads and writes is "
                "read in its C++ text, and those of a GPU are written otherwise. Plan with "
                "compiler='eager' or backend='graph'."
            )
        # Not before it is asked for: it needs torch's hooks of 2.13.
        inductor: Any = importlib.import_module(".inductor", __package__)
        settings = self.settings
        unused = self.known_bytes - storage_bytes(tensors(list(inputs)))
        extra = settings.extra
        if unused > 0:
            extra = (*extra, Storage("tensors that the step does not use", unused, "state"))
        asked = inductor.Asked(
            settings.make,
            settings.budget,
            settings.profile,
            settings.device,
            extra,
            settings.words,
            self.name_of_model,
        )
        kept, run = inductor.compiled(module, list(inputs), asked)
        if kept is not None:
            check_plan(kept.graph, kept.plan)
            self.made = _trace_of(kept.graph), kept.plan
        return run

    def _partition(
        self,
        module: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Any = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        module.graph.eliminate_dead_code()
        copy_statistics(module)
        joint = joint_of(module, num_fwd_outputs, list(static_lifetime_input_indices or ()))
        place = main_device(joint.captured)
        # Fake tensors, which AOTAutograd traces with, take no time and no memory.
        with unset_fake_temporarily():
            speeds, costs = operations(
                joint.captured, place, profile=self.settings.profile, device=self.settings.device
            )
            ways, notes = scratch_of_calls(joint.captured.recording, place, costs)
        named = to_graph(
            joint.captured,
            name="joint graph",
            device=speeds,
            seconds=[it and it[0] for it in costs],
            ways=ways,
            allocator="torch" if place.type == "cuda" else "none",
            extra=self.settings.extra,
            replayable=False,
        )
        plan = self.settings.make(named.graph, self.settings.budget)
        plan = replace(plan, notes=(*plan.notes, *notes))
        check_plan(named.graph, plan)
        self.made = Trace(named, joint.captured), plan
        return partitioned(joint, named, plan)


@contextmanager
def until_ready() -> Iterator[None]:
    """Let torch.compile compile a model inside; it ends by Ready, or by a TraceError."""
    # Libraries warn from within a forward pass; that is no reason not to take it whole.
    logs = {
        it
        for it in vars(logging.Logger).values()
        if callable(it) and getattr(it, "__name__", "").startswith(_LOGS)
    }
    left_out = torch._dynamo.config.ignore_logging_functions | logs
    try:
        with torch.enable_grad(), torch._dynamo.config.patch(ignore_logging_functions=left_out):
            yield
    except Ready:
        pass
    except Exception as error:
        cause = _ours(error)
        if cause is not None:
            raise cause from None
        raise TraceError(
            f"torch.compile cannot take the model as one graph: {_first_lines(error)}. Change "
            "that place, or plan with backend='graph' or 'modules'."
        ) from error


def storage_bytes(held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    memories = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in held}
    return sum(memories.values())


def _trace_of(graph: Graph) -> Trace:
    """Return a trace of which there is a graph of kernels alone; its calls are in compiled code."""
    nothing = Captured(Recording(), 0, (), (), (), (), None, (), (), ())
    return Trace(Named(graph, {}, {}), nothing)


def _hook(module: str, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            # torch's own modules use what torch has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TraceError(
            f"torch {torch.__version__} has no {module}.{name}, which backend='compile' needs; it "
            "was written for torch 2.13. Plan with backend='graph'."
        ) from error


def _ours(error: BaseException) -> BaseException | None:
    """The error of ours that torch.compile wrapped, if there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BudgetError | TraceError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3]).rstrip(".")
