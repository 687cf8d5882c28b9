"""A model that returns its loss beside other outputs: backward is planned from that loss alone.

One model, and each way in which a gradient of its outputs may be requested.
"""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from small_models import module_of
from steps import grads
from steps import same as equal
from torch import nn

from sn_memory import PlanError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import HostState, ReplayError, estimate, plan, trace, verify
from sn_memory.torch.model.step import run_step


class Labelled(nn.Module):
    """Logits and their loss; one head is for the logits of another task alone."""

    def __init__(self, form=dict, spectral=False):
        super().__init__()
        torch.manual_seed(0)
        layers = [it for _ in range(6) for it in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
        self.body = nn.Sequential(*layers)
        self.head, self.other = nn.Linear(16, 100), nn.Linear(16, 4)
        if spectral:
            nn.utils.parametrizations.spectral_norm(self.head)
        self.form = form

    def forward(self, x, labels):
        found = self.body(x).tanh()
        logits = self.head(found)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.form is tuple:
            return loss, logits, self.other(found), loss.detach()
        if self.form is dict:
            return {"logits": logits, "other": self.other(found), "loss": loss}
        return SimpleNamespace(loss=loss, logits=logits, other=self.other(found))


def sample(batch=256):
    return torch.randn(batch, 16), torch.randint(0, 100, (batch,))


def three(out):
    if isinstance(out, tuple):
        return out[:3]
    out = out if isinstance(out, dict) else vars(out)
    return out["loss"], out["logits"], out["other"]


LOSSES = {
    "loss": lambda loss, logits, other: loss,
    "twice": lambda loss, logits, other: 2 * loss + loss.square(),
    "penalty": lambda loss, logits, other: loss + logits.square().mean(),
    "logits": lambda loss, logits, other: logits.logsumexp(-1).mean(),
    "other": lambda loss, logits, other: other.square().mean(),
    "all": lambda loss, logits, other: loss * 3 + logits.sin().mean() + other.sum(),
}


def loss_of(model, inputs, name):
    torch.manual_seed(1)
    return LOSSES[name](*three(model(*inputs)))


def steps(pair, *names):
    """Take steps of both models that begin with no gradients; return those of each."""
    model, mine, planned, inputs = pair
    for it in (model, mine):
        it.zero_grad()
    for name in names:
        loss_of(planned, inputs, name).backward()
        loss_of(model, inputs, name).backward()
    return grads(mine), grads(model)


def make_pair(budget=10**8, form=dict, batch=256, spectral=False, **settings):
    model, inputs = Labelled(form, spectral), sample(batch)
    mine = copy.deepcopy(model)
    settings = {"backend": "graph", "profile": False, **settings}
    return model, mine, plan(mine, inputs, budget, **settings), inputs


@pytest.mark.parametrize("form", [dict, tuple, SimpleNamespace])
def test_percent_are_of_the_plain_step(form):
    model, _, planned, inputs = make_pair("80%", form, 1024)
    plain = run_step(model, model, (inputs, {}), kernels=True).peak_bytes
    baseline = planned.sn_memory.plan.baseline_peak_bytes
    assert abs(baseline / plain - 1) < 0.005
    assert abs(estimate(model, inputs).step_bytes / plain - 1) < 0.005
    assert not any("plain step" in it for it in planned.sn_memory.latest_trace.notes)
    held = run_step(planned, planned, (inputs, {}), kernels=True).peak_bytes
    assert held <= planned.sn_memory.budget_bytes
    assert not verify(planned, inputs).different
    assert sum(planned.sn_memory.latest_trace.captured.ends) == 1


def test_scalars_beside_the_first_may_be_part_of_the_loss():
    def forward(self, x, first):
        found = self.layer(x) * self.scale
        parts = (found.mean(), found.square().mean(), found)
        return parts if first else (found, parts[0])

    model = module_of(forward, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(())))
    for first, ends in ((True, (True, True, False)), (False, (True, True))):
        traced = trace(model, (torch.randn(2, 4), first), profile=False)
        assert traced.captured.ends == ends


@pytest.mark.parametrize(("form", "first", "accumulates"), [
    (dict, "loss", False), (dict, "penalty", True), (dict, "logits", False), (dict, "other", True),
    (tuple, "penalty", False), (SimpleNamespace, "penalty", True),
])  # fmt: skip
def test_gradients_of_other_outputs_are_right_from_the_first_on(form, first, accumulates):
    pair = make_pair(form=form)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in (first, *LOSSES, "loss", "loss", "logits", first):
            assert equal(*steps(pair, *[name] * (1 + accumulates)))
    (words,) = [str(it.message) for it in caught if "other than the loss" in str(it.message)]
    assert "runs without its plan" in words
    assert "the budget is" in words


def test_the_loss_alone_runs_as_planned_and_warns_of_nothing():
    pair = _, mine, planned, _ = make_pair("80%")
    planned_step = planned.sn_memory.latest
    for name in ("loss", "twice", "loss"):
        assert equal(*steps(pair, name))
        assert mine.other.weight.grad is None
    assert planned.sn_memory.inputs.running is planned_step


def test_later_steps_are_planned_for_all_outputs():
    pair = *_, planned, _ = make_pair()
    before = planned.sn_memory.latest
    with pytest.warns(PlanWarning, match="planned for what was requested"):
        steps(pair, "penalty")
    steps(pair, "penalty")
    now = planned.sn_memory.inputs.running
    assert now is not before
    assert now.captured.ends == (True, False, True)
    steps(pair, "loss")
    assert planned.sn_memory.inputs.running is now
    # Of another shape, too.
    steps((*pair[:3], sample(8)), "penalty")
    assert planned.sn_memory.inputs.running.captured.ends == now.captured.ends
    for name in ("all", "other"):
        steps(pair, name)
    assert planned.sn_memory.inputs.running.captured.ends == (True, True, True)
    # Logits alone take what the plain step takes.
    pair = *_, planned, _ = make_pair()
    with pytest.warns(PlanWarning, match="planned for what was requested"):
        steps(pair, "logits")
    steps(pair, "logits")
    assert planned.sn_memory.inputs.running.captured.ends == (True, False, False)


def test_strict_raises_and_the_next_step_is_planned_so():
    pair = make_pair(strict=True)
    with pytest.raises(PlanError, match=r"strict: .* other than the loss"):
        steps(pair, "penalty")
    assert equal(*steps(pair, "penalty"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", [("loss", "logits"), ("logits", "loss"), ("loss", "penalty")])
def test_several_backward_passes_of_one_graph(order):
    model, mine, planned, inputs = make_pair()
    for it in (planned, model, planned, model):
        if it is planned:
            model.zero_grad()
            mine.zero_grad()
        torch.manual_seed(1)
        outs = three(it(*inputs))
        LOSSES[order[0]](*outs).backward(retain_graph=True)
        LOSSES[order[1]](*outs).backward()
        with pytest.raises((ReplayError, RuntimeError), match="second time"):
            LOSSES[order[1]](*outs).backward()
    assert equal(grads(mine), grads(model))


@pytest.mark.filterwarnings("ignore")
def test_gradients_by_name_of_parameters_and_inputs():
    model, mine, planned, inputs = make_pair()
    x = inputs[0].requires_grad_()
    names = ("body.0.weight", "head.bias", "other.bias")
    for name in ("loss", "logits", "other", "all", "loss"):
        found = []
        for it, own in ((planned, mine), (model, model)):
            leaves = [x, *map(own.get_parameter, names)]
            loss = loss_of(it, inputs, name)
            found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        assert equal(*found)
    with pytest.raises(RuntimeError, match=r"unused|not have been used"):
        torch.autograd.grad(loss_of(planned, inputs, "loss"), [mine.other.bias])


@pytest.mark.filterwarnings("ignore")
def test_hooks_on_parameters_see_what_the_plain_step_shows():
    pair = model, mine, *_ = make_pair()
    seen = {mine: [], model: []}
    for own in (mine, model):
        for name, it in own.named_parameters():
            it.register_post_accumulate_grad_hook(
                lambda leaf, name=name, own=own: seen[own].append((name, leaf.grad))
            )
    for name in ("loss", "penalty", "other", "loss"):
        for calls in seen.values():
            calls.clear()
        steps(pair, name)
        # Of a parameter that may have a gradient and has none, torch calls them with None.
        called = [sorted(it for it in seen[own] if it[1] is not None) for own in (mine, model)]
        (names, got), (expected_names, expected) = (zip(*it, strict=True) for it in called)
        assert names == expected_names
        assert equal(got, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_is_frozen_before_backward():
    model, mine, planned, inputs = make_pair()
    for it, own in ((planned, mine), (model, model)):
        loss = loss_of(it, inputs, "penalty")
        own.head.bias.requires_grad_(False)
        loss.backward()
    assert equal(grads(mine), grads(model))
    assert mine.head.bias.grad is None


def test_what_cannot_run_once_more_is_refused():
    pair = make_pair(spectral=True)
    steps(pair, "loss")
    with pytest.raises(ReplayError, match=r"output other than the loss .* writes over"):
        steps(pair, "penalty")
    # Planned for both by now.
    steps(pair, "penalty")


def test_state_on_the_host_refuses_other_gradients():
    model, inputs = Labelled(), sample()
    mine = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(it.parameters(), 0.1) for it in (mine, model)]
    held = HostState(in_place=False)
    planned = plan(mine, inputs, "95%", profile=False, state=held, optimizer=optimizers[0])
    for _ in range(2):
        for it, optimizer in zip((planned, model), optimizers, strict=True):
            loss_of(it, inputs, "loss").backward()
            optimizer.step()
            optimizer.zero_grad()
        assert equal(mine.state_dict().values(), model.state_dict().values())
    with pytest.raises(ReplayError, match="an output other than the loss"):
        loss_of(planned, inputs, "penalty").backward()


@pytest.mark.parametrize("backend", ["compile", "modules"])
def test_other_backends_take_gradients_of_all_outputs(backend):
    pair = model, *_ = make_pair(backend=backend)
    zeros = [torch.zeros_like(it) for it in model.parameters()]
    for name in LOSSES:
        found = steps(pair, name)
        assert backend == "compile" or equal(*found)
        for got, expected, zero in zip(*found, zeros, strict=True):
            both = [zero if it is None else it for it in (got, expected)]
            assert torch.allclose(*both, rtol=1e-4, atol=1e-6)
