"""Whether, and how, each tensor is worth compressing: measured at the start, decided alike by all.

Published schemes are mostly slower than plain Horovod on the networks people have, and a model of
seconds is never quite right. So the tuner asks the model first and the clock last:

1. *plain*: steps travel as with stock Horovod and are timed; then the link is measured by two
   all-reduces, and the codec on this process.
2. *choose*: the cost model picks a method for each tensor. If it sees nothing to gain, all stay
   plain, and that is the end.
3. *trial*: as many steps by those methods are timed. If their median is not below that of the plain
   steps by `margin`, all tensors go back to plain for good.

After `again` steps it starts over, or later if what it took would by then be more than `share` of
the time. Ranks see different times, so whatever is decided is decided from integers that an
all-reduce has summed: they are the same bits on all ranks.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..base.errors import CompressError
from ..settings import Settings
from .cost import Link, Method, Route, choose, step
from .layers import Layer
from .predict import routes_of
from .rates import Rates, fit_link, measure_rates

_log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
LINK_SIZES = (4, 2**22)  # bytes of the two all-reduces
_REPEAT = 5
_NANO = 1e-9


class SumOfRanks(Protocol):
    """An all-reduce of the rim: it blocks, and all ranks call it in the same order."""

    def __call__(self, name: str, words: Array) -> Array:
        """The sum over the ranks of [n] float32, or of [n] int64; the same bits on every rank."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and from what; equal on all ranks.

    Attributes
    ----------
    methods : by name of the tensor
    link, rates : as measured; rates are the mean over the ranks
    plain_s, chosen_s : predicted seconds of codec and exchange
    """

    methods: dict[str, Method]
    link: Link
    rates: Rates
    plain_s: float
    chosen_s: float


class Tuner:
    """The choice for one optimizer.

    The rim calls `method(name, shape)` for every gradient, and the tuner tells steps apart by a
    name that comes again. Measuring happens inside such a call, on all ranks, before the first
    tensor of a step is on its way.

    Parameters
    ----------
    settings : of the exchange; "shared" and "gather" are both asked about
    ranks : of the process set
    total : the rim's all-reduce
    methods : what may be chosen beside plain
    steps : plain steps, and steps of a trial, that are timed
    skip : steps before each of them that are not: names are negotiated, `shared` warms up
    margin : fraction of a step by which a trial must be faster
    again : steps until everything is measured anew, at least
    share : most of the time that measuring and trials may take in the long run
    rates : None measures the codec
    clock : seconds; a test gives its own
    plain : what plain steps are called in the log
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: int,
        total: SumOfRanks,
        methods: Sequence[Method] = ("shared", "gather"),
        steps: int = 5,
        skip: int = 2,
        margin: float = 0.02,
        again: int = 5000,
        share: float = 0.005,
        rates: Rates | None = None,
        clock: Callable[[], float] = time.perf_counter,
        plain: str = "Horovod",
    ) -> None:
        counts = (ranks, steps, skip, again)
        if min(counts) < 1 or not 0 <= margin < 1 or not share > 0:
            raise CompressError(
                f"Tuner: ranks={ranks!r}, steps={steps!r}, skip={skip!r}, again={again!r}, "
                f"margin={margin!r}, share={share!r}; expected one or more of each, a margin from "
                "0 to below 1, and a share above 0"
            )
        self.settings, self.ranks = settings, ranks
        self.decision: Decision | None = None
        self._total, self._allowed, self._rates = total, tuple(methods), rates
        self._steps, self._skip, self._margin = steps, skip, margin
        self._again, self._share = again, share
        self._clock, self._plain = clock, plain
        self._layers: dict[str, Layer] = {}
        self._seen: set[str] = set()
        self._methods: dict[str, Method] = {}
        self._phase, self._in_phase = "plain", 0
        self._times: list[float] = []
        self._plain_s = self._trial_s = 0.0
        self._began = self._opened = clock()
        self._steps_since = -1  # `_opened`, when it began to measure: none has ended yet
        self._rest = again

    def method(self, name: str, shape: Sequence[int]) -> Method:
        """How the next gradient of this tensor travels; the same on every rank."""
        if name in self._seen or not self._seen:
            self._step()
            self._seen.clear()
        self._seen.add(name)
        if name not in self._layers:
            self._layers[name] = Layer(name, tuple(shape))
        return self.chosen(name)

    def chosen(self, name: str) -> Method:
        """How a tensor travels by what was decided last; no step begins by asking."""
        return self._methods.get(name, "plain")

    @property
    def settled(self) -> bool:
        """Whether nothing is being timed at the moment."""
        return self._phase == "settled"

    def report(self) -> dict[str, float]:
        """What was measured and chosen last; the same on every rank.

        tuned: whether nothing is being timed; tuned_tensors: those that may be compressed;
        plain_step_s, trial_step_s: median seconds of a step, 0 where none was timed.
        """
        chosen = sum(method != "plain" for method in self._methods.values())
        return {
            "tuned": float(self.settled), "tuned_tensors": chosen,
            "plain_step_s": self._plain_s, "trial_step_s": self._trial_s,
        }  # fmt: skip

    @property
    def rest_steps(self) -> int:
        """Steps from the next one on in which nothing is timed and no choice changes."""
        first = self._in_phase < 1  # in which what the exchange owed still leaves
        return max(self._rest - self._in_phase, 0) if self.settled and not first else 0

    @property
    def idle_steps(self) -> int:
        """Steps from the next one on that need not ask: all plain, nothing timed; see `pass_by`."""
        return self.rest_steps if set(self._methods.values()) <= {"plain"} else 0

    def pass_by(self, steps: int) -> None:
        """Take note of steps that have not asked; the next gradient begins another one."""
        self._in_phase += steps
        self._seen.clear()

    def _step(self) -> None:
        """A step begins."""
        now = self._clock()
        if self.settled:
            self._in_phase += 1
            if self._in_phase > self._rest:
                self._methods = {}
                self._opened, self._steps_since = now, 0
                self._enter("plain")
        else:
            if self._in_phase > self._skip:
                self._times.append(now - self._began)
            self._in_phase += 1
            self._steps_since += 1
            if len(self._times) == self._steps:
                self._judge()
        # What judging took belongs to no step.
        self._began = self._clock()

    def _judge(self) -> None:
        median = self._mean(statistics.median(self._times))
        if self._phase == "plain":
            self._plain_s = median
            if self.ranks == 1:
                self._settle(self._plain_s)  # there is no link to measure, and nothing to gain
                return
            self.decision = self._decide()
            self._methods = self.decision.methods
            trial = any(method != "plain" for method in self._methods.values())
            if trial:
                self._enter("trial")
            else:
                _log.info("plain %s is fastest here: %s", self._plain, self._why())
                self._settle(self._plain_s)
            return
        self._trial_s = median
        if median > (1 - self._margin) * self._plain_s:
            _log.info(
                "plain %s is faster here: %.1f ms a step, %.1f ms with compression; %s",
                self._plain,
                1e3 * self._plain_s,
                1e3 * median,
                self._why(),
            )
            self._methods = {}
            self._settle(self._plain_s)
        else:
            count = Counter(self._methods.values())
            _log.info(
                "%s: %.1f ms a step, %.1f ms plain; %s",
                ", ".join(f"{n} tensors {name}" for name, n in sorted(count.items())),
                1e3 * median,
                1e3 * self._plain_s,
                self._why(),
            )
            self._settle(median)

    def _settle(self, step_s: float) -> None:
        spent_s = self._clock() - self._opened - self._steps_since * self._plain_s
        lost_s = max(self._mean(spent_s), 0.0)
        self._rest = max(self._again, math.ceil(lost_s / (self._share * max(step_s, _NANO))))
        self._enter("settled")

    def _enter(self, phase: str) -> None:
        self._phase, self._in_phase, self._times = phase, 0, []
        if phase == "trial" and "shared" in self._methods.values():
            # Its own dense steps come first.
            self._in_phase = -self.settings.warmup

    def _why(self) -> str:
        assert self.decision is not None
        link = self.decision.link
        return (
            f"link {link.bytes_per_s * 8e-9:.2g} Gbit/s, {1e6 * link.latency_s:.0f} us a message; "
            f"predicted {1e3 * self.decision.chosen_s:.1f} ms of codec and exchange, "
            f"{1e3 * self.decision.plain_s:.1f} ms plain"
        )

    def _decide(self) -> Decision:
        """Measure, then ask the model; called by all ranks at once."""
        link = self._measure_link()
        rates = self._agree(self._rates or measure_rates(self.settings, repeat=1, say=_log.debug))
        layers = [self._layers[name] for name in sorted(self._layers)]
        options: dict[str, Sequence[Route]] = {
            method: routes_of(method, layers, ranks=self.ranks, settings=self.settings, rates=rates)
            for method in ("plain", *self._allowed)
        }
        routes = choose(options, ranks=self.ranks, link=link, margin=self._margin)

        def seconds(of: Sequence[Route]) -> float:
            return step(of, ranks=self.ranks, link=link).seconds

        # A route that falls back on plain says so itself.
        names = [layer.name for layer in layers]
        methods = {n: route.method for n, route in zip(names, routes, strict=True)}
        return Decision(methods, link, rates, seconds(options["plain"]), seconds(routes))

    def _measure_link(self) -> Link:
        _log.info("measuring link and codec, a second or two")
        best = []
        for size in LINK_SIZES:
            values = np.zeros(size // 4, np.float32)
            times = []
            for number in range(_REPEAT):
                # All begin together, or the first rank to come measures how late the others are.
                self._total(f"sn.tune.ready.{size}.{number}", np.zeros(1, np.int64))
                start = self._clock()
                self._total(f"sn.tune.link.{size}.{number}", values)
                times.append(self._clock() - start)
            best.append(self._mean(min(times)))
        # The small one is nearly all agreement; how much of it is messages cannot be seen here.
        return fit_link(LINK_SIZES, best, self.ranks)

    def _agree(self, rates: Rates) -> Rates:
        """The mean over the ranks, each number in whole femtoseconds."""
        own = np.array([round(value * 1e15) for value in vars(rates).values()], np.int64)
        total = self._total("sn.tune.rates", own)
        return Rates(*(int(value) / self.ranks / 1e15 for value in total))

    def _mean(self, seconds: float) -> float:
        """The mean over the ranks, in whole nanoseconds: the same number on all of them."""
        own = np.array([round(seconds / _NANO)], np.int64)
        return int(self._total("sn.tune.seconds", own)[0]) * _NANO / self.ranks
