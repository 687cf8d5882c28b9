"""Parameters, gradients and optimizer state on the host: the same bits, within the budget."""

import copy
import gc
import itertools
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from late_lanes import OddLanes
from small_models import module_of, most_scratch
from steps import grads, optimizer_tensors, same
from torch import nn

from sn_memory import BudgetError, PlanError, check_plan
from sn_memory.torch import HostState, ReplayError, StorageTracker, TraceError, plan, verify
from sn_memory.torch.host import buffers
from sn_memory.torch.state import parameter
from sn_memory.torch.state.model_state import check_model

# The same plans wherever they are made.
SETTINGS = {"profile": False, "time_limit_s": 0.5}
pytestmark = pytest.mark.usefixtures("counted_work")
OPTIMIZERS = {
    "adamw": lambda it: torch.optim.AdamW(it, lr=1e-2),
    "momentum": lambda it: torch.optim.SGD(it, lr=1e-1, momentum=0.9, weight_decay=1e-2),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda it: torch.optim.RMSprop(it, lr=1e-3),
    "amsgrad": lambda it: torch.optim.Adam(it, lr=1e-2, amsgrad=True),
    "adagrad": lambda it: torch.optim.Adagrad(it, lr=1e-2),
}


class Net(nn.Module):
    """A loss, layers of two sizes, a norm, and a weight that is used twice."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers):
        x = self.tokens(numbers)
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), numbers.flatten())


def batches(count, size=8):
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (size, 16), generator=drawn) for _ in range(count)]


# Updates where state rests, or of copies, and when; see HostState.
IN_PLACE = pytest.mark.parametrize("in_place", [True, False])
WAYS = [("step", True), ("step", False), ("backward", True), ("backward", False)]
EACH_WAY = pytest.mark.parametrize(("update", "in_place"), WAYS)


def pair(make="adamw", budget="50%", update="step", model=None, in_place=False, sample=None):
    """A model planned with its state on the host, one that is not, and an optimizer of each."""
    torch.manual_seed(0)
    plain = Net() if model is None else model
    mine = copy.deepcopy(plain)
    optimizers = [OPTIMIZERS[make](it.parameters()) for it in (mine, plain)]
    sample = batches(1)[0] if sample is None else sample
    state = HostState(in_place=in_place, update=update)
    planned = plan(mine, sample, budget, optimizer=optimizers[0], state=state, **SETTINGS)
    return planned, plain, *optimizers


def trained(model, optimizer, data, *, clip=None, scheduler=None, micro=1, scaler=None):
    losses = []
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for at, numbers in enumerate(data, start=1):
        loss = model(numbers)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if at % micro:
            continue
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def trains_alike(pair, data, **settings):
    """Whether both models of a pair have the same losses and the same state after these batches.

    settings : of `trained`; functions get the optimizer
    """
    mine, plain, *optimizers = pair
    losses = []
    for model, optimizer in zip((mine, plain), optimizers, strict=True):
        own = {key: it(optimizer) if callable(it) else it for key, it in settings.items()}
        losses.append(trained(model, optimizer, data, **own))
    return losses[0] == losses[1] and alike(mine, plain)


def alike(mine, plain):
    own, others = mine.state_dict(), plain.state_dict()
    return own.keys() == others.keys() and same(map(own.get, others), others.values())


# Of AdamW each way is in the tests of any order of copies.
@pytest.mark.parametrize(
    ("make", "update", "in_place"),
    [(make, *WAYS[at % 4]) for at, make in enumerate(OPTIMIZERS)],
)
def test_bits_are_those_of_training_without(make, update, in_place):
    # In place a parameter itself moves later, as its state then costs nothing.
    budget = "30%" if make == "adamw" else "55%"
    mine, *others = pair(make, budget, update, in_place=in_place)
    assert trains_alike((mine, *others), batches(5))
    places = set(mine.sn_memory.state.places.values())
    assert places > {"device"} or make == "adafactor" or (in_place and places & {"state", "host"})
    assert "host" in places or budget == "55%"
    check_plan(mine.sn_memory.trace.graph, mine.sn_memory.plan)


@EACH_WAY
def test_the_peak_is_as_predicted(update, in_place):
    mine, _, optimizer, _ = pair("adamw", "45%", update, in_place=in_place)
    state, numbers = mine.sn_memory.state, batches(1)[0]
    highest = lowest = mine.sn_memory.plan.peak_bytes
    # Counts of steps, 4 bytes each, are new ones while the list of what is held has the old.
    counts = 4 * len(state.parameters)
    if update == "step":
        # With copies on the host tensors are counted, and no scratch.
        lowest -= most_scratch(mine)
    elif in_place:
        # The first step held more: the state of a parameter is created in memory, then moved.
        lowest -= max(it.numel() * 8 for it in mine.parameters())
    else:
        highest += counts

    def tracker():
        held = [it for it in grads(mine) if it is not None] + optimizer_tensors(optimizer)
        return StorageTracker([*mine.parameters(), numbers, *held], ignored=state.buffers.blocks)

    for step in range(3):
        with tracker() as tracked:
            mine(numbers).backward()
        with tracker() as later:
            optimizer.step()
        optimizer.zero_grad()
        assert step == 0 or lowest <= tracked.peak_bytes <= highest
        if step and update == "step" and state.latest.step_peak_bytes:
            assert later.peak_bytes <= mine.sn_memory.plan.budget_bytes + counts


@pytest.mark.parametrize("way", ["leave", "arrive"])
def test_a_copy_that_is_over_holds_no_memory(way):
    """Else a tensor freed after it is there beside the next: 16 KiB above a peak, now and then."""
    held, before, seen, over = HostState(), Future(), [], threading.Event()
    block = held.buffer_of(held.empty_like(torch.ones(4096))).block
    here = torch.ones(4 * 4096, dtype=torch.uint8)
    memory, lanes = weakref.ref(here), held.lanes()
    copied = (
        lanes.leave(here, block, [before]) if way == "leave" else lanes.arrive(block, here, before)
    )
    del here
    copied.add_done_callback(lambda _: (seen.append(memory()), over.set()))
    before.set_result(None)
    assert over.wait(60)
    assert seen == [None]


def test_a_kind_whose_state_does_not_fit_says_what_it_needs():
    """Of doubles: no plan is missing, and nothing failed to be traced."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    sample = torch.ones(8, 64)
    model = plan(model, sample, "45%", optimizer=optimizer, state="host", **SETTINGS)
    model.double()
    with pytest.raises(BudgetError, match="no plan of its ops was found that keeps") as refused:
        model(sample.double())
    assert refused.value.peak_bytes > refused.value.budget_bytes
    assert "traced" not in str(refused.value)


@EACH_WAY
def test_any_order_of_copies_gives_the_same(monkeypatch, update, in_place):
    """As late as they may, or at random."""
    lanes = OddLanes(0.3 if in_place else 0.0)
    monkeypatch.setattr(HostState, "lanes", lambda self: lanes)
    monkeypatch.setattr(HostState, "speeds", lambda self: (1e9, 2e9))
    budget = "35%" if in_place else "45%"
    assert trains_alike(pair("adamw", budget, update, in_place=in_place), batches(4))
    assert lanes.faults == []
    assert not lanes.under_way()


STEP_LR = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)}
SCALER = {"scaler": lambda _: torch.amp.GradScaler("cpu", init_scale=1024.0)}


CLIPPED = {"clip": 0.1, "micro": 2}


@pytest.mark.parametrize(("make", "update", "in_place", "loop"), [
    ("momentum", "step", True, STEP_LR), ("momentum", "backward", False, STEP_LR),
    ("adamw", "step", True, CLIPPED), ("adamw", "step", False, CLIPPED),
    ("adamw", "step", False, SCALER),
])  # fmt: skip
def test_loops(make, update, in_place, loop):
    """Schedulers set the rate; gradients are scaled, added and clipped on the host."""
    assert trains_alike(pair(make, "50%", update, in_place=in_place), batches(6), **loop)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_scheduler_may_be_made_before_the_plan(monkeypatch, update):
    """It puts a step into the optimizer, which is not that of the plan."""
    schedulers = {}

    def scheduled(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        schedulers[optimizer] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        return optimizer

    monkeypatch.setitem(OPTIMIZERS, "scheduled", scheduled)
    both = pair("scheduled", "50%", update)
    assert trains_alike(both, batches(6), scheduler=schedulers.get)
    assert both[2].param_groups[0]["lr"] == both[3].param_groups[0]["lr"] < 0.1


def test_what_needs_all_gradients_says_so_where_they_are_used_up():
    mine, _, optimizer, _ = pair("adamw", "50%", "backward")
    mine(batches(1)[0]).backward()
    with pytest.raises(PlanError, match="update='step'"):
        nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
    with pytest.raises(PlanError, match="already applied"):
        next(mine.parameters()).grad.abs()
    with pytest.raises(PlanError, match="second forward pass"):
        mine(batches(1)[0])
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert grads(mine) == [None] * len(grads(mine))
    mine(batches(1)[0]).backward()


def test_a_parameter_that_is_not_trained_may_lie_on_the_host():
    model = Net()
    model.layers[:2].requires_grad_(False)
    assert trains_alike(pair("adamw", "65%", "backward", model), batches(3))


def test_parameters_that_the_optimizer_does_not_have_keep_their_gradients():
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.layers.parameters())
    mine = plan(model, batches(1)[0], "60%", optimizer=optimizer, state="host", **SETTINGS)
    mine(batches(1)[0]).backward()
    plain(batches(1)[0]).backward()
    assert torch.equal(mine.norm.weight.grad, plain.norm.weight.grad)


@pytest.mark.parametrize(("update", "in_place"), WAYS[:1] + WAYS[3:])
def test_saved_here_and_loaded_there(tmp_path, update, in_place):
    """Both ways: what is on the host is loaded without a plan, and the reverse."""
    both = mine, plain, *optimizers = pair("adamw", "45%", update, in_place=in_place)
    data = batches(6)

    def hand_over(giver, taker, first, second):
        torch.save((giver.state_dict(), first.state_dict()), tmp_path / "saved")
        # What it trained on of its own is forgotten.
        trained(taker, second, data[:2])
        weights, state = torch.load(tmp_path / "saved")
        taker.load_state_dict(weights)
        second.load_state_dict(state)

    trained(mine, optimizers[0], data[:3])
    hand_over(mine, plain, *optimizers)
    assert trains_alike(both, data[3:])
    hand_over(plain, mine, *reversed(optimizers))
    assert trains_alike(both, data)
    assert set(mine.sn_memory.state.places.values()) & {"state", "host"}


@IN_PLACE
def test_inputs_of_another_size(in_place):
    both = mine, plain, *_ = pair("adamw", "60%", "backward", in_place=in_place)
    assert trains_alike(both, [*batches(2), *batches(1, 5), *batches(1, 3), *batches(1)])
    assert len(mine.sn_memory.kinds) == 3
    with torch.no_grad():
        assert torch.equal(mine(batches(1, 4)[0]), plain(batches(1, 4)[0]))


@EACH_WAY
def test_an_exception_in_the_middle_loses_nothing(monkeypatch, update, in_place):
    """Parameters are those before or after their own update; the next step is as ever."""
    budget = "35%" if in_place else "45%"
    mine, plain, *optimizers = pair("adamw", budget, update, in_place=in_place)
    data = batches(3)
    trained(mine, optimizers[0], data[:1])
    trained(plain, optimizers[1], data[:1])
    before = dict(copy.deepcopy(mine).named_parameters())
    trained(plain, optimizers[1], data[1:2])
    after = dict(plain.named_parameters())
    broken, real = Mock(side_effect=InterruptedError), parameter.updated
    some = itertools.chain([real] * 3, itertools.repeat(broken))
    with monkeypatch.context() as patch:
        patch.setattr(parameter, "updated", lambda *args: next(some)(*args))
        with pytest.raises(InterruptedError):
            trained(mine, optimizers[0], data[1:2])
    now = mine.state_dict()
    changed = [name for name in before if not torch.equal(now[name], before[name])]
    assert len(changed) == 3
    assert all(torch.equal(now[name], after[name]) for name in changed)
    optimizers[0].step()
    optimizers[0].zero_grad()
    trained(mine, optimizers[0], data)


def test_where_all_fits_nothing_moves():
    both = pair("adamw", "100%")
    assert set(both[0].sn_memory.state.places.values()) == {"device"}
    assert trains_alike(both, batches(2))


def test_the_least_that_can_be_had_is_said():
    with pytest.raises(BudgetError) as caught:
        pair("adamw", "5%", "backward")
    # Another search, cut after as many seconds, may miss the very smallest.
    least = int(1.25 * caught.value.peak_bytes)
    mine, *_ = pair("adamw", least, "backward")
    assert mine.sn_memory.plan.peak_bytes <= least


class Normed(nn.Module):
    """Statistics, a count, a buffer that two modules share, and a weight that two share."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 64), nn.BatchNorm1d(64)
        self.last, self.other = nn.Linear(64, 16), nn.Linear(64, 16)
        self.other.weight = self.last.weight
        self.register_buffer("scale", torch.ones(()))
        self.last.register_buffer("scale", self.scale)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return ((self.last(x) * (1 + self.last.scale)) + self.other(x)).square().sum()


def test_a_model_that_is_created_on_the_host(tmp_path):
    """From the meta device, with its buffers; nothing of its parameters is allocated elsewhere."""
    with torch.device("meta"):
        model = Normed()
    held = HostState(tmp_path, keep_cached=False)
    held.hold(model)
    assert model.other.weight is model.last.weight
    assert model.scale is model.last.scale
    assert not model.scale.is_meta
    assert model.scale == 0
    plain = Normed()
    model.load_state_dict(plain.state_dict())
    optimizers = [OPTIMIZERS["adamw"](it.parameters()) for it in (model, plain)]
    sample = torch.randn(32, 16)
    mine = plan(model, sample, "80%", optimizer=optimizers[0], state=held, **SETTINGS)
    assert trains_alike((mine, plain, *optimizers), [sample] * 3)
    assert str(tmp_path) in repr(mine.sn_memory.state)


def mapped_bytes(folder):
    """Pages of a folder's files that are resident in this process; those of libraries come late."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@IN_PLACE
def test_what_was_touched_on_the_host_stays_resident_only_where_updates_are_made_there(
    tmp_path, in_place
):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    held = HostState(tmp_path, in_place=in_place, update="backward")
    for layer in held.hold(model):
        layer.reset_parameters()
    size = sum(it.nbytes for it in model.parameters())

    def sums():
        return [it.detach().double().sum().item() for it in model.parameters()]

    assert mapped_bytes(tmp_path) > 0.9 * size
    values = sums()
    held.let_go()
    assert mapped_bytes(tmp_path) < 0.1 * size
    assert sums() == values
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = torch.randn(4, 1024)
    mine = plan(model, sample, "45%", optimizer=optimizer, state=held, **SETTINGS)
    for _ in range(2):
        mine(sample).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (mapped_bytes(tmp_path) > 0.5 * size) == in_place
    assert sums() != values


def test_a_buffer_that_nothing_would_load_is_refused(tmp_path):
    with torch.device("meta"):
        model = Normed()
        model.last.register_buffer("angles", torch.arange(8), persistent=False)
    held = HostState(tmp_path)
    with pytest.raises(PlanError, match=r"'last\.angles'.* would load it"):
        held.hold(model)
    # Nothing was begun.
    assert all(it.is_meta for it in (*model.parameters(), *model.buffers()))
    model.last.register_buffer("angles", torch.arange(8), persistent=False)
    assert not any(it.is_meta for it in held.hold(model).buffers())


@pytest.mark.parametrize(("settings", "free", "found"), [
    ({}, 101, "in place"), ({}, 100, "device"), ({}, None, "device"),
    ({"keep_cached": False}, 101, "device"), ({"in_place": False}, 101, "device"),
    ({"in_place": True}, 1, "in place"),
])  # fmt: skip
def test_who_updates_is_by_what_the_page_cache_can_keep(monkeypatch, settings, free, found):
    monkeypatch.setattr(buffers, "available_bytes", lambda: free)
    assert HostState(**settings).updater(100) == found


def sharing_memory(model):
    model.norm.bias = nn.Parameter(model.norm.weight.data)
    return {}


def hooked(model):
    model.norm.weight.register_post_accumulate_grad_hook(lambda it: None)
    return {}


def by_other_steps(model):
    kind = type("Mine", (torch.optim.SGD,), {})
    return {"optimizer": kind(model.parameters(), lr=0.1)}


def untraced(model):
    model.norm.register_forward_hook(lambda module, args, out: out if out.sum().item() else -out)
    return {}


REFUSED = {
    "an optimizer's class": ({"optimizer": torch.optim.AdamW}, PlanError, "an instance"),
    "no optimizer": ({"optimizer": None}, ValueError, "optimizer=None"),
    "LBFGS": (
        lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())},
        PlanError,
        "by parameter",
    ),
    "a class of one's own": (by_other_steps, PlanError, "by parameter"),
    "modules": ({"backend": "modules"}, ValueError, "backend='modules'"),
    "offload": ({"techniques": ("keep", "offload")}, ValueError, "offload"),
    "folder": ({"state": "/nowhere"}, PlanError, "not a folder"),
    "parameters that share memory": (sharing_memory, PlanError, "share memory"),
    "hooks": (hooked, PlanError, "hook"),
    "a model that cannot be traced": (untraced, TraceError, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    settings, kind, words = REFUSED[name]
    model = Net()
    default = {"optimizer": torch.optim.AdamW(model.parameters()), "state": "host"}
    settings = default | (settings(model) if callable(settings) else settings)
    with pytest.raises(kind, match=words):
        plan(model, batches(1)[0], "50%", **SETTINGS, **settings)


def test_a_time_of_updates_is_one_of_two():
    with pytest.raises(ValueError, match="got update 'later', expected one of"):
        HostState(update="later")


def test_a_model_on_a_device_without_streams_is_refused():
    model = Net()
    model.norm.bias.__class__ = type("There", (nn.Parameter,), {"device": torch.device("mps")})
    with pytest.raises(PlanError, match="on mps"):
        check_model(model)


def test_verify_is_refused_and_groups_stay_and_the_file_goes_with_the_model():
    mine, _, optimizer, _ = pair("adamw", "50%")
    with pytest.raises(PlanError, match="updates"):
        verify(mine, batches(1)[0])
    with pytest.raises(PlanError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert isinstance(optimizer, torch.optim.AdamW)
    trained(mine, optimizer, batches(1))
    held = weakref.ref(mine.sn_memory.state.buffers)
    assert isinstance(held(), HostState)
    del mine, optimizer, _
    gc.collect()
    assert held() is None


@EACH_WAY
def test_a_backward_pass_for_inputs_alone_uses_no_gradient_of_a_parameter(update, in_place):
    """As in adversarial training: the step after it is the first of its own."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    model = module_of(lambda self, x: self.layers(x).square().mean(), layers=layers)
    x = torch.randn(16, 32)
    sample = x.clone().requires_grad_()
    mine, plain, *optimizers = pair("adamw", "70%", update, model, in_place, sample)
    for step in range(3):
        found = []
        for model, optimizer in zip((mine, plain), optimizers, strict=True):
            attacked = x.clone().requires_grad_()
            if step == 1:
                model(attacked).backward(inputs=[attacked])
                toward = attacked.grad
            else:
                toward = torch.autograd.grad(model(attacked), attacked)[0]
            attacked = (x + toward.sign()).requires_grad_()
            model(attacked).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([toward, attacked.grad])
        assert same(*found)
        assert alike(mine, plain)
    weights = [*mine.parameters()]
    some_alone = "gradients of some parameters alone are requested"
    with pytest.raises(ReplayError, match=some_alone):
        torch.autograd.grad(mine(x), weights[:2])
    with pytest.raises(ReplayError, match=some_alone):
        mine(x).backward(inputs=weights[:2])
    assert all(weight.grad is None for weight in weights)
