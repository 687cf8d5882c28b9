"""The loops of the search in C++ give what the oracles in Python give, to the last bit."""

import math
import random

import annealing_oracle
import fitting_oracle
import pytest
import simulate_oracle
from graphs import resnet
from random_graphs import budget_of, random_graph

from sn_memory import Device, Graph
from sn_memory.base import errors
from sn_memory.cost.offload import BACK, BESIDE, BOTH, OUT, Impossible
from sn_memory.graph.liveness import KEEP, holes
from sn_memory.plan.search.candidates import all_moved, carried, fit
from sn_memory.plan.search.improve import anneal
from sn_memory.plan.simulate import compiled, simulate


def attempt(function, *args):
    try:
        return function(*args)
    except Impossible:
        return None


def random_choice(shape, draw):
    ops = len(shape.graph.ops)
    return [draw.choice([KEEP, KEEP, 0, draw.randint(0, ops)]) for _ in range(shape.count)]


def random_moves(shape, draw):
    moves = {}
    for hole in range(shape.count):
        if shape.end[hole] - shape.start[hole] > 1 and draw.random() < 0.4:
            out = draw.randint(shape.start[hole], shape.end[hole] - 1)
            moves[hole] = (out, draw.randint(out + 1, shape.end[hole]))
    return moves


def test_choices_lead_to_the_same_schedules():
    possible = impossible = 0
    for seed in range(250):
        shape = holes(random_graph(seed, most_ops=14, plain=seed % 3 == 0))
        draw = random.Random(seed)
        for moves in ({}, {}, random_moves(shape, draw)):
            choice = random_choice(shape, draw)
            ours = attempt(simulate, shape, choice, moves)
            oracle = attempt(simulate_oracle.simulate, shape, choice, moves)
            if ours is None or oracle is None:
                assert ours is oracle is None, f"seed {seed}"
                impossible += 1
                continue
            possible += 1
            assert ours.live_bytes.tolist() == oracle.live_bytes.tolist(), f"seed {seed}"
            assert ours.intervals.tolist() == oracle.intervals.tolist(), f"seed {seed}"
            for name in ("ops", "at", "host_copies", "run_seconds", "peak_bytes"):
                assert getattr(ours, name) == getattr(oracle, name), f"seed {seed}, {name}"
    assert possible > 250
    assert impossible > 60


def shapes():
    for seed in range(90):
        yield holes(random_graph(seed, most_ops=25, plain=seed % 3 == 0), lean=True)
    yield holes(resnet(2, stages=(1, 1, 1, 1), inplace_relu=True, granularity="call").graph())


def test_fitting_and_trimming_decide_the_same():
    fitted = 0
    for number, shape in enumerate(shapes()):
        draw, budget = random.Random(number), budget_of(shape.graph, 0.85)
        factors = [draw.uniform(0.5, 2) for _ in range(shape.count)] if number % 2 else ()
        settings = {"deadline": math.inf, "factors": factors}
        ours = fit(shape, shape.natural(), budget, **settings)
        oracle = fitting_oracle.fit(shape, shape.natural(), budget, **settings)
        assert (ours is None) == (oracle is None), f"graph {number}"
        if ours is None or oracle is None:
            continue
        fitted += 1
        assert ours[0] == oracle[0], f"graph {number}"
        order = [hole for hole, held in enumerate(ours[0]) if held != KEEP]
        draw.shuffle(order)
        for filtered in (False, True):
            choice = compiled(shape).trim(
                ours[0], order, budget, lambda: False, None, filtered=filtered
            )
            same, _ = fitting_oracle.trim(
                shape, *oracle, order, budget, deadline=math.inf, moves=None, filtered=filtered
            )
            assert choice == same, f"graph {number}, filtered {filtered}"
    assert fitted > 15


def test_what_does_not_suit_is_refused():
    core, shape = errors.core(), holes(random_graph(3))
    loops = compiled(shape)
    for wrong in ([KEEP] * (shape.count + 1), [len(shape.graph.ops) + 1] * shape.count):
        with pytest.raises(ValueError, match="choices"):
            loops.simulate(wrong, None)
    with pytest.raises(ValueError, match="moves"):
        loops.simulate(shape.natural(), {0: (5, 2)})
    with pytest.raises(ValueError, match="factors"):
        loops.fit(shape.natural(), 10, lambda: False, None, 3, [1.0])
    with pytest.raises(ZeroDivisionError):
        loops.fit(shape.natural(), 0, lambda: 1 / 0, None, 3, ())
    with pytest.raises(ValueError, match="PyCapsule"):
        core.simulate(None, b"", b"")
    with pytest.raises(RuntimeError, match="another thread"):
        # One search at a time.
        loops.fit(shape.natural(), 0, lambda: loops.simulate(shape.natural(), None), None, 3, ())


@pytest.mark.parametrize("speed", [None, 40.0, 4.0])
def test_annealing_makes_the_same_choices(speed):
    changed, waits = 0, set()
    for number in range(16):
        graph = random_graph(number, most_ops=16, plain=number % 3 == 0)
        link = Device(to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
        shape = holes(Graph(graph.storages, graph.ops, name=graph.name, device=link), lean=True)
        budget = budget_of(shape.graph, 0.8)
        rules = {
            "offload": speed is not None, "recompute": True, "wait": True, "tries": 300,
            "warm": 0.01, "seed": number, "deadline": math.inf,
        }  # fmt: skip
        start = all_moved(shape) if number % 2 and speed else carried(shape, shape.natural(), {})
        ours = anneal(shape, start, budget, **rules)
        theirs = annealing_oracle.anneal(shape, start, budget, **rules)
        assert (ours.choice, ours.moved) == (theirs.choice, theirs.moved), f"graph {number}"
        assert ours.seconds == theirs.seconds
        changed += (ours.choice, ours.moved) != (start.choice, start.moved)
        waits |= set(ours.moved.values())
    assert changed > 5
    assert waits == (set() if speed is None else {BESIDE, OUT, BACK, BOTH})
