"""The class of a planned model: a subclass of the model's class with another forward.

This forward has the signature, annotations and docstring of the original, as trainers and text
generation inspect these to choose the arguments they pass. Whatever cannot be planned with any
sample is also rejected here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, update_wrapper, wraps
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C._dynamo import eval_frame

from ..errors import SampleError, TraceError
from .modes import warn
from .sharded import register_fsdp_alias
from .signature import tensors

RECORD = "sn_memory"
_PLAIN = "_sn_memory_plain_class"
# Methods with which trainers enable checkpointing in models of transformers and diffusers.
_CHECKPOINTING = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
)
# Models of the same class have the same planned class, as `torch.func.stack_module_state` and
# comparisons of `type` expect. An entry lives as long as one of its models.
_PLANNED: WeakValueDictionary[tuple[Any, ...], type[torch.nn.Module]] = WeakValueDictionary()


def planned_class(model: torch.nn.Module, mixin: type) -> type[torch.nn.Module]:
    """Return a subclass of the model's class, with its name, whose forward is mixin.run_planned.

    An instance without a record is plain: e.g. a copy whose forward was replaced by a function that
    calls this one.
    """
    kind = type(model)
    present = tuple(name for name in _CHECKPOINTING if hasattr(model, name))
    # A forward assigned to the class later has another signature.
    key = (kind, kind.forward, mixin, present)
    planned = _PLANNED.get(key)
    if planned is not None:
        return planned

    def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if RECORD not in model.__dict__:
            return kind.forward(model, *args, **kwargs)
        # Older releases have no `is_exporting`; there the next check raises.
        exporting = getattr(torch.compiler, "is_exporting", bool)()
        if exporting or (torch.jit.is_tracing() and torch.is_grad_enabled()):
            raise exported(kind)
        if _is_compiled(model.__dict__[RECORD]):
            raise TraceError(
                f"torch.compile was given a planned {kind.__name__}, or a function that calls one, "
                "and would compile its forward without the plan. Plan with backend='compile', "
                "which compiles the model as planned, and call that; or leave it out: "
                "torch.compiler.disable(model)."
            )
        # After the check for Dynamo, in which arguments are not Python objects.
        if _is_symbolic(args, kwargs):
            raise exported(kind)
        return mixin.run_planned(model, kind.forward, args, kwargs)  # type: ignore[attr-defined]

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "forward": _disguised(run, kind.forward),
        _PLAIN: kind,
    }
    members |= {name: _ignored(kind, name) for name in present}
    planned = type(kind.__name__, (mixin, kind), members)
    _PLANNED[key] = planned
    return planned


def exported(kind: type[torch.nn.Module]) -> TraceError:
    """Return the error for exporters given a planned model."""
    return TraceError(
        f"torch.export, torch.jit, torch.fx or an exporter to ONNX was given a planned "
        f"{kind.__name__}, whose plan is for training on this machine. Export the model "
        "without a plan: the one that plan was given, or copy.deepcopy(model)."
    )


def uninitialized(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """Return an instance without attributes."""
    model: torch.nn.Module = object.__new__(kind)
    return model


def plain_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that a planned class derives from; other classes as they are."""
    cls: type[torch.nn.Module] = getattr(kind, _PLAIN, kind)
    return cls


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a planned model as it was before planning; other models as they are."""
    if RECORD not in model.__dict__:
        return model
    plain = uninitialized(plain_class(type(model)))
    for key, value in model.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is model:
            # A forward assigned to the instance, as accelerate does for autocast. Bound to the
            # planned model it would run the plan.
            value = MethodType(value.__func__, plain)
        if key != RECORD:
            plain.__dict__[key] = value
    register_fsdp_alias(plain, model)
    return plain


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a planned model as it was before planning, for use inside its forward.

    A forward assigned to the instance is left out: it already runs around the planned one, and
    contexts that it enters may not be reentrant. Its autocast is already on.
    """
    inner = plain_model(model)
    inner.__dict__.pop("forward", None)
    return inner


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a model is compiled, by torch.compile(model) or by model.compile()."""
    # model.compile() stores the compiled call under this name.
    stand_in = model.__dict__.get("_compiled_call_impl")
    return type(model).__name__ == "OptimizedModule" or stand_in is not None


def as_written(model: torch.nn.Module, *, keep: bool) -> tuple[torch.nn.Module, bool]:
    """Return the model as it was before torch.compile, and whether it was compiled.

    The model passed in stays compiled. With `keep=False` it is returned as it is.
    """
    if not keep or not is_compiled(model):
        return model, False
    if type(model).__name__ == "OptimizedModule":
        model = model.__dict__["_modules"]["_orig_mod"]
    if model.__dict__.get("_compiled_call_impl") is not None:
        plain = uninitialized(type(model))
        plain.__dict__.update(model.__dict__)
        plain.__dict__["_compiled_call_impl"] = None
        register_fsdp_alias(plain, model)
        model = plain
    return model, True


def _ignored(kind: Any, name: str) -> Callable[..., Any]:
    """Return a method that enables checkpointing in plain instances, and warns in planned ones."""
    own = getattr(kind, name, None)

    def enable(self: Any, *args: Any, **kwargs: Any) -> Any:
        if RECORD not in self.__dict__:
            # PEFT's models get the method from an inner module.
            original = kind.__getattr__(self, name) if own is None else partial(own, self)
            return original(*args, **kwargs)
        warn(
            f"gradient checkpointing was requested of a planned {type(self).__name__} and ignored: "
            "its plan decides what is run again, within its budget. To use it nevertheless, enable "
            "it before planning."
        )
        return None

    return enable if own is None else wraps(own)(enable)


def _is_symbolic(args: Any, kwargs: Any) -> bool:
    """Whether torch.fx calls a forward with proxies, e.g. in `prepare_qat_fx`."""
    # The outermost module gets one proxy for all arguments.
    passed = (args,) if isinstance(args, torch.fx.Proxy) else (*args, *kwargs.values())
    return any(isinstance(value, torch.fx.Proxy) for value in passed)


def is_in_compiled() -> bool:
    """Whether Dynamo traces this code, or runs it because it could not be traced."""
    # After an error in tracing, e.g. one of ours, the same code runs under the callback.
    return torch.compiler.is_dynamo_compiling() or callable(eval_frame.get_eval_frame_callback())


def _is_compiled(record: Any) -> bool:
    """Whether torch.compile traces this code, or runs it because it could not be traced."""
    if is_in_compiled():
        return True
    if not torch.compiler.is_compiling():
        return False
    # All threads share the flag: another may be compiling a step of this model, under the lock.
    with record.lock:
        return torch.compiler.is_compiling()


def _disguised(run: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls run(self, args, kwargs) and looks like the original."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    # Annotations may be strings, which `typing` looks up in the function's globals.
    theirs = getattr(inspect.unwrap(original), "__globals__", {})
    function = FunctionType(forward.__code__, theirs, forward.__name__, None, forward.__closure__)
    update_wrapper(function, original)
    # Code that unwraps functions, as accelerate does, would bypass the plan.
    del function.__wrapped__  # type: ignore[attr-defined]
    # A function written in C may have no signature.
    with suppress(TypeError, ValueError):
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function


def check_model(model: Any) -> None:
    """Raise TypeError for anything but a module, TraceError for a module that cannot be trained."""
    if isinstance(model, type):
        raise TypeError(
            f"got the class {model.__name__} as model, expected an instance of it. Make one: "
            f"{model.__name__}(...)."
        )
    if not isinstance(model, torch.nn.Module):
        name = getattr(model, "__name__", "")
        what = f"{type(model).__name__} {name}".strip()
        raise TypeError(
            f"got a {what} as model, expected an instance of torch.nn.Module. A function becomes "
            "one as the forward of a class that derives from it."
        )
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if torch.nn.parameter.is_lazy(tensor)
    ]
    if lazy:
        raise TraceError(
            f"{lazy[0]!r} and {len(lazy) - 1} other tensors of the {type(model).__name__} have no "
            "shapes yet, as its lazy modules have not run. Call model(sample) once before."
        )
    if next(model.parameters(), None) is None:
        raise TraceError(
            f"the {type(model).__name__} has no parameters, so that no training step can be "
            "planned. Pass the module that holds those that are trained."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError for anything but an optimizer or a class or function that returns one."""
    if optimizer is None or callable(optimizer) or hasattr(optimizer, "param_groups"):
        return
    known = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
    name = known.get(str(optimizer).lower(), "AdamW")
    raise TypeError(
        f"got optimizer {optimizer!r}, expected an optimizer or its class: torch.optim.{name}."
    )


def check_memory(model: torch.nn.Module, arguments: Any, why: str) -> None:
    """Raise TraceError for a model or sample on the meta device; `why` says what needs values."""
    if any(tensor.is_meta for tensor in (*tensors(arguments), *model.parameters())):
        raise TraceError(
            f"{why}, and the model or the sample is on the meta device. Pass them with memory, or "
            "plan with backend='graph', which then makes a plan to read."
        )


@contextmanager
def explained(arguments: Any) -> Iterator[None]:
    """Turn autograd's error about an inference tensor into one that names the argument."""
    try:
        yield
    except Exception as error:
        inference = [at for at, tensor in enumerate(tensors(arguments)) if tensor.is_inference()]
        if not inference or "inference" not in str(error).lower():
            raise
        raise SampleError(
            f"tensor {inference[0]} of the sample was made in torch.inference_mode, and autograd "
            "saves no such tensor for the backward pass. Make it outside, or pass its clone()."
        ) from error
