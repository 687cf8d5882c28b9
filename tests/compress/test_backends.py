"""The back end is chosen by what is there and by the environment, and says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def backends(wish: str | None, *, hide: bool = False) -> subprocess.CompletedProcess[str]:
    """Print backends() and the bytes of one payload in a fresh interpreter."""
    code = (
        f"import sys; sys.modules.update({{'sn_compress._core': None}} if {hide} else {{}})\n"
        "import numpy as np, sn_compress\n"
        "payload = sn_compress.FFTCodec(theta=0.9).encode(np.arange(5000, dtype=np.float32))\n"
        "print(sn_compress.backends()['cpu'])\n"
        "print(payload.to_bytes().hex())"
    )
    env = {key: value for key, value in os.environ.items() if key != "SN_COMPRESS_BACKEND"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    if wish is not None:
        env["SN_COMPRESS_BACKEND"] = wish
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_numpy_on_request_gives_the_same_bytes(core):
    own, asked = backends(None), backends("numpy")
    assert own.stdout.startswith("cpp: ")
    assert asked.stdout.startswith("numpy: requested by SN_COMPRESS_BACKEND")
    assert own.stdout.splitlines()[1] == asked.stdout.splitlines()[1]
    assert not own.stderr
    assert not asked.stderr


def test_cpp_on_request(core):
    assert backends("cpp").stdout.startswith("cpp: ")


def test_a_missing_extension_is_not_silent():
    done = backends(None, hide=True)
    assert done.stdout.startswith("numpy: the compiled extension is missing")
    assert "many times slower" in done.stderr
    assert done.returncode == 0


def test_cpp_on_request_but_missing():
    done = backends("cpp", hide=True)
    assert done.returncode == 1
    assert (
        "CompressError: SN_COMPRESS_BACKEND=cpp, but the compiled extension is missing"
        in done.stderr
    )


@pytest.mark.parametrize("wish", ["cuda", "NUMPY"])
def test_unknown_wish(wish):
    done = backends(wish)
    assert done.returncode == 1
    assert f'CompressError: SN_COMPRESS_BACKEND=\'{wish}\'; expected "numpy", "cpp"' in done.stderr
