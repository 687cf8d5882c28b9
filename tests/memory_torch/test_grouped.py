"""Products of groups, as mixtures of experts compute them: fake tensors have the kernel's form."""

import pytest
import torch
from small_models import module_of
from steps import gradients, same

from sn_memory.torch import plan, trace
from sn_memory.torch.trace.fake import FakeMode

GROUPS, ROWS, INNER, COLUMNS = 3, 16, 8, 12
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
pytestmark = pytest.mark.skipif(grouped_mm is None, reason="this torch has no grouped_mm")


def ends(of):
    """Where each group ends: the last one at the end."""
    return torch.tensor([of // 4, of // 2, of], dtype=torch.int32)


FORMS = {
    "rows": ((ROWS, INNER), (GROUPS, INNER, COLUMNS), ROWS),
    "columns": ((GROUPS, ROWS, INNER), (INNER, COLUMNS), COLUMNS),
    "inner": ((ROWS, INNER), (INNER, COLUMNS), INNER),
    "none": ((GROUPS, ROWS, INNER), (GROUPS, INNER, COLUMNS), None),
}


# Kernels take columns of the second factor that begin at multiples of 16 bytes, or rows.
KINDS = [
    (torch.float32, False),
    *((it, True) for it in (torch.float32, torch.half, torch.bfloat16)),
]


@pytest.mark.parametrize(("dtype", "turned"), KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_that_of_the_kernel(form, dtype, turned):
    """Twelve columns are no whole rows of 16 bytes in two bytes each: those are padded."""
    first, second, cut = FORMS[form]
    offs = None if cut is None else ends(cut)
    a, b = torch.randn(first, dtype=dtype), torch.randn(second, dtype=dtype)
    if turned:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    real = torch.ops.aten._grouped_mm.default(a, b, offs)
    with FakeMode() as mode:
        given = [it if it is None else mode.from_tensor(it) for it in (a, b, offs)]
        fake = torch.ops.aten._grouped_mm.default(*given)
    assert (fake.size(), fake.stride(), fake.dtype) == (real.size(), real.stride(), real.dtype)
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def experts(width=16, count=4):
    """Rows go to experts in turn."""

    def forward(self, x):
        step = x.shape[0] // count
        offs = torch.arange(step, x.shape[0] + 1, step, dtype=torch.int32)
        for _ in range(2):
            x = x + grouped_mm(grouped_mm(x, self.up, offs=offs).relu(), self.down, offs=offs)
        return x.square().mean()

    up = torch.nn.Parameter(torch.randn(count, width, 4 * width) / width)
    return module_of(forward, up=up, down=torch.nn.Parameter(up.detach().mT.contiguous()))


def test_experts_in_float32_are_planned_by_their_ops():
    model, x = experts(), torch.randn(64, 16)
    graph = trace(model, x, profile=False).graph
    products = [it for it in graph.ops if it.kind == "_grouped_mm"]
    assert len(products) == 4 + 4 + 3  # the input wants no gradient
    # Each row once, whatever expert it goes to; of a gradient of weights, each row's outer product.
    assert {it.flops for it in products} == {2.0 * 64 * 16 * 64}
    planned = plan(model, x, "90%", backend="graph", profile=False)
    other = torch.randn(64, 16)
    assert same(gradients(planned, other), gradients(model, other))
