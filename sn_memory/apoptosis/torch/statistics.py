"""What every reader of a group saw and put out, on the last batches of training.

The traced graph is run once more on them, without gradients. Dropout is left out, so that chance is
not taken for a difference, and running statistics are copies, so that nothing of the model changes.
Even rows of a batch give the factors, odd rows the change: what least squares fitted by chance is
not counted as likeness. A batch of one row is used for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..groups import Group, Site


@dataclass
class Moments:
    """Sums over samples of (h, 1) (h, 1)^T in float64, [n + 1, n + 1], and of squares put out."""

    fit: torch.Tensor
    check: torch.Tensor
    squares: torch.Tensor


class _Run(fx.Interpreter):  # type: ignore[misc,unused-ignore]  # torch is Any to the checker
    def __init__(self, graph: fx.GraphModule, sites: dict[str, tuple[Site, Moments]]) -> None:
        super().__init__(graph)
        self.sites = sites

    def run_node(self, n: fx.Node) -> Any:
        if "dropout" in str(n.target):
            return self.env[n.args[0]]
        if n.name not in self.sites:
            return super().run_node(n)
        site, moments = self.sites[n.name]
        seen = self.env[n.args[0]]
        _add(moments, site, seen)
        out = super().run_node(n)
        odd = out[1::2] if len(out) > 1 else out
        moments.squares += odd.double().square().sum()
        return out


def _add(moments: Moments, site: Site, seen: torch.Tensor) -> None:
    channels = len(moments.fit) - 1
    # [rows, others, channels, places] -> [rows, samples, channels]
    seen = seen.movedim(site.axis, -1)
    seen = seen.reshape(len(seen), -1, channels, site.places).transpose(2, 3)
    seen = seen.reshape(len(seen), -1, channels)
    fit, check = (seen[0::2], seen[1::2]) if len(seen) > 1 else (seen, seen)
    for total, rows in ((moments.fit, fit), (moments.check, check)):
        flat = rows.reshape(-1, channels).double()
        ones = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
        total += ones.T @ ones


def measure(
    program: Any, model: torch.nn.Module, groups: Sequence[Group], batches: Sequence[Any]
) -> list[list[Moments]]:
    """Return the moments of each reader of each group, summed over batches of (args, kwargs)."""
    device = next(model.parameters()).device
    found: list[list[Moments]] = []
    sites: dict[str, tuple[Site, Moments]] = {}
    for group in groups:
        empty = torch.zeros(group.width + 1, group.width + 1, dtype=torch.float64, device=device)
        row = [Moments(empty.clone(), empty.clone(), empty[0, 0].clone()) for _ in group.sites]
        sites |= {site.call: (site, own) for site, own in zip(group.sites, row, strict=True)}
        found.append(row)
    signature = program.graph_signature
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    constants = program.constants
    with torch.no_grad():
        for args, kwargs in batches:
            lifted = [
                state[spec.target] if spec.target in state else constants[spec.target]
                for spec in signature.input_specs
                if spec.target is not None
            ]
            copies = [
                value if isinstance(value, torch.nn.Parameter) else value.clone()
                for value in lifted
            ]
            given = torch.utils._pytree.tree_leaves((args, kwargs))
            _Run(program.graph_module, sites).run(*copies, *given)
    return found
