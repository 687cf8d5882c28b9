"""Edits that Horovod 0.28.1 needs to build today, as data: file, old text, new text, reason.

The obvious way is a patch file, but when it fails to apply it says "hunk 3 failed" and leaves the
reader to find out what hunk 3 was for. Here every edit states its reason and how often its text
must occur; an edit that does not match stops the build before the compiler starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

VERSION: Final = "0.28.1"


class EditError(RuntimeError):
    """An edit did not match, so the source is not the release for which it was written."""


@dataclass(frozen=True)
class Versions:
    """Versions that determine the edits; None where the framework is absent."""

    torch: tuple[int, ...] | None = None
    tensorflow: tuple[int, ...] | None = None
    standard: int = 17  # of C++, that torch's headers ask for
    cuda_unused: bool = False  # torch is a CUDA build, and this one is for CPU tensors
    gpu: bool = False  # it is built with NCCL


def always(_: Versions) -> bool:
    """Return True: the edit applies to every combination of versions."""
    return True


def new_tensorflow(versions: Versions) -> bool:
    """Say whether TensorFlow is one whose XLA headers are no longer where Horovod looks."""
    return versions.tensorflow is not None and versions.tensorflow >= (2, 16)


def cpu_beside_cuda(versions: Versions) -> bool:
    """Say whether a CUDA build of torch gets a Horovod for CPU tensors."""
    return versions.cuda_unused


def with_nccl(versions: Versions) -> bool:
    """Say whether the build links NCCL and CUDA, which may lie in folders that go with it."""
    return versions.gpu


STANDARD: Final = "{standard}"  # in the new text of an edit: the C++ standard


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in `file`, where it must occur exactly `count` times."""

    name: str
    file: str
    old: str
    new: str
    why: str
    count: int = 1
    when: Callable[[Versions], bool] = always

    def text(self) -> str:
        """Return everything that determines the edited source, for the hash of the build."""
        return "\0".join((self.file, self.old, self.new, str(self.count)))


EDITS: Final = (
    Edit(
        name="c++-core",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD {standard})",
        why="headers of torch >= 2.1 and TensorFlow >= 2.10 use C++17, of torch >= 2.15 C++20",
    ),
    Edit(
        name="c++-torch",
        file="horovod/torch/CMakeLists.txt",
        old="    set(CMAKE_CXX_STANDARD 14)",
        new="    set(CMAKE_CXX_STANDARD {standard})",
        why="the torch part sets the standard back to 14 for itself",
    ),
    Edit(
        name="c++-gloo",
        file="third_party/gloo/CMakeLists.txt",
        old="-std=c++11 -fPIC",
        new="-std=c++{standard} -fPIC",
        why="Gloo names a standard of its own; one standard for all that ends in one library",
    ),
    Edit(
        name="no-cuda-of-torch",
        file="cmake/Modules/FindPytorch.cmake",
        old="print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) "
        "else False)",
        new="print(False)",
        why="a CUDA build of torch made CMake ask for a CUDA toolkit, also where no GPU operation "
        "is wanted: so nobody without a toolkit got a Horovod",
        when=cpu_beside_cuda,
    ),
    Edit(
        name="run-path",
        file="CMakeLists.txt",
        old="project(horovod CXX)\n",
        new="project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HOROVOD_RPATH}")\n',
        why="its libraries would look for NCCL and CUDA in the folder of the build, which is gone "
        "when they run, and where anybody on a shared machine may put another",
        when=with_nccl,
    ),
    Edit(
        name="no-xla-ops",
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        why="its includes tensorflow/compiler/xla/... are gone from TensorFlow's headers; "
        "only the opt-in HOROVOD_ENABLE_XLA_OPS is lost",
        when=new_tensorflow,
    ),
    Edit(
        name="gcc13-stdexcept",
        file="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n",
        why="g++ 13's headers no longer bring <stdexcept> in by accident",
    ),
    Edit(
        name="gcc13-string",
        file="horovod/common/group_table.h",
        old="#include <queue>\n#include <unordered_map>\n",
        new="#include <queue>\n#include <string>\n#include <unordered_map>\n",
        why="g++ 13's headers no longer bring <string> in by accident",
    ),
    Edit(
        name="python312-include",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_paths()['include'])",
        why="Python 3.12 has no distutils; the include path came out empty, without an error",
    ),
    Edit(
        name="python312-import",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which\n",
        why="Python 3.12 has no distutils",
    ),
    Edit(
        name="python312-use",
        file="horovod/runner/js_run.py",
        old="find_executable('jsrun')",
        new="which('jsrun')",
        why="goes with the import above",
    ),
    Edit(
        name="no-setup-requires",
        file="setup.py",
        old="setup_requires=require_list if is_build_action() else [],",
        new="setup_requires=[],",
        why="setuptools would fetch packages in the middle of the build, on its own terms; "
        "the build script installs them first and says so",
    ),
    Edit(
        name="no-debug-info",
        file="setup.py",
        old="else 'RelWithDebInfo'",
        new="else 'Release'",
        why="the same -O3 code without debug information compiles sooner and in less memory",
    ),
    Edit(
        name="gloo-iface",
        file="horovod/common/gloo/gloo_context.cc",
        old="  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        new="  // the interface was given to the global context only\n"
        "  device_attr.iface = global_context.gloo_iface_;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        why="process sets, the global one among them, ignored HOROVOD_GLOO_IFACE and took the "
        "address the host name resolves to: ranks on hosts with several networks hung or aborted",
    ),
)


def wanted(versions: Versions, edits: tuple[Edit, ...] = EDITS) -> tuple[Edit, ...]:
    """Return the edits for these versions, in order, with the C++ standard filled in."""
    return tuple(
        replace(edit, new=edit.new.replace(STANDARD, str(versions.standard)))
        for edit in edits
        if edit.when(versions)
    )


def apply(edits: tuple[Edit, ...], tree: Path) -> None:
    """Apply the edits to the unpacked source under `tree`, or raise and say which one failed."""
    for edit in edits:
        path = tree / edit.file
        if not path.is_file():
            raise EditError(
                f"edit '{edit.name}': no file {edit.file} in {tree}. The source is not the one "
                "these edits were written for; use the Horovod version named by the script."
            )
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != edit.count:
            raise EditError(
                f"edit '{edit.name}' in {edit.file}: its text occurs {count} times, "
                f"expected {edit.count}. The source is not the one this edit was written for; "
                f"text: {edit.old!r}. Why it is wanted: {edit.why}."
            )
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
