"""Check an installed wheel: both extensions, kernels, shipped graphs, the command line.

    python scripts/try_wheel.py

Run it outside of any clone, in an environment that has only the wheel of this project, so that
the installed files are imported. Needs no framework.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Check everything that packaging could have left out."""
    here = Path(__file__).resolve().parent
    import numpy as np

    import sn_compress
    import sn_memory
    from sn_compress._cuda import source
    from sn_memory.base import errors

    where = {Path(str(package.__file__)).parent.parent for package in (sn_compress, sn_memory)}
    assert here.parent not in where, f"imported from the clone: {where}"
    assert sn_compress.backends()["cpu"].startswith("cpp"), sn_compress.backends()
    errors.core()  # raises where the wheel has no compiled extension
    assert source("seal.cu").read_bytes()
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    codec = sn_compress.codec("fft")
    assert codec.decode(codec.encode(values)).shape == values.shape
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder, "plan.json"))
        limits = ["--budget", "90%", "--time-limit", "5", "--quiet", "--json"]
        for words in (["plan", "alexnet", *limits, "-o", plan], ["check", "alexnet", plan]):
            process = subprocess.run(
                [sys.executable, "-m", "sn_cli", "memory", *words], capture_output=True, text=True,
                cwd=folder,
            )  # fmt: skip
            assert process.returncode == 0, process.stderr
            print(f"sn memory {words[0]}: exit 0")
    print(json.dumps({"python": sys.version.split()[0], "version": sn_compress.__version__}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
