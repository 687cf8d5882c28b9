"""Time limits hold: in packer and planner, on the wall or in counted work."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from graphs import resnet
from pool_search_oracle import Lists, PythonSearch
from random_graphs import budget_of, training_chain

from sn_memory import BudgetError, plan_graph
from sn_memory.base import errors, progress
from sn_memory.graph.liveness import holes
from sn_memory.plan.search.candidates import fit
from sn_memory.plan.simulate import compiled
from sn_memory.pool.pack import UNIT, Rule, Searcher, Verdict, arrange
from sn_memory.pool.problem import read_problem

ROOT = Path(__file__).resolve().parents[2]
# Two buffers rest on each other here, so that their bounds rise byte by byte to 5e11.
CREEPING = (
    (10, 19, 1, 3), (7, 10, 14, 1), (18, 27, 1, 512), (13, 14, 75, 1), (6, 14, 30, 512),
    (6, 14, 566833903835, 1), (0, 9, 0, 8), (19, 28, 0, 3), (14, 15, 0, 512), (3, 8, 65, 512),
)  # fmt: skip


@pytest.mark.parametrize("capacity", [None, 566833903944])
def test_bounds_that_creep_do_not_hang(capacity):
    """In a process of its own, which can be ended whoever has the interpreter lock."""
    code = f"""
import time
from sn_memory import CapacityError
from sn_memory.pool.pack import arrange
from sn_memory.check import check_packing
rows = {CREEPING}
try:
    packing = arrange(rows, {capacity}, time_limit_s=0.3)
    check_packing(rows, packing.offsets)
except CapacityError as error:
    assert not error.proved
print(time.process_time())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 5


def creeping(backend):
    rows = [row for row in CREEPING if row[2]]
    problem = read_problem(rows)
    problem = problem.only(problem.components()[0])
    weights = np.full(problem.sections, UNIT, np.int64)
    start = (problem.lower_bound, Rule.LOWEST, np.arange(len(rows)), weights)
    return (
        backend(problem).start(*start) if backend is Searcher else backend(Lists(problem), *start)
    )


def test_a_search_cut_in_a_decision_goes_on_as_its_oracle():
    search, oracle = creeping(Searcher), creeping(PythonSearch)
    for work in (1, 7, 100, 3, 50_000, 1):
        assert search.run(50, work) is oracle.run(50, work) is Verdict.UNFINISHED
        assert search.spent == oracle.spent
        offsets, weights = search.read()
        assert offsets.tolist() == oracle.offsets().tolist()
        assert weights.tolist() == oracle.weights().tolist()
    whole = creeping(PythonSearch)
    assert whole.run(10**9, oracle.work) is Verdict.UNFINISHED
    assert whole.least == oracle.least
    # It notes each value once: some 50 of 10 buffers and their sections; byte by byte there would
    # be thousands.
    assert len(whole.trail) < 100


def at_once(*calls):
    """What the calls raise, each in a thread of its own."""
    raised = []

    def one(call):
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def ticks_during(call):
    """How often another thread comes to its turn."""
    over, ticks = threading.Event(), []

    def tick():
        while not over.wait(0.01):
            ticks.append(1)

    def called():
        call()
        over.set()

    assert not at_once(tick, called)
    return len(ticks)


def test_other_threads_run_while_the_packer_searches():
    search = creeping(Searcher)
    assert ticks_during(lambda: search.run(10**9, 20_000_000)) > 3  # half a second
    run = partial(errors.core().run, search._handle, 10**9, 100_000_000)
    (refused,) = at_once(run, run)
    assert "another thread" in refused


def annealing(work, tries):
    shape = holes(resnet(2, 50).graph(), lean=True)
    no_lanes = (0.0, np.zeros(0), np.zeros(0), -1)
    compiled(shape).anneal(
        shape.natural(), [False] * shape.count, budget_of(shape.graph, 0.5), work, no_lanes,
        (0.003, 1e-5), tries=tries, seed=0, recompute=True, wait=False,
    )  # fmt: skip


def test_other_threads_run_while_the_planner_anneals():
    # `bool` is no Python code: asked, it gives no other thread a turn.
    assert ticks_during(lambda: annealing(bool, 20_000)) > 3


def test_counted_work_in_cpp_can_be_interrupted():
    """It asks no clock, but lets Ctrl-C in."""

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            annealing(2**60, 2**40)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_fitting_ends_within_a_round():
    shape = holes(resnet(2, 50).graph())
    budget = budget_of(shape.graph, 1 / 3)

    def units(deadline):
        with progress.counting(True):
            assert fit(shape, shape.natural(), budget, deadline=deadline, rounds=1) is None
            return progress.now() * progress.UNITS_PER_S

    # 10,000 units of some 80,000 that a round takes.
    assert units(10_000 / progress.UNITS_PER_S) < units(math.inf) / 4


# What it takes beside the search: looks at the clock that are far apart, and the plan written down.
ALLOWANCE_S = 0.4


def in_time(call, limit_s, allowance_s=ALLOWANCE_S):
    """Whether a call keeps a limit to a tenth; of three times, as other processes may have ours."""
    for _ in range(3):
        began = time.perf_counter()
        with suppress(BudgetError):
            call()
        if time.perf_counter() - began < limit_s * 1.1 + allowance_s:
            return True
    return False


@pytest.mark.parametrize(
    ("techniques", "share"),
    [(("keep", "recompute"), 0.05), (("keep", "recompute", "offload"), 0.4)],
)
def test_the_wall_clock_ends_all_stages_together(techniques, share):
    """Alone, each stage would take longer: the search, the other planners, and saying no."""
    graph = resnet(8, 152).graph()
    plan_graph(training_chain(3), "80%")  # imports what solves linear programs
    settings = {"techniques": techniques, "time_limit_s": 1.5}
    assert in_time(partial(plan_graph, graph, budget_of(graph, share), **settings), 1.5)


def test_sleep_counts():
    """A thread that gets no processor time still answers in time."""
    graph = resnet(4, 50).graph()
    settings = {"time_limit_s": 1.0, "progress": lambda _: time.sleep(0.2)}
    call = partial(plan_graph, graph, budget_of(graph, 0.4), **settings)
    assert in_time(call, 1.0, 0.2 + ALLOWANCE_S)


def burnt(done):
    while not done.wait(0):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.05])
def test_counted_work_gives_the_same_plan_whatever_the_clock(monkeypatch, share):
    """The limit is hit: with more time there is another answer."""
    graph = resnet(4, 50).graph()

    def planned(limit):
        settings = {"time_limit_s": limit, "deterministic": True}
        try:
            return plan_graph(graph, budget_of(graph, share), **settings)
        except BudgetError as error:
            return error.plan

    first = planned(0.1)
    real, done = time.perf_counter, threading.Event()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 50 * real())
    thread = threading.Thread(target=burnt, args=(done,))
    thread.start()
    try:
        second = planned(0.1)
    finally:
        done.set()
        thread.join()
    assert second.to_json() == first.to_json()
    more = planned(3.0)
    assert (more.peak_bytes, more.seconds) != (first.peak_bytes, first.seconds)


def test_the_packer_counts_as_the_planner_does(monkeypatch):
    assert arrange([(0, 2, 3), (0, 2, 5, 16), (0, 2, 1, 8)], time_limit_s=5).seconds < 1
    before = time.perf_counter()
    assert in_time(partial(arrange, CREEPING, time_limit_s=0.5), 0.5)
    assert time.perf_counter() - before >= 0.5
    draw = random.Random(0)
    rows = []
    for _ in range(300):
        lower = draw.randrange(100)
        rows.append((lower, lower + draw.randrange(1, 30), draw.randrange(1, 1000)))
    first = arrange(rows, time_limit_s=0.03, deterministic=True)
    real = time.perf_counter
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 50 * real())
    assert arrange(rows, time_limit_s=0.03, deterministic=True) == first
    assert first.seconds >= 0.03
