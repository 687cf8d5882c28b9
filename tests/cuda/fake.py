"""A CuPy of NumPy arrays, for tests of what Python does around the kernels.

Arrays have an address and a device; kernels are those of g++ (host.py); cuFFT is SciPy. It stands
in for the library in tests only: the package itself never runs without the real one.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from host import Host

from sn_compress import _cuda, arrays


class FakeDevice(contextlib.AbstractContextManager):
    id = 0

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeArray(np.ndarray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return FakeDevice()

    def get(self) -> np.ndarray:
        return np.array(self)

    def __array_function__(self, *call: Any) -> Any:
        """Results are of the device, too; NumPy joins arrays of a class to plain ones."""
        made = super().__array_function__(*call)
        return made.view(FakeArray) if isinstance(made, np.ndarray) else made


FakeArray.__module__ = "cupy"


def fake(array: Any) -> Any:
    return np.asarray(array).view(FakeArray)


class FakeTensor(torch.Tensor):
    """A torch tensor that says it is on a GPU."""

    is_cuda = True
    device = SimpleNamespace(index=0)


FakeTensor.__module__ = "torch"


def tensor(array: Any) -> Any:
    """A tensor over the same memory."""
    return torch.as_tensor(array).as_subclass(FakeTensor)


def made(array: Any, framework: str | None) -> Any:
    return tensor(np.asarray(array)) if framework == "torch" else fake(array)


def poisoned(shape: Any, dtype: str) -> Any:
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xFF)
    return fake(array)


class FakeCuda(Host):
    """What View.run returns."""

    device = 0
    stream = SimpleNamespace(synchronize=lambda: None)

    @contextlib.contextmanager
    def context(self) -> Any:
        yield CUPY


CUPY = SimpleNamespace(
    empty=poisoned,
    zeros=lambda shape, dtype: fake(np.zeros(shape, dtype)),
    asarray=fake,
    from_dlpack=lambda owner: fake(
        owner.as_subclass(torch.Tensor).numpy() if isinstance(owner, torch.Tensor) else owner
    ),
    stack=lambda arrays: fake(np.stack(arrays)),
    ascontiguousarray=lambda array: fake(np.ascontiguousarray(array)),
    lib=SimpleNamespace(
        stride_tricks=SimpleNamespace(
            as_strided=lambda *args: fake(np.lib.stride_tricks.as_strided(*args))
        )
    ),
    cuda=SimpleNamespace(Device=lambda _: FakeDevice()),
)


class _Fft:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: fake(getattr(scipy.fft, name)(*args, **kwargs))


def _fft_of(like: Any) -> Any:
    return _Fft() if isinstance(like, FakeArray) else scipy.fft


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The stand-in in place of CuPy; remembers its launches."""
    device = FakeCuda()
    monkeypatch.setattr(_cuda, "cupy", lambda: CUPY)
    monkeypatch.setattr(_cuda, "installed", lambda: True)
    monkeypatch.setattr(arrays, "scipy_fft", _fft_of)
    monkeypatch.setattr(_cuda, "current", lambda number, framework: device)
    monkeypatch.setattr(_cuda, "from_host", lambda array, number, framework: made(array, framework))
    monkeypatch.setattr(
        _cuda, "empty", lambda n, number, framework: made(poisoned(n, "f4"), framework)
    )
    return device
