"""Two ranks of torch.distributed on this machine, each a process that runs the same code."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_two_ranks(code, store, *arguments, timeout_s=200):
    """Run code with its rank, the path of a store and more arguments; what each prints last, JSON.

    Modules of these tests can be imported there.
    """
    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(store), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=timeout_s) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
