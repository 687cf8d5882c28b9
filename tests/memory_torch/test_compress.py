"""Technique compress: what waits in few bits, what it costs gradients, and that bytes are kept."""

import copy
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import most_scratch
from torch import nn

from sn_memory import BudgetError, Device, PlanError
from sn_memory.activations import gradient_sd
from sn_memory.graph.rewrite import with_compressed
from sn_memory.plan.policies import policy
from sn_memory.torch import TraceError, compress_activations, plan, trace, verify
from sn_memory.torch.trace.compressible import Compress, Decompress, Form
from sn_memory.torch.trace.record import View

# Convolutions take time here, as on a CPU; on the nominal accelerator memory traffic is all.
SLOW = {"profile": False, "device": Device("a core", 3e10, 1e10)}
# The same on any machine, so that what is compared was not cut by its load.
COUNTED = {**SLOW, "deterministic": True}
RECOMPUTE, COMPRESS = ("keep", "recompute"), ("keep", "recompute", "compress")


def unit(before, after):
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


def network():
    """Convolutions, norms, ReLUs, pooling and dropout: each form there is but that of Booleans."""
    return nn.Sequential(
        *unit(3, 8), *unit(8, 8), *unit(8, 8), nn.MaxPool2d(2), *unit(8, 16), *unit(16, 16),
        nn.Flatten(), nn.Dropout(), nn.Linear(16 * 36, 10),
    )  # fmt: skip


def batch():
    return torch.randn(16, 3, 12, 12)


def everything(model, sample, **options):
    """A model with all compressed that can be, and nothing run again."""
    traced = trace(model, sample, profile=False, bits=options.get("bits", 8))
    graph = with_compressed(traced.graph, traced.forms)
    made = policy("liveness")(graph, budget_bytes=None)
    planned = plan(
        model, sample, made.peak_bytes, planner=made, techniques=COMPRESS, profile=False, **options
    )
    return planned, traced


def gradients(model, sample):
    model.zero_grad()
    torch.manual_seed(5)
    out = model(sample)
    out.backward(torch.sin(torch.arange(out.numel()).float()).view_as(out))
    return out.detach(), {name: it.grad.clone() for name, it in model.named_parameters()}


def test_who_asks_decides_the_form():
    traced = trace(network(), batch(), profile=False, bits=4)
    kinds = {name.partition("#")[0]: (form.kind, form.bits) for name, form in traced.forms.items()}
    assert kinds == {
        "0/convolution": ("values", 8),  # of a norm: not linear
        "3/convolution": ("values", 8),
        "6/convolution": ("values", 8),
        "10/convolution": ("values", 8),
        "13/convolution": ("values", 8),
        "2/relu": ("signed", 4),  # of a convolution and a ReLU
        "5/relu": ("signed", 4),
        "12/relu": ("signed", 4),
        "8/relu": ("signs", 8),  # of a ReLU and the shape of what is pooled
        "15/relu": ("signs", 8),
        "9/max_pool2d_with_indices": ("values", 4),
        "17/empty_like": ("mask", 8),
        "17/mul": ("values", 4),
    }
    direct = {name.partition("#")[0] for name, form in traced.forms.items() if form.direct}
    assert direct == {"8/relu", "15/relu", "17/empty_like"}
    for storage in traced.graph.storages:
        assert (storage.compressed is not None) == (storage.name in traced.forms)
    assert not trace(network(), batch(), profile=False).forms


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["values", "signed", "signs", "mask", "bits"]),
    bits=st.sampled_from([1, 2, 4, 8]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
)
def test_there_and_back(kind, bits, shape, seed):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=chance).transpose(0, 1)
    if kind == "signed":
        values = values.relu()
    if kind == "mask":
        values = values.gt(0).float() / 0.3
    if kind == "bits":
        values = values.gt(0)
    values = values.clone(memory_format=torch.preserve_format)
    form = Form(kind, View(0, tuple(values.shape), values.stride(), 0, values.dtype), bits)
    small = Compress(form, 3)(values)
    back = Decompress(form)(small)
    assert small.nbytes == form.nbytes
    assert form.view.shows(back)
    if kind in ("mask", "bits"):
        assert torch.equal(back, values)
    elif kind == "signs":
        assert torch.equal(back, (values > 0).float())
    else:
        # One step of a group's grid is at most its range over the points, rounded up to bfloat16;
        # a grid with points on either side of zero has at most one point less on the wider one.
        wide = 2 * float(values.max() - values.min())
        assert float((back - values).abs().max()) <= 1.01 * wide / max(1, 2**bits - 2)
        assert (back[values == 0] == 0).all()
        if kind == "signed":
            assert torch.equal(back > 0, values > 0)


def test_nan_and_infinity_come_back():
    values = torch.randn(3000).relu()
    values[7], values[500] = float("nan"), float("inf")
    for kind in ("values", "signed"):
        form = Form(kind, View(0, (3000,), (1,), 0, torch.float32), 4)
        small = Compress(form, 0)(values)
        back = Decompress(form)(small)
        assert torch.isnan(back).nonzero().tolist() == [[7]]
        assert torch.isinf(back).nonzero().tolist() == [[500]]
        assert small.nbytes == form.nbytes


@pytest.mark.parametrize("share", ["100%", "80%", "75%"])
def test_bytes_are_as_planned(share):
    model, sample = network(), batch()
    planned = plan(model, sample, share, techniques=COMPRESS, time_limit_s=0.5, **COUNTED)
    found = verify(planned, sample)
    made = planned.sn_memory.plan
    assert found.measured_peak_bytes == found.predicted_peak_bytes == made.peak_bytes
    assert bool(made.decided("compress")) == (share != "100%")
    # Outputs and statistics are those of the plain model, whatever waits in few bits.
    assert all(name.startswith("gradient") for name in found.different)
    # Which are chosen depends on kernels' scratch: of signs alone nothing is lost.
    assert found.equal or share != "100%"


def test_a_relu_before_a_pooling_layer_is_never_restored():
    """Its backward pass reads bits, the pooling layer's a size: the peak is the forward pass's."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3), nn.ReLU()
    )
    sample = torch.randn(32, 1, 24, 24)
    planned, _ = everything(model, sample)
    found = verify(planned, sample)
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    largest = 32 * 16 * 24 * 24 * 4
    given = sample.nbytes + sum(it.nbytes for it in model.parameters())
    assert found.unplanned_peak_bytes > 2.4 * largest
    assert found.measured_peak_bytes - most_scratch(planned) <= 2 * largest + given
    # The one gradient that a rounded value makes; all others pass through exact masks only.
    assert found.different == ("gradient of 3.weight",)


def test_all_compressed_measures_what_was_planned():
    model, sample = network(), batch()
    planned, traced = everything(model, sample, bits=2)
    found = verify(planned, sample)
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert len([it for it in planned.sn_memory.trace.graph.ops if it.kind == "compress"]) == len(
        traced.forms
    )


def test_what_is_exact_is_bit_equal():
    """A ReLU's mask, a pooling layer's input and dropout's mask lose nothing, at one bit a value.

    The gradients of the first layers pass through all of these, and no lossy value is read for
    them: a matrix product's gradient with respect to its input reads the weight.
    """
    model = nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Dropout(), nn.Linear(48, 64), nn.LeakyReLU(),
        nn.Unflatten(1, (1, 8, 8)), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    sample = torch.randn(128, 32)
    planned, traced = everything(model, sample, bits=1)
    kinds = {(form.kind, form.direct) for form in traced.forms.values()}
    # A leaky ReLU's backward pass reads what was restored, a ReLU's and a dropout's the bits.
    assert kinds == {("values", False), ("signs", False), ("signs", True), ("mask", True)}
    out, plain = gradients(model, sample)
    other, lossy = gradients(planned, sample)
    assert torch.equal(out, other)
    # The first layer's input belongs to the caller; biases read no activation.
    for name in ("0.weight", "0.bias", "3.bias", "9.bias"):
        assert torch.equal(plain[name], lossy[name]), name
    assert not torch.equal(plain["3.weight"], lossy["3.weight"])


@pytest.mark.parametrize("bits", [2, 8])
def test_gradients_deviate_as_predicted_and_have_no_bias(bits):
    """Of the second layers: their inputs wait in few bits, what arrives at them is exact."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten(), nn.Linear(5 * 64, 7)
    )
    sample = torch.randn(24, 3, 12, 12)
    planned, traced = everything(model, sample, bits=bits)
    inputs, arriving = {}, {}

    def watch(number):
        def passed(_, given, out):
            inputs[number] = given[0].detach()
            out.register_hook(lambda it: arriving.update({number: it.detach()}))

        return model[number].register_forward_hook(passed)

    hooks = [watch(2), watch(4)]
    _, plain = gradients(model, sample)
    # A hook that came after planning is no part of the plan.
    for hook in hooks:
        hook.remove()
    repeats = 60
    errors = {number: [] for number in (2, 4)}
    for _ in range(repeats):
        _, lossy = gradients(planned, sample)
        for number, rows in errors.items():
            rows.append((lossy[f"{number}.weight"] - plain[f"{number}.weight"]).double().numpy())
    for number, rows in errors.items():
        form = next(it for it in traced.forms.values() if it.n == inputs[number].numel())
        flat = Form(form.kind, form.view, bits)
        compress, decompress = Compress(flat, 99), Decompress(flat)
        variance = np.mean(
            [
                float((decompress(compress(inputs[number])) - inputs[number].view(form.view.size))
                      .double().square().mean())
                for _ in range(8)
            ]
        )  # fmt: skip
        outputs = model[number].weight.shape[0]
        energy = float(arriving[number].double().square().sum())
        predicted = gradient_sd(variance, energy, outputs)
        measured = np.sqrt(np.mean(np.square(rows)))
        # 10 % is what is promised; 60 repeats of hundreds of entries are far closer.
        assert measured == pytest.approx(predicted, rel=0.1)
        # The mean of 60 unbiased errors is 1 / sqrt(60) of one: 0.129. A bias would stay.
        mean = np.sqrt(np.mean(np.square(np.mean(rows, axis=0))))
        assert mean / measured == pytest.approx(repeats**-0.5, rel=0.25)


@pytest.mark.usefixtures("_no_scratch")
def test_never_slower_and_budgets_out_of_reach_otherwise():
    model, sample = network(), batch()
    for share in ("80%", "45%"):
        without, allowed = [
            plan(model, sample, share, techniques=it, time_limit_s=limit, **COUNTED).sn_memory.plan
            # Among what may be compressed, the search without has half of the time.
            for it, limit in ((RECOMPUTE, 0.25), (COMPRESS, 0.5))
        ]
        assert allowed.seconds <= without.seconds
        assert allowed.baseline_peak_bytes == without.baseline_peak_bytes
    # Rebuilding alone does not get here by far, in four times as much either.
    assert allowed.decided("compress")
    assert allowed.overhead < 0.6 * without.overhead


@pytest.mark.usefixtures("_no_scratch")
def test_little_time_is_enough_to_find_what_to_compress():
    """The walk that goes furthest leaves no plan here, and takes all of its part of the time."""
    planned = plan(network(), batch(), "45%", techniques=COMPRESS, time_limit_s=0.05, **COUNTED)
    assert planned.sn_memory.plan.decided("compress")
    # Rebuilding alone takes 0.56 at best.
    assert planned.sn_memory.plan.overhead < 0.35


def test_refusals_can_be_carried_out():
    model, sample = network(), batch()
    with pytest.raises(BudgetError) as refusal:
        plan(model, sample, "1%", techniques=COMPRESS, profile=False, time_limit_s=0.5)
    least = refusal.value.plan
    planned = plan(
        model, sample, least.peak_bytes, planner=least, techniques=COMPRESS, profile=False
    )
    assert planned.sn_memory.plan.actions == least.actions
    assert verify(planned, sample).measured_peak_bytes == least.peak_bytes


def test_training_goes_on():
    torch.manual_seed(1)
    sample, labels = batch(), torch.randint(10, (16,))
    model = network()
    planned, _ = everything(model, sample, bits=2)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(planned(sample), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3


def test_bits_of_a_controller():
    model, sample = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with compress_activations(copy.deepcopy(model), bits=2) as fixed:
        fixed.model(sample).square().mean().backward()
    traced = trace(model, sample, profile=False, bits=fixed.controller)
    widths = {
        name.partition("#")[0]: form.bits
        for name, form in traced.forms.items()
        if form.kind in ("values", "signed")
    }
    assert widths["2/relu"] == widths["17/mul"] == 2
    assert widths["3/convolution"] == 8
    with compress_activations(model, error=0.3, optimizer=optimizer, every=1) as eager:
        for _ in range(3):
            optimizer.zero_grad()
            model(sample).square().mean().backward()
            optimizer.step()
    forms = trace(model, sample, profile=False, bits=eager.controller).forms
    asked = eager.controller.bits("3/conv2d/0", linear=True)
    assert next(form for name, form in forms.items() if name.startswith("2/relu")).bits == asked


def test_what_cannot_be_done_is_said():
    model, sample = network(), batch()
    with pytest.raises(ValueError, match="only 'graph'"):
        plan(model, sample, "80%", techniques=COMPRESS, backend="modules", profile=False)
    with pytest.raises(ValueError, match="expected 1, 2, 4, 8"):
        plan(model, sample, "80%", techniques=COMPRESS, bits=3, profile=False)
    softmax = nn.Sequential(nn.Linear(64, 64), nn.Softmax(1)).double()
    with pytest.raises(PlanError, match="no storage that waits"):
        plan(softmax, torch.zeros(64, 64).double(), "80%", techniques=COMPRESS, profile=False)


def test_seconds_of_packing_are_measured():
    traced = trace(network(), batch(), bits=8)
    rows = [it for it in traced.graph.storages if it.compressed is not None]
    assert rows
    for storage in rows:
        small = storage.compressed
        # Between 20 MB/s and 50 GB/s: it was timed, and in seconds.
        for seconds in (small.compress_s, small.decompress_s or small.compress_s):
            assert storage.bytes / 5e10 < seconds < storage.bytes / 2e7 + 1e-3


def test_models_elsewhere_are_refused():
    module = importlib.import_module("sn_memory.torch.trace.trace")
    with pytest.raises(TraceError, match="compress runs on the host"):
        module._forms(None, torch.device("cuda"), 8)
