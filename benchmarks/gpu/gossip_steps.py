"""A step of GossipOptimizer between two ranks on one device, over Gloo, and the plain step."""

from __future__ import annotations

from gpu.gossip_ranks import WAYS, ranks
from gpu.section import Section, main


def measure(section: Section) -> None:
    """A row a way; ranks that average end nearer to each other than those that do not."""
    model = "gpt2/12" if section.dry else "resnet50"
    job = {"model": model, "device": section.device, "steps": 3 if section.dry else 20}
    by_rank = ranks(job, timeout_s=max(10.0, section.left_s() - 1))
    for way in WAYS:
        facts = [rank[way] for rank in by_rank]
        section.row(
            model=model, way=way, ranks=2, step_ms=1e3 * max(rank["step_s"] for rank in facts),
            distance=facts[0]["distance"],
        )  # fmt: skip
        if not all(rank["finite"] for rank in facts):
            raise RuntimeError(f"{way}: weights are not finite")
    if not by_rank[0]["gossip"]["distance"] < by_rank[0]["plain"]["distance"]:
        raise RuntimeError("gossip did not bring the ranks nearer to each other")


if __name__ == "__main__":
    main("gossip_steps", measure)
