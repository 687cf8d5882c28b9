"""The sections of evidence.py: what is recorded of a tree, row by row.

A section has units, each of which runs in a process of its own, as what one network leaves behind
(memory, compiled code, cached shapes) must not reach another's figures. Most rows are those of
other benchmarks. Names of the packages are the public ones, and a setting that `plan` no longer
takes is left out, so that the same sections can be frozen before a redesign and after it.

Over 300 lines: one function for each section, and the table of them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from evidence_rules import (
    CUT,
    Rule,
    SectionRule,
    holds,
    median_not_above,
    modules,
    not_above,
    not_below,
    not_below_part,
    reported,
    same_height,
    same_plan,
)

Rows = Iterator[dict[str, Any]]
BUDGETS = ("80%", "60%", "40%")
PLANNERS = (
    "auto", "liveness", "superneurons", "superneurons_speed", "superneurons_memory", "sqrt_n",
)  # fmt: skip
SHIPPED = ("alexnet", "resnet50", "transformer12", "unet")
# Of searches, in seconds that stand for counted work (`deterministic`), so that the plans do not
# depend on the machine or on what else runs there.
GRAPH_LIMIT_S, TORCH_LIMIT_S = 4.0, 2.0
# A search that took no more than this part of its limit was not cut anywhere: an attempt gets a
# quarter of what is left.
UNCUT = 0.25
# What works in TensorFlow is equal but for rounding where its kernels add in any order.
ROUNDING = 1e-4
PACKAGES = ("sn_memory", "sn_compress", "sn_cli")
# Of the process that runs out of memory: SuperNeurons' nets at a quarter of the width.
DEPTH_LIMIT = 256 << 20
PAIRS, STEPS = 5, 4


@dataclass(frozen=True)
class Section:
    """One file of the evidence.

    Parameters
    ----------
    what
        What it shows, in a few words.
    units
        Names of what runs in a process of its own each: those taken by default, and all.
    rows
        The rows of a unit, each with a `key` of its own.
    rules, section_rules
        What must not get worse, of a row and of all rows.
    timed
        Whether it has seconds in it, so that the machine must have nothing else to do.
    limit_s
        After which a unit is stopped.
    package
        Whose sources decide what the rows are.
    """

    what: str
    units: Callable[[], tuple[Sequence[str], Sequence[str]]]
    rows: Callable[[str], Rows]
    rules: tuple[Rule, ...]
    section_rules: tuple[SectionRule, ...] = ()
    timed: bool = False
    limit_s: float = 1800.0
    package: str = "sn_memory"


def digest(data: Any) -> str:
    """Return a short digest of JSON data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def accepted(function: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a function takes in this tree."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in settings.items() if name in known}


# --- plans of graphs


def _graph_units() -> tuple[Sequence[str], Sequence[str]]:
    from planner import NETWORKS

    shipped = [f"{name}.json" for name in SHIPPED]
    others = [name for name in NETWORKS if name not in SHIPPED]
    large = ("transformer_2500_ops", "resnet1202")
    some = ["layered12", *shipped, *(name for name in others if name not in large)]
    return some, ["layered12", *shipped, *others]


def _graph(unit: str) -> Any:
    from graphs import layered
    from planner import NETWORKS

    from sn_memory import Graph

    if unit.endswith(".json"):
        return Graph.from_json(files("sn_cli").joinpath("graphs", unit).read_text("utf-8"))
    return (layered(12, seed=1) if unit == "layered12" else NETWORKS[unit]()).graph()


def plan_columns(plan: Any, limit_s: float, *, named: bool) -> dict[str, Any]:
    """Return what is compared of a plan.

    named : whether storages have names that do not depend on the tree; else the digest of the
        choices is of their techniques and bytes
    """
    chosen = sorted(
        [decision.storage if named else decision.bytes, decision.technique]
        for decision in plan.decisions
        if decision.technique != "keep"
    )
    return {
        "choices": digest(chosen),
        "chosen": len(chosen),
        "actions": digest([list(action) for action in plan.actions]),
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "seconds": plan.seconds,
        "rerun_s": plan.seconds - plan.baseline_seconds,
        "made_by": plan.planner,
        "solve_s": plan.solve_s,
        # A named planner has no limit.
        "ended": not plan.planner.startswith("auto") or plan.solve_s <= limit_s * UNCUT,
    }


def made_or_refused(make: Callable[[], Any], planner: str) -> tuple[Any, dict[str, Any]]:
    """Return what was planned, or None and what is compared of a refusal."""
    from sn_memory import BudgetError, PlanError

    try:
        return make(), {}
    except BudgetError as error:
        cut = planner == "auto" and "was cut" in str(error)
        return None, {"refused": True, "peak_bytes": error.peak_bytes, "ended": not cut}
    except PlanError as error:
        return None, {"absent": str(error)}


def plan_rows(unit: str) -> Rows:
    """Plans of one graph at each budget, by each planner."""
    from sn_memory import check_plan, plan_graph

    graph = _graph(unit)
    settings = accepted(plan_graph, {"deterministic": True, "time_limit_s": GRAPH_LIMIT_S})
    for planner in PLANNERS:
        for budget in BUDGETS:
            row: dict[str, Any] = {"key": f"{unit} at {budget} by {planner}", "ops": len(graph.ops)}
            make = partial(plan_graph, graph, budget, planner=planner, **settings)
            plan, refusal = made_or_refused(make, planner)
            if plan is None:
                yield row | refusal
                continue
            check_plan(graph, plan)
            yield row | plan_columns(plan, GRAPH_LIMIT_S, named=True)


# --- plans of torch models


def _torch_units() -> tuple[Sequence[str], Sequence[str]]:
    from held_nets import NETS
    from planner_torch import QUICK

    some = [*QUICK, "MobileNetV3", "3-D convolutions", "LSTM", "Swin"]
    return some, [*QUICK, *NETS]


def _torch_net(unit: str) -> tuple[Any, Any]:
    import torch
    from held_nets import NETS
    from planner_torch import QUICK

    torch.manual_seed(0)
    if unit in QUICK:
        make, sample = QUICK[unit]
        return make().train(), sample()
    model, sample = NETS[unit]()
    return model.train(), sample


def _loss(outputs: Any) -> Any:
    """The loss a model gives, or the mean of squares of all it gives instead."""
    import torch

    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    # What libraries return by name is a dictionary, its first tensor the output of the model.
    output = list(outputs.values()) if isinstance(outputs, dict) else outputs
    while isinstance(output, list | tuple):
        output = next(part for part in output if isinstance(part, torch.Tensor | list | tuple))
    return output.float().pow(2).mean() if output.dim() else output


def _step(run: Any, model: Any, sample: Any, state: Any) -> str:
    """A training step from a state; the digest of its loss and gradients."""
    import torch

    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = _loss(run(**sample) if isinstance(sample, dict) else run(sample))
    loss.backward()
    sha = hashlib.sha256(loss.detach().numpy().tobytes())
    for name, parameter in model.named_parameters():
        sha.update(name.encode())
        if parameter.grad is not None:
            sha.update(parameter.grad.detach().contiguous().view(-1).view(torch.uint8).numpy())
    model.zero_grad(set_to_none=True)
    return sha.hexdigest()[:16]


def of_process(**values: Any) -> None:
    """Set what is a setting of the process in this tree; before, it was a keyword of `plan`."""
    if (settings := getattr(importlib.import_module("sn_memory"), "settings", None)) is not None:
        for name, value in values.items():
            setattr(settings, name, value)


def _planned(model: Any, sample: Any, budget: str, **more: Any) -> Any:
    """Plan a torch model so that the plan does not depend on the machine."""
    from sn_memory.torch import plan

    of_process(deterministic=more.get("deterministic", True), progress=False)
    settings = {
        "profile": False, "deterministic": True, "time_limit_s": TORCH_LIMIT_S, "trial": False,
        "progress": False, **more,
    }  # fmt: skip
    return plan(model, sample, budget, **accepted(plan, settings))


def torch_plan_rows(unit: str) -> Rows:
    """Plans of one torch model, and whether a planned step has the gradients of the plain one."""
    import copy

    model, sample = _torch_net(unit)
    state = copy.deepcopy(model.state_dict())
    plain = _step(model, model, sample, state)
    # Where the plain step itself does not repeat its bits, nothing is promised of a planned one.
    repeats = plain == _step(model, model, sample, state)
    for budget in ("80%", "60%"):
        for planner in ("sqrt_n", "auto"):
            row: dict[str, Any] = {"key": f"{unit} at {budget} by {planner}", "plain": plain}
            make = partial(_planned, model, sample, budget, planner=planner)
            planned, refusal = made_or_refused(make, planner)
            if planned is None:
                yield row | refusal
                continue
            record = planned.sn_memory
            result = _step(planned, model, sample, state)
            if record.plan is not None and hasattr(record.plan, "actions"):
                row |= plan_columns(record.plan, TORCH_LIMIT_S, named=False)
            else:
                # Modules are chosen by what was measured: no plan to be compared.
                row |= {"peak_bytes": record.plan.peak_bytes, "seconds": None, "ended": False}
            yield row | {
                "backend": record.backend,
                "planned": result,
                "equal": result == plain,
                "repeats": repeats,
            }


# --- architectures


def _architecture_units() -> tuple[Sequence[str], Sequence[str]]:
    from planner_architectures import ALL

    return list(ALL), list(ALL)


def architecture_rows(unit: str) -> Rows:
    """Rows of planner_architectures.py: right, or refused with a reason."""
    import logging

    from planner_architectures import rows_of

    for library in ("transformers", "diffusers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for row in rows_of(unit, profile=False, time_limit_s=1.0):
        ran = row["chosen"] not in ("refused", "crashed")
        yield {
            "key": f"{unit} by {row['backend']}",
            **row,
            "works": ran and not row.get("fake"),
            "equal": ran and not row["different"],
            "kept": ran and row["measured_bytes"] <= row["budget_bytes"],
        }


def _tensorflow_units() -> tuple[Sequence[str], Sequence[str]]:
    from architectures_tensorflow import BUILDERS

    return list(BUILDERS), list(BUILDERS)


def tensorflow_rows(unit: str) -> Rows:
    """Rows of planner_architectures_tensorflow.py."""
    from planner_architectures_tensorflow import row

    measured = row(unit, 1)
    ran = measured["chosen"] not in ("refused", "failed")
    yield {
        "key": unit,
        **measured,
        "works": ran and (measured["equal"] or measured["error_relative"] <= ROUNDING),
        "kept": ran and measured["measured_bytes"] <= measured["budget_bytes"],
    }


# --- what is compiled, packed, copied, and how deep a net may be


def _compiled_units() -> tuple[Sequence[str], Sequence[str]]:
    from compiled_peaks import MODELS

    return ["vit/3", "gpt2/12"], list(MODELS)


def compiled_rows(unit: str) -> Rows:
    """Rows of compiled_peaks.py at two budgets, without torch's own."""
    import torch
    from compiled_peaks import rows_of

    torch._dynamo.config.recompile_limit = 1000
    measured = rows_of(unit, (0.8, 0.6), (), 6)
    plain_s = measured[0]["step_s"]
    for row in measured[1:]:
        peak = row["peak_bytes"]
        yield {
            "key": f"{unit} at {row['setting']}",
            **row,
            "kept": peak is not None and peak <= row["budget_bytes"],
            "over_plain": row["step_s"] and row["step_s"] / plain_s,
        }


def _pool_units() -> tuple[Sequence[str], Sequence[str]]:
    return ["quick"], ["quick"]


def pool_rows(unit: str) -> Rows:
    """Heights of pool.py."""
    from pool import measurements

    for measure in measurements(True):
        row = measure()
        ended = row["proved_lowest"] or not row["time_limit_s"]
        yield {"key": f"{row['what']}, limit {row['time_limit_s']:g} s", **row, "ended": ended}


def _hidden_units() -> tuple[Sequence[str], Sequence[str]]:
    from offload_hidden import NETS

    return ["vgg16"], list(NETS)


def hidden_rows(unit: str) -> Rows:
    """Rows of offload_hidden.py: the share of the copies' seconds that ops do not wait for."""
    from offload_hidden import rows_of

    for row in rows_of(unit, 3, {}):
        kept = row["peak_mib"] <= row["budget_mib"]
        yield {"key": f"{unit}, rate {row['rate']}, share {row['share']}", **row, "kept": kept}


def _depth_units() -> tuple[Sequence[str], Sequence[str]]:
    return ["ours"], ["ours", "ours_state"]


def depth_rows(unit: str) -> Rows:
    """The largest ResNet that trains below DEPTH_LIMIT, by trials of under_limit.py."""
    from under_limit import describe, largest, trial

    def trains(size: int) -> bool:
        asked = {
            "task": "resnet", "way": unit, "update": "early", "size": size,
            "limit_bytes": DEPTH_LIMIT, "steps": 1, "time_limit_s": 4.0, "planner": "auto",
        }  # fmt: skip
        row = trial(asked, timeout_s=900)
        print(describe(row), flush=True)
        return bool(row["trained"])

    blocks = largest(trains, 32, grain=0.08, step=4)
    yield {"key": f"{unit}, {DEPTH_LIMIT >> 20} MiB", "blocks": blocks}


# --- seconds, and what is imported


def _timed_units() -> tuple[Sequence[str], Sequence[str]]:
    from planner_torch import QUICK

    return ["resnet50/8", "gpt2/12", "unet/8"], list(QUICK)


def planning_rows(unit: str) -> Rows:
    """CPU seconds of planning a torch model, the median of three after a first."""
    model, sample = _torch_net(unit)
    taken = []
    for _ in range(4):
        began = time.process_time()
        _planned(model, sample, "60%", backend="graph")
        taken.append(time.process_time() - began)
    yield {"key": unit, "planning_cpu_s": statistics.median(taken[1:]), "first_cpu_s": taken[0]}


def step_rows(unit: str) -> Rows:
    """Seconds of a planned step over those of the plain one, which take turns."""
    from tuned import paired

    model, sample = _torch_net(unit)
    planned = _planned(model, sample, "60%", backend="graph")

    def seconds(run: Any) -> Callable[[], float]:
        def step() -> float:
            model.zero_grad(set_to_none=True)
            began = time.perf_counter()
            _loss(run(sample)).backward()
            return time.perf_counter() - began

        return step

    ways = seconds(model), seconds(planned)
    for way in ways:
        way()
    timed = paired(*ways, pairs=PAIRS, steps=STEPS, mean=lambda value: value)
    yield {
        "key": unit,
        "over_plain": timed["tuned_over_plain"],
        "over_plain_cpu": timed["tuned_over_plain_cpu"],
        "plain_cpu_s": timed["plain_cpu_s"],
        "quartiles_cpu": [timed["lower_quartile_cpu"], timed["upper_quartile_cpu"]],
    }


def _closure_units() -> tuple[Sequence[str], Sequence[str]]:
    return ["torch", "tensorflow"], ["torch", "tensorflow"]


def closure_rows(unit: str) -> Rows:
    """Our modules in a process that made one plan by graph and ran one step."""
    {"torch": _one_torch_step, "tensorflow": _one_tensorflow_step}[unit]()
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
    yield {
        "key": f"{unit}, one plan by graph and one step",
        "count": len(loaded),
        "modules": loaded,
    }


def _one_torch_step() -> None:
    torch = importlib.import_module("torch")
    plan = importlib.import_module("sn_memory.torch").plan
    of_process(progress=False)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model, sample = torch.nn.Sequential(*layers), torch.randn(512, 64)
    planned = plan(model, sample, "90%", backend="graph", **accepted(plan, {"progress": False}))
    planned(sample).square().mean().backward()


def _one_tensorflow_step() -> None:
    tf = importlib.import_module("tensorflow")
    plan = importlib.import_module("sn_memory.tensorflow").plan
    of_process(progress=False)
    layers = [tf.keras.layers.Dense(64, "tanh") for _ in range(4)]
    model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
    sample = tf.random.normal((512, 64))
    planned = plan(model, sample, "90%", backend="graph", **accepted(plan, {"progress": False}))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(planned(sample, training=True) ** 2)
    tape.gradient(loss, model.trainable_variables)


# In the order they are frozen in: first what does not depend on the machine.
SECTIONS: dict[str, Section] = {
    "closure": Section(
        "modules imported", _closure_units, closure_rows, (modules,)
    ),
    "plans": Section(
        "plans of graphs", _graph_units, plan_rows, (same_plan, reported("actions"))
    ),
    "pool": Section("heights of packings", _pool_units, pool_rows, (same_height,)),
    "torch_plans": Section(
        "plans of torch models and their gradients", _torch_units, torch_plan_rows,
        (
            same_plan, holds("equal"), reported("backend"), reported("plain"),
            reported("baseline_peak_bytes"),
        ),
    ),
    "architectures": Section(
        "architectures in torch", _architecture_units, architecture_rows,
        (
            holds("works"), holds("equal"), holds("kept"), reported("chosen"),
            reported("predicted_bytes"), reported("measured_bytes"),
        ),
    ),
    "architectures_tensorflow": Section(
        "architectures in TensorFlow", _tensorflow_units, tensorflow_rows,
        (
            holds("works"), holds("kept"), reported("chosen"), reported("equal"),
            reported("predicted_bytes"), reported("measured_bytes"),
        ),
    ),
    "depth": Section(
        "depth below a limit of memory", _depth_units, depth_rows,
        (not_below_part("blocks", 0.08),), limit_s=7200.0,
    ),
    "hidden": Section(
        "copies beside ops", _hidden_units, hidden_rows,
        (holds("kept"), not_below("hidden", 0.05)), timed=True,
    ),
    "planning": Section(
        "seconds of planning", _timed_units, planning_rows,
        (not_above("planning_cpu_s", 0.25),), (median_not_above("planning_cpu_s", 0.05),),
        timed=True,
    ),
    "steps": Section(
        "planned step over plain", _timed_units, step_rows,
        (not_above("over_plain_cpu", 0.1),), (median_not_above("over_plain_cpu", 0.02),),
        timed=True,
    ),
    "compiled": Section(
        "compiled steps", _compiled_units, compiled_rows,
        (holds("kept"), not_above("peak_bytes", CUT), reported("predicted_bytes")),
        (median_not_above("over_plain", 0.02),), timed=True, limit_s=7200.0,
    ),
}  # fmt: skip
