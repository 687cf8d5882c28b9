"""The commands that read a model: `estimate` (does it fit?) and `export` (its graph, as a file).

A model is code, so it is named as `script.py:function`: the script is run as a module is imported,
and the function, called without arguments, returns `(model, sample)`, or `(model, sample,
optimizer)`, as sn_memory.torch.estimate and sn_memory.tensorflow.estimate take them.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sn_memory import PlanError
from sn_memory.base.progress import speaking
from sn_memory.base.sizes import parse_bytes, show_bytes
from sn_memory.graph.liveness import peak

from ..command import Answer, add_command, output_file

_MODEL_HELP = (
    "script.py:function; the function takes nothing and returns (model, sample), or (model, "
    "sample, optimizer). For example examples/torch_memory.py:step"
)
# The library a model's class comes from, and what reads it.
_RIMS = {
    "torch": "sn_memory.torch",
    "keras": "sn_memory.tensorflow",
    "tensorflow": "sn_memory.tensorflow",
}


class Given(NamedTuple):
    """A model, its input, its optimizer or None, and what reads models of its library."""

    model: Any
    sample: Any
    optimizer: Any
    rim: ModuleType


def add_estimate(commands: Any) -> None:
    """Add the command to its group."""
    it = add_command(
        commands,
        "estimate",
        _estimate,
        help="what a training step of a model holds; does it fit?",
        epilog="exit code 1: it does not fit into --budget",
    )
    it.add_argument("model", help=_MODEL_HELP)
    it.add_argument("--budget", help='bytes, or "6GiB": does a step fit, and what batch does?')


def add_export(commands: Any) -> None:
    """Add the command to its group."""
    it = add_command(
        commands, "export", _export, help="write the graph of a model's training step from a script"
    )
    it.add_argument("model", help=_MODEL_HELP)
    it.add_argument("-o", "--output", type=output_file, required=True, help="the graph file")
    it.add_argument(
        "--times",
        choices=("measured", "computed"),
        default="measured",
        help="of ops: timed here (default), or computed from bytes and flops, which takes no time",
    )
    it.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _estimate(options: argparse.Namespace) -> Answer:
    budget = None if options.budget is None else parse_bytes(options.budget)
    given = read_model(options.model)
    found = given.rim.estimate(given.model, given.sample, optimizer=given.optimizer)
    names = (
        "parameters", "buffers", "inputs", "gradients", "optimizer", "activations", "peak"
    )  # fmt: skip
    data: dict[str, Any] = {f"{name}_bytes": int(getattr(found, f"{name}_bytes")) for name in names}
    data |= {"peak_op": found.peak_op, "batch": found.batch}
    if budget is None:
        return Answer(str(found), data)
    fits = found.peak_bytes <= budget
    data |= {"budget_bytes": budget, "fits": fits}
    of = f"{show_bytes(found.peak_bytes)} of {show_bytes(budget)}"
    said = f"yes: a step holds {of}"
    if not fits:
        said = (
            f"no: a step would hold {of}. A plan holds less: `sn memory export` and `plan` say "
            "how much less"
        )
    return Answer(f"{found}\n{said}", data, yes=fits)


def _export(options: argparse.Namespace) -> Answer:
    given = read_model(options.model)
    with speaking(not options.quiet):
        traced = given.rim.trace(
            given.model,
            given.sample,
            profile=options.times == "measured",
            optimizer=given.optimizer,
        )
    graph = traced.graph
    graph.to_json(options.output)
    highest = peak(graph).bytes
    data = {
        "output": options.output,
        "ops": len(graph.ops),
        "storages": len(graph.storages),
        "peak_bytes": highest,
    }
    return Answer(
        f"{options.output}: {len(graph.ops)} ops, {len(graph.storages)} storages, "
        f"peak {show_bytes(highest)}",
        data,
    )


def read_model(named: str) -> Given:
    """What a function of a script returns; PlanError says what it should have been."""
    path, _, name = named.rpartition(":")
    if not path or not name.isidentifier():
        raise PlanError(f"got model {named!r}, expected script.py:function.")
    if not Path(path).is_file():
        raise PlanError(f"there is no file {path}; expected script.py:function.")
    # As where the script is started by itself, it may import what lies beside it.
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        known = runpy.run_path(path, run_name="sn_model")
        make = known.get(name)
        if not callable(make):
            made = sorted(key for key, it in known.items() if callable(it) and key[0] != "_")
            raise PlanError(
                f"{path} has no function {name}; it has {', '.join(made) or 'none'}. The function "
                "returns (model, sample)."
            )
        found = make()
    finally:
        sys.path.pop(0)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise PlanError(
            f"{name} of {path} returned a {type(found).__name__}, expected a tuple (model, sample) "
            "or (model, sample, optimizer)."
        )
    model, sample, *optimizer = found
    for base in type(model).__mro__:
        if rim := _RIMS.get(base.__module__.partition(".")[0]):
            return Given(model, sample, optimizer[0] if optimizer else None, import_module(rim))
    raise PlanError(
        f"{name} of {path} returned a {type(model).__name__} as model, expected a torch module or "
        "a Keras model."
    )
