"""Complex numbers inside a model, as in Llama 4's and Meta's own rotary embeddings.

Found with Llama 4: the backward pass of a complex product takes a conjugate, which torch only marks
on a tensor until it is read, and the model was planned by its modules.
"""

import pytest
import torch
from small_models import module_of, same_gradients
from torch import nn

from sn_memory.torch import estimate, plan, verify
from sn_memory.torch.model.step import run_step

BATCH, LENGTH, WIDTH = 8, 16, 32


def turned(x, by):
    """Rotate pairs of numbers: [..., width] by complex [length, width / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2)


def rotary(ends):
    def forward(self, x):
        for layer in self.layers:
            x = ends(layer(x).tanh(), self.by)
        return x

    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    angles = torch.arange(LENGTH)[:, None] / 100 ** torch.linspace(0, 1, WIDTH // 2)
    by = nn.Buffer(torch.polar(torch.ones_like(angles), angles))
    return module_of(forward, layers=layers, by=by)


def imaginary(x, by):
    """The imaginary part of a conjugate is a negation that torch only marks as well."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.cat([pairs.conj().imag, (pairs * pairs.conj()).real], -1)


def looks_on(x, by):
    """A conjugate that is read after what it looks at was written to."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by
    mirrored = pairs.conj()
    pairs.mul_(2)
    return torch.view_as_real(mirrored * by).flatten(-2)


def through(x, by):
    """A write through the conjugate."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by
    pairs.conj().mul_(by)
    return torch.view_as_real(pairs).flatten(-2)


@pytest.mark.parametrize("ends", [turned, imaginary])
def test_planned_by_its_ops_and_bit_equal(ends):
    model, x = rotary(ends), torch.randn(BATCH, LENGTH, WIDTH)
    assert estimate(model, x).peak_bytes == run_step(model, model, ((x,), {})).peak_bytes
    model.zero_grad()
    planned = plan(model, x, "85%", backend="graph", profile=False)
    assert planned.sn_memory.plan.decided("recompute")
    same_gradients(planned, model, x)
    found = verify(planned, x)
    assert found.equal
    assert found.measured_peak_bytes <= planned.sn_memory.budget_bytes


@pytest.mark.parametrize("ends", [looks_on, through])
def test_what_is_written_while_a_conjugate_of_it_is_in_use_is_refused(ends):
    """Replayed, the other of the two would not change with it; by modules it is as it was."""
    model, x = rotary(ends), torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.warns(UserWarning, match="conjugate"):
        planned = plan(model, x, "100%", profile=False)
    assert planned.sn_memory.backend == "modules"
    same_gradients(planned, model, x)
