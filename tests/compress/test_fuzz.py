"""Damaged payloads in numbers: SN_FUZZ=100000 pytest tests/compress/test_fuzz.py for more."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from fuzz import REFUSALS, attack

ROOT = Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("SN_FUZZ", "4000"))


# A case takes a fraction of a millisecond; ten allow for a busy machine, and show a hang.
@pytest.mark.timeout(60 + COUNT / 100)
def test_damaged_payloads_are_refused_or_decode_to_the_promised_size(backend):
    seen = attack(COUNT, seed=1)
    assert sum(seen.values()) == COUNT
    # Every check was reached, and a good part got past all of them.
    assert seen["decoded"] > COUNT / 20
    for phrase in REFUSALS[:9]:
        assert seen[phrase], phrase
    assert seen["damaged"] + seen["range ends"] + seen["marks"] + seen["ascend"] > COUNT / 20


def test_every_codec_in_short():
    """fuzz/payloads.py: with right checksums, and with those that are left wrong."""
    folder = ROOT / "fuzz"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("fuzz_payloads", folder / "payloads.py")
        payloads = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(payloads)
    finally:
        sys.path.remove(str(folder))
    seen = Counter(payloads.sealed(seed) for seed in range(COUNT // 2))
    assert seen["PayloadError"] > COUNT / 4
    assert seen["decoded"] > COUNT / 40
    seen = Counter(payloads.unsealed(seed) for seed in range(COUNT // 2))
    assert seen["PayloadError"] > COUNT / 4


def library(name: str) -> str:
    """Path of one of g++'s own libraries, or nothing."""
    asked = [shutil.which("g++") or "false", f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() else ""


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes of compiling where the machine is busy
def test_sanitizers_find_nothing(core, tmp_path):
    """The same attack on an extension that stops at the first bad access or undefined result."""
    preload = [library(name) for name in ("libasan.so", "libubsan.so")]
    if not all(preload):
        pytest.skip("g++ with its sanitizer libraries is not installed")
    built = tmp_path / "_core.so"
    command = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=address,undefined"]
    command += ["-fno-sanitize-recover=all", "-ffp-contract=off", "-shared", "-fPIC"]
    command += ["-I", sysconfig.get_path("include"), "-o", str(built)]
    command += [str(path) for path in sorted((ROOT / "csrc" / "compress").glob("*.cpp"))]
    subprocess.run(command, check=True)
    env = os.environ | {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    script = [sys.executable, str(Path(__file__).with_name("fuzz.py")), str(COUNT), "2", str(built)]
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"extension {built}" in done.stdout
