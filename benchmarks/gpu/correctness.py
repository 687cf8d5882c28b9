"""Every test that needs a GPU; on the CPU the same tests where they can run there.

A test that was skipped is no proof: reasons are counted, one row each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from machine import ROOT

from gpu.section import Section, main, run

WORKERS = 6  # each has a context on the device, and libraries' workspaces


def outcomes(report: Path) -> list[tuple[str, str, str]]:
    """Name, outcome and message of each test in pytest's JUnit file."""
    results = []
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        ends = {child.tag: child for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in ends), "passed")
        text = "" if kind == "passed" else (ends[kind].get("message") or "")
        results.append((name, kind, text[:400]))
    return results


def marked() -> list[str]:
    """Files with tests that need a GPU: to collect all others as well takes half a minute."""
    tests = ROOT / "tests"
    paths = [
        path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    return ["tests/gpu", *(str(path.relative_to(ROOT)) for path in sorted(paths))]


def measure(section: Section) -> None:
    """Run pytest; fail if a test failed, or if none passed."""
    which = ["-m", "not gpu", "tests/gpu"] if section.dry else ["-m", "gpu", *marked()]
    if not section.dry and find_spec("xdist"):
        # Most of the time is the host's: imports, compilation of kernels, planning.
        which += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which]
        # Where pytest-benchmark is installed it warns of xdist, and warnings are errors here.
        command += ["-p", "no:benchmark"]
        code, output = run(
            [*command, f"--junitxml={report}"], timeout_s=max(5.0, section.left_s() - 2)
        )
        if not report.is_file():
            raise RuntimeError(f"pytest ended with {code} and no report:\n{output}")
        tests = outcomes(report)
    kinds = Counter(kind for _, kind, _ in tests)
    section.row(
        tests=len(tests), passed=kinds["passed"], skipped=kinds["skipped"],
        failed=kinds["failure"] + kinds["error"],
    )  # fmt: skip
    for why, number in Counter(text for _, kind, text in tests if kind == "skipped").items():
        section.leave_out(f"{number} tests", why)
    for name, kind, text in tests:
        if kind in ("failure", "error"):
            section.row(test=name, outcome=kind, message=text)
    if code or not kinds["passed"]:
        raise RuntimeError(f"pytest ended with {code}, {kinds['passed']} passed:\n{output}")


if __name__ == "__main__":
    main("correctness", measure)
