"""Recurrent layers on the CPU: an LSTM is one op, whose workspace torch's fake tensors hide."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from sn_memory.base.errors import PlanWarning
from sn_memory.torch import estimate, plan, trace, verify
from sn_memory.torch.model.step import restore_step, run_step
from sn_memory.torch.quirks.recurrent import LAYER, workspace_bytes
from sn_memory.torch.trace.fake import FakeMode, fake_of

STEPS, BATCH, WIDTH, HIDDEN = 7, 5, 8, 24


class Tagger(nn.Module):
    """An LSTM inside a model: words, a bidirectional layer, scores."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, dropout=0.3, bidirectional=True)
        self.scores = nn.Linear(2 * HIDDEN, 11)

    def forward(self, x):
        return self.scores(torch.relu(self.lstm(self.words(x))[0]))


class Halves(nn.Module):
    """Three LSTMs, one after the other, with something to run again between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)[0]).exp()
        return x


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
    "tagger": Tagger,
    "halves": Halves,
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
    planned = plan(model, sample, "100%", profile=name in ("lstm", "gru", "tagger"))
    found = verify(planned, sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes


@pytest.mark.parametrize("name", ["layers", "tagger", "halves"])
def test_less_memory_for_the_same_bits(name):
    model, sample = MODELS[name](), sample_of(name)
    whole = plan(model, sample, "100%", profile=False).sn_memory.plan
    planned = plan(model, sample, "75%", profile=False)
    assert planned.sn_memory.plan.peak_bytes <= 0.75 * whole.baseline_peak_bytes
    found = verify(planned, sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes


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
def test_the_workspace_is_what_the_kernel_makes(shape, dtype):
    steps, batch, inputs, hidden = shape
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no LSTM in bfloat16")
    weights = [torch.randn(4 * hidden, n).to(dtype) for n in (inputs, hidden)]
    biases = [torch.randn(4 * hidden).to(dtype) for _ in range(2)]
    states = [torch.zeros(batch, hidden).to(dtype) for _ in range(2)]
    x = torch.randn(steps, batch, inputs).to(dtype)
    settings = (False, [], 2, hidden, 1, True, False, False, True)
    made = LAYER(x, *weights, *biases, *states, *settings)
    assert made[3].nbytes == workspace_bytes(*shape, dtype.itemsize, dtype.itemsize)


@pytest.mark.parametrize("grad", [True, False])
def test_fake_layers_return_what_real_ones_do(grad):
    model, x = nn.LSTM(WIDTH, HIDDEN), torch.randn(STEPS, BATCH, WIDTH)
    states = [torch.zeros(BATCH, HIDDEN) for _ in range(2)]
    settings = (False, [], 2, HIDDEN, 1, True, False, False, True)
    given = [x, *(it.detach() for it in model.parameters()), *states]
    mode = FakeMode()
    fakes = [fake_of(mode, it) for it in given]

    def forms(tensors):
        """Sizes, types, and which lie in one storage."""
        places = [None if it is None else it.untyped_storage()._cdata for it in tensors]
        return [
            it if it is None else (it.shape, it.stride(), it.dtype, places.index(place))
            for it, place in zip(tensors, places, strict=True)
        ]

    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    with torch.set_grad_enabled(grad):
        real = LAYER(*given, *settings)
        with mode:
            fake = LAYER(*fakes, *settings)
        assert forms(real) == forms(fake)
        if not grad:
            return
        rest = (None, None, False, 2, HIDDEN, 1, True, True, False, [], False)
        real = backward(*given, *real[:3], torch.ones_like(real[0]), *rest, real[3])
        with mode:
            fake = backward(*fakes, *fake[:3], torch.ones_like(fake[0]), *rest, fake[3])
        assert forms(real) == forms(fake)


class Frozen(nn.Module):
    """An LSTM that is not trained, run without autograd, before a layer that is."""

    def __init__(self):
        super().__init__()
        self.lstm, self.scores = nn.LSTM(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.lstm(x)[0]
        return self.scores(x).exp()


def test_without_autograd_there_is_no_workspace():
    model, sample = Frozen(), sample_of("lstm")
    found = verify(plan(model, sample, "100%", profile=False), sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes


class Packed(nn.Module):
    """Sequences of several lengths, packed inside the model."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN)
        self.lengths = [7, 6, 4, 4, 1]

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, self.lengths)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]


def test_packed_sequences_are_planned_by_modules_and_right():
    model, sample = Packed(), sample_of("packed")
    with pytest.warns(PlanWarning, match="planned by modules"):
        planned = plan(model, sample, "100%")
    assert verify(planned, sample).equal


def test_a_packed_sequence_is_one_argument():
    sample = nn.utils.rnn.pack_padded_sequence(sample_of("packed"), [7, 6, 4, 4, 1])
    with pytest.warns(PlanWarning, match="planned by modules"):
        planned = plan(nn.LSTM(WIDTH, HIDDEN), sample, "100%")
    assert verify(planned, sample).equal
    # A trace cannot be made, as rows of a step depend on values; a step knows those.
    model = nn.LSTM(WIDTH, HIDDEN)
    found = estimate(model, sample)
    with restore_step(model, sample):
        measured = run_step(model, model, ((sample,), {})).peak_bytes
    assert found.step_bytes == pytest.approx(measured, rel=0.02)
    assert found.batch is None


def test_training_goes_as_without_a_plan():
    torch.manual_seed(0)
    model, sample = Tagger(), sample_of("tagger")
    model.lstm.dropout = 0.0
    planned = plan(model, sample, "80%", profile=False)
    losses = {}
    for forward in (model, planned):
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = losses[forward] = []
        for _ in range(4):
            loss = nn.functional.cross_entropy(forward(sample).flatten(0, 1), sample.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
    plain, ours = losses.values()
    assert plain == ours
    assert ours[-1] < ours[0]
