"""Make the graphs that come with the command line from the networks of benchmarks/graphs.

    python scripts/example_graphs.py [--check]

With --check it writes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "sn_cli" / "graphs"
# As benchmarks/planner.py has them: what frameworks call, with gradients in buffers.
SETTINGS: dict[str, Any] = {"granularity": "call", "gradients": "buffers", "inplace_relu": True}


def texts() -> dict[str, str]:
    """Return the text of each graph's file, by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    graphs = import_module("graphs")
    networks: dict[str, Callable[[], Any]] = {
        "alexnet": lambda: graphs.alexnet(512, **SETTINGS),
        "resnet50": lambda: graphs.resnet(64, 50, **SETTINGS),
        "transformer12": lambda: graphs.transformer(4, 12, **SETTINGS),
        "unet": lambda: graphs.unet(8, **SETTINGS),
    }
    return {name: make().graph().to_json() for name, make in networks.items()}


def main() -> int:
    """Write the files, or compare them."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--check", action="store_true")
    args = flags.parse_args()
    stale = 0
    for name, text in texts().items():
        path = FOLDER / f"{name}.json"
        if args.check:
            stale += not path.exists() or path.read_text(encoding="utf-8") != text
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
