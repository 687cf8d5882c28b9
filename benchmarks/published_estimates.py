"""Published bytes, compared with what `estimate` says of the same set-up.

    python -m benchmarks published_estimates --json benchmarks/results/published_estimates.json

Only set-ups that are stated in full. Nothing is fitted: where ours is another number, it stands
there as it came out, and `remark` says what is known about the difference. Models are made on the
meta device; the GPU is one of the table, and is not here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from machine import origin
from rows_file import flags, save
from tables import markdown
from torch import nn
from torch.utils.checkpoint import checkpoint

from sn_memory.run.estimate import Units, on_cards
from sn_memory.torch import estimate


class Layer(nn.Module):
    """A layer of a GPT as Megatron-LM computes it, on one card: pre-norm, GELU, dropout, no fusion.

    Parameters
    ----------
    hidden, heads
        Width, and how many heads share it.
    recompute
        Whether the core of attention runs again in the backward pass.
    """

    def __init__(self, hidden: int, heads: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.into, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q, k, v, each [batch * heads, length, head]."""
        empty = q.new_empty(q.size(0), q.size(1), k.size(1))
        scores = torch.baddbmm(
            empty, q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(q.size(2))
        )
        return torch.bmm(self.dropout(scores.softmax(-1)), v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer of x, both [length, batch, hidden]."""
        length, batch, hidden = x.shape
        mixed = self.into(self.first(x)).view(length, batch * self.heads, 3, -1)
        q, k, v = (part.transpose(0, 1) for part in mixed.unbind(2))
        attended = checkpoint(self.core, q, k, v, use_reentrant=False) if self.recompute else None
        attended = self.core(q, k, v) if attended is None else attended
        x = x + self.dropout(self.out(attended.transpose(0, 1).reshape(length, batch, hidden)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


WITHIN = 0.10
_MIB = 1 << 20
_KORTHIKANTI = (
    "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023 "
    "(arXiv 2205.05198)"
)
_ZERO = "Rajbhandari et al., ZeRO, SC 2020 (arXiv 1910.02054)"
_BELOW = (
    "ours has no kernels that the driver loads after the first, nor what the allocator loses over "
    "many steps; theirs was measured after 128 steps, on a GPU that is not named"
)
_ANATOMY = (
    "Hugging Face transformers documentation v4.21 to v4.31, Efficient Training on a Single GPU / "
    "Model training anatomy, bert-large-uncased, length 512, Trainer"
)


@dataclass(frozen=True)
class Case:
    """A published figure.

    Parameters
    ----------
    name, setup, source
        What it is, in what set-up, where it stands.
    published
        Bytes.
    ours
        Tells ours.
    remark
        What is known about a difference.
    """

    name: str
    setup: str
    published: float
    ours: Callable[[], float]
    source: str
    remark: str = ""


def activations(heads: int, hidden: int, batch: int, *, recompute: bool = False) -> float:
    """Bytes that one layer of Megatron's form leaves for its backward pass; length 2048, fp16."""
    with torch.device("meta"):
        model = Layer(hidden, heads, recompute=recompute).to(torch.float16)
        sample = torch.empty(2048, batch, hidden, dtype=torch.float16, requires_grad=True)
        estimated = estimate(model, sample, device="a100-80")
    # The layer keeps its input, which is no activation to it but the layer's before; its output is
    # the next one's input.
    return estimated.activations_bytes


def formula(heads: int, hidden: int, batch: int, *, recompute: bool = False) -> float:
    """The paper's: s b h (34 + 5 a s / h), and s b h 34 where attention runs again."""
    length = 2048
    squared = 0 if recompute else 5 * heads * length / hidden
    return length * batch * hidden * (34 + squared)


def gpt(layers: int, hidden: int, heads: int, *, batch: int = 1, length: int = 1024) -> Any:
    """Return estimate of a GPT-2 of transformers with Adam in mixed precision, on one card."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, use_cache=False, n_positions=length
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        words = torch.empty(batch, length, dtype=torch.long)
        with torch.autocast("cpu", torch.float16):
            return estimate(
                model,
                {"input_ids": words, "labels": words},
                optimizer=torch.optim.Adam,
                device="h200",
            )


def model_state(estimated: Any) -> float:
    """Bytes of parameters, gradients and optimizer state."""
    return estimated.parameters_bytes + estimated.gradients_bytes + estimated.optimizer_bytes


def zero_3() -> float:
    """Bytes of model state on one of 64 cards: ZeRO's example of 7.5 billion parameters."""
    # Any model of so many parameters has this state; a product of one matrix is quickest.
    with torch.device("meta"):
        model, sample = nn.Linear(75_000, 100_000, bias=False), torch.empty(1, 75_000)
        estimated = estimate(model, sample, optimizer=torch.optim.Adam, device="h200")
    held = on_cards(
        64,
        parameters_bytes=estimated.parameters_bytes,
        gradients_bytes=estimated.gradients_bytes,
        optimizer_bytes=estimated.optimizer_bytes,
        rest_bytes=0,
        units=Units(0, 0),
    )
    return held.state_bytes


def bert(batch: int, optimizer: Any = torch.optim.AdamW) -> float:
    """Bytes that nvidia-smi shows: theirs before the model is there, and what is reserved.

    Gradients are there from the second step on: their Trainer zeroed them (`model.zero_grad()` of
    torch before 2.0), so the step is one with gradients.
    """
    import transformers

    # The sizes of bert-large-uncased; attention as the library had it then.
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
        problem_type="single_label_classification",
    )
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config).train()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        words = torch.empty(batch, 512, dtype=torch.long)
        labels = torch.empty(batch, dtype=torch.long)
        estimated = estimate(
            model, {"input_ids": words, "labels": labels}, optimizer=optimizer, device="v100"
        )
    return 1343 * _MIB + max(estimated.reserved_bytes, estimated.peak_bytes)


CASES = (
    *(
        Case(
            f"Activations of a layer, GPT {size}",
            f"h {hidden}, a {heads}, s 2048, b {batch}, fp16, dropout, attention unfused",
            formula(heads, hidden, batch),
            lambda heads=heads, hidden=hidden, batch=batch: activations(heads, hidden, batch),
            f"{_KORTHIKANTI}, equation 1, and table 3 for the sizes",
        )
        for size, heads, hidden, batch in (
            ("22B", 64, 6144, 4),
            ("175B", 96, 12288, 1),
            ("530B", 128, 20480, 1),
        )
    ),
    Case(
        "The same, attention recomputed, GPT 175B",
        "h 12288, a 96, s 2048, b 1, fp16, dropout, torch.utils.checkpoint around attention",
        formula(96, 12288, 1, recompute=True),
        lambda: activations(96, 12288, 1, recompute=True),
        f"{_KORTHIKANTI}, section 5",
    ),
    Case(
        "Model state, GPT-2 of 1.5 billion",
        "Adam, mixed precision, 16 bytes a parameter",
        24e9,
        lambda: model_state(gpt(48, 1600, 25)),
        f"{_ZERO}, section 3.1",
        "1.558 billion parameters, which the paper rounds to 1.5",
    ),
    Case(
        "Model state on one of 64 cards, 7.5 billion",
        "Adam, mixed precision, parameters, gradients and state sharded",
        1.88e9,
        zero_3,
        f"{_ZERO}, figure 1",
    ),
    Case(
        "BERT-large, batch 4, AdamW",
        "fp32, length 512, nvidia-smi",
        14949 * _MIB,
        lambda: bert(4),
        _ANATOMY,
        _BELOW,
    ),
    Case(
        "BERT-large, batch 1, gradients accumulated, AdamW",
        "fp32, length 512, nvidia-smi",
        8681 * _MIB,
        lambda: bert(1),
        _ANATOMY,
        _BELOW,
    ),
    Case(
        "BERT-large, batch 4, Adafactor",
        "fp32, length 512, nvidia-smi",
        12295 * _MIB,
        lambda: bert(4, adafactor()),
        _ANATOMY,
        _BELOW,
    ),
    Case(
        "Activations, GPT-2 of 1.5 billion, batch 32, length 1024",
        "about 12 values of 2 bytes for each hidden unit, layer and word, says the paper",
        60e9,
        lambda: gpt(48, 1600, 25, batch=32).activations_bytes,
        f"{_ZERO}, section 3.2 and its footnote",
        "the paper's rule leaves out attention's matrices, masks of dropout, logits, and most of "
        "what the two blocks of a layer keep: equation 1 of Korthikanti et al. has 34 bytes a "
        "hidden unit where it has 24, and attention's matrices besides",
    ),
)


def adafactor() -> Any:
    """Adafactor of transformers, as its Trainer makes it."""
    from transformers.optimization import Adafactor

    return lambda groups: Adafactor(groups, lr=1e-3, scale_parameter=False, relative_step=False)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table for the docs."""
    head = ("what", "published, GB", "ours, GB", "difference, %")
    lines = [
        [
            row["name"], f"{row['published_bytes'] / 1e9:,.2f}", f"{row['ours_bytes'] / 1e9:,.2f}",
            f"{row['over'] * 100:+.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def row_of(case: Case) -> dict[str, Any]:
    """Return a case with our number."""
    ours = case.ours()
    return {
        "name": case.name,
        "setup": case.setup,
        "source": case.source,
        "remark": case.remark,
        "published_bytes": case.published,
        "ours_bytes": ours,
        "over": ours / case.published - 1,
    }


def main() -> None:
    """Estimate all and write them."""
    parser = flags(__doc__)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for case in CASES:
        if options.only in case.name:
            rows.append(row_of(case))
            print(f"{case.name}: {rows[-1]['over']:+.2%}", flush=True)
    print(table(rows))
    save(options.json, origin() | {"rows": rows})


if __name__ == "__main__":
    main()
