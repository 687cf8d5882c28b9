"""Theta over the steps of one optimizer, the same on every rank.

A schedule that follows the error (EnergyBudget) has to see what all ranks lost. All tensors of a
step get its theta when it begins: then the ranks' sums of the last one are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..base.errors import CompressError
from ..base.saved import count, reading
from ..codecs.frequency.fft import FFTCodec
from ..report import Told
from ..schedule import learner, stays
from ..settings import Settings

_LATER = 2**62  # a step behind every warm-up
_AHEAD = 2**12  # steps looked ahead for another theta


class ThetaInTime:
    """The codec of each tensor at its step."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self._settings, self._threads = settings, threads
        self._schedule = settings.schedule()
        self._steps: Counter[str] = Counter()
        self._codecs: dict[float, FFTCodec] = {}

    def codec_for(self, name: str | None) -> FFTCodec:
        """The codec for the next gradient of a tensor.

        Raises CompressError without a name, by which steps are counted, if theta changes.
        """
        if name is None and not self._settings.fixed:
            raise CompressError(
                f"a gradient without a name, and theta={self._settings.theta!r} changes with the "
                "steps, which are counted by name. Use DistributedOptimizer, pass name=, or a "
                "number as theta."
            )
        step = 0 if name is None else self._steps[name]
        if name is not None:
            self._steps[name] += 1
        return self.codec_at(self._schedule.theta(step))

    def stays(self, names: Iterable[str]) -> int:
        """Steps, the next one included, in which these tensors have one theta, and the same.

        At most 2**12 where a schedule could change later; 0 if theirs differ. Not to be asked of a
        schedule that learns.
        """
        steps = {self._steps[name] for name in names}
        if all(stays(self._schedule, step) for step in steps):
            return _LATER
        own = self._schedule.theta(min(steps))
        return min(self._stays(step, own) for step in steps)

    def _stays(self, step: int, own: float) -> int:
        for ahead in range(_AHEAD):
            try:
                if self._schedule.theta(step + ahead) != own:
                    return ahead
            except Exception:  # noqa: BLE001 - of a step that may never come; raised when it does
                return ahead
        return _AHEAD

    def codec_of(self, name: str) -> FFTCodec:
        """The codec for the next gradient of a tensor, which is not counted yet."""
        return self.codec_at(self._schedule.theta(self._steps[name]))

    def step_of(self, name: str) -> int:
        """Gradients of a tensor that were counted."""
        return self._steps[name]

    def go_to(self, name: str, step: int) -> None:
        """Count as many gradients of a tensor."""
        self._steps[name] = step

    def begin_step(self, of: str, energy: float, error: float) -> float:
        """Theta of the step that begins.

        of : by what its steps are counted
        energy, error : of the step before, summed over tensors and ranks
        """
        step = self._steps[of]
        self._steps[of] += 1
        if step and (last := learner(self._schedule, step - 1)):
            last.observe(energy, error)
        return self._schedule.theta(step)

    def codec_at(self, theta: float) -> FFTCodec:
        """The codec at a theta."""
        if theta not in self._codecs:
            self._codecs[theta] = self._settings.codec_of(theta, self._threads)
        return self._codecs[theta]

    def tell(self, told: Told) -> tuple[float, float]:
        """Energy and error of what was sent, for a schedule that learns."""
        if told.energy is None:
            raise CompressError(
                "EnergyBudget has to see what a payload lost, which is not known of one made on a "
                "GPU. Use another schedule, or LowRankCompression."
            )
        return told.energy, told.error or 0.0

    @property
    def learns(self) -> bool:
        """Whether the schedule asks, now or later, what steps have lost on all ranks."""
        return learner(self._schedule, _LATER) is not None

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, {} if theta is a number; the same on every rank."""
        if self._settings.fixed:
            return {}
        last = learner(self._schedule, _LATER)
        return {
            "steps": dict(self._steps), "learned": last.state_dict() if last else {},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned; {} leaves all as it is.

        Raises CompressError, and changes nothing, if it is not that.
        """
        if self._settings.fixed or not state:
            return
        with reading("the place in the schedule"):
            steps = Counter({str(k): count(v, "step") for k, v in state["steps"].items()})
            if last := learner(self._schedule, _LATER):
                last.load_state_dict(state["learned"])
        self._steps = steps

    @contextmanager
    def loading(self, state: Any) -> Iterator[None]:
        """Take over what a saved state holds of it under "theta", unless its rest does not fit."""
        before = self.state_dict()
        self.load_state_dict(state.get("theta", {}) if isinstance(state, dict) else {})
        try:
            yield
        except CompressError:
            self.load_state_dict(before)
            raise


def squares(saved: Any) -> tuple[float, float]:
    """A saved energy and error, which may be of a step that was not finite."""
    energy, error = map(float, saved)
    if energy < 0 or error < 0:
        raise CompressError(f"a saved energy is {energy!r}, error {error!r}; expected 0 or more")
    return energy, error
