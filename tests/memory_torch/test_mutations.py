"""Whatever is changed on a planned model is followed, or refused with a reason; never passed over.

Each test plans, trains a step, changes one thing, and trains another step of the planned model and
of a plain copy: loss, gradients and buffers are equal to the bit, or an error says what changed.
"""

import copy
import enum
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import module_of
from steps import same
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

    def __init__(self, scale=1.5):
        self.scale, self.inner = scale, SimpleNamespace(shift=0.25)
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
        self.function, self.partial = torch.relu, partial(times, 2.0)
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


def item(container, key, value):
    return lambda it: getattr(it, container).__setitem__(key, value)


def doubled(module, gradients, _=None):
    return tuple(None if it is None else it * 2 for it in gradients)


ATTRIBUTES = {
    "number": setting("number", 0.75),
    "whole number": setting("whole", 3),
    "type of a number": setting("whole", 2.5),
    "flag": setting("flag", False),
    "text": setting("text", "tanh"),
    "tuple": setting("pair", (1.0, 3.0)),
    "list": lambda it: it.items.append(3.0),
    "item of a list": item("items", 0, 3.0),
    "dict in a dict": lambda it: it.by_name["b"].__setitem__(0, 2.0),
    "set": lambda it: it.names.add("b"),
    "item of a long list": item("many", 1500, 2.0),
    "function": setting("function", torch.tanh),
    "partial": setting("partial", partial(times, 3.0)),
    "object that is called": setting("calls", Power(3)),
    "attribute of what is called": lambda it: setattr(it.calls, "exponent", 3),
    "attribute of an object": lambda it: setattr(it.config, "scale", 2.5),
    "object in an object": lambda it: setattr(it.config.inner, "shift", 1.5),
    "another object": setting("config", Config(3.5)),
    "object in a list": lambda it: setattr(it.configs[1], "scale", 4.0),
    "slot of an object": lambda it: setattr(it.slotted, "factor", 3.0),
    "enumeration": setting("mode", Mode.SUBTRACT),
    "range": setting("count", range(5)),
    "array": setting("array", np.array([1.0, 5.0])),
    "item of an array": item("array", 1, 7.0),
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
    "parameter replaced": lambda it: setattr(it.linear, "weight", nn.Parameter(torch.ones(8, 8))),
    "parameter with other data": lambda it: setattr(it.linear.weight, "data", torch.ones(8, 8)),
    "parameter in place": lambda it: it.linear.weight.detach().mul_(2),
    "parameter that wants no gradient": lambda it: it.linear.weight.requires_grad_(False),
    "module that wants no gradient": lambda it: it.linear.requires_grad_(False),
    "gradient hook": lambda it: it.linear.weight.register_hook(lambda gradient: gradient * 2),
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
    "forward hook": lambda it: it.register_forward_hook(lambda *of: of[-1] * 2),
    "forward hook with names": lambda it: it.register_forward_hook(
        lambda *of: of[-1] * 2, with_kwargs=True
    ),
    "forward pre-hook": lambda it: it.register_forward_pre_hook(lambda _, given: given[0] * 2),
    "full backward hook": lambda it: it.register_full_backward_hook(doubled),
    "full backward pre-hook": lambda it: it.register_full_backward_pre_hook(doubled),
    "backward hook": lambda it: it.register_backward_hook(doubled),
    "state hook": lambda it: it.register_state_dict_post_hook(lambda *_: None),
    "state pre-hook": lambda it: it.register_load_state_dict_pre_hook(lambda *_: None),
}
CHANGES = ATTRIBUTES | MODULES | HOOKS


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
    names = mine.keys() | plain.keys()
    return [it for it in names if not same([mine.get(it)], [plain.get(it)])]


def attention():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return module_of(lambda self, x: self.layer(x, x, x)[0], layer=layer)


def recurrent():
    layer = nn.GRU(8, 8, batch_first=True)
    return module_of(lambda self, x: self.layer(x)[0], layer=layer)


def convolutions():
    first = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.GELU()
    return nn.Sequential(*first, nn.Upsample(scale_factor=2.0), nn.Flatten())


def layers():
    last = nn.LeakyReLU(), nn.Softmax(-1), nn.Dropout(0.0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), *last)


OF_TORCH = {
    attention: (2, 4, 8),
    recurrent: (2, 4, 8),
    convolutions: (2, 2, 6, 6),
    layers: (4, 8),
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


@pytest.mark.parametrize("kind", OF_TORCH)
def test_each_attribute_of_modules_of_torch(kind):
    """Each number, flag and word in turn, put back after."""
    model, x = kind(), torch.randn(OF_TORCH[kind])
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
                wrong = [it for it in unequal(got, expected) if not it.startswith("buffer")]
                assert not wrong, (key, wrong)
                followed.append(key)
    assert len(followed) >= 3


@pytest.fixture(autouse=True)
def _classes(monkeypatch):
    monkeypatch.setattr(Layer, "of_class", 1.0)


PARTS = {"outermost": lambda it: it, "inside": lambda it: it.inner[1]}
# Attributes of the outermost module are the planned one's own, its parts are the model's.
OUTERMOST = (
    *("number", "list", "function", "attribute of an object", "tensor", "tensor in place"),
    *("attribute that was not there", "attribute that was the class's", "attribute of the class"),
    *("forward", "training mode", "another module", *HOOKS),
)
SEVERAL = ("number", "function", "attribute of an object", "array", "training mode", "forward hook")
CASES = [(name, "inside", "auto") for name in CHANGES]
CASES += [(name, "outermost", "auto") for name in OUTERMOST]
CASES += [(name, "inside", "modules") for name in SEVERAL]
CASES += [(name, "inside", "compile") for name in ("number", "training mode", "forward hook")]


@pytest.mark.parametrize(("name", "where", "backend"), CASES)
def test_a_change_is_followed_or_refused(name, where, backend):
    if backend == "compile":
        torch._dynamo.reset()
    change, part = CHANGES[name], PARTS[where]
    model, x = Outer(), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    planner = {} if backend == "compile" else {"planner": "sqrt_n"}
    budget = "200%" if backend == "auto" else "300%"
    planned = plan(model, x, budget, backend=backend, profile=False, **planner)
    assert not unequal(step(planned, x), step(twin, x))
    change(part(planned))
    change(part(twin))
    for _ in range(2):  # what was planned at first sight is used the second time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            got = step(planned, x)
        expected = step(twin, x)
        if isinstance(got, Exception):
            assert isinstance(got, REFUSALS) or isinstance(expected, Exception), got
            return
        assert not isinstance(expected, Exception), expected
        assert not unequal(got, expected)


def test_the_same_settings_in_other_containers_are_no_other_kind():
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
