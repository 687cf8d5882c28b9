"""How well planning keeps its time limit, in wall-clock seconds and in counted work.

    python -m benchmarks time_limits --limits 1.5,5

One row a plan: what was asked, seconds on the wall, CPU seconds of the thread, and what came out.
"""

import argparse
import os
import time

from graphs import resnet, transformer
from tables import markdown

from sn_memory import BudgetError, plan_graph
from sn_memory.graph.liveness import peak

HEAD = ("network", "share", "limit", "counts", "wall s", "CPU s", "outcome")
NETWORKS = {
    "resnet50": lambda: resnet(8, 50).graph(),
    "resnet152": lambda: resnet(8, 152).graph(),
    "transformer": lambda: transformer(batch=8, layers=12, length=256, words=1000).graph(),
}


def row(graph, share, limit_s, *, deterministic):
    """Plan within a share of the activation memory; return wall and CPU seconds and the outcome."""
    budget = graph.base_bytes + int((peak(graph).bytes - graph.base_bytes) * share)
    settings = {"techniques": ("keep", "recompute"), "deterministic": deterministic}
    wall, cpu = time.perf_counter(), time.thread_time()
    try:
        plan = plan_graph(graph, budget, time_limit_s=limit_s, **settings)
        outcome = f"{plan.overhead:+.1%}"
    except BudgetError as error:
        outcome = f"refused, {'cut' if 'was cut' in str(error) else 'ended by itself'}"
    return time.perf_counter() - wall, time.thread_time() - cpu, outcome


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", default="1.5,5")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    options = parser.parse_args()
    row(resnet(1, 50).graph(), 0.9, 0.1, deterministic=True)  # imports what solves linear programs
    print(markdown(HEAD, []))
    for name in options.networks.split(","):
        graph = NETWORKS[name]()
        for limit in map(float, options.limits.split(",")):
            for share in (0.4, 0.05):
                for deterministic in (False, True):
                    wall, cpu, outcome = row(graph, share, limit, deterministic=deterministic)
                    counts = "work" if deterministic else "seconds"
                    line = [name, f"{share}", f"{limit:g}", counts]
                    line += [f"{wall:.2f}", f"{cpu:.2f}", outcome]
                    print(markdown(HEAD, [line]).splitlines()[-1], flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
