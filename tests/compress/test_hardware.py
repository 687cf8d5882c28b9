"""What ranks say of their hardware: the same from equal ones, another from others."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from sn_compress.ops.products import hardware_fingerprint, kernel

PROGRAM = """
import sys
import numpy as np
from sn_compress.ops.products import hardware_fingerprint
print(hardware_fingerprint(np.zeros(1, np.float32)))
"""


def in_process(**environment):
    paths = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )  # fmt: skip
    return ran.stdout


@pytest.fixture(scope="module")
def kinds():
    """Names of OpenBLAS kernels that this processor has the instructions for, NumPy alone says."""
    product = "import numpy; numpy.ones((99, 99), 'f') @ numpy.ones((99, 99), 'f')"
    ends = {
        kind: subprocess.run(
            [sys.executable, "-c", product],
            env=os.environ | {"OPENBLAS_CORETYPE": kind},
            timeout=100,
            check=False,
        ).returncode
        for kind in ("Haswell", "SkylakeX", "Sandybridge")
    }
    assert set(ends.values()) <= {0, -signal.SIGILL}, ends
    return [kind for kind, end in ends.items() if not end]


def test_other_kernels_are_told(kinds):
    """By what they compute: no name says which ones OpenBLAS has taken."""
    found = [in_process(OPENBLAS_CORETYPE=it, SN_COMPRESS_BACKEND="numpy") for it in kinds]
    assert found[0] == in_process(OPENBLAS_CORETYPE=kinds[0], SN_COMPRESS_BACKEND="numpy")
    if len(set(found)) == 1:
        pytest.skip("this NumPy has one set of kernels, or another BLAS")


def test_the_extension_has_one_set_of_bits_which_is_no_library_s(core, kinds):
    if kernel(core) is None:
        pytest.skip("this processor has no kernels that are used")
    (own,) = {in_process(OPENBLAS_CORETYPE=kind) for kind in kinds}
    assert own == in_process()
    assert own != in_process(SN_COMPRESS_BACKEND="numpy")


def test_libraries_differ():
    torch = pytest.importorskip("torch")
    assert hardware_fingerprint(torch.zeros(1)) != hardware_fingerprint(np.zeros(1, np.float32))
    assert hardware_fingerprint(torch.zeros(1)) == hardware_fingerprint(torch.ones(3))
