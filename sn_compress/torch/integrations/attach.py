"""Register the hook on a model that a library has wrapped; save and load memories in a folder."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...compression import Compression
from ...errors import CompressError, UncalledWarning
from ..ddp import CompressionState, compression_hook


def attach(
    model: Any, compression: type[Compression], where: str, **settings: Any
) -> CompressionState | None:
    """Register the hook on a DDP model and return its state; None, with a warning, on one rank.

    Raises CompressError if several ranks train the model without DDP, e.g. by FSDP.

    Parameters
    ----------
    where : the library that trains the model, for messages
    settings : of CompressionState
    """
    model = getattr(model, "_orig_mod", model)  # unwrap torch.compile
    if isinstance(model, DistributedDataParallel):
        settings.setdefault("find_unused_parameters", model.find_unused_parameters)
        state = CompressionState(
            compression, model.process_group,
            named_parameters=model.module.named_parameters(), **settings,
        )  # fmt: skip
        model.register_comm_hook(state, compression_hook)
        return state
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise CompressError(
            f"{where} trains a {type(model).__qualname__} on {ranks} ranks; expected a "
            "DistributedDataParallel. Choose DDP as its strategy; replicas of FSDP2 take "
            "sn_compress.torch.fsdp.compress_replicas."
        )
    warnings.warn(
        f"{where} trains in one process: no gradient travels, so {compression.__name__} does "
        "nothing. Start it by torchrun --nproc-per-node N, or ask for N devices.",
        UncalledWarning,
        stacklevel=3,
    )
    return None


def save(state: CompressionState | None, folder: str | Path, number: int = 0) -> None:
    """Write this rank's memory to a checkpoint's folder; call it on every rank.

    number : of the model, if a checkpoint has several
    """
    if state is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(state.state_dict(), _file(folder, state.rank, number))


def load(state: CompressionState | None, folder: str | Path, number: int = 0) -> None:
    """Load what `save` wrote: this rank's state, or the mean of all if ranks or nodes changed.

    If the checkpoint has none, e.g. from before compression was enabled, the memory starts empty,
    with an UncalledWarning. Raises CompressError if only some of the files are missing.
    """
    if state is None:
        return
    own_file = _file(folder, state.rank, number)
    first = own_file if own_file.exists() else _file(folder, 0, number)
    if not first.exists():
        start_empty(state, f"{folder} has no {own_file.name}")
        return
    saved = torch.load(first, map_location="cpu", weights_only=True)
    all_states = partial(_load_all, state, folder, number, saved["ranks"])
    if saved["ranks"] != state.ranks or first is not own_file:
        state.load_state_dict(all_states())
    else:
        state.load_state_dict(saved, all_states)


def _load_all(
    state: CompressionState, folder: str | Path, number: int, ranks: int
) -> list[dict[str, Any]]:
    """The states that so many ranks have saved, in order of rank."""
    files = [_file(folder, rank, number) for rank in range(ranks)]
    if missing := [file.name for file in files if not file.exists()]:
        raise CompressError(
            f"{folder} was saved by {ranks} ranks and has no {', '.join(missing)}; expected all, "
            f"as there are {state.ranks} ranks now, or they are on other nodes. Copy them together."
        )
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files]


def start_empty(state: CompressionState, what: str) -> None:
    """Clear the memory, with a warning, because training resumes from a checkpoint without one.

    What it holds may be from later steps, if a run goes back to an earlier checkpoint.
    """
    state.start_empty()
    warnings.warn(
        f"{what}: no memory of compressed gradients, which starts empty. This is expected if the "
        "checkpoint was saved without compression.",
        UncalledWarning,
        stacklevel=4,
    )


def _file(folder: str | Path, rank: int, number: int) -> Path:
    of_model = f"-{number}" if number else ""
    return Path(folder) / f"compression{of_model}-rank{rank}.pt"
