"""What ranks say of themselves, compared: settings at the start, parameters later."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from sn_compress import consistency
from sn_compress.consistency import (
    ParameterCheck,
    agree,
    all_equal,
    digest,
    digest_words,
    fingerprint_of,
)
from sn_compress.errors import CompressError


def on_ranks(ranks, work, joined=()):
    """work(rank, total) on threads; what each returned or raised, without those that joined."""
    live = [rank for rank in range(ranks) if rank not in joined]
    barrier, slots = threading.Barrier(len(live)), {}

    def ended(rank):
        def total(name, words):
            slots[rank] = (name, words)
            barrier.wait(20)
            assert {each[0] for each in slots.values()} == {name}
            summed = sum(each[1] for each in slots.values())
            barrier.wait(20)
            return summed

        try:
            return work(rank, total)
        except CompressError as error:
            return str(error)

    with ThreadPoolExecutor(len(live)) as pool:
        return list(pool.map(ended, live))


def agreed(every, **options):
    ranks = len(every)

    def work(rank, total):
        agree(every[rank], total=total, rank=rank, ranks=ranks, name="start", do="Do it.")
        return "agreed"

    return on_ranks(ranks, work, **options)


SAME = [("setting ratio", "100.0"), ("tensor 0", "'w' (2, 3)"), ("tensor 1", "'b' (3,)")]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_that_say_the_same_agree(ranks):
    assert agreed([SAME] * ranks) == ["agreed"] * ranks


@pytest.mark.parametrize(("other", "words"), [
    ([("setting ratio", "50.0"), *SAME[1:]], "setting ratio: 100.0 on rank 0, 50.0 on rank "),
    ([SAME[0], ("tensor 0", "'b' (2, 3)"), SAME[2]], "tensor 0: 'w' (2, 3) on rank 0, 'b' (2"),
    (SAME[:2], "tensor 1: 'b' (3,) on rank 0, nothing on rank "),
    ([*SAME, ("tensor 2", "'c' (1,)")], "tensor 2: nothing on rank 0, 'c' (1,) on rank "),
    ([], "setting ratio: 100.0 on rank 0, nothing on rank "),
])  # fmt: skip
def test_one_that_differs_is_the_same_error_on_every_rank(other, words):
    (message,) = set(agreed([SAME, SAME, SAME, other, SAME]))
    assert words in message
    assert "rank 3" in message
    assert message.endswith("Do it.")


def test_a_rank_that_has_joined_is_not_asked():
    assert agreed([SAME, None, SAME], joined=[1]) == ["agreed"] * 2
    (message,) = set(agreed([SAME, None, SAME[:1]], joined=[1]))
    assert "nothing on rank 2" in message


def test_sums_cannot_hide_a_difference():
    """Pieces of digests that add up to the same: their squares do not."""
    words = [digest_words([("a", str(i))]) for i in range(3)]
    assert all_equal(3 * words[0])
    assert not all_equal(sum(words))
    swapped = words[0].copy()
    swapped[1], swapped[2] = words[0][2], words[0][1]
    swapped[9], swapped[10] = words[0][10], words[0][9]
    assert not all_equal(words[0] + swapped)


def test_settings_say_no_addresses():
    class Mine:
        pass

    @dataclass
    class Record:
        theta: object
        threads: int = 3

    first, second = (fingerprint_of(Record(Mine()), but=["threads"]) for _ in range(2))
    assert first == second
    assert fingerprint_of(Record(0.5)) == [("setting theta", "0.5"), ("setting threads", "3")]


@pytest.mark.parametrize(("dtype", "n"), [
    ("f4", 0), ("f4", 65537), ("f4", 200_001), ("f2", 31), ("f2", 65536), ("f8", 65535),
    ("i8", 1), ("i8", 200_001), ("u1", 1), ("u1", 65537), ("?", 65535), ("c8", 65536),
])  # fmt: skip
def test_a_digest_sees_every_bit(dtype, n):
    rng = np.random.default_rng(n)
    values = rng.integers(0, 2, n * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    assert digest(values) == digest(values.copy())
    for _ in range(20 if n else 0):
        turned = values.copy()
        at = rng.integers(values.nbytes)
        turned.view(np.uint8)[at] ^= 1 if dtype == "?" else 1 << rng.integers(8)
        assert digest(turned) != digest(values)


def test_a_digest_sees_damage_that_a_plain_sum_does_not():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(100_000).astype(np.float32)
    words = values.view(np.uint32)
    for _ in range(200):
        i, j = rng.choice(values.size, 2, replace=False)
        signs, swapped, stretches = words.copy(), words.copy(), words.copy()
        signs[[i, j]] ^= 1 << 31
        swapped[[i, j]] = words[[j, i]]
        stretches[:20_000], stretches[20_000:40_000] = words[20_000:40_000], words[:20_000]
        for damaged in (signs, swapped, stretches, words ^ (1 << 31)):
            assert digest(damaged) != digest(words)


def test_comparisons_come_every_so_many_steps_and_never_at_the_first():
    due = ParameterCheck(4)
    assert [due.step() for _ in range(9)] == [False] * 4 + [True] + [False] * 3 + [True]
    assert due.free_steps == 3
    assert [due.step() for _ in range(4)] == [False] * 3 + [True]
    due.reset()
    assert not due.step()
    never = ParameterCheck(0)
    assert not any(never.step() for _ in range(1000))
    assert never.free_steps > 10**9


def test_ranks_apart_say_since_when_and_what_to_do():
    def work(rank, total):
        checked = ParameterCheck(100)
        checked.passed(300)
        digests = [("w", "00"), ("b", "0f" if rank == 2 else "01")]
        raise checked.error(400, digests, total=total, rank=rank, ranks=3)

    (message,) = set(on_ranks(3, work))
    expected = ("after step 400", "same after step 300", "b: 01 on rank 0, 0f on rank 2")
    for words in (*expected, consistency.DO):
        assert words in message


def test_numbers_in_names_count_by_their_order():
    pytest.importorskip("tensorflow")
    pytest.importorskip("horovod")  # the package needs it
    from sn_compress.tensorflow.variables import relative_names

    first = relative_names(["dense/kernel", "dense_1/kernel", "dense_1/bias_3", "x_y"])
    assert first == relative_names(["dense_4/kernel", "dense_7/kernel", "dense_7/bias_9", "x_y"])
    for other in (
        ["dense_1/kernel", "dense/kernel", "dense/bias_3", "x_y"],
        ["dense/kernel", "dense_1/kernel", "dense/bias_3", "x_y"],
        ["dense/kernel", "dense_1/kernel", "dense_1/bias_3", "x_z"],
    ):
        assert first != relative_names(other)
    assert relative_names([]) == []
    assert relative_names([""]) == ["#0"]
