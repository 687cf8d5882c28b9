"""Planned steps compared with tf.recompute_grad and keras.RematScope, at equal memory.

    python -m benchmarks planner_tensorflow_rivals [--quick] [--json FILE] [--models NAME ...]
                                                   [--side PIXELS] [--batch N]
                                                   [--time-limit SECONDS]

Each rival runs a training step; what it asks the allocator for at its peak (`Allocations`) is the
budget of ours. Then plain, rival and planned steps take turns on one thread. Medians of seven steps
count: CPU seconds of the process (`_cpu_s`), which other work on the machine hardly changes, and
wall seconds. A row also says whether the rival left the variables as the plain step does (batch
norm's moving averages are updated once), within float32 rounding. A rival that does not run gives a
row with its error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from planner_tensorflow import measured, network, one_thread, renew, seconds_of, training_step
from rows_file import flags

import sn_memory.tensorflow
from sn_memory import BudgetError, check_plan, plan_graph
from sn_memory.tensorflow.planned import PlannedStep

MODES = ("full", "activations", "larger_than")
# Names of the operations after which a block ends, and which of them do.
ENDS = {
    "resnet50": (r"_out$", slice(None)),
    "vgg16": (r"_pool$", slice(None)),
    "densenet121": (r"(_concat|pool\d_pool)$", slice(None)),
    "transformer12": (r"^add(_\d+)?$", slice(1, None, 2)),
}


def per_block(model: keras.Model, name: str) -> Callable[..., Any]:
    """The same network as a chain of blocks, each under tf.recompute_grad."""
    start, blocks = model.input, []
    pattern, which = ENDS[name]
    ends = [operation for operation in model.operations if re.search(pattern, operation.name)][
        which
    ]
    for operation in [*ends, model.operations[-1]]:
        if operation.output is not start:
            blocks.append(keras.Model(start, operation.output))
            start = operation.output
    # The last one is rebuilt right after it has run, so it is left as it is.
    *before, last = blocks

    def call(x: Any, training: bool) -> Any:
        for block in before:
            x = tf.recompute_grad(lambda inputs, block=block: block(inputs, training=training))(x)
        return last(x, training=training)

    call.trainable_variables = model.trainable_variables  # type: ignore[attr-defined]
    return call


def rivals_of(name: str, side: int, batch: int, model: keras.Model) -> dict[str, Callable[[], Any]]:
    """Per rival, what makes its training step."""

    def scope(mode: str) -> Any:
        with keras.RematScope(mode=mode):
            twin, _ = network(name, side, batch)
        for mine, other in zip(twin.variables, model.variables, strict=True):
            mine.assign(other)
        return training_step(twin), twin

    rivals: dict[str, Callable[[], Any]] = {
        "tf.recompute_grad per block": lambda: (training_step(per_block(model, name)), model)
    }
    for mode in MODES:
        rivals[f"RematScope {mode}"] = lambda mode=mode: scope(mode)
    return rivals


def state_after(step: Any, model: keras.Model, x: Any) -> list[Any]:
    """Variables after one step; put back."""
    before = [variable.numpy() for variable in model.variables]
    step(x)
    after = [variable.numpy() for variable in model.variables]
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    return after


def rows_of(name: str, side: int, batch: int, limit: float) -> Iterator[dict[str, Any]]:
    """Rows of one network, one per rival."""
    model, x = network(name, side, batch)
    plain = training_step(model)
    traced = sn_memory.tensorflow.trace(plain, x)
    graph = traced.graph
    base = graph.base_bytes
    unplanned = measured(plain, x).peak_bytes
    for rival, make in rivals_of(name, side, batch, model).items():
        row: dict[str, Any] = {
            "model": name,
            "framework": "tensorflow",
            "kind": "rival",
            "rival": rival,
            "side": side,
            "batch": batch,
            "base_bytes": base,
            "unplanned_measured_bytes": base + unplanned,
        }
        try:
            step, owner = make()
            expected = state_after(plain, model, x)
            got = state_after(step, owner, x)
        except (AttributeError, TypeError, ValueError, tf.errors.OpError) as error:
            # Keras and autograph put frames before what happened, and arguments after it.
            message = re.sub(r"\x1b\[\d*m", "", str(error)).partition("Arguments received")[0]
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            row["error"] = f"{type(error).__name__}: {lines[-1]}"
            print(f"{name}, {rival}: {row['error']}", flush=True)
            yield row
            continue
        row["state_equal"] = all(
            np.allclose(one, other, rtol=1e-3, atol=1e-5)
            for one, other in zip(expected, got, strict=True)
        )
        asked = measured(step, x).peak_bytes
        row |= {"rival_measured_bytes": base + asked, "kept": True}
        try:
            plan = plan_graph(
                graph, base + asked, techniques=("keep", "recompute"), time_limit_s=limit
            )
        except BudgetError as error:
            row["kept"], plan = False, error.plan
        check_plan(graph, plan)
        planned = PlannedStep(plain, traced, plan)
        mine = measured(planned, x).peak_bytes
        taken = seconds_of([plain, step, planned], x)
        row |= {"predicted_peak_bytes": plan.peak_bytes, "measured_peak_bytes": base + mine}
        for whose, (cpu_s, wall_s) in zip(("unplanned", "rival", "measured"), taken, strict=True):
            row |= {f"{whose}_cpu_s": cpu_s, f"{whose}_s": wall_s}
        print(
            f"{name}, {rival}: state equal {row['state_equal']}, {(base + asked) / 2**20:.1f} MiB "
            f"of {(base + unplanned) / 2**20:.1f}, CPU {taken[0][0]:.2f} -> {taken[1][0]:.2f} s; "
            f"planned {(base + mine) / 2**20:.1f} MiB, {taken[2][0]:.2f} s (kept {row['kept']})",
            flush=True,
        )
        yield row


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="images of 32 pixels, one network")
    parser.add_argument("--models", nargs="+", choices=list(ENDS))
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds of auto per rival")
    args = parser.parse_args(argv)
    one_thread()
    side = 32 if args.quick else args.side
    wanted = args.models or (["vgg16"] if args.quick else list(ENDS))
    renew(args.json, wanted, lambda name: rows_of(name, side, args.batch, args.time_limit))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
