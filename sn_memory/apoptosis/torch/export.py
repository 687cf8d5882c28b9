"""A shrunk model on disk: a plain state_dict, and JSON of its shapes and of what was merged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..events import Event
from .heads import counts_in
from .surgery import reshape, shapes_of

_FORMAT = "sn_memory.apoptosis"


def write(model: nn.Module, events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Write `path` (torch.save of the state_dict) and beside it the same name with .json."""
    path = Path(path)
    torch.save(model.state_dict(), path)
    record = {
        "format": _FORMAT,
        "version": 2,
        "shapes": shapes_of(model),
        "counts": counts_in(model),
        "events": [event.to_json() for event in events if event],
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def rebuild(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Shrink a freshly made model to what `Apoptosis.export` wrote, and load its weights.

    Parameters
    ----------
    model
        Made as it was before training, at full width; changed in place.
    path
        The file of the state_dict; its JSON lies beside it.

    Returns
    -------
    nn.Module
        The model. Make its optimizer after this call: parameters are new ones.
    """
    path = Path(path)
    record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    if record.get("format") != _FORMAT or record.get("version") != 2:
        raise ValueError(
            f"rebuild: {path.with_suffix('.json')} says format {record.get('format')!r}, version "
            f"{record.get('version')!r}; expected {_FORMAT!r}, 2. Export it again."
        )
    values = torch.load(path, weights_only=True, map_location="cpu")
    reshape(model, record["shapes"], record["counts"])
    model.load_state_dict(values)
    return model
