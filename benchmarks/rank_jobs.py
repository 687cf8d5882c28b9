"""Real Horovod ranks in the namespaces of `shaped_links`: started, monitored, collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_ranks import follow
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from machine import ROOT
from shaped_links import ShapedLinks


@contextmanager
def started(
    links: ShapedLinks,
    folder: Path,
    command: Sequence[str],
    *,
    per_node: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[list[Any], list[Path]]]:
    """Processes that run a command as Horovod's ranks, and their logs in a folder; all end with it.

    per_node : ranks that share a namespace
    env : what the ranks find in their environment besides
    """
    server = RendezvousServer(verbose=0)
    port = server.start()
    hosts = ",".join(f"{links.address(node)}:{per_node}" for node in range(links.ranks))
    slots = get_host_assignments(parse_hosts(hosts), links.ranks * per_node)
    server.init(slots)
    common = create_run_env_vars(links.address(None), ["eth0"], port)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    common |= {
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Ranks that share a few cores start, and step, far apart.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **(env or {}),
    }
    processes: list[Any] = []
    logs = [folder / f"log{slot.rank}" for slot in slots]
    try:
        for slot, log in zip(slots, logs, strict=True):
            own = {k: str(v) for k, v in {**common, **create_slot_env_vars(slot)}.items()}
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        links.command(slot.rank // per_node, *command),
                        env=os.environ | own, stdin=subprocess.DEVNULL, stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        yield processes, logs
    finally:
        # A rank whose peer is gone waits on; the peer's end is theirs.
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        server.stop()
        server._httpd.server_close()  # stop() leaves the socket open


def run_ranks(
    runs: list[dict[str, Any]],
    links: ShapedLinks,
    *,
    timeout_s: float,
    done: Callable[[int, list[dict[str, Any]]], object] = lambda number, results: None,
) -> list[list[dict[str, Any]]]:
    """Do the runs on one rank per namespace; for each run, the results of all ranks.

    done : called with its number and the results of all ranks whenever a run has ended

    Raises RuntimeError, with what the ranks said, if one fails or time is up; all are ended then.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"runs": runs}))
        ended = _Ended(Path(folder), links.ranks, done)
        command = [sys.executable, str(ROOT / "benchmarks/training_rank.py"), str(job)]
        with started(links, Path(folder), command) as (processes, logs):
            follow(processes, logs, time.monotonic() + timeout_s, ended.look)
        return ended.runs


class _Ended:
    """What ranks have written so far, one line for each run."""

    def __init__(
        self, folder: Path, ranks: int, done: Callable[[int, list[dict[str, Any]]], object]
    ) -> None:
        self.runs: list[list[dict[str, Any]]] = []
        self._files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
        self._done = done

    def look(self) -> None:
        """Take in the runs that have ended on all ranks."""
        lines = [path.read_text().split("\n")[:-1] if path.exists() else [] for path in self._files]
        for number in range(len(self.runs), min(map(len, lines))):
            self.runs.append([json.loads(of_rank[number]) for of_rank in lines])
            self._done(number, self.runs[-1])
