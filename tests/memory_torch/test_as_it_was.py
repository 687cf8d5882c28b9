"""Planning, measuring and failing to plan leave a model as it was: whatever its forward does."""

import copy
import random
import warnings
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from small_models import Everything, images, mlp
from steps import grads, same
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import TraceError, estimate, plan, trace, verify

# The generator behind np.random.rand and its like, which models draw from.
OLD = np.random.mtrand._rand


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), mlp(2))


class Appends(Base):
    """Keeps what it computes in containers, at several depths."""

    def __init__(self):
        super().__init__()
        self.history, self.table, self.last = [], {"deep": [{}]}, deque(maxlen=2)
        self.kinds = set()

    def forward(self, x):
        h = self.inner(x)
        self.history.append(h.detach())
        self.table["deep"][0]["mean"] = h.detach().mean()
        self.last.append(len(self.history))
        self.kinds.add(len(self.history))
        return h


class Settings:
    def __init__(self):
        self.calls, self.inner = 0, {"shape": None}


class Slotted:
    __slots__ = ("kept",)


class Configured(Base):
    """Writes into objects it has."""

    def __init__(self):
        super().__init__()
        self.config, self.slotted = Settings(), Slotted()
        self.slotted.kept = None

    def forward(self, x):
        h = self.inner(x)
        self.config.calls += 1
        self.config.inner["shape"] = h.shape
        self.slotted.kept = h
        return h


class Hooks(Base):
    """Registers hooks in its first run, as transformers does for hidden states."""

    def forward(self, x):
        if not getattr(self, "_hooked", False):
            self.inner[0].register_forward_hook(lambda module, args, out: out * 2)
            self._hooked = True
        return self.inner(x)


class Lazy(Base):
    """Makes a buffer and a parameter in its first run, and a module; switches modes."""

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(32))
            self.register_parameter("gain", nn.Parameter(torch.ones(32)))
            self.more = nn.Linear(32, 32)
        self.inner[1].eval()
        self.inner[0].bias.requires_grad_(False)
        return self.more(self.inner(x) * self.mask * self.gain)


class Replaces(Base):
    """Puts new tensors in the place of buffers, and counts in a tensor that is none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))
        self.register_buffer("steps", torch.zeros(()))
        self.count = torch.zeros(1)
        self.tensors = [torch.zeros(2)]

    def forward(self, x):
        h = self.inner(x)
        self.seen = self.seen + h.detach().mean(0)
        self.steps += 1
        self.count.add_(1)
        self.tensors[0].add_(1)
        return h + self.seen


class Gambles(Base):
    def forward(self, x):
        return self.inner(x) * (random.random() + OLD.rand() + torch.rand(()))


class OfItsOwnError(Exception):
    pass


class Fails(Base):
    """Leaves marks and raises."""

    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):
        self.history.append(random.random() + OLD.rand())
        self.inner(x + torch.rand(()))
        self.inner[1].eval()
        self.inner[0].register_forward_hook(lambda *_: None)
        raise OfItsOwnError


class Observed(Base):
    """Its hooks keep what they see: in a closure, in a bound object, in a global."""

    def __init__(self):
        super().__init__()
        seen = {}
        self.keeper = Settings()
        self.inner[0].register_forward_hook(lambda module, args, out: seen.update(out=out))
        self.inner[1].register_forward_hook(lambda module, args, out: SEEN.append(out))
        self.inner[3].register_forward_hook(keeping(self.keeper))
        self.seen_by_test = seen

    def forward(self, x):
        return self.inner(x)


SEEN = []


def keeping(settings):
    def hook(module, args, out):
        settings.inner["shape"] = out

    return hook


class Plain(Base):
    def forward(self, x):
        return self.inner(x)


class Values(Base):
    def forward(self, x):
        h = self.inner(x)
        return h if h.sum().item() < 1e9 else -h


class Momentum(Base):
    """A momentum encoder: its forward writes into parameters."""

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.inner).requires_grad_(False)
        for it in self.slow.parameters():
            it.data.add_(0.01)

    def forward(self, x):
        self.follow()
        return self.inner(x) - self.slow(x)

    def follow(self):
        with torch.no_grad():
            for slow, quick in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                slow.mul_(0.9).add_(quick, alpha=0.1)


class MomentumByData(Momentum):
    def follow(self):
        for slow, quick in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
            slow.data.mul_(0.9).add_(quick.data, alpha=0.1)


class MomentumAtOnce(Momentum):
    def follow(self):
        with torch.no_grad():
            torch._foreach_lerp_([*self.slow.parameters()], [*self.inner.parameters()], 0.1)


class MomentumInNewMemory(Momentum):
    def follow(self):
        for slow, quick in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
            slow.data = slow.data * 0.9 + quick.data * 0.1


class MomentumInLists(Momentum):
    """Keeps lists of the parameters, beside its modules."""

    def __init__(self):
        super().__init__()
        self.pairs = [*zip(self.slow.parameters(), self.inner.parameters(), strict=True)]

    def follow(self):
        with torch.no_grad():
            for slow, quick in self.pairs:
                slow.mul_(0.9).add_(quick, alpha=0.1)


class Clamps(Base):
    """Bounds its weights, as a critic of Wasserstein distances does."""

    def forward(self, x):
        with torch.no_grad():
            for it in self.parameters():
                it.clamp_(-0.05, 0.05)
        return self.inner(x)


class OwnGenerators(Base):
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


class Freezes(Base):
    def forward(self, x):
        self.inner[0].bias.requires_grad_(False)
        return self.inner(x)


class Counts(Base):
    """Counts in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x):
        self.count.add_(1)
        return self.inner(x) * self.count


MOMENTUM = (Momentum, MomentumByData, MomentumAtOnce)
MODELS = (
    *(Plain, Values, Appends, Configured, Hooks, Lazy, Replaces, Gambles, Fails, Observed),
    *(*MOMENTUM, MomentumInNewMemory, MomentumInLists, Clamps, OwnGenerators, Freezes),
    Everything,
)


def look(value, depth=8):
    """Describe a value so that any change shows: tensors by identity, version and bits."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__
        bits = value.detach().clone().numpy().tobytes() if kind != "FakeTensor" else None
        grad = None if value.grad is None else (id(value.grad), look(value.grad))
        return kind, id(value), bits, value.requires_grad, grad
    if depth == 0 or isinstance(value, nn.Module | type) or callable(value):
        return id(value)
    if isinstance(value, dict):
        return id(value), tuple((look(k), look(v, depth - 1)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value), tuple(look(it, depth - 1) for it in value)
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, Settings):
        return id(value), look(vars(value), depth - 1)
    if isinstance(value, Slotted):
        return id(value), look(value.kept, depth - 1)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.RandomState | random.Random):
        return repr(value.get_state() if hasattr(value, "get_state") else value.getstate())
    return repr(value)


def looks_of(model):
    """All of a model and of what is beside it."""
    found = {name: (id(it), look(it.__dict__)) for name, it in model.named_modules()}
    found["state"] = [(name, look(it)) for name, it in model.state_dict(keep_vars=True).items()]
    found["chance"] = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        repr(OLD.get_state()),
    )
    found["beside"] = look(SEEN), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return found


def differences(before, after):
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


WAYS = {
    "graph": lambda model, x: plan(model, x, "95%", backend="graph", planner="sqrt_n"),
    "too little": lambda model, x: plan(model, x, 100, profile=False, planner="sqrt_n"),
    "auto": lambda model, x: plan(model, x, "95%", profile=False, planner="sqrt_n"),
    "modules": lambda model, x: plan(model, x, "95%", backend="modules"),
    "modules, too little": lambda model, x: plan(model, x, 100, backend="modules"),
    "trace": lambda model, x: trace(model, x, profile=False),
    "estimate": lambda model, x: estimate(model, x, optimizer=torch.optim.Adam),
    "verify": lambda model, x: verify(plan(model, x, "100%", profile=False), x),
}
# Each model by the ways that others are parts of; those that leave most marks by all.
CASES = [(kind, way) for kind in MODELS for way in ("auto", "estimate", "modules")]
FULL = (Plain, Appends, Lazy, Momentum, Everything)
CASES += [(kind, way) for kind in FULL for way in WAYS if (kind, way) not in CASES]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_the_model_is_as_it_was(kind, way):
    torch.manual_seed(0)
    model = kind()
    x = images() if kind is Everything else torch.randn(128, 32)
    # Gradients of an earlier step, one frozen weight, one part in another mode.
    for it in model.parameters():
        it.grad = torch.ones_like(it)
    first = next(model.parameters())
    first.grad = None
    list(model.modules())[-1].eval()
    SEEN.clear()
    kept, before = first, looks_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            WAYS[way](model, x)
        except (TraceError, BudgetError, OfItsOwnError):
            assert kind is not Plain or "too little" in way
    assert not differences(before, looks_of(model))
    assert next(model.parameters()) is kept


@pytest.mark.parametrize("kind", [Values, Fails, Everything])
def test_the_model_is_as_it_was_under_compile(kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = kind(), images() if kind is Everything else torch.randn(128, 32)
    before = looks_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan(model, x, "100%", backend="compile", profile=False)
        except TraceError:
            assert kind in (Values, Fails)
    assert not differences(before, looks_of(model))


REPLAYED = "a replay of its calls would not"
OF_ITS_OWN = "generator of the model's own"
REFUSED = [
    *((kind, REPLAYED) for kind in (Appends, Configured, Hooks, Observed)),
    (Freezes, r"sets requires_grad of inner\.0\.bias"),
    (MomentumInNewMemory, r"sets \.data of slow\.0\.weight"),
    (MomentumInLists, "keeps elsewhere than in its modules"),
    *((partial(OwnGenerators, place), OF_ITS_OWN) for place in (None, 0, 1, 2)),
]


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_what_a_replay_would_not_do_is_refused(kind, why):
    with pytest.raises(TraceError, match=why):
        trace(kind(), torch.randn(128, 32), profile=False)


TRAINED = [
    *((kind, "modules") for kind in (Appends, Configured, Hooks, Counts, *MOMENTUM, Clamps)),
    *((kind, "graph") for kind in (Counts, *MOMENTUM, Clamps)),
]


@pytest.mark.parametrize(("kind", "backend"), TRAINED)
def test_a_forward_that_leaves_a_mark_trains_as_ever(kind, backend):
    """Its trial leaves none, so it agrees with the model's own step."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(128, 32)
    twin = copy.deepcopy(model)
    budget = "90%" if backend == "graph" and kind is not Counts else "100%"
    planned = plan(model, x, budget, backend=backend, profile=False)
    assert not planned.sn_memory.trial.different
    assert kind in (Appends, Configured, Hooks) or not verify(planned, x).different
    if kind in (Appends, Configured, Hooks):  # all that may run again does
        with pytest.raises(BudgetError) as refusal:
            plan(model, x, 100, backend=backend)
        planned = plan(model, x, refusal.value.peak_bytes, backend=backend)
        assert planned.sn_memory.plan.decided("recompute")
    losses = []
    for it in (planned, twin):
        optimizer = torch.optim.SGD([p for p in it.parameters() if p.requires_grad], 0.1)
        losses.append([])
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = it(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert same(planned.parameters(), twin.parameters())
    if kind is Appends:
        assert len(planned.history) == 3
        assert same(planned.history, twin.history)
    if kind is Configured:
        assert planned.config.calls == twin.config.calls == 3
    if kind is Counts:
        assert planned.count == twin.count == 3


class Cache:
    def __init__(self):
        self.rows = None


class Attends(nn.Module):
    """Adds what it computes to a cache, and uses all that is there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, *, cache=None):
        rows = torch.tanh(self.first(x))
        cache.rows = rows if cache.rows is None else torch.cat([cache.rows, rows])
        return torch.tanh(self.second(cache.rows.mean(0) + x)).exp()


class Reads(nn.Module):
    """Changes nothing, but what it reads is longer when it would run again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, *, cache):
        return torch.tanh(self.second(torch.tanh(self.first(x)) + cache.rows.sum(0))).exp()


class InPlace(nn.Module):
    """Changes an input that is passed by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, *, scale):
        scale.mul_(1.5)
        return torch.tanh(self.second(torch.tanh(self.first(x)))).exp() * scale


class Caching(nn.Module):
    def __init__(self, given=False):
        super().__init__()
        self.parts = nn.ModuleList([Attends(), Reads(), Attends(), mlp(2)])
        self.scaling = InPlace()

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        for part in self.parts[:3]:
            x = x + part(x, cache=cache) / 100
        scale = torch.ones(32)
        x = self.scaling(x, scale=scale)
        return self.parts[3](x)


def test_a_module_that_appends_to_a_cache_runs_once():
    torch.manual_seed(0)
    model, x = Caching(), torch.randn(64, 32)
    with pytest.raises(BudgetError) as refusal:
        plan(model, x, 100, backend="modules")
    # All that may run again does, and it is right.
    planned = plan(model, x, refusal.value.peak_bytes, backend="modules")
    names = {it.name for it in planned.sn_memory.plan.choices}
    assert not names & {"parts.0", "parts.1", "parts.2", "scaling"}
    assert planned.sn_memory.plan.decided("recompute")
    assert verify(planned, x).equal


def test_a_cache_in_the_sample_is_as_it_was():
    torch.manual_seed(0)
    model, x, cache = Caching(), torch.randn(64, 32), Cache()
    with pytest.raises(TraceError, match="changes what it is given"):
        trace(model, (x, cache), profile=False)
    assert cache.rows is None
    plan(model, (x, cache), "100%", backend="modules")
    assert cache.rows is None


class Fills(Base):
    """Appends to a list that it is given."""

    def forward(self, x, found):
        found.append(self.inner(x))
        return found[-1]


def test_a_list_in_the_sample_is_as_it_was():
    model, found = Fills(), [torch.zeros(2)]
    with pytest.raises(TraceError, match="changes what it is given"):
        trace(model, (torch.randn(128, 32), found), profile=False)
    plan(model, (torch.randn(128, 32), found), "100%", backend="modules")
    assert len(found) == 1


class WritesInside(nn.Module):
    """A module that writes into its own parameter: run again, it would do so twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.gain = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x):
        self.gain.data.mul_(0.9)
        return torch.tanh(self.linear(x) * self.gain)


def test_a_module_that_writes_into_a_parameter_does_not_run_again():
    torch.manual_seed(0)
    model = nn.Sequential(mlp(6), WritesInside(), mlp(2))
    twin, x = copy.deepcopy(model), torch.randn(128, 32)
    planned = plan(model, x, "80%", backend="modules")
    for it in (planned, twin):
        it(x).square().mean().backward()
    assert same([*planned.parameters(), *grads(planned)], [*twin.parameters(), *grads(twin)])


# What no module holds: a plan must not leave it out, a second run not leave it twice.


class Collector:
    losses: list = []  # noqa: RUF012 - one for all, as libraries of experts have it


LOSSES, LAST, TABLES = [], {}, {}


def note(module, loss):
    LAST[module.place] = loss
    LAST["latest"] = loss


def table(width):
    if width not in TABLES:
        TABLES[width] = torch.linspace(0.5, 1.5, width)
    return TABLES[width]


class Gated(nn.Module):
    """A layer whose loss of balance the loop is to add: it leaves it where `leave` does."""

    def __init__(self, place):
        super().__init__()
        self.place, self.body, self.gate = place, mlp(2), nn.Linear(32, 4)

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        self.leave(gates.mean(0).square().sum() * (self.place + 1))
        return self.body(x * table(32)) * gates.amax(-1, keepdim=True)


def gated(way, held):
    """Layers that leave their loss in a global list, one of a class, a mapping or `held`."""

    class Layer(Gated):
        def leave(self, loss):
            if way == "list":
                LOSSES.append(loss)
            elif way == "class":
                Collector.losses.append(loss)
            elif way == "function":
                note(self, loss)
            else:
                held.append(loss)

    return nn.Sequential(*(Layer(place) for place in range(4)))


def left_by(way, held):
    kept = {"list": LOSSES, "class": Collector.losses, "closure": held}.get(way)
    return [*LAST.values()] if kept is None else kept


@pytest.mark.parametrize("backend", ["regions", "modules"])
@pytest.mark.parametrize("way", ["list", "class", "function", "closure"])
def test_what_is_left_beside_modules_is_there_in_each_step(way, backend):
    held, found = [], []
    for kind in (LOSSES, Collector.losses, LAST, TABLES):
        kind.clear()
    torch.manual_seed(0)
    model, x = gated(way, held), torch.randn(64, 32)
    with pytest.raises(TraceError, match="outside of its modules"):
        plan(model, x, "100%", backend="graph", profile=False)
    planned = plan(model, x, "95%", backend=backend, profile=False)
    assert not left_by(way, held)
    for it in (model, planned):
        for _ in range(2):
            left_by(way, held).clear()
            LAST.clear()
            out = it(x)
            losses = [*left_by(way, held)]
            (out.square().mean() + sum(losses)).backward()
            after = [*left_by(way, held)]
        assert len(after) == len(losses)
        found.append([*(loss.detach() for loss in after), *grads(model)])
        model.zero_grad()
    assert same(*found)


class OfTables(Base):
    def forward(self, x):
        return self.inner(x * table(32))


@pytest.mark.parametrize("backend", ["graph", "modules"])
def test_a_cache_of_a_function_is_no_reason_against_a_plan(backend):
    TABLES.clear()
    model, x = OfTables(), torch.randn(64, 32)
    planned = plan(model, x, "100%", backend=backend, profile=False)
    planned(x).sum().backward()
    with torch.no_grad():
        assert torch.isfinite(planned(x)).all()
    assert type(TABLES[32]) is torch.Tensor


class Remembers(torch.autograd.Function):
    """Keeps its own result, as torch advises against: a cycle that nobody lets go of."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = torch.exp(x)
        return ctx.result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.result


class OfFunctions(Base):
    def forward(self, x):
        return self.inner(Remembers.apply(x @ self.inner[0].weight))


def test_what_a_function_keeps_for_its_backward_pass_is_not_left_beside():
    model, x = OfFunctions(), torch.randn(64, 32)
    assert plan(model, x, "100%", backend="graph", profile=False).sn_memory.backend == "graph"
