"""The back end for torch.compile: its compiled step, partitioned by torch's own memory budget.

The peak that each of torch's budgets leads to is measured (search.py). A plan is a setting of that
budget, stored in a file next to Inductor's cache: a later process with the same model finds the
plan by the hash of the traced model, and torch finds its compiled code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as functorch_config

from ...plan.plan import BudgetError
from ...run.measured_choice import Choice, MeasuredPlan
from ..errors import ReplayError, TraceError
from ..model.modes import is_batched, other_layout, transformed, warn
from ..model.signature import Arguments, storage_sizes, tensors
from ..step import Call, Step
from ..trace.fake import quiet
from ..trace.op_seconds import while_training

log = logging.getLogger(__name__)

# Prefixes of logger methods called in forward passes: libraries add others, e.g. `warning_once`.
_LOGS = ("debug", "info", "warn", "error", "exception", "critical", "log")
# Attributes that tell Dynamo which sizes of a tensor vary.
_MARK = re.compile(r"_dynamo_\w+_indices|_has_dynamo_dim_marking")
_HOOKS = (
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
    ("torch._functorch.config", "activation_memory_budget_solver"),
    ("torch._functorch.config", "force_non_lazy_backward_lowering"),
    ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
)


class Ready(Exception):  # noqa: N818 - not an error: the step is compiled
    """Raised in place of the first run of a compiled step."""


class Setting(NamedTuple):
    """A setting of torch's memory budget: a share of what torch saves by default, and a solver."""

    share: float
    solver: str

    def __str__(self) -> str:
        return f"activation_memory_budget={self.share:g}, solver {self.solver}"


@dataclass(frozen=True, repr=False)
class CompiledPlan(MeasuredPlan):
    """A plan by measured steps: which of the values that torch saves by default are recomputed.

    setting : of torch's memory budget; None if torch's own partition fits
    """

    setting: Setting | None = None

    def __repr__(self) -> str:
        text = super().__repr__()
        if not self.baseline_seconds:
            text = text.rpartition("\n")[0]  # no step was timed
        return f"{text}\n{self.setting}" if self.setting else f"{text}\ntorch's own partition"


@dataclass(frozen=True)
class Settings:
    """Settings for planning a compiled step.

    budget : the most bytes, or a share of the plain compiled step's peak
    timed : whether steps are timed. If not, the one that saves most is taken: it recomputes least.
    recompute : whether anything may be recomputed
    resident_bytes : bytes outside of the step: the optimizer's state
    earlier_bytes : bytes of gradients that exist when a step begins
    known : settings that kept the budget on other inputs: the first that does is taken, untimed
    key : everything else that a plan depends on, as text; None: not stored for later processes
    """

    budget: float | str
    timed: bool
    recompute: bool
    resident_bytes: int = 0
    earlier_bytes: int = 0
    known: tuple[Setting, ...] = ()
    key: str | None = None


class CompiledStep(Step):
    """A model under torch.compile, whose recomputed values are chosen by measurement.

    model : the plain model
    arguments : a real input; steps are run on it. Parameters, buffers and attributes are left
        unchanged.
    settings : how to plan

    Raises TraceError if torch.compile breaks the model into several graphs, or nothing requires a
    gradient.
    Raises BudgetError if none of torch's partitions keeps the budget.
    """

    backend = "compile"
    hidden_from_hooks = "see what its compiled code keeps, in place of what its ops would"
    # Only the allocator sees the buffers of Inductor's kernels.
    by_allocator = True
    # Inductor's kernels sum in a different order.
    rounds_alike = False

    def __init__(self, model: torch.nn.Module, arguments: Arguments, settings: Settings) -> None:
        for module, name in _HOOKS:
            _check_hook(module, name)
        self.settings, self.resident_bytes = settings, settings.resident_bytes
        self.counts_gradients = bool(settings.earlier_bytes)
        self.compiled_plan: CompiledPlan | None = None
        self.dry, self.warned = True, False
        known = [*model.parameters(), *model.buffers(), *tensors(arguments)]
        self.known_tensor_bytes = storage_bytes(known)
        # From the plain class: the planned model's own forward calls this step.
        kind = type(model)
        plain_forward = kind.forward

        # Not the module itself, whose call runs hooks: those already run around the planned model.
        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return plain_forward(module, *args, **kwargs)

        # Dynamo keys compiled code by code object, at most eight versions each (`recompile_limit`),
        # and the steps of several plans would share one.
        forward.__code__ = forward.__code__.replace()
        self.kind = kind
        self.compiled = torch.compile(forward, backend=self._backend, fullgraph=True, dynamic=False)
        # Compiled now, so that a model that cannot be planned, or does not fit, raises here.
        try:
            with quiet(), until_ready():
                self.run(model, *arguments)
            self.plan  # noqa: B018 - raises where there is none
        finally:
            self.dry = False

    @property
    def plan(self) -> CompiledPlan:
        """The latest plan; torch.compile recompiles if one of its guards fails."""
        if self.compiled_plan is None:
            raise TraceError(
                "torch.compile found nothing to differentiate in the model, so there is no "
                "backward pass to plan. Pass a model in training, with parameters that require "
                "gradients."
            )
        return self.compiled_plan

    @plan.setter
    def plan(self, compiled: CompiledPlan) -> None:
        self.compiled_plan = compiled

    @property
    def setting(self) -> tuple[float, str] | None:
        return self.plan.setting

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the forward pass of the model this was made for."""
        twin: torch.nn.Module = object.__new__(self.kind)
        # It shares `__dict__`: attributes that the forward pass sets are set on the model.
        object.__setattr__(twin, "__dict__", model.__dict__)
        with of_fixed_sizes((args, kwargs)):
            returned = self.compiled(twin, *args, **kwargs)
        inputs = {id(tensor) for tensor in tensors((args, kwargs))}
        for out in tensors(returned):
            if out.grad_fn is not None and id(out) not in inputs:
                out.register_hook(partial(self._arrived, out.stride()))
        return returned

    def _arrived(self, planned: tuple[int, ...], gradient: torch.Tensor | None) -> None:
        """Refuse what a compiled backward graph cannot do; warn if it may round differently."""
        if gradient is None:
            return  # an output that the loss does not use
        if torch.is_grad_enabled() or is_batched(gradient) or transformed():
            raise ReplayError(
                "gradients of gradients or several at a time (create_graph=True, vmap, "
                "forward-mode AD) are requested of a model planned with backend='compile', whose "
                "compiled backward pass computes one gradient. Plan with backend='graph' or "
                "'modules'."
            )
        if not self.warned and (text := other_layout(gradient, planned)):
            self.warned = True
            warn(text)

    def _backend(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        # The backward pass is traced outside of autocast, where users call it.
        clock = nullcontext() if self.dry else while_training()
        with functorch_config.patch(backward_pass_autocast="off"), clock:
            run = self._compiled(module, list(inputs))

        def ready(*args: Any) -> Any:
            if self.dry:
                raise Ready
            return run(*args)

        return ready

    def _compiled(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Plan a traced model, or read its stored plan, and compile it."""
        # Imported here: they need hooks of torch 2.13, which `_check_hook` looks for.
        search: Any = importlib.import_module(".search", __package__)
        partitioner: Any = importlib.import_module(".partitioner", __package__)
        settings = self.settings
        # Parameters and buffers that the graph does not read take memory as well.
        unused = self.known_tensor_bytes - storage_bytes(tensors(inputs))
        resident = max(0, unused) + settings.resident_bytes + settings.earlier_bytes
        path = None if settings.key is None else _path(module, inputs, settings, resident)
        kept = _read(path)
        if kept is None:
            wanted = replace(settings, resident_bytes=resident)
            search_result = search.Search(module, inputs, wanted)
            if search_result.plain is None:
                return partitioner.compile_step(module, inputs, None, separately=False)
            kept = search_result.best()
            _write(path, kept)
        self.compiled_plan = kept
        cut = kept.setting and partitioner.BudgetPartitioner(kept.setting)
        return partitioner.compile_step(module, inputs, cut, separately=False)


@contextmanager
def of_fixed_sizes(arguments: Any) -> Iterator[None]:
    """Make all input sizes static inside: a step is compiled for the sizes it is measured at.

    Users mark dynamic sizes (`mark_dynamic`), and torch marks those of tensors that a compiled
    function returned or read; `dynamic=False` does not turn that off.
    """
    taken: list[tuple[dict[str, Any], str, Any]] = []
    for tensor in tensors(arguments):
        for marked in (tensor, tensor._base):
            marks = getattr(marked, "__dict__", {})
            names = [name for name in marks if _MARK.fullmatch(name)]
            taken += [(marks, name, marks.pop(name)) for name in names]
    try:
        yield
    finally:
        for marks, name, sizes in taken:
            marks[name] = sizes


@contextmanager
def until_ready() -> Iterator[None]:
    """Compile a model inside, until Ready is raised; other errors become TraceError."""
    # Logging in a forward pass, as libraries do, must not break the graph.
    logs = {
        var
        for var in vars(logging.Logger).values()
        if callable(var) and getattr(var, "__name__", "").startswith(_LOGS)
    }
    left_out = torch._dynamo.config.ignore_logging_functions | logs
    try:
        with torch.enable_grad(), torch._dynamo.config.patch(ignore_logging_functions=left_out):
            yield
    except Ready:
        pass
    except Exception as error:
        cause = _wrapped_error(error)
        if cause is not None:
            raise cause from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = "; ".join(lines[:3]).rstrip(".")
        raise TraceError(
            f"torch.compile cannot take the model as one graph: {reason}. Change that code, or "
            "plan with backend='graph' or 'modules'."
        ) from error


def storage_bytes(held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, counting shared ones once."""
    return sum(storage_sizes(held).values())


def _check_hook(module: str, name: str) -> None:
    try:
        with warnings.catch_warnings():
            # torch's own modules import names that torch has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TraceError(
            f"torch {torch.__version__} has no {module}.{name}, which backend='compile' needs; it "
            "was written for torch 2.13. Plan with backend='graph'."
        ) from error


def _wrapped_error(error: BaseException) -> BaseException | None:
    """Return the user-facing error that torch.compile has wrapped into this one, if any."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BudgetError | TraceError | torch.OutOfMemoryError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None


def _path(
    module: fx.GraphModule, inputs: list[Any], settings: Settings, resident_bytes: int
) -> Path:
    """Return the file of a traced model's plan, in Inductor's cache folder."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    partitioner: Any = importlib.import_module(".partitioner", __package__)
    cache_dir = importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir
    text = hashlib.sha256()
    # Bodies of checkpoints and similar ops are separate graphs.
    graphs = [
        graph_module.graph
        for graph_module in module.modules()
        if isinstance(graph_module, fx.GraphModule)
    ]
    for node in (node for graph in graphs for node in graph.nodes):
        what = f"{node.op} {node.name} {_named(node.target)} {node.args} {node.kwargs}\n"
        text.update(what.encode())
    for value in (*inputs, *module.parameters(), *module.buffers()):
        form = value
        if isinstance(value, torch.Tensor):
            layout = value.shape, value.stride(), value.dtype, value.device
            form = (*layout, value.requires_grad)
        text.update(f"{form}\n".encode())
    for value in (
        *(inductor.get_hash(), functorch_config.get_hash(), torch.__version__),
        *(partitioner.version(), partitioner.SOLVERS),
        *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        *(_cards(inputs), resident_bytes, settings.budget, settings.key),
    ):
        text.update(f"{value!r}\n".encode())
    return Path(cache_dir()) / "sn_memory" / f"{text.hexdigest()}.json"


def _cards(inputs: list[Any]) -> tuple[str, ...]:
    """Return the names of the GPUs that hold the tensors; times and scratch depend on them."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    return tuple(
        sorted(torch.cuda.get_device_name(device) for device in devices if device.type == "cuda")
    )


def _named(target: Any) -> str:
    """Return the target of a node as text, without the address that `repr` has for functions."""
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _read(path: Path | None) -> CompiledPlan | None:
    """Return the stored plan; None if there is none, or it cannot be read."""
    if path is None or not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        choices = tuple(Choice(**choice) for choice in data.pop("choices"))
        setting = data.pop("setting")
        return CompiledPlan(choices, setting=setting and Setting(*setting), **data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("the plan stored in %s cannot be read (%s); it is computed again", path, error)
        return None


def _write(path: Path | None, plan: CompiledPlan) -> None:
    if path is None:
        return
    # Written to another file and renamed, as other processes may be reading it.
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(plan)))
        part.replace(path)
    except OSError as error:
        log.info("the plan cannot be stored: %s", error)
        with suppress(OSError):
            part.unlink()
