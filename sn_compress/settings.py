"""User settings: one record for all frameworks, so that each setting means the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

import scipy

from .allreduce.allocate import check_settings, is_large
from .codecs.base import VERSION
from .codecs.fft import PAPER, FFTCodec
from .consistency import WAIT_S, fingerprint_of
from .errors import CompressError
from .saved import count, reading
from .schedule import Constant, Schedule, stays

CompressionName = Literal[
    "FFTCompression", "LowRankCompression", "CastCompression", "AutoCompression"
]
Exchange = Literal["gather", "shared", "cast"]


class _OfAll(TypedDict, total=False):
    feedback: bool
    decay: float
    min_elements: int
    check_every: int
    wait_s: float
    hierarchy: Literal["auto"] | None


class FFTSettings(_OfAll, total=False):
    """Keywords of FFTCompression.using."""

    mode: Literal["paper"] | None
    theta: float | Schedule
    block: int | None
    span: int | None
    bits: int
    mantissa: int
    positions: Literal["elias-fano", "bitmap"]
    values: Literal["range", "fp16", "2bit"]
    window: Literal["block", "payload"] | float
    half: bool
    transform: Literal["fft", "dct", "hadamard", "identity"]
    scatter: bool
    threads: int | None


class LowRankSettings(_OfAll, total=False):
    """Keywords of LowRankCompression.using."""

    ratio: float
    warmup: int
    every: int


class CastSettings(_OfAll, total=False):
    """Keywords of CastCompression.using."""

    dtype: Literal["fp16", "bf16", "fp8"]


class AutoSettings(LowRankSettings, total=False):
    """Keywords of AutoCompression.using."""


_KEYWORDS: dict[CompressionName, type] = {
    "FFTCompression": FFTSettings,
    "LowRankCompression": LowRankSettings,
    "CastCompression": CastSettings,
    "AutoCompression": AutoSettings,
}


@dataclass(frozen=True)
class Settings:
    """The settings of a compression; the TypedDicts above list what users may set for each class.

    All classes share one record because `predict` evaluates several of them, with defaults for the
    settings that a class does not have.
    """

    compression: CompressionName = "FFTCompression"
    theta: float | Schedule = 0.9
    block: int | None = 4096
    span: int | None = 64
    bits: int = 4
    mantissa: int = 1
    positions: Literal["elias-fano", "bitmap"] = "elias-fano"
    values: Literal["range", "fp16", "2bit"] = "range"
    window: Literal["block", "payload"] | float = "block"
    half: bool = False
    transform: Literal["fft", "dct", "hadamard", "identity"] = "fft"
    scatter: bool = True
    feedback: bool = True
    decay: float = 1.0
    min_elements: int = 1024
    threads: int | None = None
    ratio: float = 100.0
    warmup: int = 10
    every: int = 2000
    dtype: Literal["fp16", "bf16", "fp8"] = "bf16"
    check_every: int = 100
    wait_s: float = WAIT_S
    hierarchy: Literal["auto"] | None = "auto"

    @property
    def exchange(self) -> Exchange:
        """How gradients travel: gathered payloads, words summed by an all-reduce, or casts."""
        exchanges: dict[str, Exchange] = {"FFTCompression": "gather", "CastCompression": "cast"}
        return exchanges.get(self.compression, "shared")

    @property
    def tune(self) -> bool:
        """Whether measured times decide what is compressed."""
        return self.compression == "AutoCompression"

    def changed(self, **changes: Any) -> Settings:
        """Return these settings with changes; CompressError names what is unknown or illegal."""
        self._refuse_others(changes)
        types = _types(self.compression)
        for name, value in changes.items():
            if not _fits(value, types[name]):
                raise CompressError(
                    f"{self.compression}: {name}={value!r}; expected {_words(types[name])}"
                )
        if changes.pop("mode", None) == "paper":
            changes = {**_AS_PUBLISHED, **changes}
        settings = replace(self, **changes)
        # Only FFT blocks are cut into spans; elsewhere the default of 64 must not be an error.
        spans = settings.transform == "fft" and (settings.block or 0) >= (settings.span or 0)
        if "span" not in changes and not spans:
            settings = replace(settings, span=None)
        settings.codec(threads=1)  # raises for illegal settings here rather than in mid-training
        check_settings(settings.ratio, settings.warmup, settings.every)
        if settings.min_elements < 1 or not 0 < settings.decay <= 1:
            raise CompressError(
                f"min_elements={settings.min_elements!r}, decay={settings.decay!r}; expected at "
                "least 1, and a factor above 0 up to 1"
            )
        # 16 bits round off at most 2**-8 of a value, which is not worth an error memory of four
        # bytes per parameter (docs/decisions/0103).
        exact = settings.exchange == "cast" and settings.dtype != "fp8"
        if unused := [key for key in ("feedback", "decay") if key in changes and exact]:
            raise CompressError(
                f"CastCompression: {unused[0]}={changes[unused[0]]!r} has no effect with "
                f"dtype={settings.dtype!r}, of which nothing is remembered. Leave it out, or use "
                "dtype='fp8'."
            )
        if settings.check_every < 0 or not settings.wait_s > 0:
            raise CompressError(
                f"check_every={settings.check_every!r}, wait_s={settings.wait_s!r}; expected steps "
                "from 0 (never) up, and seconds above 0"
            )
        return settings

    def _refuse_others(self, names: Iterable[str]) -> None:
        known = _types(self.compression)
        for name in names:
            if name in known:
                continue
            has = f"{self.compression} has {', '.join(sorted(known))}"
            owners = [other for other in _KEYWORDS if name in _types(other)]
            if not owners:
                raise CompressError(f"there is no setting {name}; {has}")
            raise CompressError(
                f"{name} belongs to {' and '.join(owners)}; {has}. "
                f"Use {owners[0]}.using({name}=...), or leave it out."
            )

    def call(self) -> str:
        """Return the call of `using` that produces these settings; "" for the defaults."""
        default = Settings(compression=self.compression)
        changes = [
            f"{name}={getattr(self, name)!r}"
            for name in (field.name for field in fields(self))
            if getattr(self, name) != getattr(default, name)
        ]
        return f".using({', '.join(changes)})" if changes else ""

    def refuse_wait(self, where: str) -> None:
        """Raise CompressError if wait_s is set where a process group has its own limit."""
        if self.wait_s != WAIT_S:
            raise CompressError(
                f"wait_s={self.wait_s!r} has no effect with {where}; it waits as long as its "
                "process group does. Set init_process_group(timeout=...)."
            )

    @property
    def fixed(self) -> bool:
        """Whether theta is the same at every step."""
        return isinstance(self.theta, float | int | Constant)

    def schedule(self) -> Schedule:
        """Theta over time."""
        return Constant(self.theta) if isinstance(self.theta, float | int) else self.theta

    def fingerprint(self) -> list[tuple[str, str]]:
        """Return what must be equal on all ranks, for `consistency.agree`."""
        # Ranks may differ in threads and in how long they wait: no result depends on these.
        fingerprint = fingerprint_of(self, but=("threads", "wait_s"))
        if self.exchange == "gather" and self.codec(1).version > VERSION:
            # The last bits of an FFT over a whole gradient depend on the library's version.
            fingerprint.append(("version of SciPy", scipy.__version__))
        return fingerprint

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is worth compressing."""
        return is_large(shape, self.min_elements)

    def codec(self, threads: int) -> FFTCodec:
        """The codec of the first step; `threads` applies where the settings do not say."""
        return self.codec_of(self.schedule().theta(0), threads)

    def codec_of(self, theta: float, threads: int) -> FFTCodec:
        """The codec with these settings at a given theta."""
        chosen = {name: getattr(self, name) for name in _CODEC} | {"theta": theta}
        return FFTCodec(**chosen, threads=self.threads or threads)

    @property
    def shared(self) -> dict[str, Any]:
        """Keyword arguments for an AllReduceExchange."""
        chosen = {name: getattr(self, name) for name in _SHARED}
        return {**chosen, "frequencies": self.compression == "AutoCompression"}


@cache
def _types(compression: CompressionName) -> dict[str, Any]:
    """Return the type of each keyword of a compression, by name."""
    return get_type_hints(_KEYWORDS[compression])


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value matches an annotation made of Literal, unions and classes."""
    if get_origin(kind) is Literal:
        # By identity: 1 equals True, and the truth value of an array is ambiguous.
        return any(
            value is literal or (isinstance(value, str) and value == literal)
            for literal in get_args(kind)
        )
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(kind))
    if kind is Schedule:  # a protocol, which isinstance does not check
        return callable(getattr(value, "theta", None))
    if kind in (int, float):  # includes NumPy's numbers
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    """Describe an annotation in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_words, get_args(kind)))
    known = {bool: "True or False", int: "a whole number", float: "a number", NoneType: "None"}
    return known.get(kind, "a schedule of sn_compress.schedule")


_SHARED = {"ratio", "warmup", "every", "min_elements", "feedback", "decay"}
_CODEC = (
    set(FFTSettings.__annotations__) - set(_OfAll.__annotations__) - {"mode", "scatter", "threads"}
)
_AS_PUBLISHED = {
    **PAPER, "bits": 8, "mantissa": 3, "scatter": False, "feedback": False,
}  # fmt: skip


_FOR_GOOD = 2**62  # steps
_AHEAD = 2**12  # steps of a schedule that are evaluated in advance to see whether theta changes


class ThetaInTime:
    """Counts steps, and returns theta and the codec of each."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self._settings, self._threads = settings, threads
        self._schedule = settings.schedule()
        self.steps = 0  # begun so far
        self._codecs: dict[float, FFTCodec] = {}

    def refuse_unnamed(self) -> None:
        """Raise CompressError if theta changes: a gradient without a name has no step count."""
        if not self._settings.fixed:
            raise CompressError(
                f"got a gradient without a name, but theta={self._settings.theta!r} depends on the "
                "step, which is counted by name. Use DistributedOptimizer, pass name=, or a number "
                "as theta."
            )

    def steady_steps(self) -> int:
        """Return for how many steps, from the next one on, theta stays the same.

        At most 2**12 if the schedule could change later.
        """
        if stays(self._schedule, self.steps):
            return _FOR_GOOD
        theta = self._schedule.theta(self.steps)
        for ahead in range(_AHEAD):
            try:
                if self._schedule.theta(self.steps + ahead) != theta:
                    return ahead
            except Exception:  # noqa: BLE001 - that step may never come; if it does, it raises then
                return ahead
        return _AHEAD

    @property
    def next_codec(self) -> FFTCodec:
        """The codec of the next step; does not count it."""
        return self.codec_at(self._schedule.theta(self.steps))

    def begin_step(self) -> float:
        """Count a step and return its theta."""
        step, self.steps = self.steps, self.steps + 1
        return self._schedule.theta(step)

    def codec_at(self, theta: float) -> FFTCodec:
        """The codec at a given theta."""
        if theta not in self._codecs:
            self._codecs[theta] = self._settings.codec_of(theta, self._threads)
        return self._codecs[theta]

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule, {} if theta is a number; the same on every rank."""
        if self._settings.fixed:
            return {}
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict returned; no change for {}, or if it raises CompressError."""
        if self._settings.fixed or not state:
            return
        with reading("the position in the schedule"):
            steps = count(state["steps"], "step")
        self.steps = steps

    @contextmanager
    def loading(self, state: Any) -> Iterator[None]:
        """Load "theta" of a saved state; undo that if the body raises CompressError."""
        before = self.state_dict()
        self.load_state_dict(state.get("theta", {}) if isinstance(state, dict) else {})
        try:
            yield
        except CompressError:
            self.load_state_dict(before)
            raise
