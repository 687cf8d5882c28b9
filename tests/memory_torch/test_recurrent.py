"""Recurrent layers on the CPU: an LSTM is one op, whose workspace torch's fake tensors hide."""

import copy
import subprocess
import sys

import pytest
import torch
from small_models import module_of
from steps import exact, same
from torch import nn

from sn_memory.base.errors import PlanWarning
from sn_memory.torch import estimate, plan, trace, verify
from sn_memory.torch.model.step import restore_step, run_step
from sn_memory.torch.quirks.recurrent import LAYER, workspace_bytes
from sn_memory.torch.trace.fake import FakeMode, fake_of

STEPS, BATCH, WIDTH, HIDDEN = 7, 5, 8, 24


def tagger(dropout=0.3):
    """An LSTM inside a model: words, a bidirectional layer, scores."""

    def forward(self, x):
        return self.scores(torch.relu(self.lstm(self.words(x))[0]))

    settings = {"batch_first": True, "dropout": dropout, "bidirectional": True}
    lstm = nn.LSTM(WIDTH, HIDDEN, 2, **settings)
    parts = {"words": nn.Embedding(11, WIDTH), "lstm": lstm, "scores": nn.Linear(2 * HIDDEN, 11)}
    return module_of(forward, **parts)


def halves():
    """Three LSTMs, one after the other, with something to run again between them."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)[0]).exp()
        return x

    return module_of(forward, layers=nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3)))


def frozen():
    """An LSTM that is not trained, run without autograd, before a layer that is: no workspace."""

    def forward(self, x):
        with torch.no_grad():
            x = self.lstm(x)[0]
        return self.scores(x).exp()

    return module_of(forward, lstm=nn.LSTM(WIDTH, HIDDEN), scores=nn.Linear(HIDDEN, 3))


def cell(kind, **settings):
    return lambda: kind(WIDTH, HIDDEN, **settings)


MODELS = {
    "lstm": cell(nn.LSTM),
    "no bias": cell(nn.LSTM, bias=False),
    "batch first": cell(nn.LSTM, batch_first=True),
    "bidirectional": cell(nn.LSTM, bidirectional=True),
    "layers": cell(nn.LSTM, num_layers=2, dropout=0.5),
    "projected": cell(nn.LSTM, proj_size=6),
    "gru": cell(nn.GRU, num_layers=2, dropout=0.5, bidirectional=True),
    "rnn": cell(nn.RNN),
    "relu": cell(nn.RNN, nonlinearity="relu", batch_first=True),
    "tagger": tagger,
    "halves": halves,
    "frozen": frozen,
}
ONEDNN_SAYS = "ignore:LSTM with projections is not supported with oneDNN"


def sample_of(name):
    if name == "tagger":
        return torch.randint(0, 11, (BATCH, STEPS))
    return torch.randn(STEPS, BATCH, WIDTH)


def test_timing_the_ops_of_an_lstm_leaves_the_process_alive():
    """In a process of its own: what went wrong was a signal, not an exception."""
    code = (
        "import torch, sn_memory.torch as planner\n"
        "model, sample = torch.nn.LSTM(64, 128), torch.randn(50, 32, 64)\n"
        "planned = planner.plan(model, sample, '100%')\n"
        "print(planner.verify(planned, sample).equal)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@pytest.mark.filterwarnings(ONEDNN_SAYS)
@pytest.mark.parametrize("name", MODELS)
def test_planned_and_estimated_as_it_runs(name):
    model, sample = MODELS[name](), sample_of(name)
    with restore_step(model, sample):
        measured = run_step(model, model, ((sample,), {}), kernels=True).peak_bytes
    assert estimate(model, sample).step_bytes == measured
    exact(plan(model, sample, "100%", profile=name in ("lstm", "gru", "tagger")), sample)


@pytest.mark.parametrize("name", ["layers", "tagger", "halves"])
def test_less_memory_for_the_same_bits(name):
    planned = plan(MODELS[name](), sample_of(name), "75%", profile=False)
    exact(planned, sample_of(name))
    chosen = planned.sn_memory.plan
    assert chosen.peak_bytes <= 0.75 * chosen.baseline_peak_bytes


def test_an_lstm_is_no_cheap_thing_to_run_again():
    """Without a time of its own its arithmetic counts: a product per gate, input and state."""
    graph = trace(nn.LSTM(WIDTH, HIDDEN), sample_of("lstm"), profile=False).graph
    flops = {op.kind: op.flops for op in graph.ops}
    forward = 2 * STEPS * BATCH * 4 * HIDDEN * (WIDTH + HIDDEN)
    assert flops["mkldnn_rnn_layer"] == forward
    assert flops["mkldnn_rnn_layer_backward"] == 2 * forward


SHAPES = [(1, 1, 1, 1), (7, 5, 31, 256), (50, 33, 7, 3), (3, 64, 300, 3), (101, 1, 256, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_layer_returns_what_the_kernel_does(shape, dtype):
    steps, batch, inputs, hidden = shape
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no LSTM in bfloat16")
    weights = [torch.randn(4 * hidden, n).to(dtype) for n in (inputs, hidden)]
    biases = [torch.randn(4 * hidden).to(dtype) for _ in range(2)]
    states = [torch.zeros(batch, hidden).to(dtype) for _ in range(2)]
    tensors = [torch.randn(steps, batch, inputs).to(dtype), *weights, *biases, *states]
    settings = (False, [], 2, hidden, 1, True, False, False, True)
    real = LAYER(*tensors, *settings)
    with FakeMode() as mode:
        fake = LAYER(*(fake_of(mode, it) for it in tensors), *settings)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    # The last one is the workspace.
    assert real[3].nbytes == workspace_bytes(*shape, dtype.itemsize, dtype.itemsize)


LENGTHS = [7, 6, 4, 4, 1]


@pytest.mark.parametrize("packed", ["inside", "as an argument"])
def test_packed_sequences_are_planned_by_modules_and_right(packed):
    """Sequences of several lengths."""

    def forward(self, x):
        x = nn.utils.rnn.pack_padded_sequence(x, LENGTHS)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(x)[0])[0]

    model, sample = nn.LSTM(WIDTH, HIDDEN), sample_of("packed")
    if packed == "inside":
        model = module_of(forward, lstm=model)
    else:
        sample = nn.utils.rnn.pack_padded_sequence(sample, LENGTHS)
    with pytest.warns(PlanWarning, match="planned by modules"):
        planned = plan(model, sample, "100%")
    assert verify(planned, sample).equal
    if packed == "inside":
        return
    # A trace cannot be made, as rows of a step depend on values; a step knows those.
    found = estimate(model, sample)
    with restore_step(model, sample):
        measured = run_step(model, model, ((sample,), {})).peak_bytes
    assert found.step_bytes == pytest.approx(measured, rel=0.02)
    assert found.batch is None


def test_training_goes_as_without_a_plan():
    """Two steps, the first of which changes weights that the layer keeps in a form of its own."""
    model, sample = tagger(dropout=0.0), sample_of("tagger")
    planned = plan(copy.deepcopy(model), sample, "80%", profile=False)
    for it in (model, planned):
        optimizer = torch.optim.SGD(it.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(it(sample).flatten(0, 1), sample.flatten()).backward()
            optimizer.step()
    assert same(model.parameters(), planned.parameters())
