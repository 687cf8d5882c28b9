"""What runs for an input that nobody planned for: the policy of both rims, without either."""

import logging
from types import SimpleNamespace

import pytest

from sn_memory import BudgetError, PlanError
from sn_memory.run.unseen import PlanAtOnce, TimeToPlan, UnseenInput


def step(peak_bytes):
    plan = SimpleNamespace(
        peak_bytes=peak_bytes, baseline_peak_bytes=200, seconds=1.0, baseline_seconds=1.0
    )
    return SimpleNamespace(plan=plan)


class Unseen(UnseenInput):
    """A plan of ops of 100 bytes, which is found, fails, or is too large; parts hold 50."""

    log, line = logging.getLogger("unseen"), "plan(model, [sample, another])"

    def __init__(self, *, budget_bytes=100, why="", fails=False, strict=False, clock=None):
        super().__init__("Net", budget_bytes, strict=strict, clock=clock or TimeToPlan())
        self.why, self.fails, self.seen = why, fails, []

    @staticmethod
    def first_line(error):
        return str(error)

    def described(self):
        return "x=float32[3]"

    def refusal(self):
        return self.why

    def by_ops(self):
        if self.fails:
            raise KeyError("an op")
        over = None
        if self.budget_bytes < 100:
            over = BudgetError("", peak_bytes=100, budget_bytes=self.budget_bytes, op="f")
        made = step(100)
        made.plan = self.noted(PlanAtOnce(made.plan, "planned at once", over))
        return made

    def by_parts(self, why, by_ops, *, keep):
        self.how = "parts run again"
        self.seen = [why, by_ops is not None, keep]
        return step(50)

    def kept(self, step):
        self.seen.append("kept")
        return step


def test_a_plan_of_ops_that_keeps_the_budget_runs():
    unseen = Unseen()
    assert unseen.step().plan.peak_bytes == 100
    assert unseen.seen == ["kept"]
    assert unseen.clock.planning_s > 0


@pytest.mark.parametrize(
    ("settings", "why", "has_plan"),
    [
        ({"why": "a size is open"}, "a size is open", False),
        ({"fails": True}, "it cannot be traced: 'an op'", False),
        ({"budget_bytes": 60}, "no plan of its ops was found that keeps 60 B", True),
    ],
)
def test_where_there_is_none_parts_run_again_or_strict_raises(settings, why, has_plan):
    unseen = Unseen(**settings)
    assert unseen.step().plan.peak_bytes == 50
    assert unseen.seen == [why, has_plan, True]
    text = unseen.warning(step(50), why)
    assert "met x=float32[3]: parts run again (peak 200 B -> 50 B, +0.0% time), which may" in text
    assert f"because {why}. Plan it as well: {unseen.line}" in text
    with pytest.raises(BudgetError if has_plan else PlanError, match=r"strict: Net met x=float32"):
        Unseen(strict=True, **settings).step()


def test_what_is_above_the_budget_is_said():
    unseen = Unseen(budget_bytes=40)
    unseen.step()
    assert "10 bytes above the budget" in unseen.warning(step(50), "no plan is small enough")


def test_when_planning_took_its_share_what_runs_is_not_kept():
    clock = TimeToPlan()
    clock.took(1e6)
    unseen = Unseen(clock=clock)
    unseen.step()
    assert unseen.seen == [str(clock), False, False]
