"""The last product and its loss in chunks: the same numbers, far fewer bytes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import sn_memory.torch
from sn_memory.torch import (
    ChunkedLossBackend,
    StorageTracker,
    TraceError,
    chunk_loss,
    chunked_cross_entropy,
)
from sn_memory.torch.model.step import run_step

ROWS, HIDDEN, VOCABULARY = 50, 16, 400
# Sums of float32 in another order: a few roundings of the largest term.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def given(seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(2, ROWS // 2, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    bias = torch.randn(VOCABULARY, requires_grad=True)
    target = torch.randint(0, VOCABULARY, (2, ROWS // 2))
    target[0, :5] = -100
    return hidden, weight, bias, target


def plain(hidden, weight, bias, target, softcap=None, class_weight=None, **terms):
    logits = functional.linear(hidden, weight, bias).view(-1, VOCABULARY)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, target.view(-1), weight=class_weight, **terms)


@pytest.mark.parametrize("chunks", [1, 3, 50, 64])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"softcap": 5.0},
        {"class_weight": torch.linspace(0.5, 2, VOCABULARY)},
        {"ignore_index": 3},
    ],
    ids=lambda it: "-".join(it) or "mean",
)
def test_it_is_cross_entropy_of_the_product(terms, chunks):
    found = []
    for chunked in (False, True):
        hidden, weight, bias, target = given()
        if "ignore_index" in terms:
            target[0, :5] = 3
        if chunked:
            loss = chunked_cross_entropy(hidden, weight, target, bias=bias, chunks=chunks, **terms)
        else:
            loss = plain(hidden, weight, bias, target, **terms)
        shares = torch.linspace(0.5, 1, loss.numel()).view(loss.shape)
        (loss * shares).sum().backward()
        found.append([loss.flatten(), hidden.grad, weight.grad, bias.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_in_one_chunk_every_bit_is_the_same():
    found = []
    for chunked in (False, True):
        hidden, weight, bias, target = given()
        loss = (
            chunked_cross_entropy(hidden, weight, target, bias=bias, chunks=1)
            if chunked
            else plain(hidden, weight, bias, target)
        )
        loss.backward()
        found.append([loss, hidden.grad, weight.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_only_the_logits_of_a_chunk_are_held():
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(4000, 8)
    weight.requires_grad_()
    target = torch.randint(0, 4000, (256,))
    peaks = []
    for chunks in (None, 32):
        hidden.grad = weight.grad = None
        with StorageTracker([hidden, weight, target]) as tracker:
            if chunks is None:
                functional.cross_entropy(hidden @ weight.T, target).backward()
            else:
                chunked_cross_entropy(hidden, weight, target, chunks=chunks).backward()
        peaks.append(tracker.peak_bytes)
    assert peaks[1] < peaks[0] / 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chunks": 0}, "got chunks 0"),
        ({"reduction": "median"}, "got reduction 'median'"),
        ({"label_smoothing": 2.0}, "got label_smoothing 2.0"),
        ({"softcap": 0.0}, "got softcap 0.0"),
        ({"weight": torch.zeros(5, 3)}, "expected"),
        ({"target": torch.zeros(3, dtype=torch.long)}, "expected one class for each row"),
    ],
)
def test_bad_input_is_refused(change, match):
    hidden, weight, _, target = given()
    arguments = {"hidden": hidden, "weight": weight, "target": target, **change}
    with pytest.raises(ValueError, match=match):
        chunked_cross_entropy(**arguments)


class Language(nn.Module):
    """As models of transformers do it: float, a shift, rows, and a mapping with the loss."""

    def __init__(self, *, softcap=None):
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head, self.softcap = nn.Linear(HIDDEN, VOCABULARY, bias=False), softcap

    def forward(self, numbers, labels=None):
        logits = self.head(torch.tanh(self.body(self.tokens(numbers))))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if labels is None:
            return {"logits": logits}
        shifted = logits.float()[..., :-1, :].contiguous()
        loss = functional.cross_entropy(shifted.view(-1, VOCABULARY), labels[..., 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def language():
    numbers = torch.randint(0, VOCABULARY, (2, 64))
    return {"numbers": numbers, "labels": numbers.clone()}


def compared(model, other, sample):
    one = run_step(model, model, ((), sample))
    two = run_step(other, other, ((), sample))
    for key, it in two.results.items():
        if it is not None and key in one.results and key.startswith("gradient"):
            torch.testing.assert_close(it, one.results[key], **TOLERANCE)
    return one.peak_bytes, two.peak_bytes


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_model_that_returns_its_loss_as_language_models_do(softcap):
    model, sample = Language(softcap=softcap), language()
    chunked = chunk_loss(model, sample, 8)
    whole, peak = compared(model, chunked, sample)
    assert peak < 0.6 * whole
    returned = chunked(**sample)
    assert returned["logits"] is None
    assert type(chunked).__name__ == "Language"
    assert chunked(sample["numbers"])["logits"].shape == (2, 64, VOCABULARY)
    with torch.no_grad():
        assert chunked(**sample)["logits"].shape == (2, 64, VOCABULARY)
    assert type(copy.deepcopy(chunked)) is Language


def test_a_plan_of_it_keeps_its_budget_and_its_numbers():
    model, sample = Language(), language()
    chunked = chunk_loss(model, sample, 8)
    whole = run_step(model, model, ((), sample)).peak_bytes
    planned = sn_memory.torch.plan(
        chunked, sample, int(0.6 * whole), backend="graph", profile=False, planner="sqrt_n"
    )
    _, peak = compared(chunked, planned, sample)
    assert peak <= 0.6 * whole


def test_the_planner_chooses_how_many_chunks():
    model, sample = Language(), language()
    roomy = sn_memory.torch.plan(
        model, sample, "100%", backend="graph", profile=False, loss_chunks="auto"
    )
    assert roomy.sn_memory.loss_chunks == 1
    tight = sn_memory.torch.plan(
        model, sample, "55%", backend="graph", profile=False, loss_chunks="auto"
    )
    assert tight.sn_memory.loss_chunks > 1
    assert run_step(tight, tight, ((), sample)).peak_bytes <= tight.sn_memory.budget_bytes


def test_a_model_without_such_an_end_is_refused():
    class Looks(Language):
        def forward(self, numbers, labels):
            found = super().forward(numbers, labels)
            return found["loss"] + found["logits"].square().mean()

    with pytest.raises(TraceError, match="takes no cross entropy of a product"):
        chunk_loss(Looks(), language(), 4)
    with pytest.raises(TraceError, match="takes no cross entropy of a product"):
        chunk_loss(nn.Linear(4, 4), torch.zeros(2, 4), 4)


def test_under_torch_compile():
    model, sample = Language(softcap=3.0), language()
    backend = ChunkedLossBackend(8, "aot_eager")
    plain_loss = model(**sample)["loss"]
    plain_loss.backward()
    gradients = {name: it.grad.clone() for name, it in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(lambda **batch: model(**batch)["loss"], backend=backend)(**sample)
    loss.backward()
    assert backend.found == 1
    torch.testing.assert_close(loss, plain_loss, **TOLERANCE)
    for name, it in model.named_parameters():
        torch.testing.assert_close(it.grad, gradients[name], **TOLERANCE)


def test_compiled_logits_that_leave_are_left_alone():
    model, sample = Language(), language()
    backend = ChunkedLossBackend(8, "eager")
    torch.compile(lambda **batch: model(**batch), backend=backend)(**sample)["loss"].backward()
    assert backend.found == 0
