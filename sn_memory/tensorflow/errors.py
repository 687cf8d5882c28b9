"""What can go wrong between TensorFlow and the planner."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


class TraceError(RuntimeError):
    """The model or step cannot be traced as a graph, or not be carried out again as traced.

    The message says which op, and what to do. The model or step is left as it was.
    """


def first_line(error: Exception) -> str:
    """The line of an error that says something; Keras adds where, and all arguments."""
    lines = [it.strip() for it in str(error).splitlines() if it.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    said = lines[0].replace("\x1b[1m", "").replace("\x1b[0m", "") if lines else ""
    return said if isinstance(error, TraceError) else f"{type(error).__name__}: {said}"


def as_it_is(error: E) -> E:
    """Return an error that passes through Keras' calls as it is, with its class and its fields.

    Keras makes another of each, with the arguments of the call in it, and a RuntimeError of those
    that take more than a message.
    """
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error
