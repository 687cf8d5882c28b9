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
    own, same, asked = (backends(wish) for wish in (None, "cpp", "numpy"))
    assert own.stdout.startswith("cpp: ")
    assert same.stdout == own.stdout
    assert asked.stdout.startswith("numpy: requested by SN_COMPRESS_BACKEND")
    assert own.stdout.splitlines()[1] == asked.stdout.splitlines()[1]
    assert not own.stderr + asked.stderr


def test_a_missing_extension_is_not_silent():
    done = backends(None, hide=True)
    assert done.stdout.startswith("numpy: the compiled extension is missing")
    assert "many times slower" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("wish", "hide", "message"), [
    ("cpp", True, "SN_COMPRESS_BACKEND=cpp, but the compiled extension is missing"),
    ("NUMPY", False, "SN_COMPRESS_BACKEND='NUMPY'; expected \"numpy\", \"cpp\""),
])  # fmt: skip
def test_what_cannot_be_is_refused(wish, hide, message):
    done = backends(wish, hide=hide)
    assert done.returncode == 1
    assert f"CompressError: {message}" in done.stderr
