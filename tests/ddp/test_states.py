"""Forged and cut states: fuzz/states.py in short, and what it must not get past."""

import io
import json
import sys
import tracemalloc
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sn_compress import CompressError, ErrorFeedback, FFTCodec, FFTCompression, codec
from sn_compress.engine.engine import Engine
from sn_compress.engine.engine_state import (
    from_bytes,
    load_mean,
    load_state_dict,
    state_dict,
    to_bytes,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))

import states

CASES = 280  # twenty for each subject


def test_sound_states_are_taken():
    for name, make in states.SUBJECTS.items():
        subject = make()
        saved = subject.save(subject.make())
        other = subject.make()
        subject.use(other)
        subject.load(other, saved)
        # Two of DDP give their mean; gossip makes copies when it first asks for them.
        if name not in ("ddp of two", "gossip"):
            assert states.digest(subject.save(other)) == states.digest(saved), name


def test_damaged_states():
    """Taken, or refused with a CompressError and nothing changed; whatever else is raised."""
    seen = [states.case(seed) for seed in range(CASES)]
    assert seen.count("CompressError") > CASES / 2
    assert seen.count("taken") > CASES / 20


def state_of(name: str, said: int) -> dict:
    """Of a memory of 1000 numbers, which says that it has others."""
    own = ErrorFeedback(codec(name))
    own.encode("w", np.ones(1000, np.float32))
    state = own.state_dict()
    state["memory"]["w"]["n"] = said
    return state


def peak(load, refused=True) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CompressError) if refused else nullcontext():
            load()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "n"), [("topk", 2**34), ("onebit", 2**40), ("dct", 2**47)])
def test_a_forged_number_of_elements_makes_nothing(name, n):
    state = state_of(name, n)
    for other in (ErrorFeedback(codec(name)), ErrorFeedback(FFTCodec())):
        assert peak(lambda other=other: other.load_state_dict(state)) < 1 << 20
        assert not other.remembers("w")


def test_a_codec_without_memory_says_a_size_for_nothing():
    state = state_of("qsgd", 2**40)
    other = ErrorFeedback(FFTCodec())
    assert peak(lambda: other.load_state_dict(state), refused=False) < 1 << 20
    with pytest.raises(CompressError, match="1000 elements"):
        other.encode("w", np.ones(1000, np.float32))


def test_an_array_of_one_number_said_often_makes_nothing():
    state = state_of("topk", 2**40)
    state["memory"]["w"]["state"]["arrays"] = [np.broadcast_to(np.float32(0), (2**40,))]
    assert peak(lambda: ErrorFeedback(codec("topk")).load_state_dict(state)) < 1 << 20


@pytest.mark.parametrize("change", [{"shape": [2**20, 2**20]}, {"size": 2**40}, {"step": -1}])
def test_forged_sizes_of_the_shared_exchange_make_nothing(change):
    own = states._shared()
    state = own.state_dict()
    before = states.digest(state)
    state["tensors"]["w"] |= change
    assert peak(lambda: own.load_state_dict(state)) < 1 << 20
    assert states.digest(own.state_dict()) == before


def test_ddp_takes_both_exchanges_or_none():
    subject = states.SUBJECTS["ddp"]()
    own = subject.make()
    before = states.digest(subject.save(own))
    state = subject.save(subject.make())
    state["shared"]["tensors"]["w"]["step"] = 77
    state["feedback"]["memory"]["w"]["n"] = 5
    with pytest.raises(CompressError):
        own.load_state_dict(state)
    assert states.digest(subject.save(own)) == before


def file_of(**arrays: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in arrays.items():
            file.writestr(f"{name}.npy", data)
    return stream.getvalue()


def header(shape: tuple[int, ...], rest: bytes = b"", dtype: str = "<f4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text = text.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + rest


def test_the_file_of_a_checkpoint():
    settings = FFTCompression.using(min_elements=1).settings
    own, other = (Engine(settings, 1, stock="", tuner=None) for _ in range(2))

    def load(data):
        load_state_dict(other, from_bytes(data, settings, 3), ranks=4, rank=3)

    own.feedback.encode("0:w", np.ones(500, np.float32))
    data = to_bytes(state_dict(own, ranks=4, rank=3), settings)
    load(data)
    np.testing.assert_array_equal(other.feedback.residual("0:w"), own.feedback.residual("0:w"))
    with pytest.raises(CompressError, match="rank 3"):
        from_bytes(data, settings, 2)
    head = json.dumps({"rank": 3, "exchange": "gather", "state": {}}).encode()
    for wrong in (
        b"", b"PK", data[:-30], data[: len(data) // 2],
        file_of(head=header((2**40,))),
        file_of(head=header((len(head),), head, "|O")),
        file_of(head=header((len(head),), head, "|u1")),
        file_of(other=header((1,), b"1234")),
    ):  # fmt: skip
        assert peak(partial(load, wrong)) < 1 << 20


def test_a_file_takes_what_was_seen_of_a_size():
    """How many gradients the memory of a tensor holds is a number of NumPy, not of JSON."""
    engine = Engine(states.LOW_RANK.settings, 1, stock="", tuner=None)
    engine.shared = states._shared()
    engine.shared.tensors["w"].held = 1.5
    state = state_dict(engine, ranks=1, rank=0)
    read = from_bytes(to_bytes(state, engine.settings), engine.settings, 0)
    load_state_dict(engine, read, ranks=1, rank=0)
    assert engine.shared.tensors["w"].held == 1.5


def test_means_of_states_of_other_sizes():
    one, two = (ErrorFeedback(codec("topk")) for _ in range(2))
    one.encode("w", np.ones(100, np.float32))
    two.encode("w", np.ones(200, np.float32))
    with pytest.raises(CompressError, match="elements in one state"):
        load_mean(one, [one.state_dict(), two.state_dict()])
