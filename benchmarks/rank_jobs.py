"""Real Horovod ranks, one in each namespace of `shaped_links`: started, followed, collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from shaped_links import ShapedLinks

HERE = Path(__file__).resolve().parent
_NAP_S = 0.2


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
    server = RendezvousServer(verbose=0)
    port = server.start()
    hosts = ",".join(f"{links.address(rank)}:1" for rank in range(links.ranks))
    slots = get_host_assignments(parse_hosts(hosts), links.ranks)
    server.init(slots)
    common = create_run_env_vars(links.address(None), ["eth0"], port)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"runs": runs}))
        processes, logs = [], []
        try:
            for slot in slots:
                env = {k: str(v) for k, v in {**common, **create_slot_env_vars(slot)}.items()}
                env |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
                # Ranks that share a few cores start, and step, far apart.
                env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "600"
                paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
                env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                log = open(Path(folder) / f"log{slot.rank}", "w+")  # noqa: SIM115
                logs.append(log)
                command = [sys.executable, str(HERE / "training_rank.py"), str(job)]
                processes.append(
                    subprocess.Popen(
                        links.command(slot.rank, *command),
                        env=os.environ | env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            ended = _Ended(Path(folder), links.ranks, done)
            _follow(processes, logs, time.monotonic() + timeout_s, ended)
            return ended.runs
        finally:
            # A rank whose peer is gone waits on; the peer's end is theirs.
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            for log in logs:
                log.close()
            server.stop()
            server._httpd.server_close()  # stop() leaves the socket open


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


def _follow(processes: list[Any], logs: list[Any], until: float, ended: _Ended) -> None:
    while True:
        codes = [process.poll() for process in processes]
        ended.look()
        if all(code == 0 for code in codes):
            return
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad or time.monotonic() > until:
            what = f"rank {bad[0]} ended with {codes[bad[0]]}" if bad else "time is up"
            shown = bad[0] if bad else 0
            raise RuntimeError(f"{what}; rank {shown} said:\n{_text(logs[shown])[-3000:]}")
        time.sleep(_NAP_S)


def _text(log: Any) -> str:
    return Path(log.name).read_text(errors="replace")
