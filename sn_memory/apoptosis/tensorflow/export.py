"""A shrunk model on disk: a plain Keras file or SavedModel, and JSON of what was merged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ..events import Event
from .groups import find_groups, graph_of
from .surgery import Patient, resize, tell


def write(model: Any, events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Write `path`, a .keras file or else a SavedModel, and the same name with .json."""
    path = Path(path)
    if path.suffix == ".keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    record = {
        "format": "sn_memory.apoptosis",
        "version": 1,
        "shapes": [[held.path, list(held.shape)] for held in model.variables],
        "events": [event.to_json() for event in events if event],
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def rebuild(model: Any, path: str | os.PathLike[str]) -> Any:
    """Shrink a freshly made model to what `Apoptosis.export` wrote, and load its weights.

    Parameters
    ----------
    model
        Made as it was before training, at full width; changed in place.
    path
        The .keras file. keras.models.load_model reads it just as well, where the code that made
        the model is not at hand.

    Returns
    -------
    keras.Model
        The model. Make its optimizer after this call.
    """
    values = keras.models.load_model(path, compile=False).variables
    if [len(held.shape) for held in values] != [len(held.shape) for held in model.variables]:
        raise ValueError(
            f"rebuild: {Path(path).name} has {len(values)} variables, the model "
            f"{len(model.variables)}, or of other ranks; expected the same. Make the model with "
            "the code that was trained."
        )
    graph = graph_of(model)
    walk = find_groups(graph)
    for held, value in zip(model.variables, values, strict=True):
        if tuple(held.shape) == tuple(value.shape):
            held.assign(value.numpy())
        else:
            resize(held, np.asarray(value.numpy()))
    tell(walk, Patient(graph, None).layers)
    return model
