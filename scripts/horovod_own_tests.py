"""Run Horovod's own tests of torch optimizers with a compression instead of Compression.none.

    python scripts/horovod_own_tests.py CHECKOUT

CHECKOUT is a checkout of Horovod's repository: its source archive has no tests. They run on ranks
of this machine, in one process each, as in Horovod's own runs; after a failed test the ranks are
restarted. Prints a table, and the reasons of tests that did not pass.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

TESTS = [
    "broadcast_state",
    "broadcast_state_options",
    "broadcast_state_no_grad",
    "compression_fp16",
    "force_allreduce",
    "model_parallelism",
    "delta_optimizer",
    "duplicate_names",
    "dynamic_requires_grad",
    "gradient_clipping",
    "synchronize_step_warning",
    "no_named_parameters",
    "missing_named_parameters",
    "optimizer_no_named_parameters",
    "sparse_embeddings",
    "optimizer_process_sets",
]
CLASSES = ["hvd.Compression.none", "FFTCompression", "LowRankCompression", "AutoCompression"]
MARK = "outcome: "


def on_a_rank(checkout: Path, compression: str, tests: list[str]) -> None:
    """Run tests until one fails, and print how each ended."""
    import horovod.torch as hvd
    import torch

    import sn_compress

    sys.path[:0] = [str(checkout / "test" / where) for where in ("utils", "parallel")]
    # What Horovod 0.28.1's tests take from elsewhere, and today's Python and torch have not.
    sys.modules["mock"] = mock
    vars(inspect)["getargspec"] = inspect.getfullargspec
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "for matrices only"  # the tests try it on biases
    names = {name: getattr(sn_compress, name) for name in CLASSES[1:]}
    chosen = eval(compression, {"hvd": hvd, **names})
    plain, wrap = hvd.Compression.none, hvd.DistributedOptimizer
    wrap.__defaults__ = tuple(
        chosen if default is plain else default for default in wrap.__defaults__
    )
    tested = importlib.import_module("test_torch").TorchTests
    for name in tests:
        result = unittest.TestResult()
        tested(f"test_{name}").run(result)
        outcome = "passed"
        if result.skipped:
            outcome = f"skipped: {result.skipped[0][1]}"
        elif not result.wasSuccessful():
            text = (result.errors + result.failures)[0][1]
            print(text, file=sys.stderr, flush=True)
            refused = "CompressError" in text
            outcome = f"{'refused' if refused else 'failed'}: {text.strip().splitlines()[-1]}"
        print(f"{MARK}{name}: {outcome}", flush=True)
        if not result.wasSuccessful():
            os._exit(1)  # other ranks may wait for this one
    hvd.shutdown()


def outcomes(
    checkout: Path, compression: str, tests: list[str], ranks: int, seconds: float
) -> dict[str, str]:
    """Return the outcome of each test, on the rank with the worst outcome."""
    ended: dict[str, str] = {}
    environment = {**os.environ, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # one test adds them
    while left := [name for name in tests if name not in ended]:
        launcher = Path(sys.executable).parent / "horovodrun"  # an environment need not be active
        command = [str(launcher), "-np", str(ranks), "--gloo", sys.executable, __file__]
        command += [str(checkout), "--rank", compression, "--tests", *left]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=environment
            )
            output = run.stdout
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode()
        for line in output.splitlines():
            if MARK in line:
                name, outcome = line.partition(MARK)[2].split(": ", 1)
                if ended.get(name, "passed") == "passed":
                    ended[name] = outcome
        if left[0] not in ended:
            ended[left[0]] = f"failed: no end within {seconds:g} s, or the ranks did not start"
    return ended


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="checkout of Horovod's repository")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of one start of the ranks"
    )
    parser.add_argument("--compression", nargs="+", default=CLASSES, help="Python expressions")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        on_a_rank(options.checkout, options.rank, options.tests)
        return
    reasons = []
    for compression in options.compression:
        ended = outcomes(
            options.checkout, compression, options.tests, options.ranks, options.seconds
        )
        for name, outcome in ended.items():
            print(f"{compression:24} {name:32} {outcome.partition(':')[0]}", flush=True)
            if outcome != "passed":
                reasons.append(f"{compression}, {name}: {outcome}")
    print(*reasons, sep="\n")


if __name__ == "__main__":
    main()
