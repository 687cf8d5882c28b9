"""Decides whether compression pays for an optimizer: measures at the start, decides once.

Published schemes are mostly slower than plain Horovod on typical networks, and a cost model is
never quite right. So the tuner consults the model first and the clock last:

1. *plain*: times plain steps; then two all-reduces measure the link, and each rank its codec.
2. *choose*: the cost model compares a step with all tensors plain to one in which all that are
   large enough are compressed, or cast to bf16. If it predicts no gain, all stay plain.
3. *trial*: times as many compressed steps. Unless their median is below that of the plain steps by
   `margin`, all tensors go back to plain for good.

Ranks measure different times, so decisions use integers summed by an all-reduce, which are
bit-identical on all ranks.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..consistency import Total
from ..errors import CompressError
from ..settings import Settings
from .cost import Layer, Link, Method, Route, step
from .predict import MARGIN, routes_of
from .rates import Rates, fit_link, measure_rates

_log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
LINK_SIZES = (4, 2**22)  # bytes of two all-reduces, dominated by latency and by bandwidth
_REPEAT = 5  # repetitions, of which the fastest counts
_NANO = 1e-9


@dataclass(frozen=True)
class Decision:
    """The decision and its inputs; the same on all ranks.

    Attributes
    ----------
    method : of all tensors that are large enough
    compressed : number of these tensors
    link, rates : as measured; rates are the mean over the ranks
    plain_s, compressed_s : predicted seconds of codec and exchange
    """

    method: Method
    compressed: int
    link: Link
    rates: Rates
    plain_s: float
    compressed_s: float


class Tuner:
    """Measures and chooses the method for one optimizer.

    The rim calls `method(name, shape)` for every gradient; a repeated name begins a step. Measuring
    happens inside such a call, on all ranks, before the first tensor of a step is sent.

    Parameters
    ----------
    settings : of the exchange that is compared with plain
    ranks : number of ranks in the process set
    total : the rim's all-reduce
    steps : number of plain steps, and of trial steps, that are timed
    skip : number of untimed steps before each of these, while names are negotiated
    margin : fraction of a step by which a trial must be faster
    rates : None measures the codec
    clock : returns seconds; replaced in tests
    plain : name of plain steps in the log
    casts : whether the rim supports what casts need, an all-to-all and a gather

    Attributes
    ----------
    choice : method of this step's gradients: "plain", "cast" or the exchange of the settings
    decision : None until it is made
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: int,
        total: Total,
        steps: int = 5,
        skip: int = 2,
        margin: float = MARGIN,
        rates: Rates | None = None,
        clock: Callable[[], float] = time.perf_counter,
        plain: str = "Horovod",
        casts: bool = False,
    ) -> None:
        if min(ranks, steps, skip) < 1 or not 0 <= margin < 1:
            raise CompressError(
                f"Tuner: ranks={ranks!r}, steps={steps!r}, skip={skip!r}, margin={margin!r}; "
                "expected one or more of each, and a margin from 0 to below 1"
            )
        self.settings, self.ranks = settings, ranks
        self.choice: Method = "plain"
        self.decision: Decision | None = None
        self._total, self._rates = total, rates
        self._steps, self._skip, self._margin = steps, skip, margin
        self._clock, self._plain, self._casts = clock, plain, casts
        self._layers: dict[str, Layer] = {}
        self._seen: set[str] = set()
        self._phase, self._in_phase = "plain", 0
        self._times: list[float] = []
        self._plain_s = self._trial_s = 0.0
        self._began = clock()

    def method(self, name: str, shape: Sequence[int]) -> Method:
        """Return the method for the next gradient of this tensor; the same on every rank."""
        if name in self._seen or not self._seen:
            self._step()
            self._seen.clear()
        self._seen.add(name)
        if name not in self._layers:
            self._layers[name] = Layer(name, tuple(shape))
        return self.choice

    @property
    def settled(self) -> bool:
        """Whether the choice is final, and nothing is timed any more."""
        return self._phase == "settled"

    @property
    def rests(self) -> bool:
        """Whether a step has passed since it settled, in which residuals of a trial were sent."""
        return self.settled and self._in_phase > 0

    def report(self) -> dict[str, float]:
        """Return what was measured and chosen; the same on every rank. See Compression.report."""
        compressed = self.decision.compressed if self.decision and self.choice != "plain" else 0
        return {
            "tuned": float(self.settled), "tuned_tensors": compressed,
            "plain_step_s": self._plain_s, "trial_step_s": self._trial_s,
        }  # fmt: skip

    def _step(self) -> None:
        """Begin a step, and time the previous one."""
        if self.settled:
            self._in_phase += 1
            return
        # The first call of a phase does not end a step of it, and `skip` steps are not timed.
        if self._in_phase > self._skip:
            self._times.append(self._clock() - self._began)
        self._in_phase += 1
        if len(self._times) == self._steps:
            self._judge()
        # Exclude the time spent in `_judge`.
        self._began = self._clock()

    def _judge(self) -> None:
        """Decide from the timed steps of a phase, and enter the next."""
        median = self._mean(statistics.median(self._times))
        if self._phase == "plain":
            self._plain_s = median
            if self.ranks == 1:
                self._enter("settled")  # there is no link to measure, and nothing to gain
                return
            self.decision = self._decide()
            self.choice = self.decision.method
            if self.choice == "plain":
                _log.info("plain %s is fastest here: %s", self._plain, self._why())
            self._enter("settled" if self.choice == "plain" else "trial")
            return
        assert self.decision is not None
        self._trial_s = median
        ms, plain_ms = 1e3 * median, 1e3 * self._plain_s
        if median > (1 - self._margin) * self._plain_s:
            line = f"plain {self._plain} is faster here: {plain_ms:.1f} ms a step, "
            line += f"{ms:.1f} ms with compression"
            self.choice = "plain"
        else:
            how = "cast to bf16" if self.choice == "cast" else "compressed"
            line = f"{self.decision.compressed} of {len(self._layers)} tensors are {how}: "
            line += f"{ms:.1f} ms a step, {plain_ms:.1f} ms plain"
        _log.info("%s; %s", line, self._why())
        self._enter("settled")

    def _enter(self, phase: str) -> None:
        self._phase, self._in_phase, self._times = phase, 0, []
        if phase == "trial" and self.choice == "shared":
            # The exchange starts with dense steps.
            self._in_phase = -self.settings.warmup

    def _why(self) -> str:
        assert self.decision is not None
        link = self.decision.link
        return (
            f"link {link.bytes_per_s * 8e-9:.2g} Gbit/s, {1e6 * link.latency_s:.0f} us a message; "
            f"predicted {1e3 * self.decision.compressed_s:.1f} ms of codec and exchange, "
            f"{1e3 * self.decision.plain_s:.1f} ms plain"
        )

    def _decide(self) -> Decision:
        """Measure, then consult the cost model; all ranks call it at once."""
        link = self._measure_link()
        rates = self._agree(self._rates or measure_rates(self.settings, repeat=1, say=_log.debug))
        layers = [self._layers[name] for name in sorted(self._layers)]
        methods: list[Method] = [self.settings.exchange]
        if self._casts:
            methods.append("cast")

        def routes(method: Method) -> list[Route]:
            return routes_of(method, layers, ranks=self.ranks, settings=self.settings, rates=rates)

        def seconds(of: Sequence[Route]) -> float:
            return step(of, ranks=self.ranks, link=link).seconds

        plain_s = seconds(routes("plain"))
        compressed_s, best = min((seconds(routes(method)), method) for method in methods)
        pays = compressed_s <= (1 - self._margin) * plain_s
        # Tensors that are too small have plain routes.
        count = sum(route.method != "plain" for route in routes(best))
        method = best if pays and count else "plain"
        return Decision(method, count, link, rates, plain_s, compressed_s)

    def _measure_link(self) -> Link:
        _log.info("measuring link and codec, a second or two")
        best = []
        for size in LINK_SIZES:
            values = np.zeros(size // 4, np.float32)
            times = []
            for number in range(_REPEAT):
                # Start together, or the first rank would measure how late the others are.
                self._total(f"sn.tune.ready.{size}.{number}", np.zeros(1, np.int64))
                start = self._clock()
                self._total(f"sn.tune.link.{size}.{number}", values)
                times.append(self._clock() - start)
            best.append(self._mean(min(times)))
        # Attribute the small one to messages entirely: negotiation cannot be separated here.
        return fit_link(LINK_SIZES, best, self.ranks)

    def _agree(self, rates: Rates) -> Rates:
        """Return the mean over the ranks, each number in whole femtoseconds."""
        words = np.array([round(value * 1e15) for value in vars(rates).values()], np.int64)
        total = self._total("sn.tune.rates", words)
        return Rates(*(int(value) / self.ranks / 1e15 for value in total))

    def _mean(self, seconds: float) -> float:
        """Return the mean over the ranks, in whole nanoseconds: the same number on all of them."""
        words = np.array([round(seconds / _NANO)], np.int64)
        return int(self._total("sn.tune.seconds", words)[0]) * _NANO / self.ranks
