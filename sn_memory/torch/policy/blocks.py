"""Which modules of a model are blocks: each may run again in the backward pass as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import TraceError

_ROWS = (torch.nn.Sequential, torch.nn.ModuleList)


def rows(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Return cuts of a model into blocks, each as paths of modules, the coarsest first.

    A block is a module in a row (Sequential, ModuleList) that has modules itself; where such lie
    within each other, the outermost make one cut and the innermost another. A model without any is
    cut into its own modules.
    """
    names = {module: path for path, module in model.named_modules() if module is not model and path}
    found = [
        names[module]
        for row in model.modules()
        if isinstance(row, _ROWS)
        for module in row.children()
        if module in names and next(module.children(), None) is not None
        if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
    ]
    if not found:
        found = [name for name, module in model.named_children() if _runs(module)]
    outer = tuple(it for it in found if not any(_inside(it, other) for other in found))
    inner = tuple(it for it in found if not any(_inside(other, it) for other in found))
    return [outer] if outer == inner else [outer, inner]


def named(model: torch.nn.Module, blocks: Sequence[Any]) -> tuple[str, ...]:
    """Return the paths of the blocks that a user names: paths, classes or modules.

    Raises TraceError where one is none of the model's, or lies within another.
    """
    paths = {path: module for path, module in model.named_modules() if path}
    found: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            of_it = [block] if block in paths else []
        elif isinstance(block, type):
            of_it = [path for path, module in paths.items() if isinstance(module, block)]
        else:
            of_it = [path for path, module in paths.items() if module is block]
        if not of_it:
            raise TraceError(
                f"got block {block!r}, expected a path, a class or a module within the "
                f"{type(model).__name__}."
            )
        found += of_it
    for one in found:
        if around := next((it for it in found if _inside(one, it)), None):
            raise TraceError(
                f"the block {one!r} lies within the block {around!r}: what runs again as a part of "
                "one would run again within it once more. Name one of them."
            )
    return tuple(dict.fromkeys(found))


def _inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _runs(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
