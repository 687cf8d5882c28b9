"""Steps traced for a GPU that is not here: its kernels, its bytes, and what is said of it."""

import pytest
import torch
from small_models import mlp, module_of
from steps import same
from torch import nn

from sn_memory.cost.devices import DEVICES
from sn_memory.graph.liveness import peak
from sn_memory.torch import ReplayError, TraceError, estimate, plan, trace
from sn_memory.torch.target.gpu import Walk, attention_kernel, gpu_of
from sn_memory.torch.trace.fake_step import fake_step_on
from sn_memory.torch.trace.trace import trace_unplanned


def kinds(model, sample, device="h100"):
    return [op.kind for op in trace(model, sample, device=device).graph.ops]


def attention(head=16, dropout=0.0):
    def forward(self, x, mask=None):
        q, k, v = self.into(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)

    return module_of(forward, into=nn.Linear(4 * head, 12 * head))


@pytest.mark.parametrize(
    ("device", "dtype", "mask", "head", "expected"),
    [
        ("h100", torch.bfloat16, False, 16, "cudnn"),
        ("a100", torch.bfloat16, False, 16, "flash"),
        ("a100", torch.bfloat16, True, 16, "efficient"),
        ("a100", torch.float32, False, 16, "efficient"),
        ("v100", torch.float16, False, 16, "efficient"),
        ("v100", torch.bfloat16, False, 16, "math"),
        ("a100", torch.float16, False, 12, "flash"),  # padded to 16
        ("a100", torch.float16, True, 12, "math"),
        ("mi300x", torch.bfloat16, False, 16, "flash"),
    ],
)
def test_attention_takes_the_kernel_of_the_gpu(device, dtype, mask, head, expected):
    model = attention(head).to(dtype)
    sample = (torch.zeros(2, 24, 4 * head, dtype=dtype),)
    if mask:
        sample += (torch.zeros(2, 1, 24, 24, dtype=torch.bool),)
    found = [it for it in kinds(model, sample, device) if "attention" in it]
    if expected == "math":
        assert not found
    else:
        name = f"_scaled_dot_product_{expected}_attention"
        assert found == [name, f"{name}_backward"]


def test_switches_of_attention_hold():
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert attention_kernel(q, q, q, None, 0.0, 90) == "efficient"
    assert attention_kernel(q, q, q, None, 0.0, 90) == "cudnn"


@pytest.mark.parametrize(("device", "expected"), [("a100", "sin"), ("v100", "cos")])
def test_the_model_may_ask_for_the_compute_capability(device, expected):
    def forward(self, x):
        recent = torch.cuda.get_device_capability(x.device) >= (8, 0)
        return self.inner(x).sin() if recent else self.inner(x).cos()

    assert expected in kinds(module_of(forward, inner=mlp(1)), torch.zeros(4, 32), device)


def test_layers_take_the_kernels_of_the_gpu():
    sample = torch.zeros(2, 3, 8, 8)
    names = {"cudnn_batch_norm", "cudnn_batch_norm_backward", "native_dropout"}
    assert names <= set(kinds(image(), sample))
    # On AMD's no cuDNN.
    assert "native_batch_norm" in kinds(image(), sample, "mi300x")


def recurrent(kind, **settings):
    layer = kind(8, 16, 2, batch_first=True, **settings)
    return module_of(lambda self, x: self.layer(x)[0], layer=layer)


@pytest.mark.parametrize(("kind", "keeps"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)])
def test_recurrent_layers_are_one_kernel(kind, keeps):
    traced = trace(recurrent(kind, bidirectional=True), torch.zeros(3, 5, 8), device="a100")
    assert [op.kind for op in traced.graph.ops].count("_cudnn_rnn") == 1
    assert any("estimated" in it for it in traced.notes)
    sizes = {it.name: it.bytes for it in traced.graph.storages}
    assert 3 * 5 * 16 * 2 * 2 * keeps * 4 in sizes.values()


def test_autocast_is_that_of_cuda():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace(model, torch.zeros(4, 8), device="h100")
    assert not torch.is_autocast_enabled("cuda")
    forms = {
        op.name: call.flat[0].dtype
        for op, call in zip(traced.graph.ops, traced.captured.recording.calls, strict=False)
        if op.kind in ("addmm", "native_layer_norm")
    }
    # Norms are in float32 there, not on the CPU.
    assert set(forms.values()) >= {torch.float32}
    assert next(op.dtype for op in traced.graph.ops if op.kind == "addmm") == "bf16"


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x + second


def test_a_walk_is_the_engine():
    """Shared values, broadcasts, views, functions, checkpoints, casts."""

    def forward(self, x):
        h = self.first(x) * self.scale + self.scale
        h = h + Odd.apply(h)[0]
        again = torch.utils.checkpoint.checkpoint(self.last, h, use_reentrant=False)
        return (again.double() * h[:, :1]).sum() + h.chunk(2, 1)[1].exp().mean(), h.transpose(0, 1)

    layers = {"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)}
    model = module_of(forward, scale=nn.Parameter(torch.randn(8)), **layers)
    x = torch.randn(4, 8, requires_grad=True)
    leaves = [*model.parameters(), x]
    walk = Walk()
    with walk.saving():
        outputs = model(x)
    gradients = [torch.randn_like(it) for it in outputs]
    found = {}
    walk.back(outputs, gradients, lambda leaf, it: found.__setitem__(id(leaf), it))
    expected = torch.autograd.grad(model(x), leaves, gradients)
    assert same([found[id(leaf)] for leaf in leaves], expected)
    # What was saved is let go of.
    with pytest.raises(AssertionError):
        walk.back(outputs, gradients, lambda *_: None)


def image():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 3))


MODELS = {
    "mlp": (lambda: mlp(3, 16), torch.zeros(10, 16)),
    "attention": (lambda: attention(dropout=0.1).bfloat16(), torch.zeros(2, 24, 64).bfloat16()),
    "images": (image, torch.zeros(2, 3, 12, 12)),
    "recurrent": (lambda: recurrent(nn.LSTM), torch.zeros(3, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_step_and_the_graph_say_the_same(name):
    make, sample = MODELS[name]
    model = make()
    found = estimate(model, sample, device="a100")
    graph = trace_unplanned(model, sample, gpu=gpu_of("a100", torch.device("cpu"))).graph
    step = fake_step_on(gpu_of("a100", torch.device("cpu")), model, ((sample,), {}))
    assert step.peak_bytes == peak(graph).bytes
    assert found.step_bytes == step.peak_bytes + DEVICES["a100-80"].kept_bytes
    assert found.reserved_bytes >= found.step_bytes
    assert found.seconds > 0
    assert found.room_bytes == DEVICES["a100-80"].usable_bytes


def test_sizes_are_those_of_its_allocator():
    # 16 weights and 4 biases of 4 bytes; a sample, an output, gradients: all in blocks of 512.
    with torch.device("meta"):
        model, sample = nn.Linear(4, 4), torch.empty(2, 4)
    found = estimate(model, sample, optimizer=torch.optim.SGD, device="h100")
    assert found.parameters_bytes == 2 * 512
    assert found.workspace_bytes == 64 << 20
    assert found.pinned_bytes == 0
    # Two moments of two matrices and two biases; counts of steps are on the host.
    found = estimate(mlp(2), torch.zeros(4, 32), optimizer=torch.optim.AdamW, device="h100")
    assert found.optimizer_bytes == 2 * 2 * (32 * 32 * 4 + 512)
    # For all parameters at once, with values between of all of them.
    held = found.parameters_bytes + found.gradients_bytes + found.optimizer_bytes
    assert found.update_bytes > held


def test_largest_batch_in_the_room_of_the_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 65536), nn.ReLU(), nn.Linear(65536, 4096))
        found = estimate(model, torch.empty(8, 4096), device="l4")
        batch = found.largest_batch()
        assert estimate(model, torch.empty(batch, 4096), device="l4").fits()
        assert not estimate(model, torch.empty(batch + 1, 4096), device="l4").fits()
    with pytest.raises(ValueError, match="no device was named"):
        estimate(mlp(1), torch.zeros(2, 32)).largest_batch()


def test_logits_are_told():
    class Words(nn.Linear):
        def forward(self, x, labels):
            return nn.functional.cross_entropy(super().forward(x), labels)

    sample = torch.zeros(64, 16), torch.zeros(64, dtype=torch.long)
    found = estimate(Words(16, 1000), sample, device="h100")
    assert found.logits_bytes == 64 * 1000 * 4  # the logarithms; the logits themselves are gone


def test_a_plan_on_paper():
    planned = plan(mlp(6, 256), torch.zeros(1 << 16, 256), "80%", device="h100", planner="sqrt_n")
    record = planned.sn_memory
    assert record.plan.peak_bytes <= 0.8 * record.plan.baseline_peak_bytes
    assert record.trace.graph.device.name == "h100"
    assert record.trace.graph.allocator == "torch"
    with pytest.raises(ReplayError, match="planned for h100, which is not here"):
        planned(torch.zeros(1 << 16, 256))
    with pytest.raises(ReplayError):  # nor is another input planned for what is here
        planned(torch.zeros(8, 256))
    with torch.no_grad():
        assert planned(torch.zeros(2, 256)).shape == (2, 256)
    with pytest.raises(ValueError, match="backend='modules'"):
        plan(mlp(1), torch.zeros(4, 32), "80%", device="h100", backend="modules")


@pytest.mark.parametrize("function", [trace, estimate, lambda *a, **k: plan(*a, "80%", **k)])
def test_a_name_that_is_none(function):
    with pytest.raises(ValueError, match="got device 'cuda', expected one of"):
        function(mlp(1), torch.zeros(4, 32), device="cuda")


def test_what_has_no_rule_is_named():
    class Counts(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.nonzero(x).sum()

    with pytest.raises(TraceError, match="nonzero"):
        trace(Counts(4, 4), torch.zeros(2, 4), device="h100")


def test_torch_is_as_before():
    trace(mlp(1), torch.zeros(2, 32), device="h100")
    assert not torch.is_autocast_enabled("cpu")
    attention = torch.nn.functional.scaled_dot_product_attention
    assert attention.__module__ != attention_kernel.__module__
    weight = torch.randn(4, 4, requires_grad=True)
    weight.square().sum().backward()
    assert torch.equal(weight.grad, 2 * weight)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
        assert not torch.accelerator.is_available()


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_plan_for_a_card_keeps_its_budget_by_what_is_reserved(monkeypatch, settings):
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    model, sample = mlp(12, 1024), torch.empty(1 << 13, 1024, device="meta")
    planned = plan(model.to("meta"), sample, "75%", device="h100")
    record = planned.sn_memory
    assert record.plan.peak_bytes <= record.reserved_peak_bytes <= record.budget_bytes
    assert "torch's allocator reserves" in repr(record)
    assert bool(record.plan.pool_bytes) == (not settings)
