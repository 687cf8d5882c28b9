"""The command `estimate`: whether a model fits, on this machine or on a named device."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sn_memory import PlanError
from sn_memory.base.progress import progress_output
from sn_memory.base.sizes import parse_bytes, show_bytes
from sn_memory.cost.devices import DEVICES, is_here

from ..command import Answer, add_command, picture_file, positive
from .fit_picture import save_fits
from .naming import MODEL_HELP, GraphBinding, TrainingSetup, read_model

_BY_NAME = "sn_memory.torch.by_name"
_OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "adafactor")
_DTYPES = ("fp32", "fp16", "bf16")
_CATEGORIES = (
    "parameters", "buffers", "inputs", "gradients", "optimizer", "activations", "peak"
)  # fmt: skip


def add_estimate(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(
        commands,
        "estimate",
        _estimate,
        help="memory of a model's training step, and whether it fits",
        epilog="exit code 1: it does not fit into --budget, or on --device",
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "--budget", help='bytes, or "6GiB": does a step fit, and what is the largest batch?'
    )
    parser.add_argument(
        "--device",
        help=f"an absent device ({', '.join(DEVICES)}): predict the largest batch that fits, for "
        "each training method; not measured",
    )
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, help="count the state of torch's class")
    parser.add_argument("--batch", type=_span, help="such as 8; with --device 1..512 (default)")
    parser.add_argument(
        "--sequence", type=_powers, help="such as 1024, or 128..8192: each power of two between"
    )
    parser.add_argument(
        "--cards", type=_powers, default=[1], help="such as 8, or 1..8: that many, under FSDP2"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="type of parameters; default: their own")
    parser.add_argument(
        "--amp", action="store_true", help="autocast to bf16 (with --dtype fp16, fp16)"
    )
    parser.add_argument(
        "--state",
        choices=("host",),
        help="add rows with optimizer state, and with parameters too, on the host of --device",
    )
    parser.add_argument(
        "--host-speed",
        type=positive,
        default=100.0,
        metavar="GB/S",
        help="memory bandwidth of that host, for updates on it (default: 100, an assumption)",
    )
    parser.add_argument(
        "--time-limit", type=float, default=5.0, help="seconds per plan (default 5)"
    )
    parser.add_argument("--picture", type=picture_file, help="PNG of the table to write")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _estimate(options: argparse.Namespace) -> Answer:
    named = read_model(options.model)
    if options.sequence and "sequence" not in named.sizes:
        raise PlanError(f"got --sequence, but {named.named} has no parameter `sequence`. Add one.")
    if options.device is not None and not is_here(options.device):
        return _on_device(named, options)
    if options.state is not None:
        raise PlanError(
            "got --state without --device; expected the name of a device of the table, for which "
            "this command predicts. On this machine use `sn_memory.torch.plan(..., state='host')`."
        )
    _refuse(options, ("picture",), "without --device, whose table is the picture. Pass --device.")
    _refuse(options, ("cards", "amp"), "without --device, for which alone it is computed.")
    budget = None if options.budget is None else parse_bytes(options.budget)
    length = options.sequence[0] if options.sequence else None
    setup = _setup(named, options, options.batch[0] if options.batch else 1, length)
    optimizer = _optimizer(options, setup)
    with progress_output(not options.quiet):
        estimated = setup.rim.estimate(setup.model, setup.sample, optimizer=optimizer)
    data = _bytes(estimated) | {"peak_op": estimated.peak_op, "batch": estimated.batch}
    if budget is None:
        return Answer(str(estimated), data)
    fits = estimated.peak_bytes <= budget
    data |= {"budget_bytes": budget, "fits": fits}
    of = f"{show_bytes(estimated.peak_bytes)} of {show_bytes(budget)}"
    verdict = f"yes: a step holds {of}"
    if not fits:
        verdict = (
            f"no: a step would hold {of}. A plan needs less: run `sn memory export`, then `sn "
            "memory plan`, to see how much"
        )
    return Answer(f"{estimated}\n{verdict}", data, yes=fits)


def _bytes(estimated: Any) -> dict[str, Any]:
    """Return the bytes of an estimate by category."""
    return {f"{name}_bytes": int(getattr(estimated, f"{name}_bytes")) for name in _CATEGORIES}


def _on_device(named: GraphBinding, options: argparse.Namespace) -> Answer:
    if options.budget is not None:
        raise PlanError(
            "got --budget with --device, whose memory is the budget; leave one of them out."
        )
    batches = options.batch or (1, 512)
    first = named.at(batch=batches[0], sequence=(options.sequence or [None])[0])
    if options.state and first.rim.__name__ != "sn_memory.torch":
        raise PlanError(
            "got --state for a Keras model, whose variables keep their memory as long "
            "as they exist. Leave --state out."
        )
    if options.state and options.optimizer is None and first.optimizer is None:
        raise PlanError(
            "got --state without --optimizer; expected the optimizer whose state is "
            "kept on the host. Pass --optimizer."
        )
    if first.rim.__name__ != "sn_memory.torch":
        _check_flags_of_keras(named, options)
        estimated = first.rim.estimate(
            first.model,
            first.sample,
            optimizer=_optimizer(options, first),
            device=options.device,
        )
        data = _bytes(estimated) | {
            "device": estimated.device,
            "room_bytes": estimated.room_bytes,
            "seconds": estimated.seconds,
        }
        text = str(estimated)
        if "batch" in named.sizes:
            data["batch"] = batches[0]
            text += f"\nThe batch is {batches[0]}; --batch asks for another."
        return Answer(text, data | {"notes": list(estimated.notes)}, yes=estimated.fits())
    rim, dtypes = import_module("sn_memory.torch.fit"), import_module(_BY_NAME).DTYPES
    cast = dtypes["fp16" if options.dtype == "fp16" else "bf16"] if options.amp else None

    def make(batch: int, length: int | None) -> tuple[Any, Any]:
        setup = _setup(named, options, batch, length)
        return setup.model, setup.sample

    with progress_output(not options.quiet):
        fits = [
            rim.fit(
                make,
                options.device,
                optimizer=_optimizer(options, first),
                batches=batches,
                length=length,
                cards=options.cards,
                amp=cast,
                time_limit_s=options.time_limit,
                state=options.state is not None,
                host_bytes_per_s=1e9 * options.host_speed,
            )
            for length in options.sequence or [None]
        ]
    if options.picture is not None:
        save_fits(fits, options.picture)
    text = "\n\n".join(map(str, fits))
    return Answer(
        text,
        {"fits": [fit.as_data() for fit in fits]},
        yes=any(way.batch for fit in fits for way in fit.ways),
    )


def _setup(
    named: GraphBinding, options: argparse.Namespace, batch: int, length: int | None
) -> TrainingSetup:
    """Return the model and a sample of this batch, resized if its function takes no batch."""
    setup = named.at(batch=batch, sequence=length)
    if setup.rim.__name__ != "sn_memory.torch":
        _check_flags_of_keras(named, options)
        return setup
    if options.dtype is not None:
        setup.model.to(import_module(_BY_NAME).DTYPES[options.dtype])
    if "batch" not in named.sizes and (options.device or options.batch):
        resized = import_module("sn_memory.torch.estimate").resized
        setup = setup._replace(sample=resized(setup.sample, batch))
    return setup


def _check_flags_of_keras(named: GraphBinding, options: argparse.Namespace) -> None:
    """Raise PlanError for flags that a Keras model would ignore."""
    if options.batch and "batch" not in named.sizes:
        raise PlanError(f"got --batch, but {named.named} has no parameter `batch`. Add one.")
    flags = ("cards", "dtype", "amp", "picture")
    _refuse(options, flags, "for a Keras model, where nothing computes it.")
    low, high = options.batch or (1, 1)
    if low < high or len(options.sequence or ()) > 1:
        raise PlanError(
            "got several sizes for a Keras model; expected one. The largest batch is that of "
            "`sn_memory.tensorflow.estimate(model, sample).largest_batch(budget)`."
        )


def _refuse(options: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    """Raise PlanError if one of the flags is set."""
    for flag in flags:
        if getattr(options, flag) not in (None, False, [1]):
            raise PlanError(f"got --{flag} {why}")


def _optimizer(options: argparse.Namespace, setup: TrainingSetup) -> Any:
    if options.optimizer is None:
        return setup.optimizer
    if setup.rim.__name__ != "sn_memory.torch":
        return options.optimizer
    return import_module(_BY_NAME).optimizer_of(options.optimizer)


def _span(text: str) -> tuple[int, int]:
    """Parse one number or two."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None or not int(match[1]) or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number, or two as 1..8")
    return int(match[1]), int(match[2] or match[1])


def _powers(text: str) -> Sequence[int]:
    """Parse a number, or a range in which the first number is doubled up to the second."""
    low, high = _span(text)
    powers = [low]
    while powers[-1] * 2 <= high:
        powers.append(powers[-1] * 2)
    return powers if powers[-1] == high else [*powers, high]
