"""Real ranks without a launcher: processes that meet at a file and talk over Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Rank:
    """How one rank ended; returncode is None if it was still running at the time limit."""

    returncode: int | None
    output: str


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ranks(tmp_path):
    """Return `run(n, script, *args, timeout=100)`, which gives a Rank for each."""
    return launcher(tmp_path)


@pytest.fixture(scope="module")
def ranks_of_module(tmp_path_factory):
    """The same, for one launch that many tests look at."""
    return launcher(tmp_path_factory.mktemp("ranks"))


def launcher(tmp_path: Path) -> Callable[..., list[Rank]]:
    """See `ranks`; outputs and meeting points are below this folder."""
    pytest.importorskip("torch.distributed")

    def run(n, script, *args, timeout=100.0):
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        outputs = [folder / f"rank{rank}.txt" for rank in range(n)]
        processes = []
        for rank, output in enumerate(outputs):
            command = [sys.executable, str(script), str(rank), str(n), str(folder / "meet"), *args]
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        ended = []
        until = time.monotonic() + timeout
        for process, output in zip(processes, outputs, strict=True):
            try:
                code = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
                process.kill()
                process.wait()
            ended.append(Rank(code, output.read_text()))
        return ended

    return run
