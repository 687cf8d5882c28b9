"""Real torch.distributed ranks over Gloo: a script starts itself once per rank.

    if not as_rank(work):   # in a rank: work(job) -> what it found, a dict
        main()              # calls run_ranks(__file__, job, ranks=2, timeout_s=600)

On this machine's loopback, or with `links` each in a namespace behind a shaped link.
"""

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

import torch
import torch.distributed as dist
from machine import ROOT, command, commit, origin
from rows_file import matching
from shaped_links import ShapedLinks

_FLAG = "--as-rank"
_NAP_S = 0.1
_REST_S = 0.2


def as_rank(work: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Do the work if this process was started as a rank; whether it was."""
    if _FLAG not in sys.argv:
        return False
    folder, rank = Path(sys.argv[2]), int(sys.argv[3])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    backend = job.get("backend", "gloo")
    # NCCL makes its communicator at once where it is told the device.
    device = {"device_id": torch.device("cuda", 0)} if backend == "nccl" else {}
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=job["ranks"], **device
    )
    result = work(job)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    time.sleep(_REST_S)  # Gloo's threads come to rest before the group goes
    dist.destroy_process_group()
    return True


def run_ranks(
    script: str,
    job: dict[str, Any],
    *,
    ranks: int,
    timeout_s: float,
    links: ShapedLinks | None = None,
    per_node: int = 1,
) -> list[dict[str, Any]]:
    """What each rank found.

    per_node : ranks that share a namespace of `links`

    Raises RuntimeError, with what a rank said, if one fails or time is up; all are ended then.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job | {"ranks": ranks}))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if links else "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        logs = [folder / f"log{rank}" for rank in range(ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, script, _FLAG, name, str(rank)]
                with log.open("w") as file:
                    processes.append(
                        subprocess.Popen(
                            links.command(rank // per_node, *command) if links else command,
                            env=env, stdin=subprocess.DEVNULL, stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )  # fmt: skip
            follow(processes, logs, time.monotonic() + timeout_s)
        finally:
            # A rank whose peer is gone waits on; the peer's end is theirs.
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def follow(
    processes: list[Any], logs: list[Path], until: float, look: Callable[[], object] = lambda: None
) -> None:
    """Wait for all ranks to end, and `look` meanwhile.

    Raises RuntimeError, with what the ranks said, if one fails or time is up.
    """
    while True:
        codes = [process.poll() for process in processes]
        look()
        if all(code == 0 for code in codes):
            return
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad or time.monotonic() > until:
            what = f"rank {bad[0]} ended with {codes[bad[0]]}" if bad else "time is up"
            output = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
            raise RuntimeError(f"{what}; the ranks said:\n{output}")
        time.sleep(_NAP_S)


def about(script: str) -> dict[str, Any]:
    """Columns of every row: what was run, when, on what."""
    return {
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "command": command(script),
        **origin(),
    }


def measured(rows: list[dict[str, Any]], key: dict[str, Any]) -> bool:
    """Whether there are rows of this commit and key; what a changed tree gave is measured again."""
    key = key | {"commit": commit()}
    return matching(rows, key) is not None and not key["commit"].endswith("+")
