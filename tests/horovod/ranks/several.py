"""One rank: scripts one after the other, in one start: `several.py SCRIPT.py...`."""

import runpy
import sys
from pathlib import Path

from cases import settle

for script in sys.argv[1:]:
    settle()
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
    print(f"ok {script}", flush=True)
