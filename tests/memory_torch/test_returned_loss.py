"""A model that returns its loss beside other outputs: backward is planned from that loss alone.

Over 300 lines: one model, and each way in which a gradient of its outputs may be asked for.
"""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
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


def step(model, given, name, **settings):
    torch.manual_seed(1)
    LOSSES[name](*three(model(*given))).backward(**settings)


def same(mine, theirs):
    return equal(grads(mine), grads(theirs))


def pair(budget=10**8, form=dict, batch=256, **settings):
    model, given = Labelled(form), sample(batch)
    mine = copy.deepcopy(model)
    settings = {"backend": "graph", "profile": False, **settings}
    return model, mine, plan(mine, given, budget, **settings), given


@pytest.mark.parametrize("form", [dict, tuple, SimpleNamespace])
def test_percent_are_of_the_plain_step(form):
    model, _, planned, given = pair("80%", form, 1024)
    plain = run_step(model, model, (given, {}), kernels=True).peak_bytes
    baseline = planned.sn_memory.plan.baseline_peak_bytes
    assert abs(baseline / plain - 1) < 0.005
    assert abs(estimate(model, given).step_bytes / plain - 1) < 0.005
    assert not any("plain step" in it for it in planned.sn_memory.latest_trace.notes)
    held = run_step(planned, planned, (given, {}), kernels=True).peak_bytes
    assert held <= planned.sn_memory.budget_bytes
    assert not verify(planned, given).different
    assert sum(planned.sn_memory.latest_trace.captured.ends) == 1


def test_scalars_beside_the_first_may_be_part_of_the_loss():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

        def forward(self, x, first):
            found = self.layer(x) * self.scale
            parts = (found.mean(), found.square().mean(), found)
            return parts if first else (found, parts[0])

    for first, ends in ((True, (True, True, False)), (False, (True, True))):
        traced = trace(Several(), (torch.randn(2, 4), first), profile=False)
        assert traced.captured.ends == ends


@pytest.mark.parametrize("accumulate", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    ("form", "first"),
    [
        *((dict, first) for first in ("loss", "penalty", "logits", "other")),
        *((form, "penalty") for form in (tuple, SimpleNamespace)),
    ],
)
def test_gradients_of_other_outputs_are_right_from_the_first_on(form, first, accumulate):
    model, mine, planned, given = pair(form=form)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in (first, *LOSSES, "loss", "loss", "logits", first):
            for it in (model, mine):
                it.zero_grad()
            for _ in range(1 + accumulate):
                step(planned, given, name)
                step(model, given, name)
                assert same(mine, model)
    words = [str(it.message) for it in caught if "other than the loss" in str(it.message)]
    assert len(words) == 1
    assert "runs without its plan" in words[0]
    assert "the budget is" in words[0]


def test_the_loss_alone_runs_as_planned_and_warns_of_nothing():
    model, mine, planned, given = pair("80%")
    planned_step = planned.sn_memory.latest
    for name in ("loss", "twice", "loss"):
        model.zero_grad()
        mine.zero_grad()
        step(planned, given, name)
        step(model, given, name)
        assert same(mine, model)
        assert mine.other.weight.grad is None
    assert planned.sn_memory.inputs.running is planned_step


def test_later_steps_are_planned_for_all_outputs():
    _, _, planned, given = pair()
    before = planned.sn_memory.latest
    with pytest.warns(PlanWarning, match="planned for what was requested"):
        step(planned, given, "penalty")
    step(planned, given, "penalty")
    now = planned.sn_memory.inputs.running
    assert now is not before
    assert now.captured.ends == (True, False, True)
    step(planned, given, "loss")
    assert planned.sn_memory.inputs.running is now
    # Of another shape, too.
    step(planned, sample(8), "penalty")
    assert planned.sn_memory.inputs.running.captured.ends == now.captured.ends
    for name in ("all", "other"):
        step(planned, given, name)
    assert planned.sn_memory.inputs.running.captured.ends == (True, True, True)


def test_logits_alone_take_what_the_plain_step_takes():
    _, _, planned, given = pair()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(planned, given, "logits")
        ends = planned.sn_memory.inputs.running.captured.ends
    assert ends == (True, False, False)


def test_strict_raises_and_the_next_step_is_planned_so():
    model, mine, planned, given = pair(strict=True)
    with pytest.raises(PlanError, match=r"strict: .* other than the loss"):
        step(planned, given, "penalty")
    mine.zero_grad()
    step(planned, given, "penalty")
    step(model, given, "penalty")
    assert same(mine, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", [("loss", "logits"), ("logits", "loss"), ("loss", "penalty")])
def test_several_backward_passes_of_one_graph(order):
    model, mine, planned, given = pair()
    for it in (planned, model, planned, model):
        if it is planned:
            model.zero_grad()
            mine.zero_grad()
        torch.manual_seed(1)
        outs = three(it(*given))
        LOSSES[order[0]](*outs).backward(retain_graph=True)
        LOSSES[order[1]](*outs).backward()
        with pytest.raises((ReplayError, RuntimeError), match="second time"):
            LOSSES[order[1]](*outs).backward()
    assert same(mine, model)


@pytest.mark.filterwarnings("ignore")
def test_gradients_by_name_of_parameters_and_inputs():
    model, given = Labelled(), sample()
    x = given[0].requires_grad_()
    mine = copy.deepcopy(model)
    planned = plan(mine, given, 10**8, backend="graph", profile=False)
    names = ("body.0.weight", "head.bias", "other.bias")
    for name in ("loss", "logits", "other", "all", "loss"):
        found = []
        for it, own in ((planned, mine), (model, model)):
            torch.manual_seed(1)
            loss = LOSSES[name](*three(it(*given)))
            leaves = [x, *map(own.get_parameter, names)]
            found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        for got, expected in zip(*found, strict=True):
            assert got is expected is None or torch.equal(got, expected)
    torch.manual_seed(1)
    loss, _, _ = three(planned(*given))
    with pytest.raises(RuntimeError, match=r"unused|not have been used"):
        torch.autograd.grad(loss, [mine.other.bias])


@pytest.mark.filterwarnings("ignore")
def test_hooks_on_parameters_see_what_the_plain_step_shows():
    model, mine, planned, given = pair()
    seen = []
    for own in (mine, model):
        for name, it in own.named_parameters():
            it.register_post_accumulate_grad_hook(
                lambda leaf, name=name, own=own: seen.append((own is mine, name, leaf.grad))
            )
    for name in ("loss", "penalty", "other", "loss"):
        seen.clear()
        model.zero_grad()
        mine.zero_grad()
        step(planned, given, name)
        step(model, given, name)
        # Of a parameter that may have a gradient and has none, torch calls them with None.
        there = [it for it in seen if it[2] is not None]
        got, expected = ({n: g for ours, n, g in there if ours is side} for side in (True, False))
        assert len(there) == len(got) + len(expected)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[it], expected[it]) for it in got)


def test_a_parameter_that_is_frozen_before_backward():
    model, mine, planned, given = pair()
    for it, own in ((planned, mine), (model, model)):
        torch.manual_seed(1)
        loss = LOSSES["penalty"](*three(it(*given)))
        own.head.bias.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
    assert same(mine, model)
    assert mine.head.bias.grad is None


def test_penalties_of_gradients():
    model, mine, planned, given = pair()
    for it, own in ((planned, mine), (model, model)):
        torch.manual_seed(1)
        loss, logits, _ = three(it(*given))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (found,) = torch.autograd.grad(
                loss + logits.mean(), [own.head.weight], create_graph=True
            )
            found.square().sum().backward()
    for got, expected in zip(mine.parameters(), model.parameters(), strict=True):
        assert (got.grad is None) == (expected.grad is None)
        assert got.grad is None or torch.allclose(got.grad, expected.grad, rtol=1e-5)


def test_what_cannot_run_once_more_is_refused():
    model, given = Labelled(spectral=True), sample()
    planned = plan(model, given, 10**8, backend="graph", profile=False)
    step(planned, given, "loss")
    with pytest.raises(ReplayError, match=r"output other than the loss .* writes over"):
        step(planned, given, "penalty")
    # Planned for both by now.
    step(planned, given, "penalty")


def test_state_on_the_host_refuses_other_gradients():
    model, given = Labelled(), sample()
    mine = copy.deepcopy(model)
    steps = [torch.optim.AdamW(it.parameters(), 0.1) for it in (mine, model)]
    planned = plan(
        mine, given, "95%", profile=False, state=HostState(in_place=False), optimizer=steps[0]
    )
    for _ in range(2):
        step(planned, given, "loss")
        step(model, given, "loss")
        for it in steps:
            it.step()
            it.zero_grad()
        assert all(map(torch.equal, mine.state_dict().values(), model.state_dict().values()))
    with pytest.raises(ReplayError, match="an output other than the loss"):
        step(planned, given, "penalty")


@pytest.mark.parametrize("backend", ["compile", "modules"])
def test_other_backends_take_gradients_of_all_outputs(backend):
    model, mine, planned, given = pair(backend=backend)
    for name in LOSSES:
        model.zero_grad()
        mine.zero_grad()
        step(planned, given, name)
        step(model, given, name)
        if backend == "modules":
            assert same(mine, model)
        for got, expected in zip(mine.parameters(), model.parameters(), strict=True):
            zeros = torch.zeros_like(got)
            both = [zeros if it is None else it for it in (got.grad, expected.grad)]
            assert torch.allclose(*both, rtol=1e-4, atol=1e-6)
