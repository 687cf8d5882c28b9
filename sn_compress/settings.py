"""What a user may set: one record for every rim, so that a word means the same in all of them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ._waiting import WAIT_S
from .agreement import said_of
from .codecs.fft import PAPER, FFTCodec
from .errors import CompressError
from .exchange.session import SharedExchange
from .schedule import Constant, Schedule


@dataclass(frozen=True)
class Settings:
    """The codec's settings (see FFTCodec), those of the exchange, and those of the shared one."""

    theta: float | Schedule = 0.98
    block: int | None = 4096
    bits: int = 8
    mantissa: int = 3
    positions: Literal["elias-fano", "bitmap"] = "elias-fano"
    values: Literal["range", "fp16"] = "range"
    window: Literal["block", "payload"] | float = "block"
    half: bool = False
    transform: Literal["fft", "dct", "hadamard", "identity"] = "fft"
    feedback: bool = True
    decay: float = 1.0
    min_elements: int = 1024
    threads: int | None = None
    exchange: Literal["gather", "shared"] = "shared"
    ratio: float = 100.0
    warmup: int = 10
    every: int = 2000
    tune: bool = False
    overlap: bool = False
    check_every: int = 100
    wait_s: float = WAIT_S

    def changed(self, *, mode: Literal["paper"] | None = None, **changes: Any) -> Settings:
        """These settings with changes; CompressError names what is unknown or not legal."""
        if mode not in (None, "paper"):
            raise CompressError(f'mode={mode!r}; expected "paper" or None')
        known = {field.name for field in fields(self)}
        if unknown := set(changes) - known:
            raise CompressError(
                f"there is no setting {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(known))} and mode"
            )
        exchange = self._exchange(changes.pop("exchange", "auto"), mode, set(changes))
        if mode == "paper":
            changes = {**PAPER, "feedback": False, **changes}
        settings = replace(self, **changes, exchange=exchange)
        settings.codec(threads=1)  # legal settings or an error here, not in mid-training
        settings.shared()
        if settings.min_elements < 1 or not 0 < settings.decay <= 1:
            raise CompressError(
                f"min_elements={settings.min_elements!r}, decay={settings.decay!r}; expected at "
                "least 1, and a factor above 0 up to 1"
            )
        if settings.check_every < 0 or not settings.wait_s > 0:
            raise CompressError(
                f"check_every={settings.check_every!r}, wait_s={settings.wait_s!r}; expected steps "
                "from 0 (never) up, and seconds above 0"
            )
        return settings

    def _exchange(self, asked: str, mode: str | None, given: set[str]) -> Any:
        """The exchange that was asked for, or the one that the other settings belong to."""
        own = {"gather": sorted(given & _CODEC), "shared": sorted(given & _SHARED_ONLY)}
        if mode == "paper":
            own["gather"].append("mode")
        if asked not in (*own, "auto"):
            raise CompressError(f'exchange={asked!r}; expected "auto", "gather" or "shared"')
        fitting = [name for name in own if own[name]]
        for name in fitting:
            if asked not in ("auto", name) or len(fitting) > 1:
                raise CompressError(
                    f"{', '.join(own[name])} belongs to the {name} exchange; got it together "
                    f"with {asked if asked != 'auto' else 'settings'} of the other one. "
                    "docs/exchange.md has the settings of both."
                )
        if asked != "auto":
            return asked
        return fitting[0] if fitting else self.exchange

    def refuse_torch_only(self, where: str) -> None:
        """Raise CompressError where tune=True or overlap=True would have no effect."""
        if self.tune:
            raise CompressError(
                f"tune=True has no effect with {where}; it is for optimizers of Horovod's torch. "
                "Leave it out, and ask sn_compress.predict whether compression pays."
            )
        if self.overlap:
            raise CompressError(
                f"overlap=True has no effect with {where}; it is for optimizers of Horovod's "
                "torch. Leave it out."
            )

    @property
    def fixed(self) -> bool:
        """Whether theta is the same at every step."""
        return isinstance(self.theta, float | int | Constant)

    def schedule(self) -> Schedule:
        """Theta over time, for one optimizer: a schedule may learn."""
        return Constant(self.theta) if isinstance(self.theta, float | int) else deepcopy(self.theta)

    def said(self) -> list[tuple[str, str]]:
        """Those that all ranks have to have alike, for exchange.agreement."""
        return said_of(self, but=("threads", "wait_s"))

    def codec(self, threads: int) -> FFTCodec:
        """The codec of the first step; `threads` is used where the settings leave it open."""
        return self.codec_of(self.schedule().theta(0), threads)

    def codec_of(self, theta: float, threads: int) -> FFTCodec:
        """The codec of these settings at a theta."""
        chosen = {name: getattr(self, name) for name in _CODEC} | {"theta": theta}
        return FFTCodec(**chosen, threads=self.threads or threads)

    def shared(self, *, undoable: bool = False) -> SharedExchange:
        """The shared exchange of these settings, for one optimizer."""
        chosen = {name: getattr(self, name) for name in _SHARED}
        return SharedExchange(**chosen, undoable=undoable)


_SHARED_ONLY = {"ratio", "warmup", "every", "overlap"}
_SHARED = {"ratio", "warmup", "every", "min_elements", "feedback", "decay"}
_RIM = {"threads", "exchange", "tune", "overlap", "check_every", "wait_s"}
_CODEC = {field.name for field in fields(Settings)} - _SHARED - _RIM
