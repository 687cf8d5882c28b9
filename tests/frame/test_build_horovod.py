"""The build script: edits find their place or stop, the hash sees every input, CUDA is taken.

No network.
"""

import dataclasses
import hashlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import build_horovod
import horovod_cuda
import horovod_edits
import horovod_steps
import horovod_target
import horovod_tools
import pytest
from horovod_edits import EDITS, Edit, EditError, Versions
from horovod_target import Target

NEW = Versions(torch=(2, 13, 0), tensorflow=(2, 21, 0))
TARGET = Target(
    python="3.11 cpython-311", torch="2.13.0+cpu", torch_cuda=None, tensorflow="2.21.0",
    tensorflow_cuda=False, compiler="g++ 12.2.0", machine="Linux x86_64 glibc-2.36", cpu=("avx",),
    nvcc=None, mpi=None,
)  # fmt: skip
GPU = dataclasses.replace(
    TARGET, torch="2.15.0", torch_cuda="13.2", tensorflow=None, standard=20, wheels=True,
    arches=("80", "90"),
)  # fmt: skip
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_120\\n' ;;
  -v) echo '#$ _SPACE_= ' >&2; echo "#\\$ TOP={root}/bin/.." >&2 ;;
esac
"""


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
        assert edit.old in edit.new or edit.old not in text


def test_an_edit_that_does_not_fit_stops_and_says_which(tmp_path):
    with pytest.raises(EditError, match=r"no file CMakeLists\.txt"):
        horovod_edits.apply(EDITS[:1], tmp_path)
    for edit in EDITS:
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / edit.file).write_text("something else\n")
        with pytest.raises(EditError, match="occurs 0 times") as caught:
            horovod_edits.apply((edit,), tmp_path)
        assert edit.name in str(caught.value)
        assert edit.file in str(caught.value)
    plant(tmp_path, EDITS[:1] * 2)
    with pytest.raises(EditError, match="occurs 2 times, expected 1"):
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


def names(versions: Versions) -> set[str]:
    return {edit.name for edit in horovod_edits.wanted(versions)}


def test_edits_are_those_that_a_build_needs():
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    assert all(edit.why for edit in EDITS)
    assert "no-xla-ops" in names(NEW)
    assert not {"no-xla-ops"} & (
        names(Versions(torch=(2, 13))) | names(Versions(tensorflow=(2, 15, 1)))
    )
    without = horovod_target.without_cuda(GPU)
    # Beside a torch of CUDA; a CPU build of torch has none to leave out.
    assert "no-cuda-of-torch" in names(without.versions)
    assert "no-cuda-of-torch" not in names(GPU.versions) | names(TARGET.versions)
    assert "run-path" in names(GPU.versions)
    assert "run-path" not in names(without.versions), "kept wheels stay valid"


def test_flags_are_those_of_the_frameworks_and_the_toolkit():
    flags = GPU.flags()
    assert flags["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert flags["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert flags["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    without = horovod_target.without_cuda(GPU).flags()
    assert without["HOROVOD_WITHOUT_NVTX"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in {*without, *TARGET.flags()}


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


def test_the_hash_sees_every_input():
    def digests(target, edits=EDITS):
        return target.digest(edits, "sha")

    plain, gpu = digests(TARGET), digests(GPU)
    for field, value in CHANGES.items():
        assert digests(dataclasses.replace(TARGET, **{field: value})) != plain, field
    for change in ({"arches": ("90",)}, {"wheels": False, "nvcc": "13.0"}, {"standard": 17}):
        assert digests(dataclasses.replace(GPU, **change)) != gpu, change
    other = dataclasses.replace(EDITS[0], new=EDITS[0].new + " ")
    assert digests(TARGET, (other, *EDITS[1:])) != plain
    assert TARGET.digest(EDITS, "another sha") != plain
    # Reasons are for readers: rewording one must not cost everybody a build.
    reworded = dataclasses.replace(EDITS[0], why="because")
    assert digests(TARGET, (reworded, *EDITS[1:])) == plain
    # A toolkit beside CPU frameworks changes nothing, nor do fields that came later.
    for change in ({"nvcc": "V12.4.131"}, {"wheels": True, "arches": ("80",)}):
        beside = dataclasses.replace(TARGET, **change)
        assert not beside.gpu
        assert digests(beside) == plain, change


def test_stray_switches_do_not_reach_the_build(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("MAKEFLAGS", "-j --jobserver-auth=3,4")
    env = build_horovod.build_environment(TARGET, "abc", jobs=2)
    assert "HOROVOD_WITHOUT_GLOO" not in env
    assert env["HOROVOD_WITH_GLOO"] == "1"
    assert env["MAKEFLAGS"] == "-j2"


@pytest.fixture
def steps(tmp_path):
    begun = horovod_steps.Steps(1, tmp_path / "log")
    begun.begin("a step")
    return begun


def test_a_wrong_archive_is_refused(tmp_path, steps):
    archive = tmp_path / "horovod.tar.gz"
    archive.write_bytes(b"not what it says")
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
    head = f"Metadata-Version: 1.0\nName: horovod\nVersion: {build_horovod.VERSION}\n"
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w:gz") as tar:
        for file, text in (("setup.py", setup), ("PKG-INFO", head)):
            member = tarfile.TarInfo(f"horovod-{build_horovod.VERSION}/{file}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return blob.getvalue()


@pytest.mark.parametrize("same", [False, True])
def test_a_downloaded_archive_with_another_hash_never_runs(tmp_path, monkeypatch, steps, same):
    ran = tmp_path / "it ran"
    archive = source_archive(tmp_path, touches=ran)
    env = serve(tmp_path, **{f"horovod-{build_horovod.VERSION}.tar.gz": archive})
    if same:  # it would run: or this test could not fail
        monkeypatch.setattr(build_horovod, "SDIST_SHA256", hashlib.sha256(archive).hexdigest())
        kept = build_horovod.fetch_sdist(steps, tmp_path / "cache", None, env)
        assert kept.read_bytes() == archive
    else:
        with pytest.raises(horovod_steps.StepError, match="DO NOT MATCH THE HASHES"):
            build_horovod.fetch_sdist(steps, tmp_path / "cache", None, env)
    assert ran.exists() == same


def test_tools_of_the_build_are_pinned_by_version_and_hash(tmp_path, monkeypatch, steps):
    for pin in (*horovod_tools.BUILD_PINS, *horovod_tools.CMAKE_PINS):
        assert re.fullmatch(r"[a-z]+==[\d.]+( --hash=sha256:[0-9a-f]{64})+", pin)
    for name, value in serve(tmp_path, **{"wheel-0.48.0-py3-none-any.whl": b"another"}).items():
        monkeypatch.setenv(name, value)
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
    assert all(word in text for word in ("pip install torch", "g++", "make"))


# The toolkit that the build takes: complete or passed over, with the reason.


def write(path, text="", *, runs=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if runs:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(root, version="13.0", without=()):
    """A folder with what a toolkit has, as empty files but for nvcc."""
    for first, *_ in horovod_cuda.NEEDED:
        if first not in without:
            write(root / first)
    if "bin/nvcc" not in without:
        write(root / "bin/nvcc", NVCC.format(version=version, root=root), runs=True)
    return root


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Neither the user's wish nor a toolkit of this machine."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_a_complete_toolkit_is_taken(tmp_path):
    root = toolkit(tmp_path / "cuda")
    found, why = horovod_cuda.find_toolkit("13.2", [tmp_path / "no such", root])
    assert (found.root, found.version) == (root, "13.0")
    # A wrong CUDA_HOME must not go unsaid.
    assert why == [f"{tmp_path}/no such is not there"]
    environment = found.environment()
    for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT"):
        assert environment[name] == str(root)
    assert environment["CUDACXX"] == f"{root}/bin/nvcc"
    # The kernels' flags come from the nvcc that is first on the PATH.
    assert environment["PATH"].split(os.pathsep)[0] == f"{root}/bin"


def test_an_incomplete_or_older_toolkit_is_passed_over_with_the_reason(tmp_path):
    empty, old, new = tmp_path / "empty", tmp_path / "old", toolkit(tmp_path / "new", "13.1")
    empty.mkdir()
    folders = [empty, toolkit(old, "12.8")]
    reasons = [f"{empty} is no CUDA toolkit", f"{old} is CUDA 12.8, torch's is 13.2"]
    for at, (lack, *_) in enumerate(horovod_cuda.NEEDED):
        folders.append(toolkit(tmp_path / f"lacks {at}", without=[lack]))
        reasons.append(lack)
    found, why = horovod_cuda.find_toolkit("13.2", [*folders, new])
    assert found.root == new
    assert all(said in line for said, line in zip(reasons, why, strict=True))
    assert horovod_cuda.find_toolkit("13.2", folders)[0] is None


def test_the_root_of_a_wrapper_is_not_its_folder(tmp_path, monkeypatch, bare):
    root = toolkit(tmp_path / "deep/cuda")
    wrapper = write(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n', runs=True)
    assert horovod_cuda.root_of(wrapper) == root
    first = horovod_cuda.candidates({"PATH": str(wrapper.parent)})[0]
    assert first == root
    # What the user names is taken alone: a wrong name is an answer, too.
    named = {"PATH": str(wrapper.parent), "CUDA_HOME": "/my/cuda"}
    assert [str(it) for it in horovod_cuda.candidates(named)] == ["/my/cuda"]


@pytest.mark.parametrize("layout", ["one folder", "a folder a package"])
def test_wheels_make_a_toolkit(tmp_path, layout):
    """Those of CUDA 13 share nvidia/cu13; each of CUDA 12 has its own below nvidia."""
    whole = toolkit(tmp_path / "whole")
    for at, path in enumerate(sorted(it for it in whole.rglob("*") if it.is_file())):
        package = "cu13" if layout == "one folder" else f"cuda_{at}"
        inside = path.relative_to(whole).as_posix().replace("lib64/", "lib/")
        text = path.read_text().replace(str(whole), str(tmp_path / "made"))
        write(tmp_path / "site/nvidia" / package / inside, text)
    write(tmp_path / "site/nvidia/cu13/lib/libcudart.so.13")
    made = horovod_cuda.assembled(tmp_path / "site", tmp_path / "made")
    assert made == horovod_cuda.Toolkit(tmp_path / "made", "13.0")
    assert (made.root / "lib64/libcudart_static.a").is_file()
    assert horovod_cuda.assembled(tmp_path / "empty", tmp_path / "other") is None
    assert (made.root / "lib64/libcudart.so").resolve().name == "libcudart.so.13"


def test_architectures_are_those_of_torch_that_nvcc_knows(tmp_path):
    nvcc = toolkit(tmp_path / "cuda") / "bin/nvcc"
    flags = "sm_70 sm_80 sm_90a sm_120 compute_120"
    assert horovod_cuda.architectures(flags, nvcc) == ("80", "90", "120")
    # No nvcc yet: it will be of torch's own version, and know them all.
    assert horovod_cuda.architectures("sm_70 sm_80", tmp_path / "none") == ("70", "80")


def test_the_standard_is_what_torchs_headers_ask_for():
    for header, standard in (
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L\n#error C++17", 17),
        ("    (!defined(_MSC_VER) && __cplusplus < 202002L)\n#error", 20),
        ("__cplusplus < 201402L", 17),
        ("nothing said", 17),
    ):
        assert horovod_target.standard_of(header) == standard
        edits = horovod_edits.wanted(Versions(torch=(2, 15), standard=standard))
        named = [edit.new for edit in edits if edit.name.startswith("c++-")]
        assert len(named) == 3
        assert all(str(standard) in text and "{" not in text for text in named)


def test_built_libraries_look_for_cuda_where_it_stays():
    """Not in the folder of the build: it is gone then, and in /tmp anybody may make another."""
    made = horovod_cuda.Toolkit(Path("/tmp/horovod-build-x/cuda"), "13.2")
    new = horovod_cuda.run_path("13.2", made, {}, ours=True).split(";")
    assert new[:2] == ["$ORIGIN/../../nvidia/nccl/lib", "$ORIGIN/../../nvidia/cu13/lib"]
    old = horovod_cuda.run_path("12.8", made, {}, ours=True)
    assert "$ORIGIN/../../nvidia/cuda_runtime/lib" in old
    assert all(path.startswith("$ORIGIN/") for path in new)
    there = horovod_cuda.Toolkit(Path("/opt/cuda"), "13.0")
    own = horovod_cuda.run_path("13.2", there, {"HOROVOD_NCCL_HOME": "/opt/nccl"}, ours=False)
    assert own.split(";")[:2] == ["/opt/nccl/lib", "/opt/cuda/lib64"]


def test_cmake_writes_these_paths_into_a_library(tmp_path):
    """With the edit's own lines, as $ORIGIN has to pass CMake, make and the linker unharmed."""
    if not (shutil.which("cmake") and shutil.which("g++") and shutil.which("readelf")):
        pytest.skip("needs cmake, g++ and readelf")
    (edit,) = (it for it in EDITS if it.name == "run-path")
    write(tmp_path / "a.cc", "int a() { return 1; }")
    write(tmp_path / "gone/libb.so")
    subprocess.run(
        ["g++", "-shared", "-o", tmp_path / "gone/libb.so", tmp_path / "a.cc"], check=True
    )
    text = "cmake_minimum_required(VERSION 3.13)\n{}add_library(a SHARED a.cc)\n"
    text += f"target_link_libraries(a {tmp_path}/gone/libb.so)\n"
    rpath = horovod_cuda.run_path("13.2", horovod_cuda.Toolkit(tmp_path, "13.2"), {}, ours=True)
    found = {}
    for name, lines in (("before", edit.old), ("after", edit.new)):
        write(tmp_path / "CMakeLists.txt", text.format(lines))
        build = tmp_path / name
        env = os.environ | {"HOROVOD_RPATH": rpath}
        for args in (["-S", tmp_path, "-B", build], ["--build", build]):
            subprocess.run(["cmake", *args], env=env, check=True, capture_output=True)
        found[name] = horovod_cuda.run_paths(build / "liba.so")
    assert found == {"before": [f"{tmp_path}/gone"], "after": rpath.split(";")}


def test_where_wheels_cannot_be_had_it_is_built_for_cpu_tensors(monkeypatch, tmp_path, capsys):
    """Said in one line, and with what pip said."""
    made = []

    def build(target, edits, folder, args):
        made.append(target)
        if target.gpu:
            raise horovod_tools.NoToolkitError("no index")
        return tmp_path / "horovod.whl"

    monkeypatch.setattr(build_horovod, "detect", lambda *, cpu_only: GPU)
    monkeypatch.setattr(build_horovod, "prerequisites", lambda target: [])
    monkeypatch.setattr(build_horovod, "installed_version", lambda: None)
    monkeypatch.setattr(build_horovod, "build", build)
    assert build_horovod.main(["--wheel-only", "--cache", str(tmp_path / "cache")]) == 0
    assert [target.gpu for target in made] == [True, False]
    said = capsys.readouterr().out
    assert "for CPU tensors only: no CUDA 13.2 toolkit was found, and no index\n" in said


def test_why_no_toolkit_could_be_made_is_one_line(tmp_path, monkeypatch, steps):
    """Also with what pip said, which is many."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(horovod_tools.NoToolkitError) as caught:
        horovod_tools.install_cuda(steps, "13.2", tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "No matching distribution found for nvidia-cuda-nvcc==13.2.*" in str(caught.value)
    assert f"log: {tmp_path}/log" in str(caught.value)


def test_check_tells_where_cuda_comes_from(monkeypatch, tmp_path, bare):
    monkeypatch.setattr(horovod_cuda, "candidates", lambda env: [tmp_path / "cuda"])
    said = build_horovod.describe(GPU, EDITS)
    assert "a toolkit of wheels for this build: nvidia-cuda-nvcc==13.2.*" in said
    assert "for sm_80 sm_90" in said
    toolkit(tmp_path / "cuda", without=["nvvm/bin/cicc"])
    assert f"; passed over: {tmp_path}/cuda has no nvvm/bin/cicc" in build_horovod.describe(
        GPU, EDITS
    )
    toolkit(tmp_path / "cuda")
    assert f"CUDA 13.0 at {tmp_path}/cuda" in build_horovod.describe(GPU, EDITS)
    assert "NCCL: no, torch 2.13.0+cpu is a CPU build" in build_horovod.describe(TARGET, EDITS)
