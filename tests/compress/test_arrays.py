"""The array core: arrays that cross from the host to a device."""

from __future__ import annotations

import numpy as np
import pytest

from sn_compress.arrays import Constant, asarray_like

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "across",
    [lambda host, like: Constant(host).on(like), asarray_like],
    ids=["constant", "like_of"],
)
def test_what_may_not_be_written_shares_no_memory_with_a_tensor(across):
    """torch knows no such tensors: it warns, once in a process, and writes to it."""
    host = np.frombuffer(np.arange(4.0).tobytes())
    assert not host.flags.writeable
    tensor = across(host, torch.zeros(1))
    tensor += 1
    np.testing.assert_array_equal(host, np.arange(4.0))
    np.testing.assert_array_equal(tensor.numpy(), np.arange(4.0) + 1)
