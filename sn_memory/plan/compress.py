"""Which storages to compress: sets of them are tried, each planned as any other graph.

A set S turns the graph into one where the members of S wait in their compressed form
(`rewrite.py`), and a planner (`Auto`) then keeps, rebuilds and offloads as ever. The empty set is
tried first and with half the time limit, so that allowing compression never gives a slower plan
than that much time without it.
The others come from a greedy walk down the peak: where the most bytes are live, compress what waits
there and frees the most bytes per second of compressing, until the curve is below a target; what it
leaves above the budget is for that planner to rebuild. Each target has half of the time that is
left: the walk that goes furthest often leaves no plan at all, as what is decompressed takes room as
well. Then, as long as the limit lasts, members are exchanged: what is rebuilt dearly joins,
what costs more than it is worth leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ..base.clock import now
from ..base.errors import PlanError
from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..graph.liveness import baseline_seconds, live_bytes, peak, unplanned_bytes
from ..graph.rewrite import RESTORED, SMALL, waits, with_compressed
from .answers import answers
from .buffers import peak_action
from .plan import BudgetError, Decision, Plan
from .refusal import placed, refused

# How far from the graph's own peak to the budget the greedy walk goes; all the way, first.
TARGETS = (1.0, 0.5, 0.8, 0.25)
ROUNDS = 6
# Of the time limit, what is left to find the smallest peak as long as no plan keeps the budget.
TO_REFUSE = 0.25

Chosen = frozenset[str]


class Planner(Protocol):
    """The planning of one graph, which may be asked for several budgets."""

    limit_s: float

    def look(self, budget_bytes: int) -> None:
        """Look for plans within a budget."""

    def fastest(self, budget_bytes: int) -> Plan | None:
        """Return the fastest plan found within a budget."""

    def refusal(self, budget_bytes: int) -> BudgetError:
        """Return the error that says what the smallest peak is."""


class Compressing:
    """The planning of one graph that may be compressed in parts; stands beside `Auto`.

    Parameters
    ----------
    planner
        Makes the planner of one graph: `Auto`.
    graph, techniques, time_limit_s
        As for it. For each budget, the empty set has half of the time, each walk half of what is
        left then.

    Raises
    ------
    PlanError
        If nothing in the graph can be compressed.
    """

    def __init__(
        self,
        planner: Callable[[Graph, Sequence[str], float], Planner],
        graph: Graph,
        techniques: Sequence[str],
        time_limit_s: float,
    ) -> None:
        self.planner = planner
        self.graph, self.limit_s = graph, time_limit_s
        self.began: float | None = now()
        self.techniques = [technique for technique in techniques if technique != "compress"]
        self.waits = waits(graph)
        self.saves: dict[str, int] = {}
        self.costs: dict[str, float] = {}
        for storage in graph.storages:
            small = storage.compressed
            if storage.name in self.waits and small is not None and small.bytes < storage.bytes:
                self.saves[storage.name] = storage.bytes - small.bytes
                self.costs[storage.name] = small.compress_s + (small.decompress_s or 0.0)
        if not self.saves:
            raise PlanError(
                "compress: got a graph in which no storage that waits for the backward pass has a "
                "smaller compressed form (Storage.compressed). Plan without this technique."
            )
        self.floor = self.working_set()
        self.autos: dict[Chosen, Planner] = {}
        self.looked: set[tuple[Chosen, int]] = set()

    def front(self, budgets: Sequence[int]) -> list[Plan]:
        """Return the fastest plan found for each budget; raises BudgetError."""
        return answers(budgets, self.look, self.answer)

    def look(self, budget_bytes: int) -> None:
        """Try the empty set, each walk's and, as long as the limit lasts, others."""
        began = now() if self.began is None else self.began
        self.began, end = None, began + self.limit_s
        self.attempt(frozenset(), budget_bytes, self.limit_s / 2)
        if self.floor[0] > budget_bytes:
            return
        if self.best(budget_bytes) is None:
            end -= self.limit_s * TO_REFUSE
        whole = peak(self.graph).bytes
        for share in TARGETS:
            if now() > end:
                break
            walked = self.greedy(whole - int((whole - budget_bytes) * share))
            self.attempt(walked, budget_bytes, self.part(end))
        for chosen in self.sets(budget_bytes):
            if now() > end:
                break
            self.attempt(chosen, budget_bytes, self.part(end))

    def part(self, end: float) -> float:
        """Seconds for the next set: half of what is left, and a 32nd of the limit at least."""
        return max(end - now(), self.limit_s / 16) / 2

    def sets(self, budget_bytes: int) -> Iterator[Chosen]:
        """The sets worth an attempt after the walks; later ones start from what was found."""
        yield frozenset(self.saves)
        for _ in range(ROUNDS):
            found = self.best(budget_bytes)
            if found is None:
                return
            chosen, plan = found
            dear = self.rebuilt_dearly(plan)
            yield chosen | dear
            if chosen:
                ranked = sorted(chosen, key=lambda it: (self.saves[it] / self.price(it), it))
                yield chosen - {*ranked[: max(1, len(ranked) // 4)]}
                yield chosen - {max(chosen, key=lambda it: (self.costs[it], it))}
            again = self.best(budget_bytes)
            if again is not None and again[0] == chosen:
                return

    def price(self, name: str) -> float:
        """Seconds of compressing and decompressing, above zero."""
        return max(self.costs[name], 1e-12)

    def greedy(self, target_bytes: int) -> Chosen:
        """Compress where the most is live until the curve is below a target, or nothing is left."""
        curve = live_bytes(self.graph)
        left = dict(self.saves)
        chosen: set[str] = set()
        while int(curve.max()) > target_bytes:
            at = int(curve.argmax())
            here = [it for it in left if self.waits[it].after < at < self.waits[it].small]
            if not here:
                break
            best = max(here, key=lambda it: (left[it] / self.price(it), left[it], it))
            wait = self.waits[best]
            curve[wait.after + 1 : wait.small] -= left.pop(best)
            chosen.add(best)
        return frozenset(chosen)

    def rebuilt_dearly(self, plan: Plan) -> Chosen:
        """Storages that a plan makes again, or moves, though compressing them takes less time."""
        return frozenset(
            it.storage
            for it in plan.decisions
            if it.storage in self.saves
            and (it.technique == "offload" or it.technique.startswith("recompute"))
            and (it.technique == "offload" or it.cost_s > self.costs[it.storage])
        )

    def attempt(self, chosen: Chosen, budget_bytes: int, limit_s: float) -> None:
        """Plan with a set, unless it cannot be faster than what is known."""
        if (chosen, budget_bytes) in self.looked:
            return
        self.looked.add((chosen, budget_bytes))
        if chosen not in self.autos:
            graph = with_compressed(self.graph, chosen)
            known = self.best(budget_bytes)
            least = sum(min(ways) for ways in graph.arrays.seconds)
            if known is not None and least >= known[1].seconds:
                return
            self.autos[chosen] = self.planner(graph, self.techniques, limit_s)
        auto = self.autos[chosen]
        auto.limit_s = limit_s
        auto.look(budget_bytes)

    def best(self, budget_bytes: int) -> tuple[Chosen, Plan] | None:
        """Return the fastest plan within a budget and its set; among equals the smaller set."""
        found = []
        for chosen, auto in self.autos.items():
            plan = auto.fastest(budget_bytes)
            if plan is not None:
                found.append((plan.seconds, plan.peak_bytes, len(chosen), sorted(chosen), plan))
        if not found:
            return None
        best = min(found, key=lambda it: it[:4])
        return frozenset(best[3]), best[4]

    def answer(self, budget_bytes: int, solve_s: float) -> Plan:
        found = self.best(budget_bytes)
        if found is None:
            # To say what the smallest peak is takes a search of its own, which may find a plan.
            error = self.refusal(budget_bytes)
            found = self.best(budget_bytes)
            if found is None:
                raise error
        plan = self.said(*found)
        return replace(plan, budget_bytes=budget_bytes, solve_s=solve_s)

    def said(self, chosen: Chosen, plan: Plan) -> Plan:
        """Return a plan of the compressed graph as one of the graph itself."""
        moved = {it.storage: it for it in plan.decisions}
        decisions = []
        for name, decision in moved.items():
            if name in chosen:
                wait = self.waits[name]
                first, last = self.graph.ops[wait.after].name, self.graph.ops[wait.before].name
                text = f"waits in compressed form from {first!r} to {last!r}"
                decision = Decision(name, "compress", text, self.saves[name], self.costs[name])
            else:
                kept = decision.technique == "keep"
                if kept and name.removesuffix(SMALL).removesuffix(RESTORED) in chosen:
                    continue
            decisions.append(decision)
        # What rebuilds and transfers cannot beat, compression may: each op runs once, that is all.
        least = sum(min(ways) for ways in self.graph.arrays.seconds)
        return replace(
            plan,
            decisions=tuple(decisions),
            lower_bound_seconds=min(least, plan.seconds),
            baseline_peak_bytes=unplanned_bytes(self.graph),
            baseline_seconds=baseline_seconds(self.graph),
            seconds_sources=self.graph.seconds_sources,
        )

    def refusal(self, budget_bytes: int) -> BudgetError:
        """Return the error that says what the smallest peak found is."""
        part = self.limit_s * TO_REFUSE
        self.attempt(frozenset(self.saves), max(budget_bytes, self.floor[0]), part / 2)
        plans: list[tuple[Plan, Chosen]] = []
        for chosen in (frozenset(), frozenset(self.saves), self.greedy(budget_bytes)):
            if chosen in self.autos:
                # Of that a planner spends a fifth to say no.
                self.autos[chosen].limit_s = part
                error = self.autos[chosen].refusal(budget_bytes)
                assert error.plan is not None
                plans.append((error.plan, chosen))
        plan, chosen = min(plans, key=lambda it: (it[0].peak_bytes, it[0].seconds))
        plan = self.said(chosen, plan)
        first = peak_action(self.graph, plan)
        later = (action.target for action in plan.actions[first:] if action.kind == "run")
        op = next(later, self.graph.ops[-1].name)
        floor, name = self.floor[0], self.graph.ops[self.floor[1]].name
        text = (
            f"the smallest peak found, with {len(chosen)} storages compressed, is "
            f"{show_bytes(plan.peak_bytes)}, set by {placed(self.graph, op)}; no plan can go below "
            f"{show_bytes(floor)}, what {name!r} works on"
        )
        return refused(text, self.graph, plan, budget_bytes, op=op, floor_bytes=floor)

    def working_set(self) -> tuple[int, int]:
        """The most that one op works on, with what is resident, and the op: no plan goes below.

        In the backward pass, what is read as it is compressed counts as that.
        """
        graph, arrays, resident = self.graph, self.graph.arrays, self.graph.arrays.resident
        sizes = arrays.bytes.tolist()
        best, at = graph.base_bytes, 0
        for op, reads in enumerate(arrays.reads):
            touched = {it for it in (*reads, *arrays.outputs[op]) if not resident[it]}
            need = sum(sizes[it] for it in touched) + min(arrays.workspace_bytes[op])
            for it in touched:
                name = graph.storages[it].name
                if name in self.saves and self.waits[name].before <= op < self.waits[name].small:
                    need -= self.saves[name]
            if graph.base_bytes + need > best:
                best, at = graph.base_bytes + need, op
        return best, at
