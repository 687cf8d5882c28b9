"""The examples in docstrings run and give what they say."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import sn_compress
import sn_memory

RIMS = ("torch", "tensorflow", "keras", "ddp")
PACKAGES = (sn_compress, sn_memory)
PURE = [
    found.name
    for package in PACKAGES
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if found.name.rpartition(".")[2] not in RIMS
    # Triton's kernels cannot be imported without it: tests/memory_torch/test_packing.py has them.
    and not found.name.endswith(("._core", ".__main__", ".activations.kernels"))
]


def room(name: str) -> str:
    """Return the folder right under its package that a module is in."""
    return ".".join(name.split(".")[:2])


@pytest.mark.parametrize("wanted", sorted({room(name) for name in PURE}))
def test_examples_in_docstrings(wanted):
    for name in (it for it in PURE if room(it) == wanted):
        module = importlib.import_module(name)
        package = importlib.import_module(name.partition(".")[0])
        public = {key: getattr(package, key) for key in package.__all__}
        result = doctest.testmod(module, extraglobs={**public, "np": np})
        assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name}"


def test_there_are_examples():
    modules = [importlib.import_module(name) for name in PURE]
    found = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    assert sum(len(test.examples) for test in found) >= 6
