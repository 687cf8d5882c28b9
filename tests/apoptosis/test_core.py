"""What the pure core promises: duplicates cost nothing, and no change is above the largest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sn_memory.apoptosis import Reader, Schedule, choose, fold
from sn_memory.apoptosis.pace import StepClock

ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu": lambda z: np.where(z > 0, z, 0.01 * z),
    "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "tanh": np.tanh,
    "softplus": lambda z: np.logaddexp(0, z),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + np.exp(-z)),
}


def net(seed, n=9, inputs=5, outputs=4, rows=60):
    """Weights with a bias column, inputs with the constant one, outgoing weights and bias."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(n, inputs + 1))
    x = np.c_[random.normal(size=(rows, inputs)), np.ones(rows)]
    return weights, x, random.normal(size=(outputs, n)), random.normal(size=outputs)


def moment_of(hidden):
    ones = np.c_[hidden, np.ones(len(hidden))]
    return ones.T @ ones


def put_out(hidden, outgoing, bias):
    return hidden @ outgoing.T + (0 if bias is None else bias)


def reader_of(hidden, outgoing, bias, check=None):
    check = hidden if check is None else check
    norm = float(np.linalg.norm(put_out(check, outgoing, bias)))
    return Reader(
        "reader", outgoing[None], moment_of(hidden), check[:, None], norm, bias is not None
    )


def before_and_after(choice, hidden, outgoing, bias):
    small, moved = fold(outgoing[None], bias, choice, 0)
    return put_out(hidden, outgoing, bias), put_out(hidden[:, choice.kept], small[0], moved)


@pytest.mark.parametrize(
    ("name", "with_bias"), [*((name, True) for name in ACTIVATIONS), ("relu", False)]
)
def test_duplicates_merge_without_a_change(name, with_bias):
    weights, x, outgoing, bias = net(0)
    weights[4], weights[7] = weights[1], weights[1]
    if name in ("linear", "relu", "leaky_relu"):  # c f(z) = f(c z)
        weights[7] *= 2.5
    hidden = ACTIVATIONS[name](x @ weights.T)
    bias = bias if with_bias else None
    choice = choose([reader_of(hidden, outgoing, bias)], tolerance=1e-6)
    assert choice.width - len(choice.kept) == 2
    assert len({1, 4, 7} - set(choice.kept)) == 2
    before, after = before_and_after(choice, hidden, outgoing, bias)
    # Sums of 9 products of order one in float64, factors from sums over 60 rows.
    assert np.abs(after - before).max() < 1e-11


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    tolerance=st.floats(0.001, 0.9),
    with_bias=st.booleans(),
    held_out=st.booleans(),
)
def test_the_change_is_what_was_said_and_within_tolerance(
    seed, name, tolerance, with_bias, held_out
):
    weights, x, outgoing, bias = net(seed)
    _, other, _, _ = net(seed + 1)
    bias = bias if with_bias else None
    fit = ACTIVATIONS[name](x @ weights.T)
    check = ACTIVATIONS[name]((other if held_out else x) @ weights.T)
    choice = choose([reader_of(fit, outgoing, bias, check)], tolerance=tolerance)
    before, after = before_and_after(choice, check, outgoing, bias)
    change = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert choice.changes[0] <= tolerance
    # The same sums in another order.
    assert change == pytest.approx(choice.changes[0], rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), tolerance=st.floats(0.05, 0.9))
def test_the_change_of_a_kernel_is_what_was_said(seed, tolerance):
    random = np.random.default_rng(seed)
    hidden = np.maximum(random.normal(size=(3, 8, 20)), 0)  # [rows, n, positions]
    kernel = random.normal(size=(3, 4, 8))  # [offsets, outputs, n]

    def patches(h):
        padded = np.pad(h, ((0, 0), (0, 0), (1, 1)))
        return np.stack([padded[:, :, o : o + 20] for o in range(3)])  # [o, rows, n, positions]

    def convolve(h, k):
        return np.einsum("oun,obnp->bup", k, patches(h))

    before = convolve(hidden, kernel)
    samples = patches(hidden).transpose(1, 3, 0, 2).reshape(60, 3, 8)
    moment = moment_of(hidden.transpose(0, 2, 1).reshape(-1, 8))
    reader = Reader("conv", kernel, moment, samples, float(np.linalg.norm(before)), False)
    choice = choose([reader], tolerance=tolerance)
    small, _ = fold(kernel, None, choice, 0)
    change = np.linalg.norm(convolve(hidden[:, choice.kept], small) - before)
    assert change == pytest.approx(choice.changes[0] * np.linalg.norm(before), rel=1e-9, abs=1e-9)
    assert choice.changes[0] <= tolerance


def test_all_that_stay_make_up_for_one_that_goes():
    random = np.random.default_rng(5)
    hidden = random.normal(size=(4000, 6))
    hidden[:, 4] = hidden[:, :4] @ [0.5, -1.0, 0.7, 0.3] + 2.0
    outgoing, bias = random.normal(size=(3, 6)), random.normal(size=3)
    choice = choose([reader_of(hidden, outgoing, bias)], tolerance=0.02)
    # No other one alone says most of it; the fit of all is held back by a hundredth.
    ((_, survivor),) = choice.merges
    assert survivor is None
    assert choice.changes[0] < 0.01


def test_two_readers_must_both_agree():
    random = np.random.default_rng(3)
    first, second = random.normal(size=(2, 50, 4))
    first[:, 3] = first[:, 0]

    def chosen(*hidden):
        readers = [reader_of(it, np.ones((1, 4)), np.zeros(1)) for it in hidden]
        return choose(readers, tolerance=1e-5)

    assert len(chosen(first).merges) == 1
    assert not chosen(first, second).merges
    second[:, 3] = 2 * second[:, 0]
    agreed = chosen(first, second)
    ((neuron, survivor),) = agreed.merges
    assert survivor == 3 - neuron
    factors = [fold[0, list(agreed.kept).index(survivor)] for fold in agreed.folds]
    assert sorted(abs(np.log2(factors)).round(6)) == [0, 1]


def test_dead_and_constant_neurons_go_without_a_survivor():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(40, 5))
    hidden[:, 1], hidden[:, 3] = 0.0, 0.7
    outgoing, bias = random.normal(size=(3, 5)), np.zeros(3)
    choice = choose([reader_of(hidden, outgoing, bias)], tolerance=1e-5)
    assert {*choice.merges} == {(1, None), (3, None)}
    before, after = before_and_after(choice, hidden, outgoing, bias)
    assert np.abs(after - before).max() < 1e-12
    # Without a bias a constant has nowhere to go.
    alone = choose([reader_of(hidden, outgoing, None)], tolerance=1e-5)
    assert {*alone.merges} == {(1, None)}


@pytest.mark.parametrize(
    ("settings_of", "left"),
    [({}, 1), ({"min_width": 5}, 5), ({"round_to": 4}, 4), ({"round_to": 7}, 7),
     ({"round_to": 16}, 12), ({"share": 0.25}, 9)],
)  # fmt: skip
def test_widths_are_kept(settings_of, left):
    hidden = np.repeat(np.random.default_rng(0).normal(size=(30, 1)), 12, axis=1)
    choice = choose([reader_of(hidden, np.ones((2, 12)), None)], tolerance=0.01, **settings_of)
    assert len(choice.kept) == left


def test_schedules():
    def steps(name, merged):
        schedule, found = Schedule(name, 10), []
        for step in range(1, 400):
            if schedule.is_due(step):
                found.append(step)
                schedule = schedule.after(step, merged=merged)
        return found[:5]

    assert steps("quick", True) == [10, 30, 70, 150, 310]
    assert steps("aggressive", False) == [10, 20, 30, 40, 50]
    assert steps("adaptive", True) == [10, 20, 30, 40, 50]
    assert steps("adaptive", False) == [10, 30, 70, 150, 310]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Schedule("slow", 1), "quick, adaptive, aggressive"),
        (lambda: Schedule("quick", 0), "1 or more"),
        (lambda: Schedule("quick", 10, overhead=1.0), "above 0 and below 1"),
        (lambda: choose([], tolerance=0.1), "no readers"),
        (lambda: choose([], tolerance=0.0), "above 0"),
        (
            lambda: Reader("r", np.ones((1, 2, 3)), np.ones((4, 4)), np.ones((9, 2, 3)), 1.0, True),
            r"\[n \+ 1, n \+ 1\]",
        ),
    ],
)
def test_errors_say_what_to_do(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@given(
    cost=st.floats(0, 1e6), overhead=st.floats(0.001, 0.5), merged=st.booleans(),
    name=st.sampled_from(["quick", "adaptive", "aggressive"]),
)  # fmt: skip
def test_looks_take_their_share_of_training_at_most(cost, overhead, merged, name):
    before = Schedule(name, 10, overhead=overhead)
    after = before.after(10, merged=merged, cost_steps=cost)
    allowed = overhead * (10 if merged else 1)
    # Steps are whole numbers; one unit in the last place of their product may be lost.
    assert cost <= allowed * (after.next_step - 10) * (1 + 1e-12)
    assert after.next_step >= 20
    free = Schedule(name, 10).after(10, merged=merged, cost_steps=cost)
    assert free.next_step <= after.next_step


@given(cost=st.floats(0, 1e6), overhead=st.floats(0.001, 0.5))
def test_the_first_look_waits_until_training_can_pay_for_it(cost, overhead):
    before = Schedule("adaptive", 10, overhead=overhead)
    assert before.is_open
    after = before.before_first(cost)
    assert not after.is_open
    assert after.next_step >= 10
    assert cost <= overhead * after.next_step * (1 + 1e-12)
    assert not after.after(after.next_step, merged=False).is_open
    assert not Schedule("adaptive", 10).is_open


def test_a_clock_counts_steps_and_no_pauses(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr("sn_memory.apoptosis.pace.time.perf_counter", lambda: next(now))
    clock = StepClock()
    assert clock.steps_in(3.0) == 0.0
    for _ in range(6):
        clock.tick()
    assert clock.steps_in(3.0) == 3.0
    clock.forget()
    assert clock.steps_in(3.0) == 0.0
