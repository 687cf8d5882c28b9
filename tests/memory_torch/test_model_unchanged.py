"""Planning, measuring and failing to plan leave a model as it was: whatever its forward does."""

import copy
import random
import warnings
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import Everything, images, mlp
from steps import grads, same
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import TraceError, checkpoint_policy, estimate, plan, trace, verify

# The generator behind np.random.rand and its like, which models draw from.
OLD = np.random.mtrand._rand


class Slotted:
    __slots__ = ("kept",)


class Plain(nn.Module):
    """Layers, and what the forward passes of others leave things in."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), mlp(2))
        self.history, self.table, self.last = [], {"deep": [{}]}, deque(maxlen=2)
        self.config = SimpleNamespace(calls=0, inner={"shape": None})
        self.numbers, self.slotted = set(), Slotted()
        self.count, self.tensors, self.slotted.kept = torch.zeros(1), [torch.zeros(2)], None
        self.register_buffer("seen", torch.zeros(32))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("ranges", torch.empty(0))

    def forward(self, x):
        return self.inner(x)


def model_of(forward):
    """The class of a model with this forward pass."""
    return type(forward.__name__, (Plain,), {"forward": forward})


@model_of
def values(self, x):
    h = self.inner(x)
    return h if h.sum().item() < 1e9 else -h


@model_of
def notes(self, x):
    """Keeps what it computes in containers, at several depths, and in objects it has."""
    h = self.inner(x)
    self.history.append(h.detach())
    self.table["deep"][0]["mean"] = h.detach().mean()
    self.last.append(len(self.history))
    self.numbers.add(len(self.history))
    self.config.calls += 1
    self.config.inner["shape"] = h.shape
    self.slotted.kept = h
    return h


@model_of
def configures(self, x):
    self.config.calls += 1
    return self.inner(x)


@model_of
def hooks(self, x):
    """Registers hooks in its first run, as transformers does for hidden states."""
    if not getattr(self, "_hooked", False):
        self.inner[0].register_forward_hook(lambda module, args, out: out * 2)
        self._hooked = True
    return self.inner(x)


@model_of
def lazy(self, x):
    """Makes a buffer and a parameter in its first run, and a module; switches modes."""
    if not hasattr(self, "mask"):
        self.register_buffer("mask", torch.ones(32))
        self.register_parameter("gain", nn.Parameter(torch.ones(32)))
        self.more = nn.Linear(32, 32)
    self.inner[1].eval()
    self.inner[0].bias.requires_grad_(False)
    return self.more(self.inner(x) * self.mask * self.gain)


@model_of
def replaces(self, x):
    """Puts new tensors in the place of buffers, and counts in tensors that are none."""
    h = self.inner(x)
    self.seen = self.seen + h.detach().mean(0)
    self.steps += 1
    self.count.add_(1)
    self.tensors[0].add_(1)
    return h + self.seen


@model_of
def counts(self, x):
    self.count.add_(1)
    return self.inner(x) * self.count


@model_of
def grows(self, x):
    """Gives a buffer the size of what comes first, as an observer of quantization does."""
    h = self.inner(x)
    highest = h.detach().amax(0)
    if self.ranges.numel() == 0:
        self.ranges.resize_(highest.shape).copy_(highest)
    else:
        self.ranges.copy_(torch.max(self.ranges, highest))
    return h + self.ranges


@model_of
def gambles(self, x):
    return self.inner(x) * (random.random() + OLD.rand() + torch.rand(()))


@model_of
def seeds(self, x):
    torch.manual_seed(7)
    return self.inner(x)


@model_of
def seeds_inside(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.rand(32)
    return self.inner(x + noise)


@model_of
def freezes(self, x):
    self.inner[0].bias.requires_grad_(False)
    return self.inner(x)


@model_of
def clamps(self, x):
    """Bounds its weights, as a critic of Wasserstein distances does."""
    with torch.no_grad():
        for it in self.parameters():
            it.clamp_(-0.05, 0.05)
    return self.inner(x)


class OfItsOwnError(Exception):
    pass


@model_of
def fails(self, x):
    """Leaves marks and raises."""
    self.history.append(random.random() + OLD.rand())
    self.inner(x + torch.rand(()))
    self.inner[1].eval()
    self.inner[0].register_forward_hook(lambda *_: None)
    raise OfItsOwnError


class Observed(Plain):
    """Its hooks keep what they see: in a closure, in a bound object, in a global."""

    def __init__(self):
        super().__init__()
        self.seen_by_test, keeper = {}, self.config
        seen = self.seen_by_test
        self.inner[0].register_forward_hook(lambda module, args, out: seen.update(out=out))
        self.inner[1].register_forward_hook(lambda module, args, out: SEEN.append(out))
        self.inner[3].register_forward_hook(
            lambda module, args, out: keeper.inner.update(shape=out)
        )


SEEN = []


class Momentum(Plain):
    """A momentum encoder: its forward writes into parameters."""

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.inner).requires_grad_(False)
        for it in self.slow.parameters():
            it.data.add_(0.01)

    def forward(self, x):
        self.follow()
        return self.inner(x) - self.slow(x)

    def pairs(self):
        return zip(self.slow.parameters(), self.inner.parameters(), strict=True)

    def follow(self):
        with torch.no_grad():
            for slow, quick in self.pairs():
                slow.mul_(0.9).add_(quick, alpha=0.1)


class MomentumByData(Momentum):
    def follow(self):
        for slow, quick in self.pairs():
            slow.data.mul_(0.9).add_(quick.data, alpha=0.1)


class MomentumAtOnce(Momentum):
    def follow(self):
        with torch.no_grad():
            torch._foreach_lerp_([*self.slow.parameters()], [*self.inner.parameters()], 0.1)


class MomentumInNewMemory(Momentum):
    def follow(self):
        for slow, quick in self.pairs():
            slow.data = slow.data * 0.9 + quick.data * 0.1


class MomentumInLists(Momentum):
    """Keeps lists of the parameters, not in its modules alone."""

    def __init__(self):
        super().__init__()
        self.listed = [*super().pairs()]

    def pairs(self):
        return self.listed


class OwnGenerators(Plain):
    """Draws from generators of its own: of each kind, and by Python a constant of every step."""

    def __init__(self, place=None):
        super().__init__()
        self.generators = [np.random.default_rng(1), np.random.RandomState(1), random.Random(1)]
        self.of_torch, self.place = torch.Generator(), place

    def forward(self, x):
        draws = (self.generators[0].random, self.generators[1].rand, self.generators[2].random)
        if self.place is not None:
            return self.inner(x + float(draws[self.place]()))
        drawn = sum(float(it()) for it in draws)
        return self.inner(x + torch.rand(x.shape, generator=self.of_torch) + drawn)


MOMENTUM = (Momentum, MomentumByData, MomentumAtOnce)
MODELS = (
    *(Plain, values, notes, configures, hooks, lazy, replaces, grows, gambles, fails, Observed),
    *(*MOMENTUM, MomentumInNewMemory, MomentumInLists, clamps, OwnGenerators, freezes),
    Everything,
)


def look(value, depth=8):
    """Describe a value so that any change shows: tensors by identity, version and bits."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        bits = value.detach().clone().numpy().tobytes() if kind != "FakeTensor" else None
        grad = None if value.grad is None else (id(value.grad), look(value.grad))
        return kind, id(value), bits, value.requires_grad, grad
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.RandomState):
        _, words, *rest = value.get_state()
        return words.tobytes(), rest
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if depth == 0 or isinstance(value, nn.Module | type) or callable(value):
        return id(value)
    if isinstance(value, dict):
        return id(value), tuple((look(k), look(v, depth - 1)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value), tuple(look(it, depth - 1) for it in value)
    if isinstance(value, SimpleNamespace):
        return id(value), look(vars(value), depth - 1)
    if isinstance(value, Slotted):
        return id(value), look(value.kept, depth - 1)
    return repr(value)


def looks_of(model):
    """All of a model and of what is next to it."""
    seen = {name: (id(it), look(it.__dict__)) for name, it in model.named_modules()}
    seen["state"] = [(name, look(it)) for name, it in model.state_dict(keep_vars=True).items()]
    seen["chance"] = look(torch.default_generator), random.getstate(), look(OLD)
    seen["outside"] = look(SEEN), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return seen


WAYS = {
    "graph": lambda model, x: plan(model, x, "95%", backend="graph", planner="sqrt_n"),
    "too little": lambda model, x: plan(model, x, 100, profile=False, planner="sqrt_n"),
    "auto": lambda model, x: plan(model, x, "95%", profile=False, planner="sqrt_n"),
    "modules": lambda model, x: plan(model, x, "95%", backend="modules"),
    "modules, too little": lambda model, x: plan(model, x, 100, backend="modules"),
    "trace": lambda model, x: trace(model, x, profile=False),
    "estimate": lambda model, x: estimate(model, x, optimizer=torch.optim.Adam),
    "verify": lambda model, x: verify(plan(model, x, "100%", profile=False), x),
    "compile": lambda model, x: plan(model, x, "100%", backend="compile", profile=False),
}
# Each model by the ways that others are parts of; those that leave most marks by all.
CASES = [(kind, way) for kind in MODELS for way in ("auto", "estimate")]
CASES += [(kind, "modules") for kind in MODELS[::2]]
CASES += [(kind, way) for kind in (lazy, Everything) for way in WAYS if (kind, way) not in CASES]
CASES += [(Plain, "too little"), (notes, "too little"), (values, "compile"), (fails, "compile")]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_the_model_is_as_it_was(kind, way):
    if way == "compile":
        torch._dynamo.reset()
    model = kind()
    x = images() if kind is Everything else torch.randn(128, 32)
    # Gradients of an earlier step, one frozen weight, one part in another mode.
    for it in model.parameters():
        it.grad = torch.ones_like(it)
    first = next(model.parameters())
    first.grad = None
    list(model.modules())[-1].eval()
    SEEN.clear()
    before = looks_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            WAYS[way](model, x)
        except (TraceError, BudgetError, OfItsOwnError):
            assert kind is not Plain or "too little" in way
    after = looks_of(model)
    assert not [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    assert next(model.parameters()) is first


@model_of
def adds_condition(self, x):
    return self.inner(x + self.condition)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "policy"])
def test_what_made_the_sample_or_an_attribute_is_left_alone(way, held):
    """A sample is often what an encoder returns, and a condition may be set on the model."""
    if way == "compile":
        torch._dynamo.reset()
    scale = torch.ones(32, requires_grad=True)
    computed, model = (torch.randn(128, 32) * scale).exp(), adds_condition()
    model.condition, x = (computed, torch.randn(128, 32)) if held else (0.0, computed)
    ways = WAYS | {"policy": lambda model, x: checkpoint_policy(model, x, "95%", profile=False)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ways[way](model, x)
        except TraceError:
            assert held, "as an argument it can be planned for"
        except BudgetError:
            assert "too little" in way or way == "policy"
    assert scale.grad is None
    assert model.condition is (computed if held else 0.0)
    computed.sum().backward()  # what its backward pass needs is there


REPLAYED = "a replay of its calls would not"
REFUSED = [
    *((kind, REPLAYED) for kind in (notes, configures, hooks, Observed)),
    (values, "depend on values"),
    (replaces, "replaces seen"),
    (grows, "resizes ranges, .* run one step before planning"),
    (gambles, "draws from random"),
    *((kind, "seeds torch's generator") for kind in (seeds, seeds_inside)),
    (freezes, r"sets requires_grad of inner\.0\.bias"),
    (MomentumInNewMemory, r"sets \.data of slow\.0\.weight"),
    (MomentumInLists, "keeps outside of its modules"),
    *((partial(OwnGenerators, at), "generator of the model's own") for at in (None, 0, 1, 2)),
]


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_what_a_replay_would_not_do_is_refused(kind, why):
    with pytest.raises(TraceError, match=why):
        trace(kind(), torch.randn(128, 32), profile=False)


def smallest(model, x):
    """The smallest budget by modules, at which all runs again that may."""
    with pytest.raises(BudgetError) as refusal:
        plan(model, x, 100, backend="modules")
    planned = plan(model, x, refusal.value.peak_bytes, backend="modules")
    assert planned.sn_memory.plan.decided("recompute")
    return planned


TRAINED = [
    *((kind, "modules") for kind in (notes, hooks, counts, grows, Momentum, clamps)),
    *((kind, "graph") for kind in (counts, *MOMENTUM, clamps)),
]


@pytest.mark.parametrize(("kind", "backend"), TRAINED)
def test_a_forward_that_leaves_a_mark_trains_as_ever(kind, backend):
    """Its trial leaves none, so it agrees with the model's own step."""
    model, x = kind(), torch.randn(128, 32)
    twin = copy.deepcopy(model)
    budget = "90%" if backend == "graph" and kind is not counts else "100%"
    planned = plan(model, x, budget, backend=backend, profile=False)
    assert not planned.sn_memory.trial.different
    if kind in (notes, hooks):
        planned = smallest(model, x)
    else:
        assert not verify(planned, x).different
    losses = []
    for it in (planned, twin):
        optimizer = torch.optim.SGD([p for p in it.parameters() if p.requires_grad], 0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(it(x).square().mean())
            losses[-1].backward()
            optimizer.step()
    assert same(losses[:3], losses[3:])
    assert same(planned.parameters(), twin.parameters())
    assert same(planned.history, twin.history)
    assert len(planned.history) == planned.config.calls == 3 * (kind is notes)
    if kind is counts:
        assert planned.count == twin.count == 3


class Cache:
    def __init__(self):
        self.rows = None


class Attends(nn.Sequential):
    """Adds what it computes to a cache, and uses all that is there."""

    def forward(self, x, *, cache=None):
        rows = torch.tanh(self[0](x))
        cache.rows = rows if cache.rows is None else torch.cat([cache.rows, rows])
        return torch.tanh(self[1](cache.rows.mean(0) + x)).exp()


class Reads(nn.Sequential):
    """Changes nothing, but what it reads is longer when it would run again."""

    def forward(self, x, *, cache):
        return torch.tanh(self[1](torch.tanh(self[0](x)) + cache.rows.sum(0))).exp()


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = (Attends, Reads, Attends)
        parts = (it(nn.Linear(32, 32), nn.Linear(32, 32)) for it in kinds)
        self.parts = nn.ModuleList([*parts, mlp(2)])

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        for part in self.parts[:3]:
            x = x + part(x, cache=cache) / 100
        return self.parts[3](x)


def test_a_module_that_appends_to_a_cache_runs_once():
    model, x = Caching(), torch.randn(64, 32)
    planned = smallest(model, x)
    names = {it.name for it in planned.sn_memory.plan.choices}
    assert not names & {"parts.0", "parts.1", "parts.2"}
    assert verify(planned, x).equal


class Fills(Plain):
    """Appends to a list that it gets."""

    def forward(self, x, rows):
        rows.append(self.inner(x))
        return rows[-1]


@pytest.mark.parametrize(("kind", "passed"), [(Caching, Cache()), (Fills, [torch.zeros(2)])])
def test_what_is_passed_to_be_filled_is_as_it_was(kind, passed):
    model, sample = kind(), (torch.randn(128, 32), passed)
    with pytest.raises(TraceError, match="changes what it is given"):
        trace(model, sample, profile=False)
    plan(model, sample, "100%", backend="modules")
    assert passed.rows is None if kind is Caching else len(passed) == 1


def test_a_module_that_writes_into_a_parameter_does_not_run_again():
    """Run again, it would do so twice."""

    class WritesInside(nn.Linear):
        def forward(self, x):
            self.bias.data.mul_(0.9)
            return torch.tanh(super().forward(x))

    model = nn.Sequential(mlp(6), WritesInside(32, 32), mlp(2))
    twin, x = copy.deepcopy(model), torch.randn(128, 32)
    planned = plan(model, x, "80%", backend="modules")
    for it in (planned, twin):
        it(x).square().mean().backward()
    assert same([*planned.parameters(), *grads(planned)], [*twin.parameters(), *grads(twin)])


# What no module holds: a plan must not leave it out, a second run not leave it twice.


class Collector:
    losses: list = []  # noqa: RUF012 - one for all, as libraries of experts have it


LOSSES, BY_PLACE, TABLES, HELD = [], {}, {}, []


def note(module, loss):
    BY_PLACE[module.place] = loss


def in_closure(kept=HELD):
    return lambda module, loss: kept.append(loss)


# How a layer leaves a loss, and where it is then.
LEFT = {
    "list": (lambda module, loss: LOSSES.append(loss), LOSSES),
    "class": (lambda module, loss: Collector.losses.append(loss), Collector.losses),
    "function": (lambda module, loss: note(module, loss), BY_PLACE),
    "closure": (in_closure(), HELD),
}


def table(width):
    if width not in TABLES:
        TABLES[width] = torch.linspace(0.5, 1.5, width)
    return TABLES[width]


class Gated(nn.Module):
    """A layer whose loss of balance the loop is to add."""

    def __init__(self, place):
        super().__init__()
        self.place, self.body, self.gate = place, mlp(2), nn.Linear(32, 4)

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        self.leave(gates.mean(0).square().sum() * (self.place + 1))
        return self.body(x * table(32)) * gates.amax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("way", "backend"),
    [(way, ("regions", "modules")[at % 2]) for at, way in enumerate(LEFT)] + [("list", "modules")],
)
def test_what_is_left_outside_of_modules_is_there_in_each_step(way, backend):
    leave, place = LEFT[way]
    place.clear()
    TABLES.clear()
    layer = type("Layer", (Gated,), {"leave": leave})
    model, x = nn.Sequential(*(layer(place) for place in range(4))), torch.randn(64, 32)
    with pytest.raises(TraceError, match="outside of its modules"):
        plan(model, x, "100%", backend="graph", profile=False)
    planned = plan(model, x, "95%", backend=backend, profile=False)
    assert not place
    results = []
    for it in (model, planned):
        for _ in range(2):
            place.clear()
            out = it(x)
            losses = [*(place.values() if isinstance(place, dict) else place)]
            (out.square().mean() + sum(losses)).backward()
        assert len(place) == len(losses) == 4
        results.append([*(loss.detach() for loss in losses), *grads(model)])
        model.zero_grad()
    assert same(*results)


class Remembers(torch.autograd.Function):
    """Keeps its own result, as torch advises against: a cycle that nobody lets go of."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = torch.exp(x)
        return ctx.result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.result


@model_of
def of_tables(self, x):
    return self.inner(x * table(32))


@model_of
def of_functions(self, x):
    return self.inner(Remembers.apply(x @ self.inner[0].weight))


@pytest.mark.parametrize(
    ("kind", "backend"), [(of_tables, "graph"), (of_tables, "modules"), (of_functions, "graph")]
)
def test_what_functions_keep_is_no_reason_against_a_plan(kind, backend):
    """In a cache of their own, or for their backward pass."""
    TABLES.clear()
    model, x = kind(), torch.randn(64, 32)
    planned = plan(model, x, "100%", backend=backend, profile=False)
    planned(x).sum().backward()
    with torch.no_grad():
        assert torch.isfinite(planned(x)).all()
    assert kind is of_functions or type(TABLES[32]) is torch.Tensor
