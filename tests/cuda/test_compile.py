"""Every kernel compiles for every architecture, warnings included; no device, no toolkit."""

import os
import re

import nvrtc
import pytest

from sn_compress import _cuda
from sn_compress._cuda import Program, source
from sn_compress.ops import launch
from sn_compress.ops.launch import Format
from sn_compress.ops.quantize import Layout

ARCHITECTURES = [f"{kind}_{number}" for number in (75, 80, 90, 100) for kind in ("compute", "sm")]


def fused(block: int, transform: str, span: int | None = None) -> Program:
    layout = Layout(block, 1, "range", 8, 3, "bitmap", 2 if transform == "fft" else 1)
    return Format.of(layout, transform, span).program


PROGRAMS = {
    "fused fft 4096": fused(4096, "fft"),
    "fused spans 4096": fused(4096, "fft", 64),
    "fused dct 4096": fused(4096, "dct"),
    "fused hadamard 4096": fused(4096, "hadamard"),
    "fused identity 4096": fused(4096, "identity"),
    "fused fft 32": fused(32, "fft"),
    "fused fft 8192": fused(8192, "fft"),
    "seal": launch.SEAL,
}
# Minutes would go by: the extremes of size differ in constants only, and machine code is made from
# PTX anyway.
ONCE = {name for name in PROGRAMS if name.endswith((" 32", " 8192"))}
AS_MACHINE_CODE = ("dct 4096", "hadamard 4096", "identity 4096")
COMPILED = [
    (name, architecture)
    for name in PROGRAMS
    for architecture in (["sm_90"] if name in ONCE else ARCHITECTURES)
    if architecture.startswith("sm_") or not name.endswith(AS_MACHINE_CODE)
]


@pytest.fixture(autouse=True)
def needs_nvrtc():
    if nvrtc.find() is None:
        text = "NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12==12.9.86"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_compiles_without_a_warning(name, architecture):
    program = PROGRAMS[name]
    machine = architecture.startswith("sm_")
    options = [*_cuda.options(program), f"-arch={architecture}"]
    if machine:
        options.append("--ptxas-options=-v")
    code, log = nvrtc.compile_source(_cuda.text(program.file), program.file, options)
    assert code
    assert "warning" not in log.lower(), log
    assert machine or not log.strip(), log
    assert not machine or report(log), "the report of registers is missing"
    for kernel, registers in report(log).items():
        print(f"{name} {architecture} {kernel}: {registers} registers")
        # Four blocks of 256 threads, SN_RESIDENT, share the 65536 registers of a multiprocessor.
        assert registers <= 64 or program.file != "fused.cu"


def report(log: str) -> dict[str, int]:
    """Registers of each kernel; more than one spilled complex number to a thread is a failure."""
    found: dict[str, int] = {}
    kernel = ""
    for line in log.splitlines():
        if entry := re.search(r"entry function '(\w+)'", line):
            kernel = entry[1]
        if used := re.search(r"Used (\d+) registers", line):
            found[kernel] = int(used[1])
        if spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            assert int(spill[1]) <= 8, f"{kernel}: {line}"
    return found


def test_messages_name_the_real_file_and_line():
    opening = "SN_DEVICE void raise(u32& largest, u32 value) {"
    broken = _cuda.text("fused.cu").replace(opening, opening + " nothing();")
    program = fused(32, "fft")
    with pytest.raises(nvrtc.CompileError) as failed:
        nvrtc.compile_source(broken, "x.cu", [*_cuda.options(program), "-arch=sm_80"])
    lines = source("fused.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if line == opening)
    assert f"fused.cu({at}): error" in str(failed.value)
