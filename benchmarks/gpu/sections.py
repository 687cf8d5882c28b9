"""The sections of `make gpu`, the most important first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A section: its file beside this one, what it is for, and its part of the time."""

    name: str
    what: str
    share: float


SECTIONS = (
    Plan("correctness", "every test that needs a GPU", 0.19),
    Plan("host_waits", "a step of each class waits for nothing", 0.09),
    Plan("codec_seconds", "the FFT codec beside a copy, torch.topk, a chunked DCT", 0.07),
    Plan("exchange_steps", "what each class adds to a step of DDP", 0.17),
    Plan("planned_steps", "planned models: peak as predicted, step time", 0.15),
    Plan("held_steps", "planned steps hold what is promised, kernels' scratch included", 0.08),
    Plan("activation_steps", "activations in few bits: bytes, peak, step time", 0.06),
    Plan("gossip_steps", "a step of gossip between two ranks", 0.05),
    Plan("horovod_ranks", "Horovod's own ranks with CUDA tensors", 0.04),
    Plan("sanitized", "memcheck and racecheck over every kernel", 0.06),
    Plan("slowest_kernels", "which kernels a step spends its time in", 0.04),
)
