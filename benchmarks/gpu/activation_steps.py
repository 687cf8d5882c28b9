"""Activations in few bits: bytes kept, peak, step time; benchmarks/activations_memory.

Packing runs on the host, so a tensor of a GPU is copied there and back: what that costs is here.
"""

from __future__ import annotations

import activations_memory

from gpu.section import Section, main


def measure(section: Section) -> None:
    """A row for each net at each width."""
    steps = 1 if section.dry else 10
    nets = ["cnn"] if section.dry else list(activations_memory.ALL)
    for net in nets:
        for bits in activations_memory.WIDTHS[: 1 if section.dry else None]:
            section.part(
                f"{net}, {bits} bits",
                lambda net=net, bits=bits: section.row(
                    **activations_memory.row_of(net, bits, steps, section.device)
                ),
                least_s=3,
            )


if __name__ == "__main__":
    main("activation_steps", measure)
