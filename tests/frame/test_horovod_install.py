"""A built wheel installed, proved, taken out again if it fails, laid out. No network."""

import dataclasses
import json
import os
import subprocess
import sys
import venv
import zipfile

import build_horovod
import horovod_install
import pytest
from horovod_steps import StepError, Steps
from horovod_target import Target

TARGET = Target(
    python="cpython-311-x86_64-linux-gnu", torch="2.13.0+cpu", torch_cuda=None, tensorflow="2.21.0",
    tensorflow_cuda=False, compiler="g++ 12.2.0", machine="Linux x86_64 glibc-2.36", cpu=("avx",),
    nvcc=None, mpi=None,
)  # fmt: skip
GPU = dataclasses.replace(TARGET, torch="2.15.0", tensorflow=None, torch_cuda="13.2", nvcc="13.2")
# A Horovod whose launcher reports a build and averages, for one framework a launch, as so many
# ranks as it is told here.
LAUNCH = """import sys
if "--check-build" in sys.argv:
    print("    [X] PyTorch\\n    [X] {by}\\n    [ ] MPI")
else:
    *_, script, framework = sys.argv
    assert script.endswith("horovod_smoke.py"), sys.argv
    print(f"smoke {{framework}} ok\\n" * {ranks})
    sys.exit({status})
"""


def wheel(folder, name, version="1.0", **files):
    """Write a wheel that pip installs."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file.replace("__", "/") + ".py", text)
        for file, text in {"METADATA": head, "WHEEL": tags, "RECORD": ""}.items():
            archive.writestr(f"{info}/{file}", text)
    return path


def horovod(folder, *, by="Gloo", ranks=2, status=0):
    launch = LAUNCH.format(by=by, ranks=ranks, status=status)
    return wheel(folder, "horovod", "0.28.1+snabc", horovod__runner__launch=launch)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment of its own, and wheels of what Horovod imports in place of an index."""
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env/bin/python")
    wheel(tmp_path / "index", "needed", needed="")
    monkeypatch.setattr(horovod_install, "RUNTIME", ("needed",))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    monkeypatch.setattr(horovod_install, "PIP", pip)
    monkeypatch.setattr(sys, "executable", python)
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": "",
    }.items():
        monkeypatch.setenv(name, value)

    def installed():
        code = "from importlib import metadata; print(metadata.version('horovod'))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        return done.stdout.strip() or None

    return Steps(3, tmp_path / "log"), installed


@pytest.mark.parametrize(
    ("target", "fault", "said"),
    [(TARGET, {"ranks": 1}, "torch: 1 of 2 ranks reported"),
     (GPU, {}, "NCCL was asked for and is not in the build")],
)  # fmt: skip
def test_a_wheel_that_fails_its_proof_does_not_stay(tmp_path, place, target, fault, said):
    """Or the next run would say that it is installed and nothing is to do."""
    steps, installed = place
    assert horovod_install.install(steps, horovod(tmp_path / "made", by="NCCL"), GPU) == ["NCCL"]
    assert installed() == "0.28.1+snabc"
    with pytest.raises(StepError, match=said):
        horovod_install.install(steps, horovod(tmp_path / "made", **fault), target)
    assert installed() is None


def test_wheels_are_laid_out_for_a_machine_without_an_index(tmp_path, place, monkeypatch):
    steps, _ = place
    monkeypatch.setattr(horovod_install, "PIP", horovod_install.PIP[:4])
    folder = tmp_path / "carried"
    wheel(folder, "horovod", "0.28.1+snold")
    horovod_install.carry(steps, horovod(tmp_path / "made"), folder)
    there = sorted(it.name for it in folder.iterdir())
    assert there == ["horovod-0.28.1+snabc-py3-none-any.whl", "needed-1.0-py3-none-any.whl"]


@pytest.mark.parametrize("cached", [False, True])
def test_a_report_tells_of_build_and_proof_also_of_a_kept_wheel(
    tmp_path, place, monkeypatch, cached
):
    """What is installed already is proved again for it."""
    digest = TARGET.digest(build_horovod.horovod_edits.wanted(TARGET.versions),
                           build_horovod.SDIST_SHA256)  # fmt: skip
    folder = tmp_path / "cache" / digest
    made = horovod(folder if cached else tmp_path / "made")
    times = {"toolkit": None, "jobs": 2, "seconds": 9.5, "cpu_seconds": 8.0}
    if cached:
        (folder / "built.json").write_text(json.dumps(times))

    def build(target, edits, folder, args):
        (folder / "built.json").write_text(json.dumps(times))
        return made.replace(folder / made.name)

    monkeypatch.setattr(build_horovod, "detect", lambda *, cpu_only: TARGET)
    monkeypatch.setattr(build_horovod, "prerequisites", lambda target: [])
    monkeypatch.setattr(build_horovod, "installed_version", lambda: f"0.28.1+sn{digest}")
    monkeypatch.setattr(build_horovod, "build", build)
    cache, report = ["--cache", str(tmp_path / "cache")], tmp_path / "it.json"
    assert build_horovod.main(["--json", str(report), *cache]) == 0
    found = json.loads(report.read_text())
    assert found["built"] == times
    assert (found["moves"], found["ranks"]) == (["Gloo"], 2)
    assert found["why_no_nccl"] == "torch 2.13.0+cpu is a CPU build"
