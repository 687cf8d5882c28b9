"""Kernels' scratch: measured, by rule, and counted in what a plan promises."""

import copy
import re

import pytest
import torch
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import estimate, plan, verify
from sn_memory.torch.model.step import run_step
from sn_memory.torch.model.tracker import measured_bytes
from sn_memory.torch.target.scratch import cpu_scratch_bytes

CPU = torch.device("cpu")
ATEN = torch.ops.aten
PAIR, ONE, NONE = [1, 1], [1, 1], [0, 0]


def forms(tensors):
    return [(tuple(it.shape), it.stride(), it.dtype) for it in tensors if it is not None]


def convolution(batch, channels, side, kernel, groups=1, dtype=torch.float32, layout=None):
    layout = layout or torch.contiguous_format
    image = torch.randn(batch, channels, side, side, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(24, channels // groups, kernel, kernel, dtype=dtype)
    settings = (PAIR, [kernel // 2] * 2, ONE, False, NONE, groups)
    return image, weight, settings


def calls():
    """Yield a name, tensors and a function: ops that take scratch, in forms of their own."""
    for shape in (
        *((1, 8, 14, 3), (1, 64, 56, 3), (2, 3, 64, 7), (4, 32, 28, 1), (16, 24, 7, 3)),
        *((2, 24, 32, 5, 24), (2, 8, 32, 5, 2), (2, 16, 16, 3, 1, torch.bfloat16)),
        (2, 16, 32, 3, 1, torch.float32, torch.channels_last),
    ):
        image, weight, settings = convolution(*shape)
        made = ATEN.convolution(image, weight, None, *settings)
        gradient = torch.randn_like(made)
        yield (
            "convolution",
            (image, weight),
            lambda i=image, w=weight, s=settings: ATEN.convolution(i, w, None, *s),
        )
        yield (
            "convolution_backward",
            (gradient, image, weight),
            (
                lambda g=gradient, i=image, w=weight, s=settings: ATEN.convolution_backward(
                    g, i, w, None, *s, [True, True, False]
                )
            ),
        )
    queries = torch.randn(2, 4, 200, 32)
    yield (
        "_scaled_dot_product_flash_attention_for_cpu",
        (queries,) * 3,
        lambda: ATEN._scaled_dot_product_flash_attention_for_cpu(queries, queries, queries),
    )
    rows = torch.randn(64, 96)
    yield "mm", (rows, rows.t()), lambda: ATEN.mm(rows, rows.t())
    odd = torch.randn(64, 96, 2)[..., 0]
    yield "mm", (odd, rows.t()), lambda: ATEN.mm(odd, rows.t())
    turned = torch.randn(96, 64).t()
    yield (
        "native_layer_norm",
        (turned,),
        lambda: ATEN.native_layer_norm(turned, [96], None, None, 1e-5),
    )
    yield "_softmax", (turned,), lambda: ATEN._softmax(turned, -1, False)
    yield "roll", (rows,), lambda: ATEN.roll(rows, [1], [0])
    yield "relu", (rows,), lambda: ATEN.relu(rows)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_rule_is_never_below_what_is_taken(threads):
    torch.set_num_threads(threads)
    measured = []
    with torch.no_grad():
        for name, given, work in calls():
            made = work()
            results = made if isinstance(made, tuple) else (made,)
            results = [it for it in results if isinstance(it, torch.Tensor)]
            measured.append(measured_bytes(work, CPU))
            assert measured[-1] <= cpu_scratch_bytes(name, forms(given), forms(results)), name
    assert sum(it > 0 for it in measured) > 15


def test_what_an_op_takes_is_what_the_allocator_gives_beyond_its_result():
    x = torch.randn(1000)
    assert measured_bytes(lambda: torch.relu(x), CPU) == 0
    assert measured_bytes(lambda: torch.relu(x).sum(), CPU) == x.nbytes


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 8, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 14 * 14, 10)),
    )


def held(model, sample):
    return run_step(model, model, ((sample,), {}), kernels=True).peak_bytes


@pytest.mark.rule_of_scratch
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_promised_is_what_is_held(threads, layout):
    torch.set_num_threads(threads)
    model = convolutions().to(memory_format=layout)
    sample = torch.randn(4, 3, 28, 28).to(memory_format=layout)
    plain = held(model, sample)
    for budget in ("100%", "85%"):
        planned = plan(copy.deepcopy(model), sample, budget, backend="graph", time_limit_s=20)
        made = planned.sn_memory.plan
        assert made.baseline_peak_bytes == plain
        assert held(planned, sample) == made.peak_bytes <= made.budget_bytes
        found = verify(planned, sample)
        assert found.equal
        assert found.measured_peak_bytes == found.predicted_peak_bytes
    # Ops are in the table now.
    assert estimate(model, sample).step_bytes == plain


@pytest.mark.rule_of_scratch
def test_without_timing_a_rule_promises_more_and_a_note_says_so():
    model, sample = convolutions(), torch.randn(4, 3, 28, 28)
    planned = plan(model, sample, "100%", profile=False, backend="graph")
    assert held(planned, sample) <= planned.sn_memory.plan.peak_bytes
    notes = "\n".join(planned.sn_memory.plan.notes)
    assert re.search(r"scratch of \d+ of \d+ ops, .* upper rule", notes)


def test_a_budget_below_scratch_names_the_op_and_its_scratch():
    model, sample = convolutions(), torch.randn(4, 3, 28, 28)
    with pytest.raises(BudgetError, match=r"convolution.* of scratch beside its tensors"):
        plan(model, sample, "20%", profile=False, backend="graph")


def test_a_compiled_step_counts_what_its_kernels_take():
    model, sample = convolutions(), torch.randn(4, 3, 28, 28)
    planned = plan(model, sample, "90%", backend="compile", time_limit_s=5)
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes <= found.predicted_peak_bytes
