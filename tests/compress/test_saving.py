"""Error feedback with every codec: saved and loaded, a run goes on as if nothing had happened."""

import copy
import io

import numpy as np
import pytest
from rivals.codecs import CODECS, codec
from rivals.codecs.auto import AutoState
from samples import for_each, random

from sn_compress import CompressError, ErrorFeedback, FFTCodec

SHAPES = {"a": (40, 25), "b": (9, 7)}
SIZES = {name: rows * columns for name, (rows, columns) in SHAPES.items()}
REST = FFTCodec(theta=0.9, transform="identity", block=256)
# Name of the case -> codec for a tensor of this shape.
CASES = {
    "auto": lambda shape: codec("auto", ratio=12, shape=shape, every=3),
    "auto without a shape": lambda shape: codec("auto", ratio=20, every=3),
    "fft": lambda shape: codec("fft", theta=0.9, block=256),
    "fft paper": lambda shape: codec("fft", preset="paper"),
    "dct": lambda shape: codec("dct", theta=0.9, values="2bit"),
    "hadamard": lambda shape: codec("hadamard", theta=0.9, values="sign"),
    "axes": lambda shape: codec("axes", theta=0.9, shape=shape, axes=(1,)),
    "lowrank": lambda shape: codec("lowrank", shape=shape, rank=2),
    "lowrank rest": lambda shape: codec("lowrank", shape=shape, rank=1, rest=REST),
    "topk": lambda shape: codec("topk", theta=0.9, decay=0.95),
    "dgc": lambda shape: codec("dgc", theta=0.9),
    "demo": lambda shape: codec("demo", shape=shape, topk=4),
    "demo of a vector": lambda shape: codec("demo", topk=4),
    "onebit": lambda shape: codec("onebit", bucket=50),
    "powersgd": lambda shape: codec("powersgd", shape=shape, rank=2),
    "powersgd of a vector": lambda shape: codec("powersgd"),
    "qsgd": lambda shape: codec("qsgd"),
    "terngrad": lambda shape: codec("terngrad"),
    "bounded": lambda shape: codec("bounded", bound=0.1),
    "fp16": lambda shape: codec("fp16"),
    "bf16": lambda shape: codec("bf16"),
    "fp8": lambda shape: codec("fp8"),
}
FORGETFUL = ("qsgd", "terngrad", "bounded", "fp16", "bf16")
every_case = pytest.mark.parametrize("case", CASES)


def make(case: str, decay: float = 0.9) -> ErrorFeedback:
    return ErrorFeedback(lambda name: CASES[case](SHAPES[name]), decay=decay)


def run(feedback: ErrorFeedback, steps: range) -> list[bytes]:
    return [
        feedback.encode(name, random(n, 10 * step + i)).to_bytes()
        for step in steps
        for i, (name, n) in enumerate(SIZES.items())
    ]


def through_a_file(state):
    """As NumPy keeps it: arrays, and the rest as a pickle of plain things."""
    file = io.BytesIO()
    np.save(file, np.array(state, object), allow_pickle=True)
    file.seek(0)
    return np.load(file, allow_pickle=True).item()


def leaves(node):
    if isinstance(node, dict):
        assert all(isinstance(key, str) for key in node)
        node = list(node.values())
    if isinstance(node, list | tuple):
        for child in node:
            yield from leaves(child)
    else:
        yield node


def test_every_codec_is_here():
    assert {case.split()[0] for case in CASES} == set(CODECS)


@every_case
def test_a_resumed_run_is_the_uninterrupted_one(case):
    """From a state of nothing but arrays, numbers and strings."""
    first, second, third = make(case), make(case), make(case)
    # Four steps, so that auto is between two choices, then over the next one.
    run(first, range(4))
    state = first.state_dict()
    assert all(it is None or type(it) in (int, float, str, np.ndarray) for it in leaves(state))
    kept = copy.deepcopy(state)
    second.load_state_dict(through_a_file(state))
    expected = run(first, range(4, 8))
    assert run(second, range(4, 8)) == expected
    for name in SIZES:
        np.testing.assert_array_equal(first.residual(name), second.residual(name))
    # What was saved is a copy, and what was loaded from it another one.
    for saved in (kept, state, state):
        third.load_state_dict(saved)
        assert run(third, range(4, 8)) == expected


@every_case
def test_a_value_that_is_not_finite_missing_or_of_another_tensor_is_seen(case):
    feedback = make(case)
    run(feedback, range(2))
    before = {name: feedback.residual(name) for name in SIZES}

    def refused(state, message=""):
        with pytest.raises(CompressError, match=f"memory of '[ab]' cannot be loaded{message}"):
            feedback.load_state_dict(state)

    def arrays(state):
        return [a for a in leaves(state) if isinstance(a, np.ndarray) and a.size]

    state = feedback.state_dict()
    for i, like in enumerate(arrays(state)):
        damaged = feedback.state_dict()
        arrays(damaged)[i].reshape(-1)[-1] = np.nan if like.dtype.kind == "f" else -1
        refused(damaged)
    memory = state["memory"]
    refused({**state, "memory": {**memory, "a": {**memory["a"], "state": {}}}}, ": has no")
    if any(a.size > 1 for a in arrays(state)):
        refused({**state, "memory": {"a": {**memory["a"], "state": memory["b"]["state"]}}})
    for name, residual in before.items():
        np.testing.assert_array_equal(feedback.residual(name), residual)


@for_each("number", range(len(CASES)))
def test_another_codec_takes_over_the_vector(number):
    old, new = ("fft", "topk", "onebit", "qsgd")[number % 4], list(CASES)[number]
    saved, loaded = make(old), make(new)
    run(saved, range(3))
    if new in FORGETFUL and old not in FORGETFUL:
        with pytest.raises(CompressError, match=r"'a'.*keeps no error memory.*Start without one"):
            loaded.load_state_dict(saved.state_dict())
        return
    loaded.load_state_dict(saved.state_dict())
    for name in SIZES:
        before, after = saved.residual(name), loaded.residual(name)
        # An orthonormal transform there and back, of at most 1000 values: test_feedback.py has
        # the tight bound, 2 (8 log2(4096) + 18) u for each of the two codecs.
        slack = 4 * (8 * 12 + 18) * 2.0**-24 * np.linalg.norm(before.astype(np.float64))
        assert np.linalg.norm(after.astype(np.float64) - before) <= slack
    run(loaded, range(3, 5))


def test_other_settings_of_the_same_memory_lose_nothing():
    saved = make("topk")
    run(saved, range(3))
    loaded = ErrorFeedback(codec("topk", theta=0.5, chunk=100))
    loaded.load_state_dict(saved.state_dict())
    for name in SIZES:
        np.testing.assert_array_equal(saved.residual(name), loaded.residual(name))


@pytest.mark.parametrize("old", ["dgc", "lowrank", "powersgd", "auto", "demo"])
def test_a_memory_of_a_codec_that_only_benchmarks_have_is_refused(old):
    saved, loaded = make(old), make("topk")
    run(saved, range(3))
    with pytest.raises(CompressError, match="memory of 'a' cannot be loaded: no codec is of class"):
        loaded.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("wrong", "said"), [
    ({"age": -1}, "encodings old"),
    ({"age": "old"}, "encodings old"),
    ({"choice": 10**6}, "none of the"),
    ({"choice": "x"}, "none of the"),
    ({"settings": "00" * 12}, "none of the"),  # as if the number meant another candidate
])  # fmt: skip
def test_damaged_choices_of_auto(wrong, said):
    made = CASES["auto"](SHAPES["a"])
    state = AutoState(None, None, 0)
    made.encode(random(1000), state=state)
    with pytest.raises(CompressError, match=said):
        made.load_state({**made.dump_state(state, 1000), **wrong}, 1000)


def test_a_state_of_another_format_or_name_is_refused():
    feedback = make("topk")
    run(feedback, range(1))
    state = feedback.state_dict()
    for other in (state | {"format": 1}, state | {"memory": None}, [state]):
        with pytest.raises(CompressError, match="not a state of format 2 with a memory by name"):
            feedback.load_state_dict(other)
    feedback.load_state_dict(state)
    state["memory"]["gone"] = state["memory"]["a"]
    with pytest.raises(CompressError, match="memory of 'gone', for which there is no codec"):
        feedback.load_state_dict(state)


def test_a_codec_is_asked_for_once_and_forgotten_with_its_memory():
    asked = []

    def codec_for(name):
        asked.append(name)
        return codec("lowrank", shape=SHAPES[name])

    feedback = ErrorFeedback(codec_for)
    run(feedback, range(2))
    assert asked == ["a", "b"]
    assert feedback.codec_of("a") is feedback.codec_of("a")
    feedback.forget("a")
    run(feedback, range(1))
    assert asked == ["a", "b", "a"]
