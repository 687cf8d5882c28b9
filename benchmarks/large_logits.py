"""A GPT-2 with its whole vocabulary: torch's linear_cross_entropy against all logits at once.

    python -m benchmarks large_logits [--tokens N] [--width N] [--layers N] [--times N]

Peaks are the CPU allocator's, kernels' scratch included, and what a plan by graph of the same model
promises without running anything again. Seconds are CPU seconds of a step, medians of steps taken
in turn. Errors are of the worst gradient: the largest difference from that of the plain model in
float64, over its largest value. One thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import sn_memory.torch
from sn_memory.torch.model.step import run_step

VOCABULARY = 50257


class WithLoss(nn.Module):
    """Returns the loss of a language model, by one of the ways."""

    def __init__(self, model: Any, options: Any = None, *, plain: bool = False) -> None:
        super().__init__()
        self.model, self.options, self.plain = model, options, plain

    def forward(self, tokens: Tensor) -> Tensor:
        if self.plain:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        hidden = self.model.base_model(input_ids=tokens).last_hidden_state
        return nn.functional.linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1),
            self.model.get_output_embeddings().weight,
            tokens[:, 1:].flatten(),
            options=self.options,
        )


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of one step by the parameters of the language model."""
    model.zero_grad()
    model(tokens).backward()
    return {name: parameter.grad.clone() for name, parameter in model.model.named_parameters()}


def main(argv: list[str]) -> int:
    """Measure each way and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 512), ("width", 256), ("layers", 4), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=args.width, n_layer=args.layers, n_head=4, vocab_size=VOCABULARY,
            n_positions=args.tokens, use_cache=False, loss_type="ForCausalLM",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ).train()  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (1, args.tokens))
    options = nn.LinearCrossEntropyOptions
    ways: dict[str, nn.Module] = {
        "plain": WithLoss(model, plain=True),
        "options=LinearCrossEntropyOptions()": WithLoss(model, options()),
        "batch_chunk_size=64": WithLoss(model, options(batch_chunk_size=64)),
    }
    exact = gradients(WithLoss(copy.deepcopy(model).double(), plain=True), tokens)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.times + 1):
        for name, way in ways.items():
            way.zero_grad()
            began = time.process_time()
            way(tokens).backward()
            if turn:
                took[name].append(time.process_time() - began)
    for name, way in ways.items():
        own = gradients(way, tokens)
        worst = max(
            float((own[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact
        )
        peak = run_step(way, way, ((tokens,), {}), kernels=True).peak_bytes
        planned = sn_memory.torch.plan(way, (tokens,), "100%", backend="graph")
        plan = planned.sn_memory.plan
        held = run_step(planned, planned, ((tokens,), {}), kernels=True).peak_bytes
        print(
            f"{name:36} peak {peak / 2**20:7.1f} MiB, planned {plan.peak_bytes / 2**20:7.1f} MiB, "
            f"held {held / 2**20:7.1f} MiB, {statistics.median(took[name]):6.3f} s, "
            f"error {worst:.1e}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
