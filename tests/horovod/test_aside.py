"""Standing aside: Horovod gets the tensor itself, and the compression is back at the right step."""

import gc
import weakref

import pytest

from sn_compress.torch.under_horovod.aside import Aside

NAMES = ("a", "b", "c")


class Compression:
    """Takes note of what it is asked about."""

    settings = None

    def __init__(self):
        self.asked = []

    def compress(self, tensor):
        self.asked.append(tensor)
        return tensor, None


class Optimizer:
    """What Horovod's keeps of its compression."""

    def __init__(self):
        self._compression = Compression()


@pytest.mark.parametrize("under_way", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_it_is_away_for_as_many_steps_as_it_was_told(under_way, steps):
    optimizer, woken = Optimizer(), []
    ours = optimizer._compression
    aside = Aside(optimizer, tensors=3, under_way=under_way, steps=steps, wake=woken.append)
    for _ in NAMES[under_way:]:  # the rest of the step that has begun
        tensor = object()
        assert optimizer._compression.compress(tensor) == (tensor, None)
    assert aside.begun == 0
    for step in range(steps):
        for name in NAMES:
            assert optimizer._compression.compress(name) == (name, None)
        assert aside.begun == step + 1
    assert not ours.asked
    assert not woken
    for name in NAMES:
        optimizer._compression.compress(name)
    assert ours.asked == list(NAMES)
    assert woken == [steps]
    assert optimizer._compression is ours


def test_it_comes_back_earlier_when_called():
    optimizer, woken = Optimizer(), []
    ours = optimizer._compression
    aside = Aside(optimizer, tensors=3, under_way=1, steps=10, wake=woken.append)
    for _ in range(2 + 3 + 3):
        optimizer._compression.compress(0)
    assert aside.take() == 2
    assert aside.take() == 0
    aside.end()
    aside.end()
    assert woken == [2]
    assert optimizer._compression is ours


def test_it_does_not_keep_its_optimizer():
    optimizer = Optimizer()
    Aside(optimizer, tensors=3, under_way=1, steps=10, wake=lambda steps: None)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
