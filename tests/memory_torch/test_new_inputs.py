"""Inputs that nobody planned for, while training: within the budget at first sight, and equal."""

import copy
import logging
import re
from types import MethodType

import pytest
import torch
from small_models import mlp, module_of, same_gradients
from steps import gradients, grads, plan_warnings, rows, same
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from sn_memory import BudgetError, Device, PlanError
from sn_memory.run import unseen
from sn_memory.torch import PlanWarning, StorageTracker, plan, planned, planning, trace, verify
from sn_memory.torch.model.signature import cut_out
from sn_memory.torch.target.capacity import _resident_bytes

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "graph"}
# Where the plan has to follow the budget, which `sqrt_n` does not.
SEARCHED = {"profile": False, "time_limit_s": 1.0, "backend": "graph"}


def stepped(model, *args):
    """Run one step as users do, counted; return output, gradients, and the peak."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    tracker = StorageTracker([*model.parameters(), *model.buffers(), *args])
    with tracker:
        out = model(*args)
    gradient = torch.sin(torch.arange(out.numel()).float()).view_as(out).to(out.dtype)
    tracker.meet(gradient)
    with tracker:
        out.backward(gradient)
    return [out.detach(), *grads(model), torch.get_rng_state()], tracker.peak_bytes


def kept(model, budgeted, *args):
    """Whether a planned step is the model's own to the bit, and within the budget; three times."""
    for _ in range(3):
        expected, _ = stepped(model, *args)
        found, peak = stepped(budgeted, *args)
        assert same(found, expected)
        assert peak <= budgeted.sn_memory.budget_bytes
    return True


def planned_for(model, sample, budget, **settings):
    """A plan of a copy."""
    return plan(copy.deepcopy(model), sample, budget, **(settings or SETTINGS))


def how(budgeted):
    """How the kind of input that came last was planned."""
    return budgeted.sn_memory.kinds[-1].how


@pytest.fixture
def searched(monkeypatch):
    """The searches for plans while training."""
    found = []
    own = planning.PlanOptions.planned
    monkeypatch.setattr(
        planning.PlanOptions, "planned", lambda it, graph: found.append(graph) or own(it, graph)
    )
    return found


@pytest.mark.parametrize("backend", ["graph", "compile"])
def test_smaller_batches_take_the_plan_there_is(backend, searched, caplog):
    torch._dynamo.reset()
    model = mlp(4)
    settings = SETTINGS if backend == "graph" else {"profile": False, "backend": backend}
    budgeted = planned_for(model, rows(64), "80%", **settings)
    searched.clear()
    with caplog.at_level(logging.INFO, "sn_memory.torch"):
        assert kept(model, budgeted, rows(60))
    found = budgeted.sn_memory.kinds[-1]
    assert found.inputs == "input (60, 32)"
    assert found.how.startswith("carried over from the plan of")
    if backend == "graph":
        assert found.how.endswith("of input (64, 32)")
        assert verify(budgeted, rows(60)).measured_peak_bytes == found.peak_bytes
    assert caplog.text.count("met input (60, 32)") == 1
    assert kept(model, budgeted, rows(9))
    assert how(budgeted) == "nothing runs again"
    assert not searched


def test_what_no_plan_is_small_enough_for_is_planned_at_once(searched):
    model = mlp(6)
    budgeted = planned_for(model, rows(48), "100%", **SEARCHED)
    searched.clear()
    assert kept(model, budgeted, rows(52))
    assert how(budgeted) == "planned at once"
    # Now there are two plans.
    assert kept(model, budgeted, rows(51))
    assert how(budgeted).startswith("carried over from the plan of")
    assert len(searched) == 1


def test_a_plan_that_was_passed_in_is_carried_over():
    model = mlp(6)
    passed = planned_for(model, rows(64), "75%", **SEARCHED).sn_memory.plan
    budgeted = planned_for(model, rows(64), "75%", planner=passed, **SEARCHED)
    assert kept(model, budgeted, rows(60))
    assert how(budgeted).startswith("carried over")
    # Of another size it is no plan, and another is searched for.
    assert kept(model, budgeted, rows(67))
    assert how(budgeted) == "planned at once"


def test_several_samples_and_the_largest_says_what_percent_is():
    model = mlp(6)
    both, large = (plan(model, it, "75%", **SETTINGS) for it in ([rows(8), rows(64)], rows(64)))
    assert both.sn_memory.budget_bytes == large.sn_memory.budget_bytes
    assert [it.how for it in both.sn_memory.kinds] == ["planned", "planned"]
    assert both.sn_memory.plan.peak_bytes == large.sn_memory.plan.peak_bytes
    for count in (8, 64):
        assert verify(both, rows(count)).equal
    with pytest.raises(ValueError, match="empty list"):
        plan(model, [], "75%", **SETTINGS)
    with pytest.raises(TypeError, match="several samples"):
        trace(model, [rows(8)])
    # Planned for one more, those that came while training are planned again: the budget may differ.
    large(rows(9))
    other = plan(large, rows(48), "90%", **SETTINGS)
    assert [it.inputs for it in other.sn_memory.kinds] == ["input (64, 32)", "input (48, 32)"]


@pytest.mark.parametrize(("backend", "micro_batches"), [("graph", 2), ("modules", 1)])
def test_what_others_put_around_the_forward_is_entered_once_a_step(backend, micro_batches):
    """As accelerate puts autocast there: entered twice by planning inside it, it stayed on."""
    found, plain = [], mlp(6)
    with torch.autocast("cpu", torch.bfloat16):
        planned = planned_for(plain, rows(256), 2**20, **{**SETTINGS, "backend": backend})
    for model in (plain, planned):
        autocast, calls = torch.autocast("cpu", torch.bfloat16), []
        inner = type(model).forward

        def around(self, x, autocast=autocast, calls=calls, inner=inner):
            calls.append(len(x))
            with autocast:
                return inner(self, x)

        model.forward = MethodType(around, model)
        found.append([])
        for count in (256, 64, 128, 64):
            for _ in range(micro_batches):
                out = model(rows(count))
                assert not torch.is_autocast_enabled("cpu")
                out.float().square().sum().backward()
            found[-1] += [out.detach(), *grads(model)]
            model.zero_grad()
        assert len(calls) == 4 * micro_batches
    assert same(*found)


def test_where_nothing_wants_a_gradient_nothing_is_planned():
    budgeted = plan(mlp(3), rows(8), "100%", **SETTINGS)
    with torch.no_grad():
        assert torch.equal(budgeted(rows(4)), copy.deepcopy(budgeted)(rows(4)))
    budgeted.requires_grad_(False)
    assert budgeted(rows(4)).grad_fn is None
    assert len(budgeted.sn_memory.kinds) == 1
    assert budgeted(rows(4).requires_grad_()).grad_fn is not None
    assert len(budgeted.sn_memory.kinds) == 2


class LooksAtMany(nn.Sequential):
    """Looks at a value where there are many rows, and so cannot be traced for these."""

    def forward(self, x):
        return super().forward(-x if len(x) > 64 and x.sum().item() > 1e9 else x)


@pytest.fixture
def looking():
    model = LooksAtMany(*mlp(6))
    return model, planned_for(model, rows(64), "100%")


def test_what_cannot_be_traced_runs_modules_again(looking):
    model, budgeted = looking
    with pytest.warns(
        PlanWarning, match=r"\(80, 32\).*modules run again.*cannot be traced.*plan\("
    ):
        found, peak = stepped(budgeted, rows(80))
    # The step that found the choice, and those that looked for it: none is the plain one.
    expected, plain = stepped(model, rows(80))
    assert peak <= budgeted.sn_memory.budget_bytes < plain
    assert same(found, expected)
    assert kept(model, budgeted, rows(80))
    first = budgeted.sn_memory.inputs.running
    # No larger than what was measured: nothing is measured.
    assert kept(model, budgeted, rows(70))
    assert budgeted.sn_memory.inputs.running is first
    budgeted.zero_grad()
    with pytest.warns(PlanWarning, match=r"\(84, 32\)"):
        budgeted(rows(84))
    assert budgeted.sn_memory.inputs.running is not first
    assert kept(model, budgeted, rows(84))


def test_the_safe_step_of_a_model_inside_another(looking):
    """What is measured ends at its inputs: what made these is run backward once, by its own."""
    _, budgeted = looking
    outer, copied = nn.Linear(32, 32), copy.deepcopy(budgeted)
    twin = copy.deepcopy(outer)
    with pytest.warns(PlanWarning, match="modules run again"):
        out = budgeted(outer(rows(80)))
    out.sum().backward()
    copied(twin(rows(80))).sum().backward()
    assert same([*grads(outer), *grads(budgeted)], [*grads(twin), *grads(copied)])


class Held:
    """An object that holds a tensor, as a cache of keys and values does."""

    def __init__(self, tensor):
        self.tensor = tensor


class OfHeld(nn.Sequential):
    held = None

    def forward(self, x, held=None):
        held = self.held if held is None else held
        if held is None:
            return super().forward(x)
        tensor = held if isinstance(held, torch.Tensor) else getattr(held, "tensor", held)
        return super().forward(x + (tensor[0] if isinstance(tensor, tuple | list) else tensor))


# Arguments and an attribute that hold a tensor, and a back end.
HELD = {
    "in an object": (lambda x: ((Held(x),), None), "graph"),
    "in a list of an object": (lambda x: ((Held([x]),), None), "regions"),
    "in an attribute": (lambda x: ((), x), "modules"),
    "in a tuple of an attribute": (lambda x: ((), (x,)), "graph"),
    "in an object of an attribute": (lambda x: ((), Held(x)), "regions"),
}


@pytest.mark.filterwarnings("ignore::sn_memory.torch.PlanWarning")
@pytest.mark.parametrize("where", HELD)
def test_a_measured_step_ends_at_what_is_held(where):
    """Its gradients were added to those of whatever had made the tensor, without a word."""
    hold, backend = HELD[where]
    budgeted = plan(OfHeld(*mlp(6)), rows(64), "100%", **SETTINGS | {"backend": backend})
    copied, scale = copy.deepcopy(budgeted), torch.ones(32, requires_grad=True)
    for _ in range(3):
        results = []
        for model in (budgeted, copied):
            scale.grad = None
            model.zero_grad()
            # An addition keeps nothing, so that to go back through it twice is no error.
            args, model.held = hold(rows(64) + scale)
            model(rows(64), *args).square().sum().backward()
            results.append([scale.grad, *grads(model)])
        assert same(*results)
    if where == "in an attribute":
        # The plain step that is measured had the attributes of before.
        scale.grad = None
        assert verify(budgeted, rows(64)).equal
        assert scale.grad is None


def test_an_argument_that_cannot_be_compared():
    def forward(self, x, names=None):
        return self.layers(x) * (2 if names else 1)

    model = module_of(forward, layers=mlp(6))
    budgeted = plan(model, rows(64), "80%", **SETTINGS)
    with pytest.warns(PlanWarning, match="neither a tensor nor hashable"):
        budgeted(rows(64), {"a"}).sum().backward()
    model.zero_grad()
    same_gradients(budgeted, model, rows(60), {"a", "b"})


@pytest.mark.parametrize("traced", [True, False])
def test_a_budget_that_cannot_be_kept(looking, traced):
    _, budgeted = looking
    if traced:
        budgeted = plan(mlp(6), rows(64), "100%", **SETTINGS)
    budget = budgeted.sn_memory.budget_bytes
    with plan_warnings() as texts:
        _, peak = stepped(budgeted, rows(512))
    promised = budgeted.sn_memory.kinds[-1].peak_bytes
    (text,) = texts
    assert re.search(rf"\(512, 32\).* {promised - budget} bytes above the budget", text)
    assert stepped(budgeted, rows(512))[1] == promised <= peak


def test_strict(looking):
    _, budgeted = looking
    strict = plan(budgeted, rows(64), "100%", strict=True, **SETTINGS)
    strict(rows(9)).sum().backward()
    with pytest.raises(PlanError, match=r"x \(80, 32\).*cannot be traced.*\[sample, another\]"):
        strict(rows(80))
    own = plan(mlp(6), rows(64), "100%", strict=True, **SETTINGS)
    with pytest.raises(BudgetError, match=r"\(512, 32\).*smallest peak found") as refusal:
        own(rows(512))
    assert refusal.value.peak_bytes > refusal.value.budget_bytes == own.sn_memory.budget_bytes
    by_modules = plan(mlp(6), rows(64), "90%", backend="modules", strict=True)
    by_modules(rows(66)).sum().backward()
    with pytest.raises(BudgetError, match=r"\(512, 32\)"):
        by_modules(rows(512))
    cooled = plan(annealed(), (rows(), 1.0), "90%", strict=True, **SETTINGS)
    with pytest.raises(PlanError, match="the argument tau changes from step to step"):  # noqa: PT012
        for step in range(4):
            cooled(rows(), 1 / (2 + step)).backward()
            cooled.zero_grad()


@pytest.mark.parametrize("backend", ["graph", "regions", "modules"])
def test_a_forward_that_raises_leaves_what_the_plain_one_leaves(backend):
    """Loops that skip a batch continue with its buffers and random numbers."""

    class Fails(nn.Module):
        fail = False

        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1))
            self.last = nn.Linear(32, 32)

        def forward(self, x):
            x = self.block(x)
            if self.fail:
                raise KeyError("a batch to skip")
            return self.last(x)

    torch.manual_seed(0)
    plain, x = Fails(), torch.randn(64, 32)
    model = plan(copy.deepcopy(plain), x, "150%", backend=backend, profile=False)
    ends = []
    for one in (plain, model):
        torch.manual_seed(1)
        one(x).sum().backward()
        one.fail = True
        with pytest.raises(KeyError, match="a batch to skip") as raised:
            one(x)
        assert raised.value.__context__ is None
        ends.append([torch.rand(1), *(buffer.clone() for buffer in one.buffers())])
    assert all(map(torch.equal, *ends))


def test_larger_inputs_are_measured_again_by_modules():
    """Today's budget was kept on the sample alone."""
    model = mlp(6)
    budgeted = planned_for(model, rows(64), "100%", backend="modules")
    assert not budgeted.sn_memory.plan.decided("recompute")
    assert kept(model, budgeted, rows(80))
    assert budgeted.sn_memory.inputs.running.plan.decided("recompute")


def test_where_planning_takes_too_long_modules_run_again(monkeypatch):
    model = mlp(6)
    budgeted = planned_for(model, rows(64), "100%", **SEARCHED)
    monkeypatch.setattr(unseen, "ALLOWED_S", -100.0)
    with pytest.warns(PlanWarning, match="a tenth of the time"):
        budgeted(rows(66)).sum().backward()
    assert kept(model, budgeted, rows(65))
    # Not for good: when there is time again, it is planned.
    assert len(budgeted.sn_memory.kinds) == 1
    monkeypatch.undo()
    assert kept(model, budgeted, rows(65))
    assert how(budgeted) == "planned at once"


@pytest.mark.parametrize("backend", ["graph", "modules"])
def test_batches_that_are_parts_of_one_tensor_are_one_kind(backend):
    """Data may lie in one tensor, which is no part of a step: where a batch begins is nothing."""

    def follows(self, words, following):
        return (self.body(self.words(words)) - self.words(following)).square().mean()

    data, model = rows(64 * 5), mlp(6)
    settings = {**SETTINGS, "backend": backend}
    alone = planned_for(model, rows(), "80%", **settings).sn_memory.plan
    budgeted = planned_for(model, data[64:128], "80%", **settings)
    assert budgeted.sn_memory.plan.baseline_peak_bytes == alone.baseline_peak_bytes
    assert verify(budgeted, data[:64]).measured_peak_bytes <= budgeted.sn_memory.budget_bytes
    assert _resident_bytes(model, data[:64], None, torch.device("cpu")) == _resident_bytes(
        model, data[:64].clone(), None, torch.device("cpu")
    )
    (column,) = cut_out((columns := data[:, :8],))
    assert column is columns
    # Words, and those one place on: the same tensor of all words, looked at twice.
    words = torch.arange(100) % 20
    pairs = [(words[at : at + 32], words[at + 1 : at + 33]) for at in (3, 0, 40, 67)]
    follows = module_of(follows, words=nn.Embedding(20, 32), body=mlp(4))
    planned_pairs = planned_for(follows, pairs[0], "90%", **settings)
    with plan_warnings() as texts:
        for batch in data.split(64):
            assert same(gradients(budgeted, batch), gradients(model, batch))
        for pair in pairs:
            assert same(gradients(planned_pairs, *pair), gradients(follows, *pair))
    assert not texts
    assert len(budgeted.sn_memory.kinds) == len(planned_pairs.sn_memory.kinds) == 1
    # Farther apart in that memory, and each in its own.
    for pair in ((words[:32], words[2:34]), (words[:32].clone(), words[1:33])):
        assert same(gradients(planned_pairs, *pair), gradients(follows, *pair))
    assert len(planned_pairs.sn_memory.kinds) == 3


def test_many_kinds_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(planned, "KINDS", 4)
    budgeted = plan(mlp(2), rows(64), "100%", **SETTINGS)
    record = budgeted.sn_memory
    for count in range(1, 10):
        budgeted(rows(count))
        budgeted(rows(1))
        assert len(record.steps) == len(record.kinds) <= 5
    # The sample's, the one used all along, and the last three.
    counts = {1, 7, 8, 9, 64}
    assert {it.inputs for it in record.kinds} == {f"input ({it}, 32)" for it in counts}


def test_what_other_kinds_hold_counts():
    """Each has a constant of as many numbers as there are rows."""

    def forward(self, x):
        return self.layers(x) * torch.tensor([[1.0 + row] for row in range(len(x))])

    model, largest = module_of(forward, layers=mlp(2)), rows(600)
    least = planned_for(model, largest, "100%").sn_memory.plan.peak_bytes
    budgeted = planned_for(model, largest, int(1.01 * least))
    record = budgeted.sn_memory
    for count in range(500, 512):
        budgeted(rows(count)).sum().backward()
        held = [it for step in record.steps.values() for it in step.known]
        memory = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in held}
        peak = record.latest.plan.peak_bytes + sum(memory.values())
        peak -= sum(it.untyped_storage().nbytes() for it in record.latest.known)
        assert peak <= record.budget_bytes
    assert 2 < len(record.kinds) < 12


def test_blocks_on_the_host_are_those_of_one_kind():
    link = Device("fast link", 1e9, 1e9, 1e12, 1e12, 0.0)
    settings = {"techniques": ("keep", "offload"), "device": link, "profile": False}
    budgeted = plan(mlp(8), rows(64), "75%", **settings)
    for count in (64, 60, 62, 64):
        budgeted.zero_grad()
        budgeted(rows(count)).sum().backward()
        with_blocks = [it for it in budgeted.sn_memory.steps.values() if it.program.free_buffers]
        assert with_blocks == [budgeted.sn_memory.inputs.running]
        found = verify(budgeted, rows(count))
        assert found.equal
        assert found.measured_peak_bytes <= budgeted.sn_memory.budget_bytes
    assert len(budgeted.sn_memory.kinds) == 3


@torch.library.custom_op("sn_memory_tests::laid_out_anew", mutates_args=())
def laid_out_anew(x: torch.Tensor) -> torch.Tensor:
    """An op whose rule for fake tensors keeps a layout that its kernel does not."""
    return x.clone(memory_format=torch.contiguous_format)


laid_out_anew.register_fake(torch.empty_like)
laid_out_anew.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("sampled", [4, 5])
def test_kernels_that_lay_out_otherwise(sampled):
    """Seen in the trial of the sample, or only with the new kind: it is traced as it lies then."""

    def forward(self, x):
        x = torch.relu(self.first(x))
        if x.shape[0] % 2 == 0:
            x = x.transpose(2, 3).contiguous().transpose(2, 3)
        return self.last(nn.functional.elu(laid_out_anew(x)))

    model = module_of(forward, first=nn.Linear(12, 12), last=nn.Linear(12, 12))
    sample, settings = torch.randn(sampled, 6, 10, 12), {"profile": False, "time_limit_s": 1}
    budgeted = planned_for(model, sample, "200%", **settings)
    assert budgeted.sn_memory.backend == "graph"
    assert budgeted.sn_memory.inputs.laid_out_otherwise == (sampled == 4)
    for batch in (2, 3, 6, 2):
        assert kept(model, budgeted, torch.randn(batch, 6, 10, 12))
    assert budgeted.sn_memory.inputs.laid_out_otherwise
    assert not any(it.layouts for it in budgeted.sn_memory.steps.values())


def annealed():
    """Takes a temperature, as an argument or as an attribute, that training lets fall."""

    def forward(self, x, tau=1.0):
        return (self.inner(x) / (tau * self.inner.scale)).softmax(-1).square().mean()

    inner = mlp(4)
    inner.scale = 1.0
    return module_of(forward, inner=inner)


@pytest.mark.parametrize(
    ("where", "named", "backend"),
    [("argument", "the argument tau", "graph"), ("attribute", r"inner\.scale", "modules")],
)
def test_a_number_that_changes_is_planned_for_three_times(where, named, backend):
    """Then one warning names it, and the safe plan is for all its values."""
    model = annealed()
    budget = "90%" if backend == "graph" else "100%"
    planned = plan(model, (rows(), 1.0), budget, backend=backend, profile=False)
    twin, x = copy.deepcopy(model), rows()

    def run(it, x, tau):
        it.zero_grad()
        it.inner.scale = tau if where == "attribute" else 1.0
        loss = it(x, 1.0 if where == "attribute" else tau)
        loss.backward()
        return [loss, *grads(it)]

    with plan_warnings() as told:
        for step in range(6):
            assert same(run(planned, x, 1 / (2 + step)), run(twin, x, 1 / (2 + step)))
    assert len(planned.sn_memory.kinds) == 4
    (text,) = told
    assert re.search(f"another value of {named} in 3 steps.*pass it as a tensor", text)
    if where == "argument":
        assert verify(planned, (x, 0.01)).difference == 0
    # A smaller batch needs no measurement of its own, either.
    run(planned, x[:32], 0.01)
    assert how(planned) == "modules run again"


def weight_norms(count):
    """As the old `weight_norm` they set the weight in each step, and cannot be copied."""
    torch.manual_seed(0)
    pairs = ((nn.utils.weight_norm(nn.Linear(32, 32)), nn.Tanh()) for _ in range(count))
    return nn.Sequential(*(it for pair in pairs for it in pair))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_attributes_that_a_forward_sets_make_no_other_kind():
    model, x = weight_norms(4), torch.randn(256, 32)
    with pytest.warns(PlanWarning, match="by modules"):
        planned = plan(model, x, "100%", profile=False)
    planned(x).square().mean().backward()
    assert stepped(planned, x)[1] <= stepped(model, x)[1]
    assert len(planned.sn_memory.kinds) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_attributes_that_a_compiled_forward_sets_are_planned_for_three_times():
    """Then one warning names them, and modules run again; each step was planned anew."""
    torch._dynamo.reset()
    x, expected = torch.randn(256, 32), weight_norms(1)
    compiled = plan(weight_norms(1), x, "150%", profile=False, backend="compile")
    counts = []
    with plan_warnings() as told:
        for _ in range(6):
            for it in (compiled, expected):
                it.zero_grad()
                it(x).square().mean().backward()
            for one, other in zip(grads(compiled), grads(expected), strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
            counts.append(len(compiled.sn_memory.kinds))
    hows = [it.how == "modules run again" for it in compiled.sn_memory.kinds]
    assert hows == [False] * 3 + [True]
    assert counts[-3:] == [4] * 3
    (text,) = told
    assert "another value of 0.weight in 3 steps" in text


def on_the_host():
    return saved_tensors_hooks(lambda it: it.detach().numpy().copy(), torch.from_numpy)


def in_half():
    return saved_tensors_hooks(lambda it: it.half(), lambda it: it.float())


@pytest.mark.parametrize(("hooks", "backend"), [
    *((None, "graph"), (None, "compile"), (None, "modules")),
    *((on_the_host, "graph"), (in_half, "compile"), (on_the_host, "modules")),
])  # fmt: skip
def test_inside_hooks_of_the_callers(hooks, backend):
    """A kind was traced under them: counted by a checkpoint, and packed without values."""
    torch._dynamo.reset()
    model = mlp(4)
    budgeted = planned_for(model, rows(64), "100%", profile=False, backend=backend)
    for count in (64, 60, 60):
        with plan_warnings() as texts:
            if hooks is None:
                out = checkpoint(budgeted, rows(count), use_reentrant=False)
            else:
                with hooks():
                    out = budgeted(rows(count))
            found = torch.autograd.grad(out.square().sum(), [*budgeted.parameters()])
        told = [it for it in texts if "hooks for saved tensors" in it]
        # What no unit keeps is packed by them, as without a plan.
        assert len(told) == (count == 64 and backend != "modules")
        named = "_checkpoint_hook" if hooks is None else "test_new_inputs"
        assert all(named in it for it in told)
        # By ops the hooks are left out; compiled, they see what compiled code keeps.
        if hooks is not in_half:
            loss = model(rows(count)).square().sum()
            assert same(found, torch.autograd.grad(loss, [*model.parameters()]))
    if backend != "compile":
        with on_the_host():
            assert verify(budgeted, rows(64)).equal


def doubles(module, given, result):
    return result * 2 if isinstance(module, nn.GELU) else None


@pytest.mark.parametrize(
    ("counts", "backend"),
    [(True, "graph"), (True, "modules"), (False, "compile")],
)
def test_hooks_of_all_modules_registered_after_planning(backend, counts):
    """As hooks of one module they are part of what a plan is for; those that note run each time."""
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    net, x = nn.Sequential(*blocks), torch.randn(256, 32)
    planned = planned_for(net, x, "80%", backend=backend, profile=False)
    before = planned(x).detach()
    calls = []

    def noted(module, given, result):
        calls.append(module)
        return doubles(module, given, result)

    hook = register_module_forward_hook(noted if counts else doubles)
    try:
        expected = net(x)
        count = len(calls)
        with plan_warnings() as said:
            for _ in range(2):
                assert torch.equal(planned(x), expected)
        assert len(calls) == 3 * count
    finally:
        hook.remove()
    # torch.compile does by itself what a hook does to a list.
    assert len(said) == (counts and backend == "graph")
    assert all("hooks of all modules" in it and "noted" in it for it in said)
    assert torch.equal(planned(x), before)


@pytest.mark.parametrize("backend", ["graph", "regions", "modules"])
def test_anomalies_are_looked_for_in_gradients_with_values_alone(backend):
    """Where a forward pass plans, torch found NaN in what has no values; Inf * 0 it must find."""
    model, x = mlp(6), torch.randn(64, 32)
    with torch.autograd.set_detect_anomaly(True):
        planned = planned_for(model, x, "90%", backend=backend, profile=False)
        for it in (model, planned):
            for count in (64, 64, 48):  # later steps find gradients, the last is smaller
                it(x[:count]).square().sum().backward()
        assert same(grads(planned), grads(model))
        loss = (planned(x) * torch.inf * 0).sum()
        warned = pytest.warns(UserWarning, match="Error detected in")
        with warned, pytest.raises(RuntimeError, match="returned nan"):
            loss.backward()
