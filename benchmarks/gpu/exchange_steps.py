"""What each class adds to a step of DDP, compared with PowerSGD at equal bytes and a cast.

One rank over NCCL: what the arithmetic costs, with nothing on a wire. Two ranks on one device over
Gloo: the same code with real partners, whose bits have to be equal; its seconds are Gloo's copies
by way of the host. "added" is the median step less that of plain DDP. The first model's gradients
are gathered by array code as well, though kernels are there: what says whether these stay.
"""

from __future__ import annotations

from math import prod
from typing import Any

from resnet50_gradients import OURS
from resnet50_step import powersgd_bytes, rival_of

from gpu.exchange_ranks import BY_ARRAYS, ranks, shapes_of
from gpu.section import Section, main

AUTO = OURS.replace("low rank", "auto")
MODELS = ("resnet50", "gpt2", "llama 1b")
SMALL = ("gpt2/12",)
TARGET_S = 3e-3
# Kernels by hand stay where a step of DDP adds so many times less than by array code alone.
KERNELS_PAY = 2.0


def timed(section: Section, model: str, number: int, backend: str, ways: list[str]) -> None:
    """Rows of one model, and targets of ours on ResNet-50."""
    job = {"model": model, "device": section.device, "backend": backend, "ways": ways}
    steps = 2 if section.dry else 15
    by_rank = ranks(job | {"steps": steps}, ranks=number, timeout_s=max(20.0, section.left_s()))
    rows: dict[str, dict[str, Any]] = {}
    shapes = shapes_of(model)
    plain_bytes = 4 * sum(map(prod, shapes))
    for way in ways:
        facts = [rank["ways"][way] for rank in by_rank]
        step_s = max(rank["step_s"] for rank in facts)
        brought = facts[0]["sent_bytes"] or plain_bytes
        if way.startswith("powersgd"):
            brought = powersgd_bytes(shapes, int(way.split()[1]))
        brought //= 2 if way == "fp16" else 1
        rows[way] = {
            "model": model, "way": way, "ranks": number, "backend": backend,
            "elements": by_rank[0]["elements"], "step_ms": 1e3 * step_s,
            "added_ms": 1e3 * (step_s - max(rank["ways"]["plain"]["step_s"] for rank in by_rank)),
            "launches": facts[0]["launches"], "brought_bytes": brought,
            "decided": facts[0]["decided"],
            "equal_ranks": len({rank["bits"] for rank in facts}) == 1,
        }  # fmt: skip
        section.row(**rows[way])
    differing = [way for way, row in rows.items() if not row["equal_ranks"]]
    if differing:
        raise RuntimeError(f"ranks ended with other bits: {', '.join(differing)}")
    if model == "resnet50" and backend == "nccl":
        ours, rival = rows[OURS]["added_ms"], rows[rival_of(shapes)]["added_ms"]
        section.target("ms that LowRankCompression adds, ResNet-50", ours, most=1e3 * TARGET_S)
        section.target("its ms over PowerSGD's", ours / rival, most=1.0)
        by_kernels, by_arrays = rows["gather"]["added_ms"], rows["gather" + BY_ARRAYS]["added_ms"]
        section.target(
            "ms that FFTCompression adds by array code, over its kernels'",
            by_arrays / by_kernels,
            least=KERNELS_PAY,
        )


def measure(section: Section) -> None:
    """All models over one rank, the first over two."""
    models = SMALL if section.dry else MODELS
    alone = "gloo" if section.dry else "nccl"
    for model in models:
        ways = ["plain", "fp16", rival_of(shapes_of(model)), OURS, "gather"]
        if model == models[0]:
            ways.append("gather" + BY_ARRAYS)
        section.part(
            f"{model}, 1 rank over {alone}",
            lambda model=model, ways=ways: timed(section, model, 1, alone, ways),
            least_s=10,
        )
    first = models[0]
    # torch's PowerSGD is not among them: over Gloo its collectives meet in another order by ranks.
    section.part(
        f"{first}, 2 ranks over gloo",
        lambda: timed(section, first, 2, "gloo", ["plain", OURS, AUTO, "gather"]),
        least_s=10,
    )


if __name__ == "__main__":
    main("exchange_steps", measure)
