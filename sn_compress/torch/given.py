"""What users hand to a state of DDP or FSDP2, checked before anything depends on it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CompressError


def names_given(named: Any) -> list[tuple[torch.Tensor, str]]:
    """The parameters and names of what was passed as named_parameters, in their order.

    Raises CompressError unless these are pairs of a name, which is not given twice, and a tensor.
    """
    found: list[tuple[torch.Tensor, str]] = []
    names: set[str] = set()
    for pair in _listed(named):
        ok = isinstance(pair, tuple | list) and len(pair) == 2
        if not (ok and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise CompressError(
                f"named_parameters has {_kind(pair)} in it; expected pairs of a name and a "
                "parameter. Pass model.named_parameters()."
            )
        if pair[0] in names:
            raise CompressError(
                f"named_parameters has {pair[0]!r} twice; expected names of their own. Pass "
                "model.named_parameters() of one model."
            )
        names.add(pair[0])
        found.append((pair[1], pair[0]))
    return found


def _listed(named: Any) -> list[Any]:
    if not isinstance(named, str | dict | torch.nn.Module):
        try:
            return list(named)
        except TypeError:
            pass
    raise CompressError(
        f"got a {type(named).__qualname__} as named_parameters; expected pairs of a name and a "
        "parameter. Pass model.named_parameters()."
    )


def check_scaler(scaler: Any) -> None:
    """Raise CompressError for what has no scale that could be followed."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise CompressError(
            f"got {_kind(scaler)} as scaler; expected the torch.amp.GradScaler of the training, or "
            "None"
        )


def check_flag(value: Any, name: str) -> None:
    """Raise CompressError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise CompressError(f"{name}={value!r}; expected True or False")


def _kind(thing: Any) -> str:
    if isinstance(thing, tuple | list):
        return f"({', '.join(type(each).__qualname__ for each in thing)})"
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__qualname__}"
