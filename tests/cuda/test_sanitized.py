"""The kernels on the host under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_no_sanitizer_complains():
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("g++ has no libasan.so: install its sanitizer libraries")
    # Python never frees everything; that is not what is looked for.
    env = os.environ | {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0"}
    script = Path(__file__).with_name("sanitized.py")
    env["PYTHONPATH"] = str(script.parents[2])
    run = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr[-5000:]
    assert "no complaint" in run.stdout
