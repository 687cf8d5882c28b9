"""Threads that share one planned model, each with inputs that nobody planned for."""

import copy
import threading

import pytest
import torch
from small_models import mlp
from torch.autograd import grad

from sn_memory.torch import plan

SETTINGS = {"profile": False, "time_limit_s": 2.0}


@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
@pytest.mark.filterwarnings("ignore::sn_memory.base.errors.PlanWarning")
def test_new_inputs_evaluation_and_gradients_in_three_threads(backend):
    model, sample = mlp(6), torch.randn(64, 32)
    planned = plan(copy.deepcopy(model), sample, "100%", backend=backend, **SETTINGS)
    # Before: while a step is planned other tensors stand in the place of parameters.
    own, theirs = list(planned.parameters()), list(model.parameters())
    ended, errors = [], []

    def work(number):
        try:
            for row in range(1 if backend == "compile" else 2):
                x = torch.randn(16 * number + 64 * row, 32)
                found = grad(planned(x).square().mean(), own)
                assert all(map(torch.equal, found, grad(model(x).square().mean(), theirs)))
                with torch.no_grad():
                    assert torch.equal(planned(x), model(x))
            if backend != "compile":
                x.requires_grad_()
                (slope,) = grad(planned(x).square().sum(), x, create_graph=True)
                (its,) = grad(model(x).square().sum(), x, create_graph=True)
                torch.testing.assert_close(
                    grad(slope.square().sum(), x), grad(its.square().sum(), x)
                )
            ended.append(number)
        except Exception as error:  # noqa: BLE001 - of a thread it would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(it,)) for it in (1, 2, 3)]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert not errors
    assert sorted(ended) == [1, 2, 3]
