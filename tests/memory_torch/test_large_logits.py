"""Large logits: torch's chunked loss in planned steps, and the note that names it."""

import pytest
import torch
from small_models import module_of
from steps import same
from torch import nn
from torch.nn import functional

from sn_memory import BudgetError
from sn_memory.torch import estimate, plan, trace
from sn_memory.torch.chunked_loss import chunked_scratch
from sn_memory.torch.large_logits import logits_note
from sn_memory.torch.model.step import run_step
from sn_memory.torch.model.tracker import measured_bytes

if not hasattr(nn, "LinearCrossEntropyOptions"):
    pytest.skip("this torch has no linear_cross_entropy in chunks", allow_module_level=True)

pytestmark = pytest.mark.rule_of_scratch

VOCABULARY, WIDTH = 2000, 32
CPU = torch.device("cpu")
SETTINGS = {"profile": False, "backend": "graph", "time_limit_s": 5.0}
OPTIONS = nn.LinearCrossEntropyOptions(batch_chunk_size=16)
# Sums of float32 in another order: a few roundings of the largest term.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class Language(nn.Module):
    """A language model that returns its loss: of all logits, or in chunks of rows."""

    def __init__(self, *, chunked, reduction="mean", bias=False, tied=False, cast=False):
        super().__init__()
        torch.manual_seed(0)
        self.chunked, self.reduction, self.cast = chunked, reduction, cast
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, labels):
        hidden, labels = self.body(self.tokens(tokens)).flatten(0, 1), labels.flatten()
        if self.chunked:
            loss = functional.linear_cross_entropy(
                hidden,
                self.head.weight.to(hidden.dtype),
                labels,
                linear_bias=self.head.bias,
                reduction=self.reduction,
                options=OPTIONS,
            )
        else:
            logits = self.head(hidden)
            logits = logits.float() if self.cast else logits
            loss = functional.cross_entropy(logits, labels, reduction=self.reduction)
        return loss.sum()


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (4, 64), generator=generator)
    labels = tokens.clone()
    labels[:, :5] = -100
    return tokens, labels


def gradients(model, *sample):
    model.zero_grad()
    loss = model(*sample)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def held(model, sample):
    return run_step(model, model, (sample, {}), kernels=True).peak_bytes


@pytest.mark.parametrize(
    "settings",
    [{}, {"reduction": "sum", "bias": True}, {"reduction": "none"}, {"tied": True}],
    ids=lambda it: "-".join(map(str, it.values())) or "mean",
)
def test_the_recipe_holds_less_and_computes_the_same(settings):
    sample = batch()
    whole, chunked = (Language(chunked=it, **settings) for it in (False, True))
    for one, other in zip(gradients(whole, *sample), gradients(chunked, *sample), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    assert held(chunked, sample) < 0.5 * held(whole, sample)
    planned = plan(chunked, sample, "100%", **SETTINGS)
    assert same(gradients(planned, *sample), gradients(chunked, *sample))
    assert held(planned, sample) <= planned.sn_memory.plan.peak_bytes
    assert not any("linear_cross_entropy" in it for it in planned.sn_memory.plan.notes)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_the_recipe_in_half_types(how):
    model, sample = Language(chunked=True), batch()
    if how == "bfloat16":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        planned = plan(model, sample, "100%", **SETTINGS)
        assert same(gradients(planned, *sample), gradients(model, *sample))
        assert held(planned, sample) <= planned.sn_memory.plan.peak_bytes


def test_a_hugging_face_model_with_num_items_in_batch():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    class ChunkedGPT2(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, labels, num_items_in_batch=None, **inputs):
            hidden = self.base_model(input_ids, **inputs).last_hidden_state
            loss = functional.linear_cross_entropy(
                hidden[:, :-1].flatten(0, 1),
                self.get_output_embeddings().weight,
                labels[:, 1:].flatten(),
                reduction="mean" if num_items_in_batch is None else "sum",
                options=OPTIONS,
            )
            if num_items_in_batch is not None:
                loss = loss / num_items_in_batch
            return CausalLMOutput(loss=loss)

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    chunked = ChunkedGPT2(config).train()
    whole = transformers.GPT2LMHeadModel(config).train()
    whole.load_state_dict(chunked.state_dict())
    tokens, labels = batch()
    for items in (None, 300, torch.tensor(300)):
        sample = {"input_ids": tokens, "labels": labels, "num_items_in_batch": items}
        planned = plan(chunked, sample, "90%", **SETTINGS)
        own = chunked(**sample).loss
        for model in (planned, whole):
            torch.testing.assert_close(model(**sample).loss, own, **TOLERANCE)
        assert torch.equal(planned(**sample).loss, own)


@pytest.mark.parametrize("cast", [False, True])
def test_a_plan_names_it_where_logits_set_the_peak(cast):
    model, sample = Language(chunked=False, cast=cast), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        planned = plan(model, sample, "100%", **SETTINGS)
        (note,) = [it for it in planned.sn_memory.plan.notes if "linear_cross_entropy" in it]
        assert note.startswith("logits, their log-softmax and its gradient set the peak: ")
        with pytest.raises(BudgetError, match="linear_cross_entropy, given the hidden states"):
            plan(model, sample, "50%", **SETTINGS)


def labelled(rows, *size):
    return rows, torch.zeros(size, dtype=torch.int64)


@pytest.mark.parametrize(("model", "sample"), [
    # Segments images: wide logits, which are no product with a matrix.
    (nn.Conv2d(3, 64, 1), labelled(torch.randn(2, 3, 32, 32), 2, 32, 32)),
    # Classifies: activations are larger than logits.
    (
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 10)),
        labelled(torch.randn(512, 256), 512),
    ),
], ids=["pixels", "classes"])  # fmt: skip
def test_a_plan_is_silent_where_logits_do_not(model, sample):
    def forward(self, x, labels):
        return functional.cross_entropy(self.layers(x), labels)

    model = module_of(forward, layers=model)
    chosen = plan(model, sample, "100%", **SETTINGS).sn_memory.plan
    assert not any("linear_cross_entropy" in it for it in chosen.notes)
    with pytest.raises(BudgetError) as error:
        plan(model, sample, "5%", **SETTINGS)
    assert error.value.plan is not None
    assert "linear_cross_entropy" not in str(error.value)


def test_what_torch_does_not_have_is_not_named(monkeypatch):
    model, sample = Language(chunked=False), batch()
    planned = plan(model, sample, "100%", **SETTINGS)
    graph, made = planned.sn_memory.trace.graph, planned.sn_memory.plan
    assert logits_note(graph, made)
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions")
    assert logits_note(graph, made) == ()


@pytest.mark.parametrize(("dtype", "policy", "bias", "rows"), [
    (torch.float32, "compact", False, 96), (torch.float32, "accurate", True, 90),
    (torch.float64, "balanced", True, 16), (torch.bfloat16, "accurate", True, 96),
    (torch.bfloat16, "compact", False, 90), (torch.float16, "balanced", False, 96),
    (torch.float16, "compact", True, 16),
])  # fmt: skip
def test_its_scratch_is_no_less_than_what_it_takes(dtype, policy, bias, rows):
    states, weight = torch.randn(rows, WIDTH).to(dtype), torch.randn(VOCABULARY, WIDTH).to(dtype)
    vector = torch.zeros(VOCABULARY, dtype=dtype) if bias else None
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    args = (
        states, weight, torch.zeros(rows, dtype=torch.int64), vector, None, "mean", -100, 0.0, 16,
        policy, wide, False, True, True, bias,
    )  # fmt: skip
    functional.linear_cross_entropy(*args[:3], options=OPTIONS)  # registers the op
    target = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    target(*args)
    taken = measured_bytes(lambda: target(*args), CPU)
    by_rule = chunked_scratch(target, args, CPU)
    # In half types the rule counts the weight and its gradient copied in float32. Whether a kernel
    # makes them is the processor's: float16 is multiplied as it is on some that have AVX2 only.
    copies = 0 if wide == dtype else 2 * weight.numel() * wide.itemsize
    assert taken <= by_rule <= 1.3 * taken + copies


def chunked_op(model, sample, **settings):
    (op,) = [it for it in trace(model, sample, **settings).graph.ops if "chunked" in it.name]
    return op


def test_it_is_timed_on_tensors_of_its_own_and_a_gpu_has_its_own_scratch():
    model, sample = Language(chunked=True), batch()
    timed = chunked_op(model, sample)
    assert timed.seconds is not None
    assert timed.workspaces[0].bytes >= 16 * VOCABULARY * 4
    assert chunked_op(model, sample, profile=False).flops == 3 * 2 * 256 * WIDTH * VOCABULARY
    half = model.bfloat16()
    there = chunked_op(half, sample, device="h100")
    here = chunked_op(half, sample, profile=False)
    # Here weight and gradient are made in float32 beside the chunk's logits, there they are not.
    assert there.workspaces[0].bytes < here.workspaces[0].bytes
    assert estimate(half, sample, device="h100").activations_bytes >= 16 * VOCABULARY * 4
