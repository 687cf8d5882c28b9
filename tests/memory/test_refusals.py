"""What BudgetError says: where the peak is, which budget can be had, and the plan for it."""

import pytest
from random_graphs import compressible, random_graph, training_chain

from sn_memory import BudgetError, Graph, Op, Storage, check_plan, plan_graph
from sn_memory.graph.graph import module_of
from sn_memory.graph.liveness import peak


def as_torch_names(graph):
    """The same graph with the names that torch's trace gives."""
    ops = []
    for at, op in enumerate(graph.ops):
        scope = f"net.{op.name}" if op.phase == "forward" else "backward"
        ops.append(
            Op(
                f"{scope}/{op.name}#{at}", op.inputs, op.outputs, op.writes, op.releases,
                seconds=op.seconds, phase=op.phase,
            )
        )  # fmt: skip
    return Graph(graph.storages, ops, name=graph.name)


@pytest.mark.parametrize("settings", [{}, {"planner": "sqrt_n"}])
def test_the_nearest_budget_can_be_had(settings):
    graph = as_torch_names(training_chain(6))
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, graph.base_bytes, time_limit_s=2, **settings)
    error, text = caught.value, str(caught.value)
    assert error.module.startswith("net.")
    assert f"(module {error.module!r})" in text
    assert f'{error.peak_bytes} bytes, or "{error.percent}%" of the unplanned peak' in text
    assert error.percent == -(-100 * error.peak_bytes // peak(graph).bytes) < 100
    assert check_plan(graph, error.plan).peak_bytes == error.peak_bytes
    for budget in (error.peak_bytes, f"{error.percent}%"):
        assert plan_graph(graph, budget, **settings).peak_bytes <= error.peak_bytes * 1.02


def test_a_refusal_with_compress_says_it_too():
    graph = compressible(training_chain(5))
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, 1, techniques=("keep", "compress"), time_limit_s=1)
    error = caught.value
    assert f'"{error.percent}%"' in str(error)
    plan = plan_graph(graph, f"{error.percent}%", techniques=("keep", "compress"))
    assert plan.peak_bytes <= error.percent / 100 * peak(graph).bytes


def test_no_percentage_where_nothing_can_be_saved():
    graph = Graph(
        [Storage("x", 8, "input"), Storage("y", 2, keep=True)],
        [Op("f", ("x",), ("y",), seconds=1.0)],
    )
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, 5)
    assert caught.value.percent is None
    assert "%" not in str(caught.value)


def test_modules_are_told_from_names_and_from_what_is_read():
    storages = [
        Storage("x", 8, "input"),
        Storage("conv1.weight", 8, "parameter"),
        Storage("a", 4),
        Storage("b", 4),
        Storage("y", 4, keep=True),
        Storage("g", 4),
        Storage("h", 4, keep=True),
        Storage("i", 4, keep=True),
    ]
    ops = [
        Op("conv1/convolution#0", ("x", "conv1.weight"), ("a",)),
        Op("block.relu/relu#1", ("a",), ("b",)),
        Op("forward/sum#2", ("b",), ("y",)),
        Op("backward/relu_backward#3", ("y", "b", "a"), ("g",), phase="backward"),
        Op("backward/convolution_backward#4", ("g", "conv1.weight"), ("h",), phase="backward"),
        Op("gradient_tape/model/dense/MatMul", ("h",), ("i",), phase="backward"),
    ]
    graph = Graph(storages, ops)
    found = [module_of(graph, op.name) for op in ops]
    assert found == ["conv1", "block.relu", "", "block.relu", "conv1", "model/dense"]
    assert module_of(graph, "no op of it") == ""


@pytest.mark.parametrize("seed", range(3))
def test_what_a_refusal_names_is_planned_whatever_was_asked_for_before(seed):
    graph = random_graph(seed, most_ops=40)
    named = set()
    for part in (0.0, 0.6, 0.95):
        budget = graph.base_bytes + int(part * (peak(graph).bytes - graph.base_bytes))
        try:
            plan_graph(graph, budget, deterministic=True)
        except BudgetError as error:
            named.add(error.peak_bytes)
    # One smallest peak, whatever the budget was: what is named is found again.
    assert len(named) <= 1
    for size in named:
        assert plan_graph(graph, size, deterministic=True).peak_bytes <= size
