"""Models whose course depends on values: their parts planned by ops, together within one budget."""

import copy
import itertools
import pickle
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import ReplayError, TraceError, plan
from sn_memory.torch.model.step import Measured
from sn_memory.torch.model.tracker import AllocationTracker
from sn_memory.torch.regions import step as region_steps
from sn_memory.torch.regions.choose import Choices, Timeline
from sn_memory.torch.regions.plans import RegionPlan
from sn_memory.torch.regions.search import _Choosing
from sn_memory.torch.regions.step import RegionsPlan

WIDTH, ROWS = 32, 256


def block(width=WIDTH):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class Looks(nn.Module):
    """Looks at a value after each block."""

    def __init__(self, blocks=4, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        for it in self.blocks:
            x = x + self.drop(it(x))
            if x.mean().item() > 1e6:
                break
        return x.square().mean()


class Drops(nn.Module):
    """Leaves blocks out by chance."""

    def __init__(self, blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x):
        for it in self.blocks:
            if torch.rand(()).item() < 0.6:
                x = x + it(x)
        return x.square().mean()


class Experts(nn.Module):
    """Rows go to one of two experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(block() for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = x
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(1)
            if at.numel():
                out = out.index_add(0, at, expert(x[at]))
        return out.square().mean() + self.gate(x).square().mean()


class Crosses(nn.Module):
    """Blocks that each read the same memory twice, with a break between them."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.inner = block()

        def forward(self, x, memory):
            return x + self.inner(x) + self.key(memory).tanh() * self.value(memory)

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.readers = nn.ModuleList(self.Reader() for _ in range(3))

    def forward(self, x):
        memory = self.stem(x)
        for it in self.readers:
            x = it(x, memory)
            if x.mean().item() > 1e6:
                break
        return x.square().mean() + memory.sum() * 1e-3


class Normed(nn.Module):
    """Convolutions with statistics and dropout; one block runs twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
                nn.Conv2d(16, 4, 3, padding=1),
            )
            for _ in range(3)
        )  # fmt: skip

    def forward(self, x):
        for it in (*self.blocks, self.blocks[0]):
            x = x + it(x)
            if x.mean().item() > 1e6:
                break
        return x.square().mean()


class Masks(nn.Module):
    """Only the rows that a mask shows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        rows = x[x[:, 0] > 0]
        for it in self.blocks:
            rows = rows + it(rows)
        return rows.square().mean()


class Images(nn.Module):
    """Layers on an image that lies with its channels first; what is alike gets gradients otherwise.

    As in DETR: an input that is a view and is read again after the layer, small norms between the
    layers, and a look after each.
    """

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, places):
            return self.out((self.key(x + places).softmax(1) * self.value(x)).tanh())

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(WIDTH, WIDTH, 1)
        self.mixers = nn.ModuleList(self.Mixer() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.register_buffer("places", torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))

    def forward(self, x):
        x = self.stem(x.view(-1, WIDTH, 8, 8)).flatten(2).transpose(1, 2)
        for mixer, norm, it in zip(self.mixers, self.norms, self.blocks, strict=True):
            x = norm(x + mixer(x, self.places))
            x = x + it(x)
            if not torch.isfinite(x).all():
                break
        return x.transpose(1, 2).square().mean()


NETS = {
    "looks": Looks, "drops": Drops, "experts": Experts, "crosses": Crosses, "masks": Masks,
    "images": Images,
}  # fmt: skip


def rows(seed=0, many=ROWS):
    return torch.randn(many, WIDTH, generator=torch.Generator().manual_seed(seed))


def planned(net, sample, budget, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(net, sample, budget, profile=False, time_limit_s=6.0, **settings)


def trained(net, x, seed):
    """Return loss and gradients of a step, and its peak."""
    torch.manual_seed(seed)
    net.zero_grad()
    with AllocationTracker([*net.parameters(), *net.buffers(), x], kernels=True) as tracker:
        loss = net(x)
        loss.backward()
    gradients = [it.grad for it in net.parameters()]
    return [loss.detach(), *gradients, *(it.clone() for it in net.buffers())], tracker.peak_bytes


def same(mine, own):
    return all(
        left is right if left is None or right is None else torch.equal(left, right)
        for left, right in zip(mine, own, strict=True)
    )


@pytest.mark.parametrize("name", NETS)
def test_steps_are_those_of_the_model_and_keep_the_budget(name):
    torch.manual_seed(0)
    net = NETS[name]()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "60%")
    assert made.sn_memory.backend == "regions"
    for seed in range(1, 6):
        x = rows(seed)
        own, _ = trained(plain, x, seed)
        mine, peak = trained(made, x, seed)
        assert same(mine, own)
        # Another number of rows than the sample's is told from what came before alone.
        assert peak <= made.sn_memory.budget_bytes * (1.03 if name in ("masks", "experts") else 1)


def test_statistics_and_dropout_are_those_of_the_model():
    torch.manual_seed(0)
    net = Normed()
    plain = copy.deepcopy(net)
    made = planned(net, torch.randn(2, 4, 24, 24), "75%")
    assert made.sn_memory.backend == "regions"
    for seed in range(3):
        x = torch.randn(2, 4, 24, 24)
        assert same(trained(made, x, seed)[0], trained(plain, x, seed)[0])


def test_keeps_budgets_that_modules_run_again_cannot():
    net = Looks(blocks=6)
    with pytest.raises(BudgetError) as caught:
        planned(net, rows(), "1%", backend="modules")
    made = planned(net, rows(), int(0.85 * caught.value.peak_bytes), backend="regions")
    assert trained(made, rows(3), 0)[1] <= made.sn_memory.budget_bytes
    plan_of = made.sn_memory.plan
    assert plan_of.peak_bytes == pytest.approx(plan_of.predicted_peak_bytes, rel=0.02)
    assert plan_of.baseline_seconds <= plan_of.lower_bound_seconds <= plan_of.seconds


def test_modules_that_are_alike_are_traced_once(monkeypatch):
    from sn_memory.torch.regions import find

    traced = []
    own = find.traced_call

    def counted(module, *args, **kwargs):
        traced.append(module)
        return own(module, *args, **kwargs)

    monkeypatch.setattr(find, "traced_call", counted)
    made = planned(Looks(blocks=6), rows(), "60%", backend="regions")
    # The first is given what takes no gradient. Both once more when it was seen that others read
    # what they are given.
    assert len([it for it in traced if isinstance(it, nn.Sequential)]) == 4
    assert len({path for path, _ in _calls(made)}) == 6


def _calls(made):
    return made.sn_memory.latest.chosen.calls


def test_breaks_are_named():
    made = planned(Looks(), rows(), "60%")
    (found,) = made.sn_memory.plan.breaks
    assert found.module == ""
    assert "_local_scalar_dense" in found.why
    assert "test_regions.py:" in found.why
    assert "Compute with tensors" in repr(made.sn_memory)


def test_an_error_names_what_is_held_outside_of_regions():
    with pytest.raises(BudgetError, match="outside of regions") as caught:
        planned(Looks(), rows(), "5%", backend="regions")
    made = planned(Looks(), rows(), caught.value.peak_bytes, backend="regions")
    assert made.sn_memory.plan.peak_bytes <= caught.value.peak_bytes
    assert caught.value.floor_bytes <= caught.value.peak_bytes
    assert caught.value.peak_bytes <= 1.05 * caught.value.floor_bytes


def test_a_model_without_regions_is_refused():
    class Values(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return (x * self.weight).sum() * x.sum().item()

    with pytest.raises(TraceError, match="no part of the model"):
        planned(Values(), rows(), "90%", backend="regions")


def test_more_calls_than_the_sample_had_take_leaner_plans():
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()

        def forward(self, x, rounds):
            for _ in range(int(rounds.item())):
                x = x + self.block(x)
            return x.square().mean()

    torch.manual_seed(0)
    net = Rounds()
    plain = copy.deepcopy(net)
    made = planned(net, (rows(), torch.tensor(4)), "60%")
    budget, kept = made.sn_memory.budget_bytes, []
    for rounds in (4, 5, 7, 7, 2, 0, 7):
        made.zero_grad()
        if not rounds:
            assert made(rows(), torch.tensor(0)).item() == plain(rows(), torch.tensor(0)).item()
            continue
        found = []
        for it in (plain, made):
            it.zero_grad()
            x = rows(rounds)
            with AllocationTracker([*it.parameters(), x], kernels=True) as tracker:
                it(x, torch.tensor(rounds)).backward()
            found.append(([p.grad.clone() for p in it.parameters()], tracker.peak_bytes))
        assert same(found[0][0], found[1][0])
        kept.append(found[1][1] <= budget)
    # The first step with so many may have kept too much before that was known.
    assert kept[0]
    assert kept[3:] == [True] * 3
    assert made.sn_memory.plan.leaner_steps >= 1
    assert "another course" in repr(made.sn_memory.plan)


def test_passes_that_are_thrown_away_and_evaluation_between():
    torch.manual_seed(0)
    net = Looks(dropout=0.1)
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "60%")
    made(rows())
    with torch.no_grad():
        made.eval()
        assert torch.equal(made(rows(1)), plain.eval()(rows(1)))
    made.train()
    plain.train()
    with pytest.raises(RuntimeError):
        made(rows(1, many=7)[:, :5])
    assert all("forward" not in it.__dict__ for it in made.modules())
    assert same(trained(made, rows(2), 2)[0], trained(plain, rows(2), 2)[0])


def test_gradients_that_are_there_count():
    torch.manual_seed(0)
    net = Looks()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "70%")
    for it in (made, plain):
        torch.manual_seed(5)
        for seed in range(3):
            it(rows(seed)).backward()
    assert same([it.grad for it in made.parameters()], [it.grad for it in plain.parameters()])
    held = sum(it.grad.nbytes for it in made.parameters())
    x = rows(4)
    with AllocationTracker([*made.parameters(), x], kernels=True) as tracker:
        made(x).backward()
    assert tracker.peak_bytes + held <= made.sn_memory.budget_bytes


@pytest.mark.filterwarnings("ignore:a backward pass through:sn_memory.base.errors.PlanWarning")
@pytest.mark.filterwarnings("ignore:2 forward passes of:sn_memory.base.errors.PlanWarning")
def test_a_graph_that_is_kept_and_gradients_of_gradients():
    torch.manual_seed(0)
    net = Looks()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "60%")
    for it in (made, plain):
        loss = it(rows(1))
        loss.backward(retain_graph=True)
        loss.backward()
    assert same([it.grad for it in made.parameters()], [it.grad for it in plain.parameters()])
    made.zero_grad()
    loss = made(rows(1))
    with pytest.raises(ReplayError, match="gradients of gradients"):
        torch.autograd.grad(loss, [*made.parameters()], create_graph=True)
    loss = made(rows(1))
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_copies_and_pickles_are_plain():
    made = planned(Looks(), rows(), "60%")
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert "sn_memory" not in other.__dict__
        assert torch.equal(other(rows()), made(rows()))


def test_parts_that_are_frozen_and_inputs_that_take_gradients():
    torch.manual_seed(0)
    net = Looks()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "70%")
    for it in (made, plain):
        it.blocks[1].requires_grad_(False)
    assert same(trained(made, rows(2), 2)[0], trained(plain, rows(2), 2)[0])
    found = []
    for it in (made, plain):
        it.zero_grad()
        x = rows(3).requires_grad_()
        it(x).backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_other_sizes_of_input():
    torch.manual_seed(0)
    net = Looks()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "70%")
    budget = made.sn_memory.budget_bytes
    for many in (100, 255, 300):
        x = rows(many, many)
        # What is new is planned for, which allocates as well.
        made(x)
        (mine, peak), (own, _) = trained(made, x, 1), trained(plain, x, 1)
        assert same(mine, own)
        assert peak <= budget
    assert [it.how for it in made.sn_memory.kinds][1:] == ["planned by regions"] * 3


def test_what_is_changed_in_place_at_a_border_is_no_region():
    class Writes(Looks):
        def forward(self, x):
            for it in self.blocks:
                y = it(x)
                x = x * 1.0 + y
                y.mul_(2.0)
                if x.mean().item() > 1e6:
                    break
            return (x + y).square().mean()

    torch.manual_seed(0)
    net = Writes()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "95%")
    assert same(trained(made, rows(1), 1)[0], trained(plain, rows(1), 1)[0])


def test_a_hook_that_reads_another_module_makes_no_region():
    class Scaled(Looks):
        def __init__(self):
            super().__init__()
            self.scale = 1.0
            for it in self.blocks:
                it[1].register_forward_hook(lambda module, args, out: out * self.scale)

        def forward(self, x):
            self.scale = 1.0 + float(x[0, 0] > 0)
            return super().forward(x)

    torch.manual_seed(0)
    net = Scaled()
    made = planned(net, rows(), "98%")
    torch.manual_seed(0)
    plain = Scaled()
    for seed in range(4):
        assert same(trained(made, rows(seed), 1)[0], trained(plain, rows(seed), 1)[0])


def test_a_module_that_calls_itself_and_one_inside_a_checkpoint():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()

        def forward(self, x, again=True):
            x = self.inner(x)
            return self(x, again=False) if again else x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Twice(), block()

        def forward(self, x):
            x = x + self.first(x)
            if x.mean().item() > 1e6:
                return x.sum()
            x = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=False)
            return x.square().mean()

    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "90%", backend="regions")
    assert same(trained(made, rows(1), 1)[0], trained(plain, rows(1), 1)[0])


def test_calls_for_which_there_is_no_time_run_again(monkeypatch):
    torch.manual_seed(0)
    net = Masks()
    plain = copy.deepcopy(net)
    made = planned(net, rows(), "60%")
    monkeypatch.setattr(region_steps.TimeToPlan, "left", lambda self: False)
    x = rows(9)
    (mine, peak), (own, most) = trained(made, x, 1), trained(plain, x, 1)
    assert same(mine, own)
    assert peak < 0.7 * most
    assert made.sn_memory.plan.leaner_steps == 1


def _menu(generator):
    """Return plans of a call: the fastest keeps most."""
    kept = sorted(generator.sample(range(1, 60), 3), reverse=True)
    cost = sorted(generator.sample(range(1, 30), 2))
    return [
        RegionPlan(None, size, size + 5, size + generator.randrange(20), extra, "")
        for size, extra in zip(kept, [0, *cost], strict=True)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_choices_are_near_the_best_and_above_the_bound(seed):
    generator = random.Random(seed)
    calls = 5
    outside = np.array([generator.randrange(40) for _ in range(4 * calls + 1)])
    first = np.arange(calls) * 2 + 1
    line = Timeline(outside, first, 4 * calls - first)
    choices = Choices(line, [_menu(generator) for _ in range(calls)])
    every = [np.array(it) for it in itertools.product(range(3), repeat=calls)]
    low, high = min(map(choices.peak, every)), choices.peak(every[0])
    for part in (0.0, 0.3, 0.7, 1.0):
        budget = int(low + part * (high - low))
        best = min(choices.seconds(it) for it in every if choices.peak(it) <= budget)
        found = choices.solve(budget)
        assert choices.bound(budget) <= best + 1e-9
        assert choices.peak(found) <= budget or part == 0.0
        assert choices.peak(found) <= low * 1.05 + budget * (part > 0)
        if choices.peak(found) <= budget:
            assert choices.seconds(found) <= 1.5 * best + 1e-9


def test_a_moment_that_nothing_makes_lower_leaves_the_others_to_be():
    """What is simulated of it may be more than it takes, and the rest is what can be given."""
    line = Timeline(np.array([0, 0, 90, 0, 0]), np.array([0, 1]), np.array([4, 3]))
    plans = [RegionPlan(None, kept, kept, kept, extra, "") for kept, extra in ((60, 0), (5, 1))]
    stays = [RegionPlan(None, 0, 0, 0, 0.0, "")]
    choices = Choices(line, [stays, plans])
    assert choices.solve(50).tolist() == [0, 1]
    # The same whatever was asked for: what an error names as the least is found with it.
    line = Timeline(np.array([0, 90, 0, 0, 0]), np.array([0, 2]), np.array([4, 3]))
    choices = Choices(line, [stays, plans])
    assert [choices.solve(budget).tolist() for budget in (0, 50)] == [[0, 1]] * 2


def test_what_kernels_take_beside_is_made_room_for():
    """The choice that was measured above the budget is left, also where it had room to spare."""
    line = Timeline(np.zeros(3, np.int64), np.array([0]), np.array([2]))
    plans = [RegionPlan(None, kept, 0, 0, extra, "") for kept, extra in ((60, 0), (40, 1), (10, 2))]
    made, kernels = [], 12

    class Step(SimpleNamespace):
        def copied(self):
            made.append(Step(run=None))
            return made[-1]

    def measured(forward, run):
        return Measured({}, made[-1].chosen.choices.peak(made[-1].chosen.choice) + kernels, "", 1.0)

    search = SimpleNamespace(
        options=SimpleNamespace(resident_bytes=0, safely=False),
        arguments=(),
        measured=[None],
        model=nn.Identity(),
        run=measured,
    )
    asked = RegionsPlan((), 0, 0, 100, 1.0, 1.0, "", lower_bound_seconds=1.0)
    kind = SimpleNamespace(plans=plans)
    choosing = _Choosing(search, Step(), [("layer", kind, 0)], line, asked)
    for budget, kept in ((50, 10), (52, 40), (71, 40), (72, 60)):
        assert choosing.measured(budget).plan.choices[0].saved_bytes == kept
    with pytest.raises(BudgetError) as caught:
        choosing.measured(21)
    assert caught.value.peak_bytes == 22
