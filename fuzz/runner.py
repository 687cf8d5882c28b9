"""Run cases by number until a time or a count is used up: what all scripts here do.

A script gives `main` its targets. A target's case takes a seed and returns the name of an outcome
that is documented ("decoded", "PayloadError"); whatever it raises is a fault. Cases run in worker
processes, so that a crash or a hang is one more fault, with its seed, and the run goes on.

    python fuzz/planner.py --cases 1000            the next thousand from seed 0
    python fuzz/planner.py --minutes 5 --seed 1000 five minutes, from there
    python fuzz/planner.py --only plans --one 17   one case in this process, to look at
    python fuzz/planner.py --full                  as many as each target asks for
    python fuzz/runner.py --minutes 10             all scripts, an equal part of the time each

A hang is a case of more than its limit in seconds of the processor, or one that is asleep after ten
times that on the clock: a busy machine is no fault. The exit code is 1 if there was any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Address space of a worker: a case that asks for terabytes fails at once, on every machine.
MEMORY_BYTES = 16 << 30
REPORT_S = 0.5
LINE_S = 10.0
SHOWN = 20


@dataclass(frozen=True)
class Target:
    """Cases of one kind.

    Parameters
    ----------
    case
        Takes a seed, returns the name of a documented outcome. A function of a module.
    full
        How many cases `--full` runs.
    limit_s
        A case that takes longer hangs.
    memory_bytes
        Address space of a worker.
    """

    case: Callable[[int], str]
    full: int
    limit_s: float = 2.0
    memory_bytes: int = MEMORY_BYTES


@dataclass
class Result:
    """What a run saw: outcomes with their counts, and seeds with their faults."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[int, str] = field(default_factory=dict)
    cases: int = 0
    slowest_s: float = 0.0


def _work(target: Target, seeds: range, bad: frozenset[int], pipe: Any, now: Any) -> None:
    """Run seeds in a worker; `now` holds the seed, and when it began on both clocks."""
    resource.setrlimit(resource.RLIMIT_AS, (target.memory_bytes, target.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    part = Result()
    reported = time.monotonic()
    for place, seed in enumerate(seeds):
        if seed not in bad:
            began = time.process_time()
            now[0], now[1], now[2] = float(seed), time.monotonic(), began
            try:
                part.outcomes[target.case(seed)] += 1
            except BaseException:  # noqa: BLE001 - whatever comes out is what we look for
                part.faults[seed] = traceback.format_exc()
            took = time.process_time() - began
            part.slowest_s = max(part.slowest_s, took)
            if took > target.limit_s:
                part.faults[seed] = f"took {took:.1f} s of the processor"
            part.cases += 1
        now[1] = 0.0
        if time.monotonic() - reported > REPORT_S:
            pipe.send((place + 1, part))
            part, reported = Result(), time.monotonic()
    pipe.send((len(seeds), part))


def _quietly(*arguments: Any) -> None:
    """Work until done, or until whoever started this process has gone."""
    with contextlib.suppress(BrokenPipeError):
        _work(*arguments)


class _Worker:
    """One process with its share of the seeds; started again behind each seed that ended it."""

    def __init__(self, name: str, target: Target, seeds: range, result: Result) -> None:
        self.name, self.target, self.seeds, self.result = name, target, seeds, result
        self.bad: set[int] = set()
        self.done = 0
        self.context = multiprocessing.get_context("spawn")
        self.start()

    def start(self) -> None:
        self.pipe, theirs = self.context.Pipe(duplex=False)
        self.now = self.context.RawArray("d", 3)
        left = self.seeds[self.done :]
        arguments = (self.target, left, frozenset(self.bad), theirs, self.now)
        self.process = self.context.Process(target=_quietly, args=arguments, daemon=True)
        self.offset = self.done
        self.process.start()
        theirs.close()

    def look(self) -> bool:
        """Take what the worker says, see to its end; return whether there is more to come."""
        gone = not self.process.is_alive()
        try:
            while self.pipe.poll():
                place, part = self.pipe.recv()
                self.done = self.offset + place
                self.result.outcomes += part.outcomes
                self.result.cases += part.cases
                self.result.slowest_s = max(self.result.slowest_s, part.slowest_s)
                for seed, fault in part.faults.items():
                    self.fault(seed, fault)
        except (EOFError, ConnectionResetError):
            gone = True
        if self.done >= len(self.seeds):
            self.stop()
            return False
        if gone:
            self.process.join()
            self.end(f"crashed with exit code {self.process.exitcode}")
        elif self.hangs():
            os.kill(self.process.pid, signal.SIGUSR1)  # It says where it is, whoever has the lock.
            time.sleep(0.2)
            self.process.kill()
            self.process.join()
            if self.now[1]:
                self.end(f"hung for more than {self.target.limit_s:g} s")
        return True

    def hangs(self) -> bool:
        seed, began, used = self.now
        wall = time.monotonic() - began
        if not began or wall < self.target.limit_s or not self.process.is_alive():
            return False
        state, worked = _state(self.process.pid)
        same = self.now[0] == seed and self.now[1] == began
        asleep = state != "R" and wall > 10 * self.target.limit_s
        return same and (worked - used > self.target.limit_s or asleep)

    def end(self, why: str) -> None:
        seed = int(self.now[0])
        if not self.now[1] or seed in self.bad:
            raise RuntimeError(f"{self.name}: a worker ended outside of any case: {why}")
        # What it did since its last word is done again; only this seed is left out.
        self.bad.add(seed)
        self.result.cases += 1
        self.fault(seed, why)
        self.start()

    def fault(self, seed: int, what: str) -> None:
        if len(self.result.faults) < SHOWN and seed not in self.result.faults:
            script = Path(sys.argv[0]).name
            print(f"FAULT {what.rstrip()}\n  again: {script} --only {self.name} --one {seed}")
        self.result.faults[seed] = what

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def _state(pid: int) -> tuple[str, float]:
    """Return the state of a process and its seconds of work so far; of one that is gone, none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "R", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(
    name: str,
    target: Target,
    *,
    cases: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    workers: int = 1,
) -> Result:
    """Run cases from `seed` on, for a number of them or of minutes, whichever comes first."""
    result = Result()
    last = sys.maxsize // 4 if cases is None else seed + cases
    ends = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    began = printed_at = time.monotonic()
    crew = [_Worker(name, target, range(seed + at, last, workers), result) for at in range(workers)]
    while crew and time.monotonic() < ends:
        crew = [worker for worker in crew if worker.look()]
        time.sleep(0.05)
        if time.monotonic() - printed_at > LINE_S:
            printed_at = time.monotonic()
            print(_line(name, result, printed_at - began), flush=True)
    for worker in crew:
        # Seeds go by stride, so the first that is not done is the least of all workers.
        worker.stop()
    left = min((worker.seeds[worker.done] for worker in crew), default=last)
    print(f"{_line(name, result, time.monotonic() - began)}; go on with --seed {left}")
    for outcome, times in result.outcomes.most_common():
        print(f"{times:9d} {outcome}")
    print(f"{len(result.faults):9d} FAULTS", flush=True)
    return result


def _line(name: str, result: Result, seconds: float) -> str:
    return (
        f"{name}: {result.cases} cases in {seconds:.0f} s, {len(result.faults)} faults, "
        f"slowest {result.slowest_s:.2f} s"
    )


def main(targets: Mapping[str, Target]) -> None:
    """Read the command line of a script and run its targets, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=sorted(targets))
    parser.add_argument("--one", type=int, help="run this seed in this process")
    _add_amounts(parser)
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(targets)
    if options.one is not None:
        for name in chosen:
            print(name, targets[name].case(options.one))
        return
    if options.minutes is options.cases is None and not options.full:
        parser.error("give --minutes, --cases or --full")
    failed = False
    for name in chosen:
        cases = targets[name].full if options.full else options.cases
        minutes = None if options.minutes is None else options.minutes / len(chosen)
        result = run(
            name,
            targets[name],
            cases=cases,
            minutes=minutes,
            seed=options.seed,
            workers=options.workers,
        )
        failed |= bool(result.faults) or not result.cases
    sys.exit(failed)


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, help="for all targets together")
    parser.add_argument("--cases", type=int, help="for each target")
    parser.add_argument("--full", action="store_true", help="as many as each target asks for")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=1)


def _every_script() -> None:
    parser = argparse.ArgumentParser()
    _add_amounts(parser)
    options = parser.parse_args()
    here = Path(__file__).resolve()
    scripts = sorted(path for path in here.parent.glob("*.py") if "__main__" in path.read_text())
    scripts.remove(here)
    arguments = ["--seed", str(options.seed), "--workers", str(options.workers)]
    if options.minutes is not None:
        arguments += ["--minutes", str(options.minutes / len(scripts))]
    if options.cases is not None:
        arguments += ["--cases", str(options.cases)]
    arguments += ["--full"] * options.full
    failed = [
        script.name
        for script in scripts
        if subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
    ]
    if failed:
        sys.exit(f"faults in {', '.join(failed)}")


if __name__ == "__main__":
    _every_script()
