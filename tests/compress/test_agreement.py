"""What ranks say of themselves, compared: settings at the start, parameters later."""

import threading
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
    """work(rank, total) on threads; what each returned or raised."""
    barrier, slots = threading.Barrier(ranks), [None] * ranks
    ended = [None] * ranks

    def run(rank):
        def total(name, words):
            slots[rank] = (name, words)
            barrier.wait(20)
            names = {each[0] for each in slots if each}
            assert len(names) == 1, names
            summed = sum(each[1] for each in slots if each)
            barrier.wait(20)
            return summed

        try:
            ended[rank] = work(rank, total)
        except CompressError as error:
            ended[rank] = str(error)

    def join(rank):
        try:
            while True:
                barrier.wait(20)
        except threading.BrokenBarrierError:
            return

    threads = [
        threading.Thread(target=join if rank in joined else run, args=(rank,), daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        if rank not in joined:
            thread.join(30)
    barrier.abort()
    return [each for rank, each in enumerate(ended) if rank not in joined]


def agreed(every, **options):
    ranks = len(every)

    def work(rank, total):
        agree(every[rank], total=total, rank=rank, ranks=ranks, name="start", do="Do it.")
        return "agreed"

    return on_ranks(ranks, work, **options)


SAME = [("setting ratio", "100.0"), ("tensor 0", "'w' (2, 3)"), ("tensor 1", "'b' (3,)")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_that_say_the_same_agree(ranks):
    assert agreed([SAME] * ranks) == ["agreed"] * ranks


@pytest.mark.parametrize(("other", "words"), [
    ([("setting ratio", "50.0"), *SAME[1:]], "setting ratio: 100.0 on rank 0, 50.0 on rank "),
    ([SAME[0], ("tensor 0", "'b' (2, 3)"), SAME[2]], "tensor 0: 'w' (2, 3) on rank 0, 'b' (2"),
    (SAME[:2], "tensor 1: 'b' (3,) on rank 0, nothing on rank "),
    ([*SAME, ("tensor 2", "'c' (1,)")], "tensor 2: nothing on rank 0, 'c' (1,) on rank "),
    ([], "setting ratio: 100.0 on rank 0, nothing on rank "),
])  # fmt: skip
@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (5, 3)])
def test_one_that_differs_is_the_same_error_on_every_rank(other, words, ranks, odd):
    every = [SAME] * ranks
    every[odd] = other
    said = agreed(every)
    assert len(set(said)) == 1, said
    assert words + str(odd) in said[0] or words in said[0], said[0]
    assert f"rank {odd}" in said[0], said[0]
    assert said[0].endswith("Do it.")


def test_a_rank_that_has_joined_is_not_asked():
    assert agreed([SAME, None, SAME], joined=[1]) == ["agreed"] * 2
    said = agreed([SAME, None, SAME[:1]], joined=[1])
    assert len(set(said)) == 1, said
    assert "nothing on rank 2" in said[0]


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

    assert fingerprint_of(Record(Mine()), but=["threads"]) == fingerprint_of(
        Record(Mine()), but=["threads"]
    )
    assert fingerprint_of(Record(0.5)) == [("setting theta", "0.5"), ("setting threads", "3")]


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i8", "u1", "?", "c8"])
@pytest.mark.parametrize("n", [0, 1, 31, 65535, 65536, 65537, 200_001])
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
        if rank != 5:
            checked.passed(300)
        said = [("w", "00"), ("b", "0f" if rank == 2 else "01")]
        raise checked.error(400, said, total=total, rank=rank, ranks=3)

    said = on_ranks(3, work)
    assert len(set(said)) == 1
    for words in ("after step 400", "same after step 300", "b: 01 on rank 0, 0f on rank 2"):
        assert words in said[0], said[0]
    assert consistency.DO in said[0]


def test_numbers_in_names_count_by_their_order():
    pytest.importorskip("tensorflow")
    from sn_compress.tensorflow.variables import relative_names

    first = relative_names(["dense/kernel", "dense_1/kernel", "dense_1/bias_3", "x_y"])
    assert first == relative_names(["dense_4/kernel", "dense_7/kernel", "dense_7/bias_9", "x_y"])
    assert first != relative_names(["dense_1/kernel", "dense/kernel", "dense/bias_3", "x_y"])
    assert first != relative_names(["dense/kernel", "dense_1/kernel", "dense/bias_3", "x_y"])
    assert first != relative_names(["dense/kernel", "dense_1/kernel", "dense_1/bias_3", "x_z"])
    assert relative_names([]) == []
    assert relative_names([""]) == ["#0"]
