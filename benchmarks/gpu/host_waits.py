"""A step of each class, in which the host must not wait for the device.

On a GPU torch raises whenever a step would wait (`set_sync_debug_mode`), over NCCL with one rank:
Gloo itself waits. Plain DDP goes first, to see that it is not torch's own. A dense step, in which
sizes are chosen, waits by design, and is over by then. On the CPU there is nothing to wait for, so
that steps run is all that is seen there; tests on `meta` tensors show that they read no value.
"""

from __future__ import annotations

import torch
from models import Llama
from resnet50_gradients import OURS

import sn_memory.torch
from gpu.exchange_ranks import ranks, waits_of
from gpu.section import Section, main


def exchange(section: Section, ways: list[str]) -> dict[str, str]:
    """What steps of each way waited for."""
    backend = "gloo" if section.dry else "nccl"
    job = {"model": "gpt2/12", "device": section.device, "backend": backend}
    job |= {"waits": True, "ways": ways}
    (rank,) = ranks(job, ranks=1, timeout_s=max(20.0, section.left_s()))
    return {way: str(rank["ways"][way]["waited"]) for way in ways}


def planned(section: Section, techniques: tuple[str, ...]) -> str:
    """What steps of a planned model waited for."""
    torch.manual_seed(0)
    model = Llama(vocabulary=500, width=128, layers=4, heads=4, groups=2, hidden=352)
    model, tokens = model.to(section.device), torch.zeros(4, 128, dtype=torch.long)
    tokens = tokens.to(section.device)
    planned_model = sn_memory.torch.plan(
        model,
        tokens,
        "80%",
        techniques=techniques,
        backend="graph",
        profile=False,
        time_limit_s=2.0,
    )
    if not planned_model.sn_memory.plan.decided(techniques[1]):
        raise RuntimeError(f"the plan has nothing to {techniques[1]}; this proves nothing")
    planned_model(tokens).sum().backward()
    if not section.dry:
        torch.cuda.synchronize()
    return waits_of(lambda: planned_model(tokens).sum().backward(), section.device)


def measure(section: Section) -> None:
    """A row each; fail at the end if one waited."""
    waited = {}
    for techniques in (("keep", "recompute"), ("keep", "offload")):
        name = f"planned, {techniques[1]}"
        waited[name] = planned(section, techniques)
        section.row(step=name, waited=waited[name])
    for way in ("plain", OURS, "gather"):
        waited |= exchange(section, [way])
        section.row(step=way, waited=waited[way])
    if guilty := [name for name, wait in waited.items() if wait]:
        raise RuntimeError(f"the host waited in: {', '.join(guilty)}")


if __name__ == "__main__":
    main("host_waits", measure)
