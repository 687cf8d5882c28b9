"""Error feedback: nothing is lost, only late; the memory saves, loads and keeps to its name."""

import functools
import itertools
import math
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import U, alike, codecs, examples, norm, random, transform_error

from sn_compress import CompressError, ErrorFeedback, FFTCodec
from sn_compress.engine.engine_state import load_mean

CODECS = codecs()


def drift(codec: FFTCodec, n: int, inputs: list[np.ndarray], residuals: list[float]) -> float:
    """How far the sum of what came out may be from the sum of what went in less the residual.

    The codec's own arithmetic in the spectrum is exact but for the addition of the memory, one
    rounding of a sum no larger than |x| + |residual| and as much again where a decoded value is
    subtracted from a clipped one. Each transform errs by e: forward on x, back on what is sent,
    which is at most |x| + 2 |residual|. Two more transforms read the last residual.
    """
    e = transform_error(codec, n)
    steps = zip(inputs, residuals, strict=True)
    total = sum(e * (2.1 * norm(x) + 2.1 * r) + 3 * U * (norm(x) + r) for x, r in steps)
    return total + 2 * e * residuals[-1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_all_that_went_in_comes_out_or_is_remembered(backend, codec):
    sizes = ((5000, 20, 0), (9000, 3, 60), (4097, 3, -100), (63, 3, -60), (1, 3, 0), (0, 1, 0))
    for n, steps, power in sizes:
        feedback = ErrorFeedback(codec)
        inputs, sent, residuals = [], np.zeros(n), [0.0]
        for step in range(steps):
            x = np.ldexp(random(n, step) * np.float32(1 + step % 3), power).astype(np.float32)
            payload = feedback.encode("w", x)
            inputs.append(x)
            sent += codec.decode(payload)
            residuals.append(math.sqrt(payload.error))
        # Padding has no place in the vector, but the memory of it does come back later: it stays in
        # the spectrum. What the vector shows of the sum is still exact, by linearity.
        whole = sum(x.astype(np.float64) for x in inputs)
        left = feedback.residual("w").astype(np.float64)
        before = [a + b for a, b in itertools.pairwise(residuals)]
        floor = 100 * steps * 2.0**-149 * math.sqrt(2 * n + 64)
        assert norm(sent + left - whole) <= drift(codec, n, inputs, before) + floor


@pytest.mark.parametrize(("transform", "values"), [
    ("dct", "sign"), ("hadamard", "2bit"), ("identity", "range"), ("identity", "sign"),
    ("axes", "2bit"), ("axes", "range"),
])  # fmt: skip
def test_every_step_is_a_contraction(backend, transform, values):
    """What error feedback asks of a codec, so that its memory stays bounded (Karimireddy et al.
    2019): by a fixed fraction less energy is left than there was."""
    n, block = 3000, 256
    over = {"shape": (60, 50), "axes": (1,)} if transform == "axes" else {}
    codec = FFTCodec(theta=0.75, block=block, values=values, transform=transform, **over)
    feedback = ErrorFeedback(codec)
    for step in range(30):
        payload = feedback.encode("w", random(n, step % 3))
        # Of k kept values v with mean magnitude m, k m**2 = |v|_1**2 / k >= |v|_2**2 / k is
        # taken out, less what m is rounded by, relatively below 2**-7: squared, as the mean is the
        # best level. And |v|_2**2 >= k / block of the block's energy.
        assert payload.error <= payload.energy * (1 - (1 - 2.0**-14) / block)


def test_decay_forgets(backend):
    codec = FFTCodec(theta=0.9)
    x = random(5000)
    fades = ErrorFeedback(codec, decay=0.5)
    fades.encode("w", x)
    first = fades.residual("w")
    payload = fades.encode("w", np.zeros(5000, np.float32))
    total = codec.decode(payload).astype(np.float64) + fades.residual("w")
    assert norm(total - 0.5 * first) <= drift(codec, 5000, [first], [norm(first)])


def test_illegal_decay():
    for decay in (0, -1, 1.01, math.nan):
        with pytest.raises(CompressError, match=r"decay=.*expected above 0 and at most 1"):
            ErrorFeedback(FFTCodec(), decay=decay)


BASES = [
    {},
    {"block": 64, "transform": "dct"},
    {"block": None, "transform": "hadamard"},
    {"block": 256, "transform": "identity"},
    {"transform": "axes", "shape": (30, 25, 12), "axes": (1, 2)},
    {"block": None, "transform": "axes", "shape": (9000,), "axes": (0,)},
]
# Each stays, becomes the next, and the one after that; and another block, with a rest at the end.
CHANGES = [(old, BASES[(at + by) % len(BASES)]) for at, old in enumerate(BASES) for by in range(3)]
CHANGES += [
    ({"block": a}, {"block": b}) for a, b in ((4096, 64), (64, 4096), (None, 256), (256, None))
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=str)
def test_another_transform_or_block_keeps_the_residual(backend, old, new):
    n = 9000
    saved = ErrorFeedback(FFTCodec(theta=0.9, **old))
    payload = saved.encode("w", random(n))
    loaded = ErrorFeedback(FFTCodec(theta=0.9, **new))
    loaded.load_state_dict(saved.state_dict())
    difference = norm(loaded.residual("w").astype(np.float64) - saved.residual("w"))
    e = sum(transform_error(c, n) for c in (saved.codec_of("w"), loaded.codec_of("w")))
    assert difference <= 2.1 * e * math.sqrt(payload.error)
    if old == new:
        assert difference == 0
    # And the one goes on as the other: the next step loses nothing.
    x, before, codec = random(n, 1), saved.residual("w").astype(np.float64), loaded.codec_of("w")
    total = codec.decode(loaded.encode("w", x)).astype(np.float64) + loaded.residual("w")
    assert norm(total - x - before) <= drift(codec, n, [x], [3 * norm(before)]) + difference


def test_a_shape_is_a_shape_as_a_list_too():
    """Loaded from JSON, say; or a torch.Size."""
    one, two = (
        FFTCodec(transform="axes", shape=kind((50, 10)), axes=kind((1,))) for kind in (tuple, list)
    )
    assert one.basis == two.basis
    assert repr(one) == repr(two)
    np.testing.assert_array_equal(
        one.decode(two.encode(random(500))), two.decode(one.encode(random(500)))
    )


def test_another_size_under_the_same_name():
    feedback = ErrorFeedback(FFTCodec())
    feedback.encode("w", random(5000))
    residual = feedback.residual("w")
    with pytest.raises(CompressError, match="'w' has 4999 elements; its memory has 5000"):
        feedback.encode("w", random(4999))
    np.testing.assert_array_equal(feedback.residual("w"), residual)
    feedback.forget("w")
    feedback.encode("w", random(4999))
    with pytest.raises(CompressError, match=r"nothing was encoded for 'v'; known: \['w'\]"):
        feedback.residual("v")
    feedback.forget("never seen")


GONE = object()
OF_B = ("memory", "b")
ARRAYS = (*OF_B, "state", "arrays")
# Where something else stands in a state; the arrays of "b" are of a block of 4096 and one of 1024.
BAD_STATES = {
    "entry of a wrong kind": (("memory",), {"b": None}),
    **{f"no {key}": ((*OF_B, key), GONE) for key in ("n", "codec", "basis", "state")},
    "no such codec": ((*OF_B, "codec"), "ZipCodec"),
    "other codec": ((*OF_B, "codec"), "TopKCodec"),
    "odd block": ((*OF_B, "basis", "block"), 77),
    "other block": ((*OF_B, "basis", "block"), 64),
    "other transform": ((*OF_B, "basis", "transform"), "identity"),
    "no such transform": ((*OF_B, "basis", "transform"), "sine"),
    "auto": ((*OF_B, "basis", "transform"), "auto"),
    "axes without a shape": ((*OF_B, "basis", "transform"), "axes"),
    "axes of another shape": (
        (*OF_B, "basis"),
        lambda basis: basis | {"transform": "axes", "shape": (7, 7), "axes": (0,)},
    ),
    "no such setting": ((*OF_B, "basis", "blocks"), 64),
    "basis of a wrong kind": ((*OF_B, "basis"), ["fft"]),
    "other n": ((*OF_B, "n"), 5121),
    "negative n": ((*OF_B, "n"), -5),
    "n of a wrong kind": ((*OF_B, "n"), "5000"),
    "no arrays": ((*OF_B, "state"), {}),
    "arrays of a wrong kind": (ARRAYS, "abc"),
    "part missing": (ARRAYS, lambda parts: parts[:1]),
    "part too many": (ARRAYS, lambda parts: [*parts, parts[0]]),
    "part of a wrong kind": ((*ARRAYS, 1), lambda part: part.astype("U")),
    "short part": ((*ARRAYS, 1), lambda part: part[:, :-1]),
    "NaN in it": ((*ARRAYS, 0), lambda part: part * np.float32(np.nan)),
    "beyond float32": ((*ARRAYS, 0), lambda part: part.astype("f8") + 1e300),
}


def changed(state, path, new):
    *way, last = path
    place = functools.reduce(operator.getitem, way, state)
    if new is GONE:
        del place[last]
    else:
        place[last] = new(place[last]) if callable(new) else new
    return state


@pytest.mark.parametrize("kind", BAD_STATES)
def test_a_bad_state_is_refused_and_changes_nothing(kind):
    feedback = ErrorFeedback(FFTCodec())
    for name in "ab":
        feedback.encode(name, random(5000))
    before = [feedback.residual(name) for name in "ab"]
    with pytest.raises(CompressError, match="'b'"):
        feedback.load_state_dict(changed(feedback.state_dict(), *BAD_STATES[kind]))
    alike([feedback.residual(name) for name in "ab"], before)


def test_memory_in_another_order_of_axes_is_taken():
    feedback = ErrorFeedback(FFTCodec())
    feedback.encode("a", random(8192))
    state = feedback.state_dict()
    saved = state["memory"]["a"]["state"]
    saved["arrays"] = [np.asfortranarray(part) for part in saved["arrays"]]
    other = ErrorFeedback(FFTCodec())
    other.load_state_dict(state)
    one, two = (it.encode("a", random(8192)).to_bytes() for it in (feedback, other))
    assert one == two


def test_a_state_for_another_size_is_refused(backend):
    codec = FFTCodec(theta=0.9)
    for wrong in (0, 4096, 8192, 100):
        state = codec.new_state(wrong)
        with pytest.raises(CompressError):
            codec.encode(random(5000), state=state)
        assert not any(part.any() for part in state)


@examples
@given(st.sampled_from(CODECS), st.integers(0, 3000), st.integers(0, 3000))
def test_a_restart_keeps_what_it_is_given_and_nothing_else(backend, codec, before, after):
    feedback = ErrorFeedback(codec)
    feedback.encode("w", random(before))
    feedback.encode("v", random(before))
    left = random(after, 1)
    feedback.restart({"w": left})
    assert feedback.remembers("w")
    assert not feedback.remembers("v")
    # There and back through the transform.
    error = norm(feedback.residual("w") - left)
    assert error <= 2.1 * transform_error(codec, after) * norm(left)
    feedback.encode("w", random(after, 2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_mean_of_states_keeps_what_is_to_be_sent(backend, ranks):
    saved, residuals = [], []
    for rank in range(ranks):
        feedback = ErrorFeedback(FFTCodec(theta=0.9))
        feedback.encode("w", random(5000, rank))
        if rank == 0:
            feedback.encode("only here", random(100))
            alone = feedback.residual("only here")
        saved.append(feedback.state_dict())
        residuals.append(feedback.residual("w").astype(np.float64))
    other = ErrorFeedback(FFTCodec(theta=0.9, block=1024))
    other.encode("w", random(5000))
    load_mean(other, saved)
    mean = np.mean(residuals, axis=0)
    # Transformed once forward and once back, and rounded to float32 before.
    bound = (2 * transform_error(FFTCodec(block=1024), 5000) + U) * norm(mean)
    assert norm(other.residual("w") - mean) <= bound
    # 100 elements are one block of the tail; the same bound, and a division.
    assert norm(other.residual("only here") - alone / ranks) <= 1e-5 * norm(alone)
