"""Shared by all tests: real ranks under horovodrun, and a GPU that may not be there."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# TensorFlow reads it when it is loaded. By itself it takes oneDNN on newer processors only, and on
# a CPU only oneDNN's allocator counts: the planner's tests measure the same on each machine.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
MARK = "SN_TEST_RANKS"
LAUNCH = ROOT / "tests" / "launch.py"
# Folders whose tests start ranks, and measure or count them: one worker runs them in turn. The
# documents' start some too, but measure nothing, and this worker is the last one to end.
OF_RANKS = frozenset({"ddp", "horovod", "benchmarks", "examples", "gossip"})


@dataclass(frozen=True)
class Ranks:
    """How a run of several ranks ended; `stdout` holds stderr too, in the order it came."""

    args: list[str]
    returncode: int
    stdout: str
    timed_out: bool

    def check(self) -> Ranks:
        """Fail the test, showing the output, unless every rank ended well."""
        state = "did not end in time" if self.timed_out else f"ended with {self.returncode}"
        assert self.returncode == 0, f"{' '.join(self.args)} {state}\n{self.stdout[-8000:]}"
        return self


def require_horovod() -> None:
    """Skip where Horovod was never installed; in CI, where `make` builds it, fail instead."""
    _require("horovod", "Horovod is not installed: run `python scripts/build_horovod.py`")


@pytest.fixture(autouse=True)
def settings_of_process() -> Iterator[None]:
    """Let no test leave settings of the process behind: drawn programs, say, set them."""
    yield
    if (settings := sys.modules.get("sn_memory.settings")) is not None:
        settings.deterministic, settings.progress = False, None


@pytest.fixture
def counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans of a test count work in place of seconds."""
    sn_memory = importlib.import_module("sn_memory")
    monkeypatch.setattr(sn_memory.settings, "deterministic", True)


@pytest.fixture
def with_tensorflow() -> None:
    """Skip where TensorFlow was never installed; in CI, where `make` installs it, fail instead."""
    _require("tensorflow", "TensorFlow is not installed: pip install 'superneurons[tensorflow]'")


def _require(package: str, missing: str) -> None:
    if importlib.util.find_spec(package):
        return
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def run_ranks(
    np: int,
    script: Path | str,
    *args: object,
    timeout: float = 120,
    options: Sequence[str] = (),
    **env: str,
) -> Ranks:
    """Run a script on `np` ranks of this machine; at the time limit end all of its processes.

    options : further ones for horovodrun
    """
    command = [sys.executable, str(LAUNCH), "--gloo", "-np", str(np), *options]
    command += [sys.executable, str(script), *map(str, args)]
    # One thread per rank: more ranks than cores would otherwise spend their time waiting.
    quiet = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    quiet |= {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    mark = uuid.uuid4().hex
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    quiet["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | quiet | env | {MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        # Told to end, horovodrun ends its ranks and reports; what is left is killed below.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            _kill_marked(mark)
            output, _ = process.communicate()
    finally:
        _kill_marked(mark)
    return Ranks(command, process.returncode or int(timed_out), output, timed_out)


def _kill_marked(mark: str) -> None:
    """Kill every process that carries our mark in its environment.

    Groups and sessions are no help: horovodrun gives each rank a session of its own.
    """
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            # It ended meanwhile, or belongs to somebody else.
            continue


@pytest.fixture
def horovodrun() -> Callable[..., Ranks]:
    """Return `run(np, script, *args, timeout=120, **env) -> Ranks`, on real Horovod."""
    require_horovod()
    return run_ranks


@pytest.fixture
def rank_script(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes the source of a rank's script and gives its path."""

    def write(source: str, name: str = "rank.py") -> Path:
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return path

    return write


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add our option, and know pytest-timeout's setting where that is not installed."""
    parser.addoption(
        "--slow-for", type=float, default=float("inf"), metavar="SECONDS",
        help="begin no slow test later than so many seconds after the start; skip it",
    )  # fmt: skip
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds of a test; heeded by pytest-timeout only")


def pytest_configure(config: pytest.Config) -> None:
    """Know its marker, too."""
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): heeded by pytest-timeout only")


BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test for which there is no time left: machines of CI differ by three times."""
    limit_s = item.config.getoption("--slow-for")
    if time.monotonic() - BEGAN > limit_s and item.get_closest_marker("slow"):
        pytest.skip(f"no slow test begins after {limit_s:.0f} s (--slow-for)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a file at a time, and all tests that start ranks to one of them.

    These would take each other's cores. Groups, xdist's own way, need a `_nodeid` that items
    no longer have in pytest 9.2: nothing is sorted there, and nothing says so.
    """
    from xdist.scheduler import LoadScopeScheduling

    class InTurn(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return "ranks" if starts_ranks(file) else file

    if _is_limited(config):
        # By itself xdist begins with the files of most tests: the same would always come late.
        config.option.loadscopereorder = False
    return InTurn(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while tests are collected: nothing of all that is any.

    It took a quarter of the time. What is there then is there to the end, and is not looked
    through again while tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def file_of(nodeid: str) -> str:
    """The file of a test, from the root."""
    return nodeid.partition("::")[0]


def starts_ranks(file: str) -> bool:
    """Whether tests of a file start ranks."""
    return bool(OF_RANKS & set(Path(file).parts))


def _is_limited(config: pytest.Config) -> bool:
    return bool(config.getoption("--slow-for") < float("inf"))


def in_turn(files: Sequence[str], turn: int) -> dict[str, tuple[bool, int]]:
    """Keys that sort files: those of ranks first, both kinds from another one on in each turn.

    One worker has all tests of ranks, and ends as late as the others together.
    """
    keys = {}
    for of_ranks in (True, False):
        kind = [file for file in files if starts_ranks(file) == of_ranks]
        keys |= {file: (not of_ranks, (at - turn) % len(kind)) for at, file in enumerate(kind)}
    return keys


def _commit() -> int:
    """A number of the commit that is tested; 0 where there is none."""
    with suppress(OSError, ValueError):
        shown = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return int(shown.stdout[:8], 16)
    return 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where what they need is missing; let time run out elsewhere at each commit."""
    if _is_limited(config):
        files = dict.fromkeys(file_of(item.nodeid) for item in items)
        keys = in_turn(list(files), _commit())
        items.sort(key=lambda item: keys[file_of(item.nodeid)])
    for item in items:
        for mark in item.iter_markers("gpu"):
            missing = dict.fromkeys(MISSING[need]() for need in mark.args or ("torch",))
            missing.pop("", None)
            if missing:
                item.add_marker(pytest.mark.skip(reason="; ".join(missing)))


@cache
def _no_torch() -> str:
    if not importlib.util.find_spec("torch"):
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"no CUDA device for torch {torch.__version__}"


@cache
def _no_cupy() -> str:
    if not importlib.util.find_spec("cupy"):
        return "CuPy is not installed (pip install superneurons[cuda])"
    import cupy

    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device for CuPy: {error}"
    return "" if devices else "no CUDA device for CuPy"


@cache
def _no_nccl() -> str:
    if why := _no_torch():
        return why
    import torch.distributed as dist

    return "" if dist.is_available() and dist.is_nccl_available() else "this torch has no NCCL"


# What a test may ask for: `gpu`, which is `gpu("torch")`; `gpu("cupy")`; `gpu("cupy", "nccl")`.
MISSING = {"torch": _no_torch, "cupy": _no_cupy, "nccl": _no_nccl}
