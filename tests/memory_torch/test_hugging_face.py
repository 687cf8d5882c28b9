"""Hugging Face's models under a plan: text generation, caches, what a first forward pass sets."""

import pytest
import torch

from sn_memory.torch import plan, verify

transformers = pytest.importorskip("transformers")

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "graph"}


def gpt2(**settings):
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # Large, so that positions and masks show in the tokens.
    sizes |= {"initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes, **settings)
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config).train()


def tokens(rows=4, length=16):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(2, 64, (rows, length), generator=generator)


def test_generate_with_prompts_padded_on_the_left():
    model, prompts = gpt2(use_cache=False), tokens(2, 6)
    planned = plan(model, {"input_ids": tokens(), "labels": tokens()}, "80%", **SETTINGS)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    for use_cache in (False, True):
        plain, mine = (
            it.eval().generate(prompts, attention_mask=mask, use_cache=use_cache, **settings)
            for it in (model, planned)
        )
        assert torch.equal(plain, mine)


@pytest.mark.filterwarnings("ignore:2 forward passes")  # The budget is one step's.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_planned_step_returns_its_cache():
    """By default GPT-2 returns keys and values in an object of its own class."""
    model, sample = gpt2(), {"input_ids": tokens(), "labels": tokens()}
    planned = plan(model, sample, "85%", **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute")
    caches = []
    for ids in (tokens(), tokens().flip(0)):
        mine, theirs = (it(input_ids=ids, labels=ids.clone()) for it in (planned, model))
        assert torch.equal(mine.loss, theirs.loss)
        caches.append(mine.past_key_values)
        assert type(caches[-1]) is type(theirs.past_key_values)
        for a, b in zip(caches[-1].layers, theirs.past_key_values.layers, strict=True):
            assert type(a.keys) is type(a.values) is torch.Tensor
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
    assert caches[0] is not caches[1]
    found = verify(planned, sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    # The cache can be gone on with.
    more = tokens(4, 1)
    with torch.no_grad():
        mine, theirs = (
            it(more, past_key_values=it(tokens()).past_key_values) for it in (planned, model)
        )
    assert torch.equal(mine.logits, theirs.logits)


def test_what_a_first_forward_sets_is_no_reason_against_a_plan_of_ops():
    """DINOv2 writes into its configuration in its first forward pass, and installs hooks."""
    kind = transformers.Dinov2ForImageClassification
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
    sizes |= {"num_labels": 5, "image_size": 32, "patch_size": 8}
    model = kind(kind.config_class(**sizes)).train()
    sample = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    hooks = [len(it._forward_hooks) for it in model.modules()]
    planned = plan(model, sample, "80%", **SETTINGS)
    assert model.config.problem_type is None
    assert [len(it._forward_hooks) for it in model.modules()] == hooks
    assert planned.sn_memory.trial.compared
    assert not verify(planned, sample).different
    # Another size is planned at once, from the same state.
    planned(**{name: it[:2] for name, it in sample.items()}).loss.backward()
    assert planned.sn_memory.kinds[-1].how != "modules run again"
