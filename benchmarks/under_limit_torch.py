"""The ways of under_limit.py in torch: plain, torch.utils.checkpoint, and planned by sn_memory.

Of `ours_state` the parameters lie on disk as well, as far as the plan wants them there.

All update by SGD as gradients complete (`register_post_accumulate_grad_hook`), so that no way holds
all gradients at once: what is left to grow with depth is parameters and activations. `update="end"`
steps when all gradients are there, as most training loops do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import scipy.optimize
import sympy
import torch
from models.resnet import ResNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import sn_memory.torch
from sn_memory import BudgetError

RATE = 1e-3
# Images of 112 pixels at a quarter of the width: of SuperNeurons' nets (224 pixels, width 64) a
# sixteenth of the parameters and of the activations, in the same proportion.
BATCH, SIDE, WIDTH = 16, 112, 16
GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 50257}
Step = Callable[[], float]
# A model, its sample, and what there is to say of it.
PlanningResult = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


def load() -> None:
    """Have everything there that some way imports late, so that all ways begin alike."""
    import torch._subclasses.fake_tensor
    import transformers

    assert all((scipy.optimize.linprog, sympy.Symbol, transformers.GPT2LMHeadModel))
    torch.set_num_threads(1)
    layer = nn.Linear(2, 2)
    sn_memory.torch.trace(layer, torch.zeros(1, 2), profile=False)


def refuses(error: BaseException) -> bool:
    """Whether it is sn_memory that says the budget cannot be kept."""
    return isinstance(error, BudgetError)


def prepared(asked: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Return what runs a step, and what there is to say of it."""
    torch.manual_seed(0)
    make = {"resnet": _resnet, "gpt2": _gpt2}[asked["task"]]
    ours_state = asked["way"] == "ours_state"
    held = sn_memory.torch.HostState(update="backward") if ours_state else None
    model, sample, about = make(asked, held)
    about["parameter_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    if held is not None:
        optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
        state = {"optimizer": optimizer, "state": held}
    else:
        state = {"state": "hooks" if asked["update"] == "early" else None}
    if asked["way"].startswith("ours"):
        began = time.process_time()
        model, planned = _planned(model, sample, asked, state)
        about |= planned | {"planning_cpu_s": time.process_time() - began}
    if held is not None:
        # Not before: the plan gives the optimizer a step of its own.
        update: Callable[[], Any] = optimizer.step
    else:
        update = _update_early(model) if asked["update"] == "early" else _update_at_end(model)

    def step() -> float:
        loss: Tensor = model(*sample)
        loss.backward()
        update()
        return float(loss.detach())

    return step, about


def _planned(
    model: nn.Module, sample: tuple[Tensor, ...], asked: dict[str, Any], state: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Plan within the limit, less a margin for what is no storage: objects, scratch, page ends."""
    budget = asked["limit_bytes"] - asked["margin_bytes"]
    # Work is counted, not seconds: the machine is shared with others.
    sn_memory.settings.deterministic = True
    planned = sn_memory.torch.plan(
        model,
        sample,
        budget,
        planner=asked.get("planner", "auto"),
        backend="graph",
        profile=False,
        time_limit_s=asked["time_limit_s"],
        **state,
    )
    plan = planned.sn_memory.plan
    return planned, {
        "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes,
        "planned_extra": plan.overhead,
        "ops": len(planned.sn_memory.trace.graph.ops),
        **({"state": repr(planned.sn_memory.state)} if planned.sn_memory.state else {}),
    }


def _update_early(model: nn.Module) -> Callable[[], None]:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-RATE)
        parameter.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    return lambda: None


def _update_at_end(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


class _Classified(nn.Module):
    """A ResNet with its loss; blocks one by one, or in checkpoints of some."""

    def __init__(self, third: int, way: str, width: int) -> None:
        super().__init__()
        self.net = ResNet((6, 32, third, 6), width=width)
        self.way = way

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, blocks = self.net.stem(images), self.net.blocks
        if self.way == "checkpoint":
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
        elif self.way == "checkpoint_sqrt":
            segments = round(math.sqrt(len(blocks)))
            x = checkpoint_sequential(blocks, segments, x, use_reentrant=False)
        else:
            x = blocks(x)
        y = self.net.head(self.net.pool(x).flatten(1))
        return nn.functional.cross_entropy(y, labels)


def _resnet(asked: dict[str, Any], held: sn_memory.torch.HostState | None) -> PlanningResult:
    """Of SuperNeurons' rule: 6, 32, n, 6 blocks of three layers, and two more."""
    third, width, side = asked["size"], asked.get("width", WIDTH), asked.get("side", SIDE)
    # One that lies on disk is made there: it may not fit in memory.
    with torch.device("cpu" if held is None else "meta"):
        model = _Classified(third, asked["way"], width)
    if held is not None:
        held.hold(model)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()
        # What was touched would count as resident.
        held.let_go()
    images, labels = torch.randn(BATCH, 3, side, side), torch.randint(0, 1000, (BATCH,))
    return model, (images, labels), {"depth": 3 * (44 + third) + 2, "images": BATCH}


def _gpt2(asked: dict[str, Any], held: None) -> PlanningResult:
    """Hugging Face's GPT-2, batch 1, the loss over all tokens and the whole vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    length = asked["size"]
    chance = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_positions=length, use_cache=False, loss_type="ForCausalLM", **GPT2, **chance
    )
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config).train()
    if asked["way"] == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, GPT2["vocab_size"], (1, length))
    chunked = asked["way"].startswith("ours")
    return _WithLabels(model, chunked=chunked), (tokens,), {"tokens": length}


class _WithLabels(nn.Module):
    """Returns the loss of a language model alone; if `chunked`, from some logits at a time."""

    def __init__(self, model: Any, *, chunked: bool) -> None:
        super().__init__()
        self.model, self.chunked = model, chunked

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.chunked:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens, return_dict=True).loss
            return loss
        hidden = self.model.base_model(input_ids=tokens).last_hidden_state
        return nn.functional.linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1),
            self.model.get_output_embeddings().weight,
            tokens[:, 1:].flatten(),
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=128),
        )
