"""Sizes that gradients have outgrown are chosen anew, on all ranks alike; others never are."""

import numpy as np
import pytest
import torch
from sessions import exchange_all
from test_choose import dense_step, exact_sessions

from sn_compress.allreduce.allocate import (
    VOTE,
    is_outgrown,
    looks,
    majority,
    next_vote,
    votes,
    words_of,
)
from sn_compress.errors import CompressError, PayloadError

SHAPES = {"trunk": (128, 96), "late": (128, 64)}


class Gradients:
    """Of two ranks: a mean of twelve directions, and in each step some noise of each rank's own.

    faint : steps in which the gradient of "late" is of one direction
    scale : of what follows
    """

    def __init__(self, faint, scale=1.0):
        self.faint, self.scale, self.step = faint, scale, 0
        self.rng, self.means = np.random.default_rng(11), {}
        for name, sides in SHAPES.items():
            left, right = (np.linalg.qr(self.rng.standard_normal((it, 12)))[0] for it in sides)
            self.means[name] = left @ right.T

    def draw(self, name):
        noise = self.rng.standard_normal(SHAPES[name]) * 2e-3
        mean = self.means[name]
        if name == "late" and self.step < self.faint:
            mean = np.outer(np.ones(128), np.ones(64)) * 1e-3
            noise = noise * 1e-3
        elif name == "late":
            mean, noise = self.scale * mean, self.scale * noise
        return (mean + noise).astype(np.float32).reshape(-1)

    def of_step(self):
        found = [{name: self.draw(name) for name in SHAPES} for _ in range(2)]
        self.step += 1
        return found


def train(gradients, steps, ranks=2, sessions=None, like=np.asarray):
    """Which steps were dense for "late"; what each rank still has to send, over a gradient."""
    sessions = sessions or exact_sessions(ranks)
    dense, held = [], []
    for step in range(steps):
        values = [{n: like(it) for n, it in own.items()} for own in gradients.of_step()]
        asked = {name: [own.dense(name, SHAPES[name]) for own in sessions] for name in SHAPES}
        for name, each in asked.items():
            assert len(set(each)) == 1, (step, name)
        now = {name: shape for name, shape in SHAPES.items() if asked[name][0]}
        if "late" in now:
            dense.append(step)
        if now:
            dense_step(sessions, values, now)
        names = [name for name in SHAPES if name not in now]
        if names:
            exchange_all(sessions, names, values)
        for own in sessions:
            own.commit()
        assert len({own.tensors["late"].size for own in sessions}) == 1
        norm = np.linalg.norm(values[0]["late"])
        known = sessions[0].remembers("late") and norm > 0
        held.append(np.linalg.norm(sessions[0].residual("late")) / norm if known else 0.0)
    return dense, held, sessions


@pytest.mark.parametrize(
    ("faint", "like"), [(2, np.asarray), (30, torch.from_numpy), (120, np.asarray)],
    ids=["2 numpy", "30 torch", "120 numpy"],
)  # fmt: skip
def test_a_size_that_was_outgrown_is_chosen_anew(faint, like):
    """As a head's whose loss has hardly begun: one direction, when sizes are chosen, then many."""
    dense, held, sessions = train(Gradients(faint), 2 * faint + 120, like=like)
    assert dense[0] == 0
    (anew,) = dense[1:]
    assert anew <= max(VOTE + 1, 2 * faint + 2)
    assert max(held[:anew]) > 4  # what the choice had come to
    assert max(held[anew + 20 :]) < 2
    tensor = sessions[0].tensors["late"]
    even = 128 * 64 / sessions[0].ratio
    assert even / 2 < sum(words_of(tensor.shape, tensor.size.size, 2)) <= even


def test_a_gradient_that_only_grows_is_not_chosen_anew():
    """A weight of a loss from 1e-3 to 1: as many directions as before carry it."""

    class Ramp(Gradients):
        def of_step(self):
            self.scale = 10 ** (-3 + 3 * min(1, self.step / 100))
            return super().of_step()

    dense, held, _ = train(Ramp(0), 220)
    assert dense == [0]
    assert max(held[120:]) < 4


def test_ordinary_training_is_not_chosen_anew():
    """Nor where a spike, a gradient of zeros or one that is lost meets a vote."""

    class Odd(Gradients):
        def of_step(self):
            found = super().of_step()
            for own in found:
                own["late"] *= {51: 0.0, 101: 1e4, 201: np.nan}.get(self.step - 1, 1.0)
            return found

    dense, _, sessions = train(Odd(0), 260)
    assert dense == [0]
    assert np.isfinite(sessions[0].residual("late")).all()


def test_a_state_saved_between_vote_and_choice_goes_on_alike():
    dense, _, sessions = train(Gradients(30), VOTE + 1)
    again = exact_sessions(2)
    for own, each in zip(again, sessions, strict=True):
        own.load_state_dict(each.state_dict())
    assert dense == [0]
    assert [own.dense("late", SHAPES["late"]) for own in again] == [True, True]


def test_votes_are_doubled_in_time():
    assert [next_vote(since) for since in (0, 49, 50, 99, 100, 399, 400)] == [
        50, 50, 100, 100, 200, 400, 800,
    ]  # fmt: skip

    assert [since for since in range(420) if looks(since)] == [25, 50, 100, 200, 400]


def test_a_tensor_that_holds_as_much_as_others_is_not_outgrown():
    """As all do where the ratio is high: there is nothing to take from."""
    assert is_outgrown(5.0, [1.0, 1.5, 9.0])
    assert not is_outgrown(5.0, [1.0, 1.7, 9.0])
    assert not is_outgrown(3.9, [0.1])
    assert not is_outgrown(9.0, [])


def test_more_than_half_of_the_ranks_that_speak_decide():
    said = [votes([True, True, False]), votes([True, False, False]), votes([True, False, False])]
    assert majority(sum(said), 3) == [True, False, False]
    assert majority(sum(said[:2]), 3) == [True, False, False]  # the third has joined
    for place in range(5):
        for bit in range(32):
            total = sum(said)
            total.view(np.uint32)[place] ^= np.uint32(1 << bit)
            with pytest.raises(PayloadError, match="votes on sizes"):
                majority(total, 3)
    with pytest.raises(CompressError, match="got 5 words of votes; expected 4"):
        majority(said[0], 2)
