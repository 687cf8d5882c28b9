"""What torch's allocator reserves for a plan, and plans that keep a budget of that."""

from types import SimpleNamespace

import pytest

from sn_memory import BudgetError, Graph, Op, Plan, Storage, plan_graph
from sn_memory.cost.bfc import BFCSettings
from sn_memory.cost.caching import AllocatorSettings
from sn_memory.plan.policies import policy
from sn_memory.run.planned import KeptStep, PlannedKind
from sn_memory.run.reserved import LEAST_BYTES, reserved, within_reserved
from sn_memory.run.unseen import AT_ONCE, CARRIED_OVER, NOTHING_AGAIN, PLANNED, UnseenInput

MIB = 1 << 20
RECOMPUTE = ("keep", "recompute")
DEFAULT, EXPANDABLE = AllocatorSettings(), AllocatorSettings(expandable=True)
GROWTH = BFCSettings(growth=True)


def chain(layers, mib):
    """Layers whose activations of several sizes are needed again in the backward pass."""
    sizes = [mib * MIB + (at % 5) * 3 * MIB + at * 4096 for at in range(layers + 1)]
    storages = [Storage("h0", sizes[0], "input")]
    storages += [Storage(f"h{at}", sizes[at]) for at in range(1, layers + 1)]
    storages += [Storage(f"g{at}", sizes[at]) for at in range(layers, -1, -1)]
    ops = [Op(f"f{at}", (f"h{at}",), (f"h{at + 1}",), seconds=1.0) for at in range(layers)]
    ops.append(Op("loss", (f"h{layers}",), (f"g{layers}",), seconds=0.1))
    ops += [
        Op(f"b{at}", (f"h{at}", f"g{at + 1}"), (f"g{at}",), phase="backward", seconds=2.0)
        for at in range(layers - 1, -1, -1)
    ]
    return Graph(storages, ops, allocator="torch", name="chain")


def whole(graph):
    return policy("liveness")(graph, budget_bytes=None)


def searching(graph, asked):
    def search(live_bytes, seconds):
        asked.append((live_bytes, seconds))
        return plan_graph(graph, live_bytes, techniques=RECOMPUTE, time_limit_s=5)

    return search


def test_what_is_resident_has_segments_of_its_own():
    graph = Graph(
        [Storage("x", 12 * MIB, "input"), Storage("h", 12 * MIB), Storage("y", 2, keep=True)],
        [Op("f", ("x",), ("h",)), Op("g", ("h",), ("y",))],
        allocator="torch",
    )
    # 12 MiB for x, which was there before; 12 MiB for h, and 2 for y.
    found = reserved(graph, whole(graph))
    assert (found.peak_bytes, found.pool_bytes) == (26 * MIB, 0)
    assert reserved(graph, whole(graph), EXPANDABLE).peak_bytes == 42 * MIB


def test_a_first_segment_is_cut_as_one_that_grows_would_be():
    graph = chain(12, 12)
    plan = whole(graph)
    found = reserved(graph, plan)
    assert found.pool_bytes > 0
    assert plan.peak_bytes <= found.peak_bytes < 1.1 * plan.peak_bytes
    # Above max_split_size_mb blocks are not cut: no first segment.
    odd = reserved(graph, plan, AllocatorSettings(max_split_bytes=64 * MIB))
    assert odd.pool_bytes == 0
    assert odd.peak_bytes >= found.peak_bytes


def test_a_short_search_that_finds_nothing_refuses_nobody():
    graph, asked = chain(24, 30), []
    plans = searching(graph, asked)

    def search(live_bytes, seconds):
        plan = plans(live_bytes, seconds)
        if seconds is not None:  # as on a busy machine
            raise BudgetError("cut", peak_bytes=0, budget_bytes=live_bytes, op="")
        return plan

    budget = int(0.8 * reserved(graph, whole(graph)).peak_bytes)
    plan = within_reserved(graph, budget, search, DEFAULT)
    assert plan.reserved_peak_bytes <= budget
    assert [seconds for _, seconds in asked][:3:2] == [None, None]


@pytest.mark.parametrize(
    ("settings", "share"),
    [(DEFAULT, 0.6), (DEFAULT, 0.8), (EXPANDABLE, 0.7), (BFCSettings(), 0.8), (GROWTH, 0.6),
     (GROWTH, 0.7)],
)  # fmt: skip
def test_a_plan_is_made_lower_until_what_is_reserved_keeps_the_budget(settings, share):
    graph, asked = chain(24, 30), []
    budget = int(share * whole(graph).peak_bytes)
    found = within_reserved(graph, budget, searching(graph, asked), settings)
    assert found.reserved_peak_bytes <= budget
    assert found.reserved_peak_bytes == reserved(graph, found, settings).peak_bytes
    assert found.budget_bytes == budget
    assert found.notes[0].startswith(f"{settings.reserves} ")
    assert found.allocator == settings.name
    assert asked[0] == (budget, None)
    assert len(asked) <= 5
    assert sum(seconds for _, seconds in asked[1:]) <= 0.2 * max(found.solve_s, 5)
    assert Plan.from_json(found.to_json()) == found


def test_where_no_plan_is_low_enough_the_error_names_what_would_help():
    graph = chain(16, 12)
    least = plan_graph(graph, "40%", techniques=RECOMPUTE, time_limit_s=2)
    settings = AllocatorSettings(max_split_bytes=20 * MIB)
    with pytest.raises(BudgetError, match="torch's allocator reserves") as caught:
        within_reserved(graph, least.peak_bytes, searching(graph, []), settings)
    error = caught.value
    assert "PYTORCH_ALLOC_CONF" in str(error)
    assert error.peak_bytes == reserved(graph, error.plan, settings).peak_bytes
    assert error.peak_bytes > error.budget_bytes == least.peak_bytes


def test_with_memory_growth_the_error_names_a_limit():
    graph = chain(16, 12)
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, "1%", techniques=RECOMPUTE, time_limit_s=2)
    budget = caught.value.peak_bytes + 4 * MIB
    assert GROWTH.most(budget) < caught.value.peak_bytes
    with pytest.raises(BudgetError, match="TensorFlow's allocator reserves") as caught:
        within_reserved(graph, budget, searching(graph, []), GROWTH)
    assert "set a memory_limit without memory growth, which reserves" in str(caught.value)
    assert "PYTORCH" not in str(caught.value)


def test_small_budgets_are_kept_by_live_bytes_and_it_is_noted():
    graph, asked = chain(6, 1), []
    budget = int(0.9 * whole(graph).peak_bytes)
    assert budget < LEAST_BYTES
    found = within_reserved(graph, budget, searching(graph, asked), DEFAULT)
    assert len(asked) == 1
    assert found.reserved_peak_bytes > budget
    assert "more than the budget" in found.notes[0]


def test_an_allocator_without_rules_is_noted():
    graph, settings = chain(6, 12), AllocatorSettings.of("backend:cudaMallocAsync")
    found = within_reserved(graph, 1 << 40, searching(graph, []), settings)
    assert found.reserved_peak_bytes is None
    assert "cudaMallocAsync" in found.notes[0]


def test_plans_at_once_keep_a_budget_of_reserved_bytes():
    graph = chain(24, 30)
    plain = whole(graph)
    needs, most = plain.peak_bytes, reserved(graph, plain, DEFAULT).peak_bytes
    assert most > needs

    def search(graph):
        return within_reserved(graph, needs, searching(graph, []), DEFAULT)

    def planned(budget, allocator, **others):
        """The plan for a new input, and how it came about; `others`: plans for known ones."""
        kept = [
            KeptStep(SimpleNamespace(plan=plan), PlannedKind(name, PLANNED, 0, 0))
            for name, plan in others.items()
        ]
        unseen = SimpleNamespace()
        return UnseenInput.planned(unseen, graph, search, budget, kept, allocator), unseen.how

    assert planned(needs, None)[1] == NOTHING_AGAIN
    found, how = planned(needs, DEFAULT)
    assert how == AT_ONCE
    assert found.reserved_peak_bytes <= needs
    again, how = planned(needs, DEFAULT, it=found, all=plain)
    assert how == f"{CARRIED_OVER} it"
    assert again.reserved_peak_bytes == found.reserved_peak_bytes
    assert again.pool_bytes == found.pool_bytes > 0
    # Where there is room for what is reserved, all is kept.
    assert planned(most, DEFAULT)[0].reserved_peak_bytes == most


def test_the_gradient_of_an_output_is_not_of_the_pool():
    """A caller makes it between the passes, elsewhere; what the pool has free is not for it."""
    graph = Graph(
        [
            Storage("x", 16 * MIB, "input"), Storage("h", 64 * MIB),
            Storage("y", 32 * MIB, keep=True, held=True),
            Storage("dy", 32 * MIB, "gradient", keep=True, held=True),
            Storage("dx", 32 * MIB, "gradient", keep=True),
        ],
        [
            Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0),
            Op("loss", ("y",), ("dy",), seconds=1.0),
            Op("back", ("dy",), ("dx",), phase="backward", seconds=1.0),
        ],
    )  # fmt: skip
    plan = whole(graph)
    # `dy` finds no place where `h` was, `dx` does.
    assert plan.peak_bytes == 112 * MIB
    assert reserved(graph, plan).peak_bytes == (16 + 32 + 96) * MIB
    kept = within_reserved(graph, 144 * MIB, lambda live, seconds: plan, DEFAULT)
    assert any("32 MiB of it are gradients of outputs" in note for note in kept.notes)
    with pytest.raises(BudgetError):
        within_reserved(graph, 143 * MIB, lambda live, seconds: plan, DEFAULT)
