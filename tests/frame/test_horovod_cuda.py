"""The toolkit that Horovod's build takes: complete or passed over, with the reason. No network."""

import dataclasses
import os
import shutil
import stat
import subprocess
from pathlib import Path

import build_horovod
import horovod_cuda
import horovod_edits
import horovod_steps
import horovod_target
import horovod_tools
import pytest
from horovod_edits import EDITS, Versions
from horovod_target import Target

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
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_120\\n' ;;
  -v) echo '#$ _SPACE_= ' >&2; echo "#\\$ TOP={root}/bin/.." >&2 ;;
esac
"""


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
    found, why = horovod_cuda.found("13.2", [tmp_path / "no such", root])
    assert (found.root, found.version) == (root, "13.0")
    # A wrong CUDA_HOME must not go unsaid.
    assert why == [f"{tmp_path}/no such is not there"]
    environment = found.environment()
    for name in ("CUDA_HOME", "HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT"):
        assert environment[name] == str(root)
    assert environment["CUDACXX"] == f"{root}/bin/nvcc"
    # The kernels' flags come from the nvcc that is first on the PATH.
    assert environment["PATH"].split(os.pathsep)[0] == f"{root}/bin"


@pytest.mark.parametrize("lack", [first for first, *_ in horovod_cuda.NEEDED])
def test_one_that_lacks_a_part_is_passed_over_and_the_part_named(tmp_path, lack):
    root = toolkit(tmp_path / "cuda", without=[lack])
    found, (why,) = horovod_cuda.found("13.0", [root])
    assert found is None
    assert lack in why


def test_a_folder_without_any_part_is_no_toolkit(tmp_path):
    found, why = horovod_cuda.found("13.0", [tmp_path])
    assert (found, why) == (None, [f"{tmp_path} is no CUDA toolkit"])


def test_another_major_version_is_passed_over(tmp_path):
    old, new = toolkit(tmp_path / "old", "12.8"), toolkit(tmp_path / "new", "13.1")
    found, why = horovod_cuda.found("13.2", [old, new])
    assert found.root == new
    assert why == [f"{old} is CUDA 12.8, torch's is 13.2"]


def test_the_root_of_a_wrapper_is_not_its_folder(tmp_path, monkeypatch, bare):
    root = toolkit(tmp_path / "deep/cuda")
    wrapper = write(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n', runs=True)
    assert horovod_cuda.root_of(wrapper) == root
    first = horovod_cuda.candidates({"PATH": str(wrapper.parent)})[0]
    assert first == root
    # What the user names is taken alone: a wrong name is an answer, too.
    named = {"PATH": str(wrapper.parent), "CUDA_HOME": "/my/cuda"}
    assert [str(it) for it in horovod_cuda.candidates(named)] == ["/my/cuda"]


def test_wheels_are_of_torchs_own_version():
    new = horovod_cuda.requirements("13.2")
    assert "nvidia-cuda-nvcc==13.2.*" in new
    assert "nvidia-cuda-cccl>=13.2,<14" in new
    assert not any("-cu13" in it for it in new)
    old = horovod_cuda.requirements("12.8")
    assert "nvidia-cuda-nvcc-cu12==12.8.*" in old
    assert all("-cu12" in it for it in old)


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
    assert (made.root / "lib64/libcudart.so").resolve().name == "libcudart.so.13"


def test_wheels_that_lack_a_part_make_none(tmp_path):
    toolkit(tmp_path / "site/nvidia/cu13", without=["include/crt/host_config.h"])
    assert horovod_cuda.assembled(tmp_path / "site", tmp_path / "made") is None
    assert "include/crt/host_config.h" in horovod_cuda.missing(tmp_path / "made")
    assert horovod_cuda.assembled(tmp_path / "empty", tmp_path / "other") is None


def test_architectures_are_those_of_torch_that_nvcc_knows(tmp_path):
    root = toolkit(tmp_path / "cuda")
    flags = "sm_70 sm_80 sm_90a sm_120 compute_120"
    assert horovod_cuda.architectures(flags, root / "bin/nvcc") == ("80", "90", "120")
    # No nvcc yet: it will be of torch's own version, and know them all.
    assert horovod_cuda.architectures("sm_70 sm_80", tmp_path / "none") == ("70", "80")
    assert horovod_cuda.architectures("", root / "bin/nvcc") == ()


@pytest.mark.parametrize(("header", "standard"), [
    ("#if !defined(_MSC_VER) && __cplusplus < 201703L\n#error C++17", 17),
    ("    (!defined(_MSC_VER) && __cplusplus < 202002L)\n#error", 20),
    ("__cplusplus < 201402L", 17),
    ("nothing said", 17),
])  # fmt: skip
def test_the_standard_is_what_torchs_headers_ask_for(header, standard):
    assert horovod_target.standard_of(header) == standard


def test_the_standard_is_written_into_the_edits():
    for standard in (17, 20):
        edits = horovod_edits.wanted(Versions(torch=(2, 15), standard=standard))
        named = {edit.name: edit for edit in edits if edit.name.startswith("c++-")}
        assert len(named) == 3
        for edit in named.values():
            assert str(standard) in edit.new
            assert "{" not in edit.new


GPU = dataclasses.replace(
    TARGET, torch="2.15.0", torch_cuda="13.2", tensorflow=None, standard=20, wheels=True,
    arches=("80", "90"),
)  # fmt: skip


def test_without_a_framework_it_says_so_and_does_not_ask_for_cuda(monkeypatch, tmp_path, capsys):
    bare = dataclasses.replace(GPU, torch=None, torch_cuda=None)
    monkeypatch.setattr(build_horovod, "detect", lambda *, cpu_only: bare)
    assert build_horovod.main(["--check", "--cache", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "missing: neither torch nor TensorFlow is installed" in said
    assert "NCCL: no, " in said


def test_a_cuda_tensorflow_that_does_not_say_its_version_gets_no_wheels(monkeypatch, bare):
    monkeypatch.setattr(horovod_cuda, "candidates", lambda env: [])
    monkeypatch.setattr(horovod_target, "_tensorflow_build", lambda: "is_cuda_build: True")
    monkeypatch.setattr(horovod_target, "_version", {"tensorflow": "2.21.0"}.get)
    target = horovod_target.detect()
    assert target.tensorflow_cuda
    assert not target.gpu
    assert "no CUDA toolkit" in target.why_no_gpu()


def names(target: Target) -> set[str]:
    return {edit.name for edit in horovod_edits.wanted(target.versions)}


def test_a_build_for_cpu_tensors_beside_a_cuda_torch_asks_for_no_toolkit():
    assert GPU.flags()["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert "no-cuda-of-torch" not in names(GPU)
    without = horovod_target.without_cuda(GPU)
    assert without.flags()["HOROVOD_WITHOUT_NVTX"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in without.flags()
    assert "no-cuda-of-torch" in names(without)
    assert "no-cuda-of-torch" not in names(TARGET), "torch is a CPU build there"


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
    assert "run-path" in names(GPU)
    assert "run-path" not in names(horovod_target.without_cuda(GPU)), "kept wheels stay valid"


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


def test_the_hash_sees_cuda_and_knows_wheels_of_before():
    digest = GPU.digest(EDITS, "sha")
    for change in ({"arches": ("90",)}, {"wheels": False, "nvcc": "13.0"}, {"standard": 17}):
        assert dataclasses.replace(GPU, **change).digest(EDITS, "sha") != digest
    # What a build for CPU tensors was hashed to before there were these fields.
    edits = horovod_edits.wanted(TARGET.versions)
    recorded = dataclasses.replace(TARGET, wheels=True, arches=("80",))
    assert recorded.digest(edits, "sha") == TARGET.digest(edits, "sha")


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


def test_why_no_toolkit_could_be_made_is_one_line(tmp_path, monkeypatch):
    """Also with what pip said, which is many."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    steps = horovod_steps.Steps(1, tmp_path / "build.log")
    steps.begin("put a CUDA toolkit together from wheels")
    with pytest.raises(horovod_tools.NoToolkitError) as caught:
        horovod_tools.install_cuda(steps, "13.2", tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "No matching distribution found for nvidia-cuda-nvcc==13.2.*" in str(caught.value)
    assert f"log: {tmp_path}/build.log" in str(caught.value)


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
