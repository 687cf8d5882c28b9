"""make gpu: what it says where nothing is there, how it ends, what it leaves of a section."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu import lent, runner  # noqa: E402 - a folder of scripts
from gpu.sections import SECTIONS, Plan  # noqa: E402

HIDDEN = "tensorflow,keras,horovod,cupy,cupyx"
# Of the extra [dev]: a GPU machine need not have them.
DEV = (
    "accelerate,build,diffusers,matplotlib,mypy,peft,pytest_timeout,ruff,sklearn,torch_geometric,"
    "transformers,xdist"
)
WITHOUT = {"SN_ABSENT": HIDDEN, "PYTHONPATH": str(ROOT / "benchmarks/gpu/absent")}


def python(*args, **env):
    paths = [env.pop("PYTHONPATH", ""), str(ROOT), str(ROOT / "benchmarks")]
    paths.append(os.environ.get("PYTHONPATH", ""))
    env = os.environ | env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=580
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_test_file_dies_of_what_is_missing():
    """With torch, SciPy, pytest and hypothesis alone, all that need a GPU can be collected."""
    plugins = [f"-pno:{name}" for name in ("timeout", "xdist", "xdist.looponfail", "cacheprovider")]
    done = python(
        "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *plugins, "tests",
        **(WITHOUT | {"SN_ABSENT": f"{HIDDEN},{DEV}"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    files = ("exchange", "planner", "activations", "apoptosis")
    for file in ("cuda/test_gpu", "ddp/test_gpu", *(f"gpu/test_{it}" for it in files)):
        assert f"tests/{file}.py::" in done.stdout, file
    assert re.search(r"\d+/\d+ tests collected", done.stdout)


@pytest.mark.parametrize(
    ("required", "status", "why"), [(0, 0, "no torch"), (1, 3, "no CUDA device")]
)
def test_without_a_device_or_torch_every_section_says_so(tmp_path, required, status, why):
    out = tmp_path / "results"
    env = WITHOUT | {"SN_ABSENT": "torch"} if why == "no torch" else {"CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "gpu.runner", "--required", str(required), "--out", str(out), **env)
    assert done.returncode == status, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [plan.name for plan in SECTIONS]
    assert all(why in line for line in lines)
    assert not out.exists(), "results that are there stay"


def test_shares_are_whole_and_every_section_has_its_file():
    assert sum(plan.share for plan in SECTIONS) == pytest.approx(1)
    for plan in SECTIONS:
        assert (ROOT / f"benchmarks/gpu/{plan.name}.py").is_file()


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """`scripts(name=source)`: sections of these sources, run by the runner; their results."""
    package = tmp_path / "gpu"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'benchmarks/gpu')!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'benchmarks'}")

    def run(seconds=20.0, **sources):
        results = []
        for name, source in sources.items():
            text = f"from gpu.section import *\ndef measure(section):\n    {source}\n"
            (package / f"{name}.py").write_text(f"{text}main({name!r}, measure)\n")
            plan = Plan(name, "", 1.0)
            results.append(runner.run_section(plan, "cpu", tmp_path / "out", seconds))
        return results

    return run


@pytest.mark.slow
def test_how_sections_end(scripts, tmp_path):
    """Well, with a reason, with an error after a row, killed: each is told, and rows are kept."""
    well, cannot, failed, crashed = scripts(
        well="section.row(a=1)",
        cannot="raise CannotError('no such thing here')",
        failed="section.row(a=2); raise RuntimeError('x')",
        crashed="section.row(a=3); os.kill(os.getpid(), 11)",
    )
    assert [it["state"] for it in (well, cannot, failed, crashed)] == [
        "ok", "cannot", "failed", "failed",
    ]  # fmt: skip
    assert cannot["why"] == "no such thing here"
    assert [it["rows"] for it in (failed, crashed)] == [[{"a": 2}], [{"a": 3}]]
    assert json.loads((tmp_path / "out/crashed.json").read_text()) == crashed
    assert runner.status([well, cannot]) == 0
    assert runner.status([well, failed]) == 1
    assert "no such thing here" in runner.table([well, cannot])


def test_time_that_is_up_ends_a_section_and_what_it_started(scripts):
    # On a busy machine the section itself may take many seconds to begin.
    for seconds in (8.0, 40.0, 200.0):
        (late,) = scripts(
            seconds=seconds,
            late="import subprocess; p = subprocess.Popen(['sleep', '600']); "
            "section.row(child=p.pid); time.sleep(600)",
        )
        if late["rows"]:
            break
    assert late["state"] == "failed"
    assert "time was up" in late["why"]
    (row,) = late["rows"]
    status = Path(f"/proc/{row['child']}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_scipys_copy_stands_in_for_array_api_compat(tmp_path):
    if not lent.lend_array_api_compat(tmp_path):
        pytest.skip("this SciPy has no copy of array-api-compat")
    done = python(
        "-c",
        "import array_api_compat, sn_compress.arrays; print(array_api_compat.__file__)",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_horovod_is_lent_from_wheels_if_it_runs(tmp_path, monkeypatch):
    find = lent.importlib.util.find_spec
    monkeypatch.setattr(
        lent.importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name)
    )
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels, launcher = tmp_path / "wheels", ("horovod/runner/launch.py", "import lent_part, numpy")
    wheels.mkdir()
    for name, (file, text) in {
        f"horovod-1-{tag}-{tag}-any": launcher,
        "part-1-py2.py3-none-any": ("lent_part.py", ""),
        "numpy-1-py3-none-any": ("numpy/__init__.py", "raise SystemExit('not this one')"),
        "old-1-cp27-cp27-any": ("old.py", ""),
    }.items():
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as archive:
            archive.writestr(file, text)
            archive.writestr(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA", "")
    assert "no wheel for this Python" in lent.lend_horovod(tmp_path / "none", tmp_path)
    folder = tmp_path / "lent"
    folder.mkdir()
    assert f"unpacked of horovod-1-{tag}-{tag}-any.whl" in lent.lend_horovod(wheels, folder)
    assert (folder / "lent_part.py").is_file()
    assert not (folder / "numpy").exists(), "what is installed stays"
    assert not (folder / "old.py").exists(), "for another Python"
    (wheels / "part-1-py2.py3-none-any.whl").unlink()
    folder = tmp_path / "again"
    folder.mkdir()
    assert "does not run here: ModuleNotFoundError" in lent.lend_horovod(wheels, folder)
    assert not [*folder.iterdir()]
