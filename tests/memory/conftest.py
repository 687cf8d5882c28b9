"""The neighbours a test may import: random graphs, oracles, networks of the benchmarks."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# pytest imports test files by path, so folders that are no packages need saying.
for folder in (HERE, HERE.parent / "oracles", HERE.parent.parent / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
