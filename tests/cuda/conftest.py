"""The helpers beside the tests are plain modules; rivals are among the benchmarks."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]
sys.path.append(str(HERE.parent / "compress"))

from fake import gpu  # noqa: E402, F401
