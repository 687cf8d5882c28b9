"""Names of models on the command line: a function, or a configuration.

    script.py:function          the script is run as a module is imported
    package.module:function     imported, from where Python finds modules and from this folder
    config.json                 of Hugging Face transformers; the model is made without values

A function returns `(model, sample)`, or `(model, sample, optimizer)`, as sn_memory.torch.estimate
and sn_memory.tensorflow.estimate take them. It may take `batch` and `sequence`, by these names;
otherwise its sample is resized to other batches.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sn_memory import PlanError

MODEL_HELP = (
    "script.py:function or package.module:function, which returns (model, sample) or (model, "
    "sample, optimizer) and may take batch and sequence; or the config.json of a Hugging Face "
    "model. For example examples/torch_memory.py:step"
)
_EXPECTED = "expected script.py:function, package.module:function or a config.json."
# Library of a model's class, and the rim that reads it.
_RIMS = {
    "torch": "sn_memory.torch",
    "keras": "sn_memory.tensorflow",
    "tensorflow": "sn_memory.tensorflow",
}


class TrainingSetup(NamedTuple):
    """A model, its input, its optimizer or None, and the rim of its library."""

    model: Any
    sample: Any
    optimizer: Any
    rim: ModuleType


class GraphBinding:
    """A model by its name.

    Parameters
    ----------
    named
        The name as given.
    make
        Builds it, at a batch and a sequence length where it takes them.
    sizes
        Which of `batch` and `sequence` it takes.
    """

    def __init__(self, named: str, make: Callable[..., Any], sizes: frozenset[str]) -> None:
        self.named, self.sizes = named, sizes
        self._make = make

    def at(self, **sizes: int | None) -> TrainingSetup:
        """Return the model and its sample; PlanError says what was expected."""
        wanted = {
            key: size for key, size in sizes.items() if size is not None and key in self.sizes
        }
        with _of_user(self.named):
            returned = self._make(**wanted)
        if not isinstance(returned, tuple) or len(returned) not in (2, 3):
            raise PlanError(
                f"{self.named} returned a {type(returned).__name__}, expected a tuple (model, "
                "sample) or (model, sample, optimizer)."
            )
        model, sample, *optimizer = returned
        for base in type(model).__mro__:
            if rim := _RIMS.get(base.__module__.partition(".")[0]):
                return TrainingSetup(
                    model, sample, optimizer[0] if optimizer else None, import_module(rim)
                )
        raise PlanError(
            f"{self.named} returned a {type(model).__name__} as model, expected a torch module or "
            "a Keras model."
        )


def read_model(named: str) -> GraphBinding:
    """Resolve a name; PlanError says what is wrong with it."""
    if named.endswith(".json"):
        return _of_configuration(named)
    path, _, name = named.rpartition(":")
    if not path or not name.isidentifier():
        raise PlanError(f"got model {named!r}, {_EXPECTED}")
    known = _names_of_script(path) if path.endswith(".py") or Path(path).is_file() else None
    known = _names_of_module(path) if known is None else known
    make = known.get(name)
    if not callable(make):
        functions = sorted(key for key, value in known.items() if callable(value) and key[0] != "_")
        raise PlanError(
            f"{path} has no function {name}; it has {', '.join(functions) or 'none'}. The function "
            "returns (model, sample)."
        )
    taken = frozenset(inspect.signature(make).parameters) & {"batch", "sequence"}
    return GraphBinding(f"{name} of {path}", make, frozenset(taken))


@contextmanager
def _of_user(named: str) -> Iterator[None]:
    """Report that user code failed; its own exit code would be taken as our answer.

    A missing library is reported as everywhere else.
    """
    try:
        yield
    except (PlanError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise PlanError(f"{named} failed, as shown above, and gave no model.") from error


def _names_of_script(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise PlanError(f"there is no file {path}; {_EXPECTED}")
    # As when it is started directly, the script may import its neighbours.
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with _of_user(path):
            return runpy.run_path(path, run_name="sn_model")
    finally:
        sys.path.pop(0)


def _names_of_module(path: str) -> dict[str, Any]:
    if not all(part.isidentifier() for part in path.split(".")):
        raise PlanError(f"there is no file {path}; {_EXPECTED}")
    sys.path.insert(0, "")
    try:
        spec = util.find_spec(path)
        if spec is None:
            raise PlanError(f"there is no file and no module {path}; {_EXPECTED}")
        with _of_user(path):
            return vars(import_module(path))
    except ModuleNotFoundError as error:
        if error.name and path.startswith(error.name):
            raise PlanError(f"there is no file and no module {path}; {_EXPECTED}") from error
        raise
    finally:
        sys.path.remove("")


def _of_configuration(path: str) -> GraphBinding:
    make = import_module("sn_memory.torch.by_name").language_model(path)
    return GraphBinding(path, make, frozenset({"batch", "sequence"}))
