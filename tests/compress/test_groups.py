"""Groups on grids: C++ and NumPy agree bit by bit, grids are as fine as said, chance is fair."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from samples import for_each

from sn_compress import _native
from sn_compress.ops import groups

SIZES = (0, 1, 31, 32, 33, 63, 1000, 2**20 + 1)
KEY = (0x12345678, 0x9ABCDEF0)
KINDS = ("float32", "float16", "bfloat16")


def vectors(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32)
    holes = x.copy()
    holes[rng.random(n) < 0.3] = 0
    few = x.copy()
    few[5::501] = 0
    bad = x.copy()
    bad[: n // 3 : 7] = np.nan
    bad[1 : n // 2 : 31] = -np.inf
    bad[5::97] = 3e38
    return {
        "normal": x,
        "half zeros": np.maximum(x, 0),
        "negative": -np.maximum(x, 0),
        "holes": holes,
        "few zeros": few,
        "far from zero": x + np.float32(1000),
        "wide": x * np.float32(10) ** (np.arange(n) % 60 - 30).astype(np.float32),
        "fine": x * np.float32(2.0**-106),
        "denormal": (np.arange(n) % 7 - 3).astype(np.float32) * np.float32(2.0**-149),
        "all equal": np.full(n, 0.3, np.float32),
        "zeros": np.zeros(n, np.float32),
        "not finite": bad,
        "all NaN": np.full(n, np.nan, np.float32),
    }


def narrowed(x: np.ndarray, kind: str) -> np.ndarray:
    """The values as another type, bfloat16 as its bits."""
    if kind == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(kind)


class Form:
    """The extension with its loops in one form."""

    def __init__(self, core, name: str) -> None:
        self.pack_groups = lambda *args: core.pack_groups(*args, name)
        self.unpack_groups = lambda *args: core.unpack_groups(*args, name)


def unpacked(kept: groups.Grids, n: int, bits: int, group: int) -> np.ndarray:
    return groups.unpack(kept.bases, kept.steps, kept.codes, n, bits, group)


def same(ours: groups.Grids, theirs: groups.Grids) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


@for_each("n", SIZES)
@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_all_forms_of_both_back_ends_give_the_same_bits(core, monkeypatch, n, bits):
    forms = {name: Form(core, name) for name in core.group_forms()}
    assert "plain" in forms
    # The long one in one group and of one kind only: NumPy takes a second for each.
    kinds = dict(itertools.islice(vectors(n).items(), 1 if n > 2000 else None))
    for group, name in itertools.product((256,) if n > 2000 else (32, 256, 65536), kinds):
        for bound in (math.inf, 0.3, 1e-3):
            monkeypatch.setattr(_native, "core", lambda: None)
            twin = groups.pack(kinds[name], bits, group, bound, KEY)
            values = unpacked(twin, n, bits, group)
            for form, native in forms.items():
                monkeypatch.setattr(_native, "core", lambda native=native: native)
                ours = groups.pack(kinds[name], bits, group, bound, KEY, 3 if n > 2000 else 1)
                assert same(ours, twin), (form, name, group, bound)
                assert unpacked(ours, n, bits, group).tobytes() == values.tobytes(), form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_all_forms_give_the_same_bits_of_each_type_and_run(core, monkeypatch, kind, bits):
    """Runs of odd length begin in the middle of a random word; those of 33 fill no vector."""
    n = 33 * 7 * 16
    runs = ((0, True), (33, True), (33 * 7, False), (33 * 14, True))
    for (name, x), (run, look) in itertools.product(vectors(n).items(), runs):
        values, found = narrowed(x, kind), set()
        for form in core.group_forms():
            monkeypatch.setattr(_native, "core", lambda form=form: Form(core, form))
            kept = groups.pack(values, bits, 256, math.inf, KEY, run=run, look=look)
            back = np.empty_like(values)
            groups.unpack(*kept[:2], kept.codes, n, bits, 256, out=back, run=run)
            found.add(b"".join(part.tobytes() for part in (*kept, back)))
        assert len(found) == 1, (name, run)


# Axes of an array in memory, those of a row's places, and how many images: as norms see channels
# last, by batch, instance and groups of channels, channels first on small images, and two that no
# tile is for.
TURNED = {
    "batch": ((3, 9, 11, 40), (3, 0, 1, 2), 3),
    "instance": ((2, 20, 15, 24), (0, 3, 1, 2), 2),
    "groups": ((2, 7, 5, 6, 8), (0, 3, 1, 2, 4), 3),
    "groups of three": ((2, 7, 5, 6, 3), (0, 3, 1, 2, 4), 3),
    "channels first": ((5, 37, 7, 7), (1, 0, 2, 3), 3),
    "three axes of rows": ((3, 4, 5, 6, 7), (0, 2, 4, 1, 3), 2),
    "columns": ((4, 5, 6), (0, 2, 1), 1),
    "whole lines": ((4, 12, 25, 64), (3, 0, 1, 2), 3),
    "whole lines in pieces": ((2, 40, 3, 8, 64), (2, 4, 0, 1, 3), 3),
    "whole lines of odd runs": ((3, 9, 21, 64), (3, 0, 1, 2), 3),
    "gaps": ((5, 8, 12), (2, 0, 1), 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TURNED)
def test_turned_views_are_packed_as_their_copies(backend, name, kind):
    shape, order, axes = TURNED[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 1::5] = np.abs(x[..., 1::5])
    x[..., 2::5] = -np.abs(x[..., 2::5])
    x.ravel()[::97] = 0
    lossy = x.copy()
    lossy.ravel()[50::331] = np.inf
    cases = ((1, math.inf), (2, math.inf), (4, 0.3), (4, math.inf), (8, math.inf))
    for number, ((bits, bound), look) in enumerate(itertools.product(cases, (True, False))):
        memory = narrowed(lossy if number // 2 % 2 == number % 2 else x, kind)
        memory = memory[:, ::2] if name == "gaps" else memory
        view = memory.transpose(order)
        run, copy = math.prod(view.shape[-axes:]), np.ascontiguousarray(view)
        expected = groups.pack(copy, bits, 256, bound, KEY, run=run, look=look)
        for threads in (1, 3):
            kept = groups.pack(view, bits, 256, bound, KEY, threads, run=run, look=look)
            assert same(kept, expected)
            place = np.zeros_like(memory).transpose(order)
            args = (*kept[:2], kept.codes, view.size, bits, 256)
            groups.unpack(*args, threads, out=place, run=run)
            whole = groups.unpack(*args, out=np.empty(view.size, view.dtype), run=run)
            assert place.tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_floats_of_two_bytes_are_packed_as_their_values(backend, kind):
    """All 65,536 of them, in random order, and back again."""
    values = np.random.default_rng(0).permutation(np.arange(2**16, dtype=np.uint16))
    dtype = getattr(torch, kind)
    wide = torch.from_numpy(values.view(np.int16)).view(dtype).float().numpy()
    values = values.view(np.float16) if kind == "float16" else values
    for bits in groups.WIDTHS:
        kept = groups.pack(values, bits, 256, math.inf, KEY)
        expected = groups.pack(wide, bits, 256, math.inf, KEY)
        for field, ours, theirs in zip(kept._fields, kept, expected, strict=True):
            # NaN among what escapes may have other bits than before.
            assert np.array_equal(ours, theirs, equal_nan=field == "values"), (field, bits)
        back = np.empty_like(values)
        groups.unpack(*kept[:2], kept.codes, values.size, bits, 256, out=back)
        ours = torch.from_numpy(back.view(np.int16)).view(dtype)
        full = torch.from_numpy(unpacked(kept, values.size, bits, 256)).to(dtype)
        torch.testing.assert_close(ours, full, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_grids_are_as_fine_as_the_values_allow(backend, bits):
    top = 2**bits - 1
    for name, x in vectors(1000).items():
        kept = groups.pack(x, bits, 32, math.inf, KEY)
        steps = groups.step_values(kept.steps)
        for g, step in enumerate(steps):
            row = x[32 * g : 32 * g + 32].astype(float)
            row = row[np.abs(row) < 2.0**120]
            if not row.size:
                continue
            low, high = row.min(), row.max()
            # A grid through zero loses one point at most; rounding up to 8 bits loses 1/128.
            through_zero = (row == 0).any() and low < 0 < high
            points = max(top - 1, 1) if through_zero else top
            widest = max((high - low) / points, 2.0**-110)
            assert step <= widest * (1 + 2.0**-7) * (1 + 2.0**-20), name
        if bits > 1:
            fit = np.abs(x) < 2.0**120
            assert np.array_equal(np.flatnonzero(~fit), kept.at), name


def test_words_are_fair_and_do_not_depend_on_their_neighbours():
    """Each check is off by six deviations with probability 2e-9."""
    n = 2**20
    words = groups.random_words(0, n, groups.keys(3, 1))
    for bit in range(32):
        ones = int((words >> bit & 1).sum())
        assert abs(ones - n / 2) < 6 * math.sqrt(n) / 2, bit
    u = words / 2.0**32 - 0.5
    halves = groups.random_halves(0, 2 * n, groups.keys(3, 1)) / 2.0**16 - 0.5
    assert abs((halves[::2] * halves[1::2]).sum()) < 6 * math.sqrt(n) / 12
    others = {
        "next": u[1:],
        "next group": u[256:],
        "next step": groups.random_words(0, n, groups.keys(3, 2)) / 2.0**32 - 0.5,
        "next seed": groups.random_words(0, n, groups.keys(4, 1)) / 2.0**32 - 0.5,
        "beyond 32 bits": groups.random_words(2**32, n, groups.keys(3, 1)) / 2.0**32 - 0.5,
    }
    for name, other in others.items():
        products = u[: other.size] * other
        # Of independent uniform numbers, a product has the deviation 1/12.
        assert abs(products.sum()) < 6 * math.sqrt(other.size) / 12, name


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_lies_on_the_grid_stays(backend, bits):
    """Each point of grids of every step of eight bits, with as many points below zero as may be."""
    top = 2**bits - 1
    mantissas = (128 + np.arange(128)).astype(np.float32) * np.float32(2.0**-9)
    for below in sorted({1, top // 3, top // 2, top - 1}):
        points = np.resize(np.arange(top + 1) - below, 256).astype(np.float32)
        x = (mantissas[:, None] * points).ravel()
        for number in range(8):
            kept = groups.pack(x, bits, 256, math.inf, groups.keys(0, number))
            assert np.array_equal(unpacked(kept, x.size, bits, 256), x), below


@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_variance_is_that_of_the_errors(backend, bits):
    """Of 2**18 squared errors the mean is off by six of its own deviations, at 2e-9."""
    n = 2**18
    for name in ("normal", "half zeros"):
        x = vectors(n)[name]
        kept = groups.pack(x, bits, 256, math.inf, KEY)
        squared = np.square(unpacked(kept, n, bits, 256).astype(float) - x)
        # g is rounded to 1/256: g (256 - g) is off by 1/2 of 256 at most, but 1/6 on average.
        slack = 6 * squared.std() / math.sqrt(n) + 2.0**-9 * squared.mean()
        assert abs(kept.variance(n) - squared.mean()) < slack, name


def test_at_one_bit_the_fewest_of_zeros_and_both_sides_escape():
    """Two points hold zero and one side; a zero among 256 elements does not cost half of them."""
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    x[[3, 300]] = (0.0, -0.0)
    grids = groups.pack(x, 1, 256, math.inf, KEY)
    assert grids.at.tolist() == [3, 300]
    values = unpacked(grids, 512, 1, 256)[:256]
    assert {*values.tolist()} == {x[:256].min(), values.max()}
    # More zeros than elements of a side: that side escapes, and no zero does.
    x[:256][x[:256] < 0.5] = 0
    x[:5] = -0.1
    assert groups.pack(x, 1, 256, math.inf, KEY).at.tolist() == [*range(5), 300]


def test_buffers_that_do_not_belong_together_are_refused(core):
    x, bases, steps = np.zeros(64, np.float32), np.zeros(2, np.float32), np.zeros(2, np.uint16)
    spread, packed = np.zeros(2, np.uint32), np.zeros(32, np.uint8)

    def pack(kind="float32", spread=spread, bits=4, group=32):
        args = (bases, steps, spread, packed, 0, 64, bits, group, 1.0, 0, 0, ())
        core.pack_groups(x, kind, *args)

    def unpack(bits=4, group=32, *form):
        core.unpack_groups(bases, steps, packed, x, "float32", 0, 64, bits, group, (), *form)

    pack()
    unpack()
    for bits, group in ((3, 32), (8, 32), (4, 64), (4, 48), (4, 0)):
        for call in (pack, unpack):
            with pytest.raises(ValueError, match="do not match"):
                call(bits=bits, group=group)
    with pytest.raises(ValueError, match="no form sse9"):
        unpack(4, 32, "sse9")
    with pytest.raises(ValueError, match="float64"):
        pack(kind="float64")
    with pytest.raises(ValueError, match="spread"):
        pack(spread=spread[:1])
    eight = np.zeros(8, np.float32), np.zeros(8, np.uint16), packed, x, "float32", 0, 8, 4, 32
    core.unpack_groups(*eight, (64, 8, 0, 1, 8, 0, 8))
    for numbers in [
        (64, 8, 0, 1, 8, 0, 9), (65, 8, 0, 1, 8, 0, 8), (64, 8, 0, 2, 8, 0, 8),
        (64, 0, 0, 1, 8, 0, 8), (64, 8, 0, 1, 0, 0, 8), (64, 8, 0, -1, 8, 0, 1),
        (64, 3, 0, 1, 8, 0, 8), (0, 8, 0, 1, 8, 0, 8),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="a turn that does not match"):
            core.unpack_groups(*eight, numbers)
