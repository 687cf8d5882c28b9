"""The build script: edits find their place or stop, the hash sees every input. No network."""

import dataclasses
import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path

import build_horovod
import horovod_edits
import horovod_steps
import horovod_tools
import pytest
from horovod_edits import EDITS, Edit, EditError, Versions
from horovod_target import Target

NEW = Versions(torch=(2, 13, 0), tensorflow=(2, 21, 0))
TARGET = Target(
    python="3.11 cpython-311",
    torch="2.13.0+cpu",
    torch_cuda=None,
    tensorflow="2.21.0",
    tensorflow_cuda=False,
    compiler="g++ 12.2.0",
    machine="Linux x86_64 glibc-2.36",
    cpu=("avx",),
    nvcc=None,
    mpi=None,
)


def plant(tree: Path, edits: tuple[Edit, ...]) -> None:
    """Write files in which each edit finds its text as often as it says."""
    for edit in edits:
        path = tree / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "first line\n"
        path.write_text(before + (edit.old + "\n") * edit.count)


def test_edits_replace_their_text_and_nothing_else(tmp_path):
    plant(tmp_path, EDITS)
    horovod_edits.apply(EDITS, tmp_path)
    for edit in EDITS:
        text = (tmp_path / edit.file).read_text()
        assert text.startswith("first line\n")
        assert edit.new in text
        if edit.old not in edit.new:
            assert edit.old not in text


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_without_its_place_stops_and_says_which(tmp_path, edit):
    plant(tmp_path, EDITS)
    (tmp_path / edit.file).write_text("something else\n")
    with pytest.raises(EditError) as caught:
        horovod_edits.apply((edit,), tmp_path)
    assert edit.name in str(caught.value)
    assert edit.file in str(caught.value)
    assert "occurs 0 times" in str(caught.value)


def test_an_edit_that_fits_twice_stops(tmp_path):
    plant(tmp_path, EDITS[:1])
    plant(tmp_path, EDITS[:1])
    with pytest.raises(EditError, match="occurs 2 times, expected 1"):
        horovod_edits.apply(EDITS[:1], tmp_path)


def test_a_missing_file_stops(tmp_path):
    with pytest.raises(EditError, match=r"no file CMakeLists\.txt"):
        horovod_edits.apply(EDITS[:1], tmp_path)


def test_edits_apply_to_the_real_source(tmp_path):
    kept = build_horovod.CACHE / "sdist" / f"horovod-{build_horovod.VERSION}.tar.gz"
    if not kept.is_file():
        pytest.skip("the source archive is not in the cache: run scripts/build_horovod.py")
    files = {f"horovod-{build_horovod.VERSION}/{edit.file}" for edit in EDITS}
    with tarfile.open(kept) as archive:
        for member in archive:
            if member.name in files:
                path = tmp_path / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    tree = tmp_path / f"horovod-{build_horovod.VERSION}"
    # All of them, also those that no single build takes together.
    every = horovod_edits.wanted(dataclasses.replace(NEW, gpu=True, cuda_unused=True))
    assert len(every) == len(EDITS)
    horovod_edits.apply(every, tree)
    assert "distutils" not in (tree / "horovod/torch/CMakeLists.txt").read_text()
    compile((tree / "setup.py").read_text(), "setup.py", "exec")
    compile((tree / "horovod/runner/js_run.py").read_text(), "js_run.py", "exec")


def test_xla_is_dropped_only_where_tensorflow_needs_it():
    def names(versions):
        return {edit.name for edit in horovod_edits.wanted(versions)}

    assert "no-xla-ops" in names(NEW)
    assert "no-xla-ops" not in names(Versions(torch=(2, 13)))
    assert "no-xla-ops" not in names(Versions(tensorflow=(2, 15, 1)))


def test_names_are_unique_and_reasons_given():
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    assert all(edit.why for edit in EDITS)


CHANGES = {
    "python": "3.12 cpython-312",
    "torch": "2.12.0",
    "tensorflow": None,
    "compiler": "g++ 13.2.0",
    "machine": "Linux aarch64 glibc-2.36",
    "cpu": (),
    "mpi": "mpirun (Open MPI) 4.1.4",
    "settings": (("CXXFLAGS", "-O1"),),
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_hash_sees_every_input(field):
    changed = dataclasses.replace(TARGET, **{field: CHANGES[field]})
    assert changed.digest(EDITS, "sha") != TARGET.digest(EDITS, "sha")


def test_the_hash_sees_edits_and_source():
    digest = TARGET.digest(EDITS, "sha")
    other = dataclasses.replace(EDITS[0], new=EDITS[0].new + " ")
    assert TARGET.digest((other, *EDITS[1:]), "sha") != digest
    assert TARGET.digest(EDITS, "another sha") != digest
    # Reasons are for readers: rewording one must not cost everybody a build.
    reworded = dataclasses.replace(EDITS[0], why="because")
    assert TARGET.digest((reworded, *EDITS[1:]), "sha") == digest


def test_a_cuda_toolkit_beside_cpu_frameworks_changes_nothing():
    beside = dataclasses.replace(TARGET, nvcc="V12.4.131")
    assert not beside.gpu
    assert beside.digest(EDITS, "sha") == TARGET.digest(EDITS, "sha")


def test_nccl_when_toolkit_and_gpu_frameworks_are_there():
    gpu = dataclasses.replace(
        TARGET, nvcc="V12.4.131", torch="2.13.0", torch_cuda="12.4", tensorflow=None
    )
    assert gpu.flags()["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert gpu.flags()["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in TARGET.flags()


def test_stray_switches_do_not_reach_the_build(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("MAKEFLAGS", "-j --jobserver-auth=3,4")
    env = build_horovod.build_environment(TARGET, "abc", jobs=2)
    assert "HOROVOD_WITHOUT_GLOO" not in env
    assert env["HOROVOD_WITH_GLOO"] == "1"
    assert env["MAKEFLAGS"] == "-j2"


def test_a_wrong_archive_is_refused(tmp_path):
    archive = tmp_path / "horovod.tar.gz"
    archive.write_bytes(b"not what it says")
    steps = horovod_steps.Steps(1, tmp_path / "log")
    steps.begin("get Horovod's source and check its hash")
    with pytest.raises(horovod_steps.StepError, match=build_horovod.SDIST_SHA256):
        build_horovod.fetch_sdist(steps, tmp_path / "cache", archive, {})


def serve(folder, **files):
    """Lay out a folder as a package index for pip; return the environment that makes pip use it."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
    }


def source_archive(tmp_path, *, touches):
    """Return a source archive whose setup.py leaves a file behind when it runs."""
    setup = (
        f"open({str(touches)!r}, 'w').close()\n"
        "from setuptools import setup\n"
        f"setup(name='horovod', version={build_horovod.VERSION!r})\n"
    )
    name = f"horovod-{build_horovod.VERSION}"
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w:gz") as tar:
        for file, text in (
            ("setup.py", setup),
            (
                "PKG-INFO",
                f"Metadata-Version: 1.0\nName: horovod\nVersion: {build_horovod.VERSION}\n",
            ),
        ):
            member = tarfile.TarInfo(f"{name}/{file}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return blob.getvalue()


def test_a_downloaded_archive_with_another_hash_never_runs(tmp_path):
    ran = tmp_path / "it ran"
    archive = source_archive(tmp_path, touches=ran)
    env = serve(tmp_path, **{f"horovod-{build_horovod.VERSION}.tar.gz": archive})
    steps = horovod_steps.Steps(1, tmp_path / "log")
    steps.begin("get Horovod's source and check its hash")
    with pytest.raises(horovod_steps.StepError, match="DO NOT MATCH THE HASHES"):
        build_horovod.fetch_sdist(steps, tmp_path / "cache", None, env)
    assert not ran.exists()


def test_the_archive_of_that_test_would_run(tmp_path, monkeypatch):
    # Or the test before this one could not fail.
    ran = tmp_path / "it ran"
    archive = source_archive(tmp_path, touches=ran)
    monkeypatch.setattr(build_horovod, "SDIST_SHA256", hashlib.sha256(archive).hexdigest())
    env = serve(tmp_path, **{f"horovod-{build_horovod.VERSION}.tar.gz": archive})
    steps = horovod_steps.Steps(1, tmp_path / "log")
    steps.begin("get Horovod's source and check its hash")
    kept = build_horovod.fetch_sdist(steps, tmp_path / "cache", None, env)
    assert kept.read_bytes() == archive
    assert ran.exists()


def test_tools_of_the_build_are_pinned_by_version_and_hash(tmp_path, monkeypatch):
    for pin in (*horovod_tools.BUILD_PINS, *horovod_tools.CMAKE_PINS):
        assert re.fullmatch(r"[a-z]+==[\d.]+( --hash=sha256:[0-9a-f]{64})+", pin)
    for name, value in serve(tmp_path, **{"wheel-0.48.0-py3-none-any.whl": b"another"}).items():
        monkeypatch.setenv(name, value)
    steps = horovod_steps.Steps(1, tmp_path / "log")
    steps.begin("get what the build needs")
    with pytest.raises(horovod_steps.StepError, match="another file than the pinned one"):
        horovod_tools.install_pinned(steps, horovod_tools.BUILD_PINS[1:2], tmp_path / "tools")
    assert not (tmp_path / "tools" / "wheel").exists()


def test_a_failed_command_names_step_log_and_cure(tmp_path):
    steps = horovod_steps.Steps(3, tmp_path / "log")
    steps.begin("compile")
    script = "print('a.cc:1:10: fatal error: Python.h: No such file or directory'); exit(1)"
    with pytest.raises(horovod_steps.StepError) as caught:
        steps.run([sys.executable, "-c", script])
    text = str(caught.value)
    assert "step 1 of 3 failed: compile" in text
    assert "fatal error: Python.h" in text
    assert "apt-get install python3-dev" in text
    assert str(tmp_path / "log") in text
    assert "Python.h" in (tmp_path / "log").read_text()


def test_missing_tools_are_all_named_at_once(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    bare = dataclasses.replace(TARGET, torch=None, tensorflow=None, compiler="no compiler")
    text = "\n".join(horovod_tools.prerequisites(bare))
    for word in ("pip install torch", "g++", "make"):
        assert word in text
