"""What every reader of a group saw and put out, on the last batches of training.

The traced graph is run once more on them, without gradients. Dropout is left out, so that chance is
not taken for a difference, and running statistics are copies, so that nothing of the model changes.
Even rows of a batch are fitted, odd rows show the change: what least squares fitted by chance is
not counted as likeness. A batch of one row is used for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..groups import Group, Site
from ..samples import Seen, grid, offsets, same_padding


class _Run(fx.Interpreter):  # type: ignore[misc,unused-ignore]  # torch is Any to the checker
    def __init__(
        self, graph: fx.GraphModule, sites: dict[str, tuple[Site, torch.Tensor, Seen]], share: int
    ) -> None:
        super().__init__(graph)
        self.sites, self.share = sites, share

    def run_node(self, n: fx.Node) -> Any:
        if "dropout" in str(n.target):
            return self.env[n.args[0]]
        if "scaled_dot_product_attention" in str(n.target) and len(n.args) > 4:
            given = self.fetch_args_kwargs_from_env(n)
            return n.target(*given[0][:4], 0.0, *given[0][5:], **given[1])
        if n.name not in self.sites:
            return super().run_node(n)
        site, fit, own = self.sites[n.name]
        seen = self.env[n.args[0]]
        out = super().run_node(n)
        _add_fit(fit, site, seen)
        even = slice(1, None, 2) if len(seen) > 1 else slice(None)
        if "conv" in str(n.target):
            samples, made = _patches(n.args, seen[even], out[even], self.env, self.share)
        else:
            samples = seen[even].reshape(-1, len(fit) - 1, site.places).transpose(1, 2)
            made = out[even].reshape(len(samples), -1)
            some = slice(None, None, -(-len(samples) // self.share))
            samples, made = samples[some], made[some]
        own.samples.append(samples.float().cpu().numpy())
        own.squares.append(made.double().square().sum(1).cpu().numpy())
        return out


def _add_fit(fit: torch.Tensor, site: Site, seen: torch.Tensor) -> None:
    channels = len(fit) - 1
    # [rows, others, channels, places] -> [rows and others and places, channels]
    rows = (seen[0::2] if len(seen) > 1 else seen).movedim(site.axis, -1)
    rows = rows.reshape(-1, channels, site.places).transpose(1, 2)
    flat = rows.reshape(-1, channels).double()
    ones = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
    fit += ones.T @ ones


def _patches(
    arguments: Any, seen: torch.Tensor, out: torch.Tensor, env: Any, share: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [samples, offsets, n] and outputs [samples, outputs] of a convolution.

    Outputs are taken on a grid of positions, so that there are about `share` of them.
    """
    spatial = seen.dim() - 2
    kernel = env[arguments[1]].shape[2:]
    stride, padding, dilation = (
        _each(arguments[place] if len(arguments) > place else default, spatial)
        for place, default in ((3, 1), (4, 0), (5, 1))
    )
    if padding == "same":
        sides = same_padding(kernel, stride, dilation, seen.shape[2:])
    else:
        widths = [0] * spatial if isinstance(padding, str) else padding
        sides = [(width, width) for width in widths]
    flat = [side for pair in reversed(sides) for side in pair]
    padded = torch.nn.functional.pad(seen, flat)
    positions = grid(out.shape[2:], max(1, share // len(out)))
    made = out[(..., *_mesh(positions))]
    parts = []
    for offset in offsets(kernel):
        places = [
            [p * step + o * spread for p in row]
            for row, step, o, spread in zip(positions, stride, offset, dilation, strict=True)
        ]
        part = padded[(..., *_mesh(places))]  # [rows, n, positions]
        parts.append(part.flatten(2).transpose(1, 2).reshape(-1, seen.shape[1]))
    return torch.stack(parts, 1), made.flatten(2).transpose(1, 2).reshape(-1, out.shape[1])


def _each(value: Any, spatial: int) -> Any:
    if isinstance(value, str):
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _mesh(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.meshgrid(*(torch.tensor(row) for row in rows), indexing="ij"))


def measure(
    program: Any,
    model: torch.nn.Module,
    groups: Sequence[Group],
    batches: Sequence[Any],
    samples: int,
) -> list[list[Seen]]:
    """Return what each reader of each group saw in batches of (args, kwargs).

    About `samples` outputs of each reader are kept in all.
    """
    device = next(model.parameters()).device
    found: list[list[Seen]] = []
    fits: list[tuple[torch.Tensor, Seen]] = []
    sites: dict[str, tuple[Site, torch.Tensor, Seen]] = {}
    for group in groups:
        size = group.width + 1
        found.append([Seen(np.zeros((size, size))) for _ in group.sites])
        for site, seen in zip(group.sites, found[-1], strict=True):
            # Where the model is: a sum of products of many rows.
            fits.append((torch.zeros(size, size, dtype=torch.float64, device=device), seen))
            sites[site.call] = site, *fits[-1]
    signature = program.graph_signature
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    constants = program.constants
    share = math.ceil(samples / len(batches))
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
            _Run(program.graph_module, sites, share).run(*copies, *given)
    for fit, seen in fits:
        seen.fit = fit.cpu().numpy()
    return found
