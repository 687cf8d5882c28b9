"""What users hand to a state of DDP or FSDP2, checked before anything depends on it."""

from __future__ import annotations

from typing import Any

import torch

from ...base.errors import CompressError


class Names:
    """Those of a model's parameters, from named_parameters; or made up, None given, as they come.

    Raises CompressError for what are no named parameters; see names_given.
    """

    def __init__(self, named: Any) -> None:
        self.complete = named is not None
        # By identity; held, so that no other tensor can get the same one.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        for parameter, name in names_given(named) if self.complete else ():
            self._known[id(parameter)] = parameter, name

    def known(self) -> list[tuple[torch.Tensor, str]]:
        """All so far, in their order."""
        return list(self._known.values())

    def of(self, parameter: torch.Tensor) -> str:
        """Its name; CompressError for one that is not among those given."""
        if id(parameter) not in self._known:
            if self.complete:
                raise CompressError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in named_parameters; "
                    "expected all of the model's. Pass model.named_parameters() of the model "
                    "that DDP has."
                )
            self._known[id(parameter)] = parameter, f"parameter {len(self._known)}"
        return self._known[id(parameter)][1]


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
