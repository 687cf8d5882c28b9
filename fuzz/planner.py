"""Graphs, plans and command lines with damage, and planning of what is left: errors or truth.

What is accepted must be so by `oracle.py` too, which shares no code with the checker.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from mutants import damaged_json, damaged_text, pick
from oracle import judge
from runner import Target, main

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "memory"))
from random_graphs import random_graph, training_chain

from sn_cli.main import main as command
from sn_memory import BudgetError, Graph, GraphError, Plan, PlanError, check_plan, plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.plan.policies import names, policy

BASES = 48


@cache
def base_graph(number: int) -> Graph:
    """One of the sound graphs: random ones with everything the format can say, and chains."""
    if number % 4 == 0:
        return training_chain(2 + number // 8, seed=number)
    return random_graph(number, most_ops=14, plain=number % 4 == 1)


@cache
def plan_text(number: int, planner: str) -> str:
    """A sound plan of a graph, as text."""
    graph = base_graph(number)
    budget = (peak(graph).bytes * 4 + graph.base_bytes) // 5
    if planner == "auto":
        with contextlib.suppress(BudgetError):
            return plan_graph(graph, budget, time_limit_s=0.1).to_json()
        planner = "superneurons"
    return policy(planner)(graph, budget_bytes=budget).to_json()


def graphs(seed: int) -> str:
    """Read a damaged graph; one that is read is carried out as it stands."""
    rng = np.random.default_rng(seed)
    text = base_graph(seed % BASES).to_json()
    if seed % 3:
        mutant = damaged_json(rng, text)
    else:
        mutant = damaged_text(rng, text).decode(errors="surrogateescape")
    if not mutant.lstrip().startswith("{"):
        return "no brace"
    try:
        graph = Graph.from_json(mutant)
    except GraphError:
        return "GraphError"
    assert Graph.from_json(graph.to_json()) == graph
    assert sum(graph.arrays.bytes.tolist()) < 2**62
    plan = policy("liveness")(graph, budget_bytes=None)
    assert check_plan(graph, plan).peak_bytes == plan.peak_bytes
    assert judge(graph, plan)
    return "read"


def damaged_actions(rng: np.random.Generator, text: str, graph: Graph) -> str:
    """Return a plan with actions changed so that they still look like actions."""
    data = json.loads(text)
    actions = data["actions"]
    for _ in range(int(rng.integers(1, 3))):
        if not actions:
            break
        at, to = (int(place) for place in rng.integers(len(actions), size=2))
        kind = rng.integers(6)
        if kind == 0:
            del actions[at]
        elif kind == 1:
            actions.insert(to, list(actions[at]))
        elif kind == 2:
            actions[at], actions[to] = actions[to], actions[at]
        elif kind == 3 and at:
            actions[at], actions[at - 1] = actions[at - 1], actions[at]
        elif kind == 4:
            records = graph.ops if actions[at][0] == "run" else graph.storages
            actions[at][1] = pick(rng, records).name if records else "x"
        else:
            kind = pick(rng, ("free", "offload", "prefetch"))
            actions.insert(at, [kind, pick(rng, graph.storages).name])
    return json.dumps(data)


def predicted(graph: Graph, plan: Plan) -> Plan:
    """Return the plan with the peak and seconds that its actions have, where they can be run."""
    from sn_memory.check import carry_out

    with contextlib.suppress(PlanError):
        replay = carry_out(graph, plan)
        return replace(plan, peak_bytes=replay.peak_bytes, seconds=replay.seconds)
    return plan


def mutants(seed: int) -> str:
    """Read and check a damaged plan; checker and oracle agree."""
    rng = np.random.default_rng(seed)
    graph = base_graph(seed % BASES)
    text = plan_text(seed % BASES, pick(rng, ("auto", *names())))
    if seed % 5 == 0:
        mutant = damaged_text(rng, text).decode(errors="surrogateescape")
    else:
        mutant = damaged_json(rng, text) if seed % 5 == 1 else damaged_actions(rng, text, graph)
    if not mutant.lstrip().startswith("{"):
        return "no brace"
    try:
        plan = Plan.from_json(mutant)
    except PlanError:
        return "PlanError, reading"
    if seed % 5 > 2:
        # So that not all fail by what they predict.
        plan = predicted(graph, plan)
    try:
        check_plan(graph, plan)
    except PlanError:
        assert not judge(graph, plan)
        return "PlanError, checking"
    assert judge(graph, plan)
    return "accepted"


def planned(seed: int) -> str:
    """Plan what is left of a damaged graph."""
    rng = np.random.default_rng(seed)
    try:
        graph = Graph.from_json(damaged_json(rng, base_graph(seed % BASES).to_json()))
    except GraphError:
        return "GraphError"
    budget = graph.base_bytes + int((peak(graph).bytes - graph.base_bytes) * rng.uniform(0.4, 1.1))
    techniques = pick(rng, (("keep",), ("keep", "recompute"), ("keep", "recompute", "offload")))
    chosen = pick(rng, ("auto", "auto", "auto", *names()))
    try:
        plan = plan_graph(graph, budget, planner=chosen, techniques=techniques, time_limit_s=0.2)
    except BudgetError as error:
        assert error.peak_bytes > budget
        return "BudgetError"
    assert check_plan(graph, plan).peak_bytes <= budget
    assert judge(graph, plan)
    return "planned"


def commands(seed: int) -> str:
    """Give the command line damaged files and odd arguments."""
    rng = np.random.default_rng(seed)
    graph = base_graph(seed % BASES)
    with tempfile.TemporaryDirectory() as folder:
        graph_file, plan_file = Path(folder, "graph.json"), Path(folder, "plan.json")
        texts = [graph.to_json(), plan_text(seed % BASES, pick(rng, names()))]
        for file, text in zip((graph_file, plan_file), texts, strict=True):
            file.write_bytes(damaged_text(rng, text) if rng.random() < 0.3 else text.encode())
        budget = pick(rng, ("60%", "1e9", "-5", "9" * 400, "", "0", "1 GiB", "nan", "²", "\ud800"))
        odd = pick(rng, ("", "nan", "-1", "inf", "1e999", "0.05", "0.1", "x"))
        argv = pick(
            rng,
            (
                ["plan", str(graph_file), "--quiet", "--budget", budget, "--time-limit", odd],
                ["plan", str(graph_file), "--quiet", "--budget", "90%", "--time-limit", "0.05"],
                ["check", str(graph_file), str(plan_file)],
                ["report", str(graph_file), str(plan_file), "--against", "none", "--rows", "3"],
                ["check", str(graph_file) + pick(rng, ("\0", "\ud800", "/", "x")), folder],
                ["pack", str(graph_file), "--capacity", budget],
            ),
        )
        output, wrong = io.StringIO(), io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong):
            try:
                code = command(["memory", *argv])
            except SystemExit as end:
                return f"{argv[0]}: usage, exit {end.code}"
        output.getvalue().encode()
        wrong.flush()
        text = wrong.buffer.getvalue().decode()
        # Yes, no, or a sentence: never a traceback, and never the name of a class of ours.
        assert code in (0, 1, 2), (argv, code)
        assert code < 2 or text.startswith("sn: "), (argv, text)
        assert not re.search(r"\w(Error|Exception)\b", text.partition("\n")[0]), (argv, text)
        return f"{argv[0]}: {code}"


TARGETS = {
    "graphs": Target(graphs, full=100_000),
    "plans": Target(mutants, full=100_000),
    "planned": Target(planned, full=3_000),
    "commands": Target(commands, full=10_000),
}

if __name__ == "__main__":
    main(TARGETS)
