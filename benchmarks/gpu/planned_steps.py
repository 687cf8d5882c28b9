"""Planned models on the device: predicted and measured peaks, and the seconds of a step.

Peaks are those of torch's allocator (`max_memory_allocated`, and `max_memory_reserved` beside it),
less what lay there before that is no part of the step; on the CPU live storages are counted.
torch.utils.checkpoint by groups of sqrt(n) blocks, and `activation_memory_budget`, come first, and
ours is planned with each one's measured peak as its budget. With `offload` the share of the copies'
time that is hidden is one less what the step takes longer over what its copies take alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from device_peak import peak_of_step
from models import Gpt2, Llama, UNet, resnet
from planner_torch import tokens
from planner_torch_rivals import blocks_of, checkpointed
from torch import nn

import sn_memory.torch
from gpu.section import Section, main
from sn_memory import BudgetError
from sn_memory.torch import StorageTracker

Make = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], torch.dtype]
FULL: dict[str, Make] = {
    "resnet50": (partial(resnet, 50), lambda: torch.randn(64, 3, 224, 224), torch.float32),
    "gpt2": (partial(Gpt2, dropout=0.0), lambda: tokens(8, 1024), torch.float32),
    "llama, 8 blocks, bf16": (
        partial(Llama, width=2048, layers=8, heads=32, groups=8, hidden=8192),
        lambda: tokens(4, 2048),
        torch.bfloat16,
    ),
    "unet": (UNet, lambda: torch.randn(4, 1, 512, 512), torch.float32),
}
SMALL: dict[str, Make] = {
    "llama/64": (
        partial(Llama, vocabulary=500, width=32, layers=4, heads=4, groups=2, hidden=88),
        lambda: tokens(8, 64) % 500,
        torch.bfloat16,
    )
}
SHARES = ("75%", "50%")
SHARES_MOVED = ("75%", "90%", "98%")  # the first that can be kept without rebuilding
NEAR = 3.0  # % that a peak may differ from the predicted one


class Net:
    """A network on the device, and its steps."""

    def __init__(self, section: Section, name: str, make: Make) -> None:
        self.section, self.name, self.device = section, name, section.device
        torch.manual_seed(0)
        self.model = make[0]().to(self.device, make[2])
        self.sample = make[1]()
        floating = self.sample.is_floating_point()
        self.sample = self.sample.to(self.device, make[2] if floating else None)
        self.kept = [*self.model.parameters(), *self.model.buffers(), self.sample]

    def step(self, forward: Callable[..., Any]) -> None:
        """One step, gradients dropped first; in place of a loss the output's gradient is given."""
        self.model.zero_grad(set_to_none=True)
        output = forward(self.sample)
        torch.autograd.backward([output], [torch.ones_like(output)])

    def measured(self, forward: Callable[..., Any]) -> dict[str, Any]:
        """Peak and seconds of a step; the first two warm up, libraries take their workspaces."""
        steps = 1 if self.section.dry else 5
        for _ in range(2):
            self.step(forward)
        self.model.zero_grad(set_to_none=True)
        record = getattr(forward, "sn_memory", None)
        kept = [*self.kept, *(record.latest.known if record else ())]
        if self.device == "cpu":
            ignored = record.latest.ignored if record else ()
            with StorageTracker(kept, ignored=ignored) as tracker:
                self.step(forward)
            peak: dict[str, Any] = {"peak_bytes": tracker.peak_bytes, "reserved_bytes": None}
        else:
            peak = peak_of_step(lambda: self.step(forward), kept)
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step(forward)
            if self.device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return {**peak, "step_ms": 1e3 * statistics.median(taken)}

    def row(self, way: str, forward: Callable[..., Any], **columns: Any) -> dict[str, Any]:
        """Measure a way and keep its row."""
        values = {"model": self.name, "way": way, **columns, **self.measured(forward)}
        if predicted := values.get("predicted_bytes"):
            values["percent_off"] = 100 * (values["peak_bytes"] / predicted - 1)
        self.section.row(**values)
        return values

    def planned(
        self, way: str, budget: int | str, techniques: Sequence[str] = ("keep", "recompute"),
        **settings: Any,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Plan, measure, keep the row; None, and left out, where no plan keeps the budget."""
        limit_s = max(1.0, min(20.0, self.section.left_s() / 8))
        settings = {"backend": "graph", "profile": not self.section.dry} | settings
        try:
            planned = sn_memory.torch.plan(
                self.model,
                self.sample,
                budget,
                techniques=techniques,
                time_limit_s=limit_s,
                **settings,
            )
        except BudgetError as refusal:
            self.section.leave_out(f"{self.name}, {way}", str(refusal))
            return None
        plan = planned.sn_memory.plan
        columns = {"budget": budget, "predicted_bytes": plan.peak_bytes}
        columns["simulated_reserved_bytes"] = planned.sn_memory.reserved_peak_bytes
        if techniques[-1] == "offload":
            columns |= copies(planned, self.device)
        row = self.row(way, planned, **columns)
        if settings["backend"] == "graph":
            off = abs(row["percent_off"])
            self.section.target(f"% off the predicted peak: {self.name}, {way}", off, most=NEAR)
        return row


def copies(planned: nn.Module, device: str) -> dict[str, Any]:
    """Bytes that leave the device in a step, the pinned block, and what both ways take alone."""
    program = planned.sn_memory.latest.program
    moved = sum(copy.nbytes for copy in program.made_copies.values())
    block = sum(buffer.block.numel() for buffer in program.free_buffers)
    columns = {"moved_bytes": moved, "pinned_bytes": block, "copies_ms": None}
    if device == "cuda" and moved:
        here = torch.empty(moved, dtype=torch.uint8, device=device)
        host = torch.empty(moved, dtype=torch.uint8, pin_memory=True)
        host.copy_(here)
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.copy_(here, non_blocking=True)
        here.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        columns["copies_ms"] = 1e3 * (time.perf_counter() - start)
    return columns


def rivals(net: Net) -> list[tuple[str, int]]:
    """Measure torch's own tools; each one's name and peak."""
    peaks = []
    blocks = blocks_of(net.model)
    size = max(1, round(len(blocks) ** 0.5))
    groups = [blocks[at : at + size] for at in range(0, len(blocks), size)]

    def by_groups(x: torch.Tensor) -> Any:
        with checkpointed(groups):
            return net.model(x)

    if blocks:
        peaks.append(("checkpoint", net.row("torch checkpoint, sqrt(n)", by_groups)["peak_bytes"]))
    if net.section.left_s() > 20 or net.section.dry:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            compiled = torch.compile(net.model, backend="aot_eager", dynamic=False)
            row = net.row("torch activation_memory_budget 0.5, aot_eager", compiled)
        peaks.append(("activation_memory_budget", row["peak_bytes"]))
        torch._dynamo.reset()
    return peaks


def offloaded(net: Net, plain: dict[str, Any]) -> None:
    """What of the copies' time the step hides."""
    row = None
    for share in SHARES_MOVED:
        row = row or net.planned(f"planned, offload, {share}", share, ("keep", "offload"))
    if row and row["copies_ms"]:
        longer = row["step_ms"] - plain["step_ms"]
        net.section.row(
            model=net.name, way="offload, share of copies hidden",
            hidden=1 - longer / row["copies_ms"],
        )  # fmt: skip


def of_net(section: Section, name: str, make: Make) -> None:
    """All rows of a network."""
    net = Net(section, name, make)
    plain = net.row("plain", net.model)
    for share in SHARES[: 1 if section.dry else None]:
        net.planned(f"planned, {share}", share)
    offloaded(net, plain)
    for rival, peak in rivals(net):
        net.planned(f"planned at the peak of {rival}", peak)


def measure(section: Section) -> None:
    """All networks."""
    for name, make in (SMALL if section.dry else FULL).items():
        section.part(name, partial(of_net, section, name, make), least_s=5)
        gc.collect()
        if section.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main("planned_steps", measure)
