"""Errors and warnings of planning TensorFlow models."""

from __future__ import annotations

from typing import TypeVar

import keras
import tensorflow as tf

from ..base.errors import warn_user

E = TypeVar("E", bound=Exception)


class TraceError(RuntimeError):
    """The model or step cannot be traced as a graph, or cannot be run as traced.

    The message names the op and says what to do. The model or step is left as it was.
    """


def warn(text: str) -> None:
    """Warn at the calling line of user code, outside of this package, Keras and TensorFlow."""
    warn_user(text, *(library.__file__.removesuffix("__init__.py") for library in (keras, tf)))


def first_line(error: Exception) -> str:
    """Return the line of an error that says what happened, without what Keras adds to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        del lines[0]
    line = lines[0].replace("\x1b[1m", "").replace("\x1b[0m", "") if lines else ""
    return line if isinstance(error, TraceError) else f"{type(error).__name__}: {line}"


def as_it_is(error: E) -> E:
    """Return an error that passes through Keras' calls unchanged, with its class and its fields.

    Keras replaces errors by new ones that list the arguments of the call; an error whose
    constructor takes more than a message becomes a RuntimeError.
    """
    # Keras sets this on errors that it has already replaced.
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error
