"""Whatever is changed on a planned model is followed, or refused with a reason; never passed over.

Each test plans, trains a step, changes one thing, and trains another step of the planned model and
of a plain copy: loss, gradients and buffers are equal to the bit, or an error says what changed.
"""

import copy
import enum
import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sn_memory.base.errors import PlanError, PlanWarning
from sn_memory.torch import plan
from sn_memory.torch.errors import ReplayError, TraceError

SETTINGS = {"profile": False, "planner": "sqrt_n"}
REFUSALS = (PlanError, ReplayError, TraceError)


class Mode(enum.Enum):
    ADD = 1
    SUBTRACT = 2


class Config:
    """As models of transformers have one."""

    def __init__(self):
        self.scale, self.inner = 1.5, SimpleNamespace(shift=0.25)
        self.unused = None


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.25


class Power:
    """An object that is called."""

    def __init__(self, exponent):
        self.exponent = exponent

    def __call__(self, x):
        return x.abs() ** self.exponent


def times(factor, x):
    return x * factor


class Layer(nn.Module):
    """Reads an attribute of each sort."""

    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Tanh()
        self.register_buffer("offset", torch.full((8,), 0.5))
        self.number, self.whole, self.flag, self.text = 0.5, 2, True, "relu"
        self.pair, self.items, self.by_name = (1.0, 2.0), [1.0, 2.0], {"a": 1.0, "b": [0.5]}
        self.names, self.many = {"a"}, [1.0] * 2000
        self.function, self.partial = torch.relu, functools.partial(times, 2.0)
        self.calls, self.config, self.slotted = Power(2), Config(), Slotted()
        self.mode, self.count = Mode.ADD, range(3)
        self.array, self.scalar = np.array([1.0, 2.0]), np.float32(0.5)
        self.mask, self.dtype = torch.ones(8), torch.float32
        self.configs = [Config(), Config()]
        self.absent = None

    def forward(self, x):
        x = self.last(self.norm(self.linear(x))) * self.number + self.offset
        x = x * self.whole if self.flag else x
        x = getattr(torch, self.text)(x) + self.pair[1] + sum(self.items) + self.by_name["b"][0]
        x = x * len(self.names) * self.many[1500]
        x = x + self.function(x) + self.partial(x) + self.calls(x)
        x = x * self.config.scale + self.config.inner.shift + self.slotted.factor
        x = x + 1 if self.mode is Mode.ADD else x - 1
        x = x + len(self.count) + float(self.array[1]) + float(self.scalar)
        x = (x * self.mask).to(self.dtype) * self.of_class * self.configs[1].scale
        if getattr(self, "later", 0):
            x = x * self.later
        return x if self.absent is None else x * self.absent


class Outer(Layer):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Layer())

    def forward(self, x):
        return super().forward(self.inner(x))


def setting(name, value):
    return lambda it: setattr(it, name, value)


def on_weight(change):
    def of(it):
        change(it.linear)

    return of


def replaced(it):
    it.weight = nn.Parameter(it.weight.detach() * 2)


def with_data(it):
    it.weight.data = it.weight.data * 2


def scaled(it):
    with torch.no_grad():
        it.weight.mul_(2)


def with_gradient_hook(it):
    it.weight.register_hook(lambda gradient: gradient * 2)


ATTRIBUTES = {
    "number": setting("number", 0.75),
    "whole number": setting("whole", 3),
    "type of a number": setting("whole", 2.5),
    "flag": setting("flag", False),
    "text": setting("text", "tanh"),
    "tuple": setting("pair", (1.0, 3.0)),
    "list": lambda it: it.items.append(3.0),
    "item of a list": lambda it: it.items.__setitem__(0, 3.0),
    "dict in a dict": lambda it: it.by_name["b"].__setitem__(0, 2.0),
    "set": lambda it: it.names.add("b"),
    "item of a long list": lambda it: it.many.__setitem__(1500, 2.0),
    "function": setting("function", torch.tanh),
    "partial": setting("partial", functools.partial(times, 3.0)),
    "object that is called": setting("calls", Power(3)),
    "attribute of what is called": lambda it: setattr(it.calls, "exponent", 3),
    "attribute of an object": lambda it: setattr(it.config, "scale", 2.5),
    "object in an object": lambda it: setattr(it.config.inner, "shift", 1.5),
    "another object": lambda it: setattr(it, "config", changed_config()),
    "object in a list": lambda it: setattr(it.configs[1], "scale", 4.0),
    "slot of an object": lambda it: setattr(it.slotted, "factor", 3.0),
    "enumeration": setting("mode", Mode.SUBTRACT),
    "range": setting("count", range(5)),
    "array": setting("array", np.array([1.0, 5.0])),
    "item of an array": lambda it: it.array.__setitem__(1, 7.0),
    "number of NumPy": setting("scalar", np.float32(2.5)),
    "tensor": setting("mask", torch.full((8,), 3.0)),
    "tensor in place": lambda it: it.mask.mul_(3),
    "dtype": setting("dtype", torch.float64),
    "attribute that was none": setting("absent", 2.0),
    "attribute that was not there": setting("later", 2.0),
    "attribute that was the class's": setting("of_class", 2.0),
    "attribute of the class": lambda it: setattr(type(it), "of_class", type(it).of_class + 1),
    "forward": lambda it: setattr(it.last, "forward", torch.sigmoid),
}
MODULES = {
    "training mode": lambda it: it.eval(),
    "training mode of a part": lambda it: it.norm.eval(),
    "another module": setting("last", nn.Sigmoid()),
    "another module of its class": setting("linear", nn.Linear(8, 8)),
    "attribute of a module": lambda it: setattr(it.norm, "eps", 0.5),
    "no bias": lambda it: setattr(it.linear, "bias", None),
    "parameter replaced": on_weight(replaced),
    "parameter with other data": on_weight(with_data),
    "parameter in place": on_weight(scaled),
    "parameter that wants no gradient": lambda it: it.linear.weight.requires_grad_(False),
    "module that wants no gradient": lambda it: it.linear.requires_grad_(False),
    "gradient hook": on_weight(with_gradient_hook),
    "buffer replaced": setting("offset", torch.full((8,), 2.0)),
    "buffer in place": lambda it: it.offset.mul_(3),
    "buffer that wants a gradient": lambda it: it.offset.requires_grad_(),
    "no buffer": lambda it: it.norm.register_buffer("running_mean", None),
    "dtype of the whole": lambda it: it.double(),
    "dtype of a part": lambda it: it.linear.half(),
    "dtype of a buffer": lambda it: setattr(it, "offset", it.offset.double()),
    "shape of a parameter": lambda it: setattr(it.linear, "bias", nn.Parameter(torch.ones(1))),
}
HOOKS = {
    "forward hook": lambda it: it.register_forward_hook(lambda _, given, out: out * 2),
    "forward hook with names": lambda it: it.register_forward_hook(
        lambda _, given, names, out: out * 2, with_kwargs=True
    ),
    "forward pre-hook": lambda it: it.register_forward_pre_hook(lambda _, given: given[0] * 2),
    "full backward hook": lambda it: it.register_full_backward_hook(
        lambda _, before, after: tuple(None if it is None else it * 2 for it in before)
    ),
    "full backward pre-hook": lambda it: it.register_full_backward_pre_hook(
        lambda _, after: tuple(it * 2 for it in after)
    ),
    "backward hook": lambda it: it.register_backward_hook(
        lambda _, before, after: tuple(None if it is None else it * 2 for it in before)
    ),
    "state hook": lambda it: it.register_state_dict_post_hook(lambda *_: None),
    "state pre-hook": lambda it: it.register_load_state_dict_pre_hook(lambda *_: None),
}
CHANGES = ATTRIBUTES | MODULES | HOOKS


def changed_config():
    config = Config()
    config.scale = 3.5
    return config


def step(model, x):
    """Train one step; return loss, gradients and buffers, or the error."""
    torch.manual_seed(1)
    for it in model.parameters():
        it.grad = None
    try:
        loss = model(x).square().mean()
        loss.backward()
    except Exception as error:  # noqa: BLE001 - a plain model may refuse a change as well
        return error
    gradients = {f"gradient of {name}": it.grad for name, it in model.named_parameters()}
    buffers = {f"buffer {name}": it.clone() for name, it in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers}


def unequal(mine, plain):
    """Return the names of results that are not bit-equal."""
    return [
        name
        for name in mine.keys() | plain.keys()
        if not (
            mine.get(name) is plain.get(name) is None
            or (
                mine.get(name) is not None
                and plain.get(name) is not None
                and torch.equal(mine[name], plain[name])
            )
        )
    ]


def follows(planned, model, x, change, part):
    """Check that a change is followed or refused; return whether it was followed."""
    twin = copy.deepcopy(model)
    first = step(planned, x)
    plain = step(twin, x)
    assert not isinstance(first, Exception), first
    assert not unequal(first, plain)
    change(part(planned))
    change(part(twin))
    for _ in range(2):  # what was planned at first sight is used the second time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            got = step(planned, x)
        expected = step(twin, x)
        if isinstance(got, Exception):
            assert isinstance(got, REFUSALS) or isinstance(expected, Exception), got
            return False
        assert not isinstance(expected, Exception), expected
        assert not unequal(got, expected)
    return True


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.GELU(),
        nn.Upsample(scale_factor=2.0),
        nn.Flatten(),
    )


def layers():
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.LeakyReLU(), nn.Softmax(-1), nn.Dropout(0.0)
    )


OF_TORCH = {
    "attention": (Attention, (2, 4, 8)),
    "recurrent": (Recurrent, (2, 4, 8)),
    "convolutions": (convolutions, (2, 2, 6, 6)),
    "layers": (layers, (4, 8)),
}


def another(value):
    """Return another value of the type, or None where there is none to try."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 0.125
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return tuple(it + 1 for it in value)
    words = {"none": "tanh", "nearest": "bilinear", "zeros": "circular"}
    return words.get(value) if isinstance(value, str) else None


@pytest.mark.parametrize("name", OF_TORCH)
def test_each_attribute_of_modules_of_torch(name):
    """Each number, flag and word in turn, put back after."""
    make, shape = OF_TORCH[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    planned, followed = plan(model, x, "200%", **SETTINGS), []
    for place, module in enumerate(model.modules()):
        for key, value in [*vars(module).items()]:
            other = another(value)
            if key.startswith("_") or other is None or not place:
                continue
            twin = copy.deepcopy(model)
            for it in (module, [*twin.modules()][place]):
                setattr(it, key, other)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got, expected = step(planned, x), step(twin, x)
            setattr(module, key, value)
            if isinstance(expected, Exception):
                assert isinstance(got, Exception), key
            elif isinstance(got, Exception):
                assert isinstance(got, REFUSALS), (key, got)
            else:
                same = [it for it in unequal(got, expected) if not it.startswith("buffer")]
                assert not same, (key, same)
                followed.append(key)
    assert len(followed) >= 3


@pytest.fixture(autouse=True)
def _classes(monkeypatch):
    monkeypatch.setattr(Layer, "of_class", 1.0)


PARTS = {"outermost": lambda it: it, "inside": lambda it: it.inner[1]}
# Attributes of the outermost module are the planned one's own, its parts are the model's.
WHERE = [(name, "inside") for name in CHANGES]
WHERE += [(name, "outermost") for name in (*ATTRIBUTES, *HOOKS, "training mode", "another module")]


@pytest.mark.parametrize(("name", "where"), WHERE)
def test_a_change_is_followed_or_refused(name, where):
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(6, 8)
    planned = plan(model, x, "200%", **SETTINGS)
    follows(planned, model, x, CHANGES[name], PARTS[where])


SEVERAL = ("number", "function", "attribute of an object", "array", "training mode", "forward hook")


@pytest.mark.parametrize("backend", ["modules", "compile"])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_change_is_followed_by_every_back_end(name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(6, 8)
    settings = {**SETTINGS, "backend": backend}
    if backend == "compile":
        del settings["planner"]
    planned = plan(model, x, "300%", **settings)
    follows(planned, model, x, CHANGES[name], PARTS["inside"])


def test_the_same_settings_in_other_containers_are_no_other_kind():
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(6, 8)
    model.by_name["itself"] = model.by_name
    planned = plan(model, x, "200%", **SETTINGS)
    planned.items, planned.names = [*planned.items], {*planned.names}
    for count in (1, 2):
        assert planned(x).grad_fn.name() == "_PlannedBackward"
        assert len(planned.sn_memory.kinds) == count
        planned.by_name["b"] = [4.0]
    assert "modes and numbers in its modules" in planned.sn_memory.kinds[-1].unlike


def test_the_scale_of_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model, x = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config), torch.randn(4, 8)
    planned = plan(model, x, "100%", **SETTINGS)
    next(it for it in planned.modules() if hasattr(it, "set_scale")).set_scale("default", 8.0)
    assert torch.equal(planned(x), model(x))
    assert len(planned.sn_memory.kinds) == 2


@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_full_backward_pre_hook"]
)
def test_hooks_that_note(register):
    """Inside the model one that comes after planning is noticed; on the model itself all run."""
    model, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), []
    planned = plan(model, x.requires_grad_(), "1MiB", **SETTINGS)
    outer = getattr(planned, register)(lambda *_: seen.append(1))
    planned(x).sum().backward()
    assert seen == [1]
    assert len(planned.sn_memory.kinds) == 1
    outer.remove()
    inner = getattr(planned[0], register)(lambda *_: seen.append(2))
    # It writes to a list, which a replay would not do.
    with pytest.warns(PlanWarning, match="modules run again.*cannot be traced"):
        out = planned(x)
    out.sum().backward()
    assert "0.its hooks" in planned.sn_memory.kinds[-1].unlike
    assert seen[-1] == 2
    inner.remove()
    planned(x)
    assert len(planned.sn_memory.kinds) == 2
