"""Error feedback with every codec: saved and loaded, a run goes on as if nothing had happened."""

import copy
import io

import numpy as np
import pytest
import test_registry
from rivals.codecs import CODECS, codec
from rivals.codecs.auto import AutoState
from samples import alike, for_each, random
from test_registry import pair

from sn_compress import CompressError, ErrorFeedback, FFTCodec

SIZES = {"a": 1000, "b": 63}
REST = FFTCodec(theta=0.9, transform="identity", block=256)
# Name of the case -> codec for n elements: those of the contract, and those that take one shape.
CASES = test_registry.CASES | {
    "auto": lambda n: codec("auto", ratio=12, shape=pair(n), every=3),
    "auto without a shape": lambda n: codec("auto", ratio=20, every=3),
    "axes": lambda n: codec("axes", theta=0.9, shape=pair(n), axes=(1,)),
    "lowrank": lambda n: codec("lowrank", shape=pair(n), rank=2),
    "lowrank rest": lambda n: codec("lowrank", shape=pair(n), rank=1, rest=REST),
}
FORGETFUL = ("qsgd", "terngrad", "bounded", "fp16", "bf16")
every_case = pytest.mark.parametrize("case", CASES)


def make(case: str, decay: float = 0.9) -> ErrorFeedback:
    return ErrorFeedback(lambda name: CASES[case](SIZES[name]), decay=decay)


def run(feedback: ErrorFeedback, steps: range) -> list[bytes]:
    return [
        feedback.encode(name, random(n, 10 * step + i)).to_bytes()
        for step in steps
        for i, (name, n) in enumerate(SIZES.items())
    ]


def residuals(feedback: ErrorFeedback) -> list[np.ndarray]:
    return [feedback.residual(name) for name in SIZES]


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
    alike(residuals(first), residuals(second))
    # What was saved is a copy, and what was loaded from it another one.
    for saved in (kept, state, state):
        third.load_state_dict(saved)
        assert run(third, range(4, 8)) == expected


@every_case
def test_a_value_that_is_not_finite_missing_or_of_another_tensor_is_seen(case):
    feedback = make(case)
    run(feedback, range(2))
    before = residuals(feedback)

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
    alike(residuals(feedback), before)


@for_each("number", range(len(CASES)))
def test_another_codec_takes_over_the_vector(number):
    old, new = ("fft", "topk", "onebit", "qsgd")[number % 4], list(CASES)[number]
    saved, loaded = make(old), make(new)
    run(saved, range(3))
    if new.split()[0] in FORGETFUL and old not in FORGETFUL:
        with pytest.raises(CompressError, match=r"'a'.*keeps no error memory.*Start without one"):
            loaded.load_state_dict(saved.state_dict())
        return
    loaded.load_state_dict(saved.state_dict())
    for before, after in zip(residuals(saved), residuals(loaded), strict=True):
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
    alike(residuals(saved), residuals(loaded))


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
    made = CASES["auto"](1000)
    state = AutoState(None, None, 0)
    made.encode(random(1000), state=state)
    with pytest.raises(CompressError, match=said):
        made.load_state({**made.dump_state(state, 1000), **wrong}, 1000)


def test_a_state_of_another_format_or_name_is_refused():
    feedback = make("topk")
    run(feedback, range(1))
    state = feedback.state_dict()
    wrong = [state | {"memory": memory} for memory in (None, [1])]
    wrong += [{"format": 2}, state | {"format": 1}, state | {"format": 3}, {}, [{}], [state]]
    for other in wrong:
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
        return codec("lowrank", shape=pair(SIZES[name]))

    feedback = ErrorFeedback(codec_for)
    run(feedback, range(2))
    assert asked == ["a", "b"]
    assert feedback.codec_of("a") is feedback.codec_of("a")
    feedback.forget("a")
    run(feedback, range(1))
    assert asked == ["a", "b", "a"]
