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

from gpu import lent, runner, section  # noqa: E402 - a folder of scripts
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


def test_hidden_packages_are_as_good_as_not_installed():
    code = (
        "import importlib.util, json\n"
        f"for name in {HIDDEN.split(',')!r}:\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError as missing: assert missing.name == name\n"
        "    else: raise SystemExit(name)\n"
        "import numpy, subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-c', 'import horovod']).returncode - 1)"
    )
    done = python("-c", code, **WITHOUT)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(("required", "status"), [(0, 0), (1, 3)])
def test_without_a_device_every_section_says_so(tmp_path, required, status):
    out = tmp_path / "results"
    done = python(
        "-m", "gpu.runner", "--required", str(required), "--out", str(out), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == status, done.stderr
    said = done.stdout.splitlines()
    assert [line.split()[0] for line in said] == [plan.name for plan in SECTIONS]
    assert all("no CUDA device" in line for line in said)
    assert not out.exists(), "results that are there stay"


def test_without_torch_it_says_that_instead():
    done = python("-m", "gpu.runner", "--required", "0", **(WITHOUT | {"SN_ABSENT": "torch"}))
    assert done.returncode == 0
    assert "no torch" in done.stdout


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


@pytest.mark.slow
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


def test_a_target_that_was_missed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(section, "_device_name", lambda device: "a card")
    path = tmp_path / "it.json"
    made = section.Section("it", ["--device", "cuda", "--json", str(path)])
    made.target("speed", 10, least=50)
    made.target("seconds", 1, most=2)
    made.ended("ok")
    found = json.loads(path.read_text()) | {"seconds": 1.0}
    assert [it["met"] for it in found["targets"]] == [False, True]
    assert runner.status([found]) == 4
    assert "missed: speed" in runner.table([found])


def test_scipys_copy_stands_in_for_array_api_compat(tmp_path):
    if not lent.lend_array_api_compat(tmp_path):
        pytest.skip("this SciPy has no copy of array-api-compat")
    done = python(
        "-c",
        "import array_api_compat, sn_compress.arrays; print(array_api_compat.__file__)",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path)), done.stderr


THIS = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def wheels(folder, **files):
    """Wheels by name, each with a file: `wheels(folder, **{"a-1-py3-none-any": ("a.py", "")})`."""
    folder.mkdir()
    for name, (file, text) in files.items():
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
            archive.writestr(file, text)
            archive.writestr(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA", "")
    return folder


@pytest.fixture
def no_horovod(monkeypatch):
    """This interpreter may have one; what is asked is where there is none."""
    find = lent.importlib.util.find_spec
    monkeypatch.setattr(
        lent.importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name)
    )


@pytest.mark.parametrize(
    ("launcher", "said", "there"),
    [("import lent_part, numpy", f"unpacked of horovod-1-{THIS}-{THIS}-any.whl", True),
     ("import no_such_thing", "does not run here: ModuleNotFoundError: No module named", False)],
)  # fmt: skip
def test_horovod_is_lent_from_wheels_if_it_runs(tmp_path, no_horovod, launcher, said, there):
    folder, name = tmp_path / "lent", f"horovod-1-{THIS}-{THIS}-any"
    folder.mkdir()
    given = wheels(
        tmp_path / "wheels",
        **{
            name: ("horovod/runner/launch.py", launcher),
            "other-1-cp38-abi3-any": ("horovod/__init__.py", ""),
            "other-2-cp38-abi3-any": ("horovod/torch.py", ""),
            "other-3-cp38-abi3-any": ("horovod/runner/__init__.py", ""),
            "part-1-py2.py3-none-any": ("lent_part.py", ""),
            "numpy-1-py3-none-any": ("numpy/__init__.py", "raise SystemExit('not this one')"),
            "old-1-cp27-cp27-any": ("old.py", ""),
        },
    )
    assert said in lent.lend_horovod(given, folder)
    assert (folder / "lent_part.py").is_file() == there
    assert not (folder / "numpy").exists(), "what is installed stays"
    assert not (folder / "old.py").exists(), "for another Python"
    assert there or not [*folder.iterdir()]


def test_without_a_wheel_horovod_is_not_lent(tmp_path, no_horovod, monkeypatch):
    given = wheels(tmp_path / "wheels", **{"horovod-1-cp27-cp27-any": ("horovod.py", "")})
    assert "no wheel for this Python" in lent.lend_horovod(given, tmp_path)
    assert "no wheel for this Python" in lent.lend_horovod(tmp_path / "none", tmp_path)
    monkeypatch.setattr(lent.importlib.util, "find_spec", lambda name: name)
    assert lent.lend_horovod(given, tmp_path) == "Horovod: the one installed"
