"""What a forward reads from modules beside tensors is part of a plan: changed, it is noticed."""

import warnings

import pytest
import torch
from small_models import mlp
from torch import nn

from sn_memory.torch import PlanWarning, plan

SETTINGS = {"profile": False, "planner": "sqrt_n"}


class Scaled(nn.Module):
    """A layer that is scaled as LoRA's are: by numbers in a dict, in a list, deeper down."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scaling = {"default": 1.0}
        self.rates = [1.0, 0.5]
        self.active = {"default"}
        self.deep = {"by": [{"layer": (1.0, 2.0)}]}
        self.tensors = {"offset": torch.zeros(8)}

    def forward(self, x):
        x = self.linear(x) * self.scaling["default"] * sum(self.rates)
        if "default" in self.active:
            x = x + self.tensors["offset"]
        return x * self.deep["by"][0]["layer"][1]


def net():
    return nn.Sequential(nn.Linear(8, 8), Scaled())


def is_known(model, sample):
    """Whether an input is of a kind that was planned for; it is then, whatever it was."""
    before = len(model.sn_memory.kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(sample)
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [it for it, _ in node.next_functions if it is not None]
    assert "_PlannedBackward" in names
    return len(model.sn_memory.kinds) == before


CHANGES = {
    "dict": lambda it: it.scaling.update(default=2.0),
    "type": lambda it: it.scaling.update(default=1),
    "more": lambda it: it.scaling.update(other=1.0),
    "list": lambda it: it.rates.append(2.0),
    "order": lambda it: it.rates.reverse(),
    "set": lambda it: it.active.clear(),
    "deep": lambda it: it.deep["by"].__setitem__(0, {"layer": (1.0, 3.0)}),
    "tensor": lambda it: it.tensors.update(offset=torch.ones(8)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_settings_in_containers(change):
    model, sample = net(), torch.randn(4, 8)
    # The tensor of before is still held, for its own kind.
    planned = plan(model, sample, "120%", **SETTINGS)
    assert is_known(planned, sample)
    CHANGES[change](planned[1])
    assert not is_known(planned, sample)
    assert torch.equal(planned(sample), model(sample))
    unlike = planned.sn_memory.kinds[-1].unlike
    assert "modes and numbers in its modules are otherwise" in unlike
    assert is_known(planned, sample)


def test_the_same_settings_in_other_containers():
    model, sample = net(), torch.randn(4, 8)
    planned = plan(model, sample, "100%", **SETTINGS)
    planned[1].scaling = dict(planned[1].scaling)
    planned[1].rates = [*planned[1].rates]
    assert is_known(planned, sample)
    planned[1].scaling["default"] = 3.0
    assert not is_known(planned, sample)
    planned[1].scaling["default"] = 1.0
    assert is_known(planned, sample)


def test_a_container_in_itself():
    model, sample = net(), torch.randn(4, 8)
    model[1].deep["self"] = model[1].deep
    planned = plan(model, sample, "100%", **SETTINGS)
    assert is_known(planned, sample)
    planned[1].deep["by"] = [{"layer": (1.0, 4.0)}]
    assert not is_known(planned, sample)


def test_the_scale_of_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model, sample = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config), torch.randn(4, 8)
    planned = plan(model, sample, "100%", **SETTINGS)
    assert is_known(planned, sample)
    layer = next(it for it in planned.modules() if hasattr(it, "set_scale"))
    layer.set_scale("default", 8.0)
    assert not is_known(planned, sample)
    assert torch.equal(planned(sample), model(sample))


@pytest.mark.parametrize(
    "register",
    [
        lambda it, seen: it.register_forward_hook(lambda *_: seen.append(1)),
        lambda it, seen: it.register_forward_pre_hook(lambda *_: seen.append(1)),
        lambda it, seen: it.register_full_backward_hook(lambda *_: seen.append(1)),
        lambda it, seen: it.register_full_backward_pre_hook(lambda *_: seen.append(1)),
    ],
    ids=["forward", "before", "backward", "before backward"],
)
def test_hooks(register):
    """Inside the model one that comes after planning is noticed; on the model itself all run."""
    model, sample = mlp(2), torch.randn(4, 32, requires_grad=True)
    planned = plan(model, sample, "200%", **SETTINGS)
    seen = []
    outer = register(planned, seen)
    assert is_known(planned, sample)
    seen.clear()
    planned(sample).sum().backward()
    assert seen == [1]
    outer.remove()
    inner = register(planned[0][0], seen)
    seen.clear()
    # It writes to a list, which a replay would not do.
    with pytest.warns(PlanWarning, match="modules run again.*cannot be traced"):
        out = planned(sample)
    out.sum().backward()
    assert "0.0.its hooks" in planned.sn_memory.kinds[-1].unlike
    assert seen == [1]
    inner.remove()
    assert is_known(planned, sample)
