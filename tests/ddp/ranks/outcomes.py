"""One rank: what becomes of gradients that are thrown away, held, applied; one function a case."""

import copy

import torch
from cases import (
    CAST,
    FFT,
    LAST,
    LOSSY,
    RANK,
    SHARED,
    Ledger,
    apply,
    assert_alike,
    assert_equal,
    fails_in_the_middle,
    hooked,
    loss_of,
    message_of,
    net,
    said_by_all,
    sgd,
    state_of,
    train,
    weights_of,
    wrap,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from sn_compress import AutoCompression, LowRankCompression

COMPRESSED = ("0.weight", "2.weight", "4.weight", "5.weight")


def fresh(compression):
    model = net()
    ddp, state = hooked(model, compression)
    return model, state, ddp, sgd(model, 0.05)


def memories(state):
    state.state_dict()  # between passes
    return {
        name: torch.from_numpy(state.engine.exchange.residual(name)).clone()
        for name in COMPRESSED
        if state.engine.exchange.remembers(name)
    }


def none_after(ddp, optimizer, step):
    (-loss_of(ddp, step)).backward()
    optimizer.zero_grad()


def zeros_after(ddp, optimizer, step):
    (-loss_of(ddp, step)).backward()
    optimizer.zero_grad(set_to_none=False)


def by_the_model(ddp, optimizer, step):
    ddp.module.zero_grad()
    (1e4 * loss_of(ddp, step)).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
    ddp.module.zero_grad()


def a_step_on_nothing(ddp, optimizer, step):
    ddp.module.zero_grad()
    loss_of(ddp, step).backward()
    ddp.module.zero_grad()
    optimizer.step()


def two_of_them_and_one_alone(ddp, optimizer, step):
    for extra in (0, 10):
        optimizer.zero_grad()
        loss_of(ddp, step + extra).backward()
    optimizer.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, step + 20).backward()


WAYS = [none_after, zeros_after, by_the_model, a_step_on_nothing, two_of_them_and_one_alone]


def what_is_thrown_away_leaves_no_trace():
    """To the bit, whatever it was and however it goes: weights after each step, and memories."""
    for compression in LOSSY:
        ends, found = [], []
        for throws in (False, True):
            model, state, ddp, optimizer = fresh(compression)
            # Behind the dense steps, which count as they come.
            for step, way in enumerate([None, None, None, *WAYS, None]):
                apply(ddp, optimizer, step)
                found.append(weights_of(model))
                if throws and way:
                    way(ddp, optimizer, step + 50)
            ends.append(memories(state))
        half = len(found) // 2
        for step, (never, other) in enumerate(zip(found[:half], found[half:], strict=True)):
            assert_equal(never, other, f"{compression}, behind {WAYS[max(step - 4, 0)].__name__}")
        for name, left in ends[0].items():
            assert torch.equal(ends[1][name], left), (compression, name)
            assert left.any()


class Turns(nn.Module):
    """Two networks of which one runs at a time; a judge also judges what the maker makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(64, 64), nn.Linear(64, 64)
        self.turn = [self.maker, self.judge]

    def forward(self, x):
        for part in self.turn:
            x = part(x)
        return x


def one_that_was_frozen_first_is_asked_too():
    """Networks take turns, the other one is frozen and keeps its gradients until its own turn.

    DDP hands the hook these gradients again, and drops what comes of them.
    """
    for compression in LOSSY:
        ends = []
        for clears in (False, True):
            model = Turns()
            ddp, _ = hooked(model, compression, find_unused_parameters=True)
            parts = (model.maker, [model.maker, model.judge]), (model.judge, [model.judge])
            for step in range(6):
                for part, model.turn in parts:
                    optimizer = sgd(part)
                    for other in (model.maker, model.judge):
                        other.requires_grad_(other is part)
                    optimizer.zero_grad()
                    loss_of(ddp, 2 * step + (part is model.judge)).backward()
                    optimizer.step()
                    if clears:
                        optimizer.zero_grad()
            ends.append(weights_of(model))
        assert_equal(*ends, compression)


def what_no_rank_used_in_a_pass_is_sent_once():
    """Losses of two networks, one after the other, and a step: the first keeps its gradients."""
    for compression in LOSSY:
        for view in (False, True):
            model = Turns()
            options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
            ddp, state = hooked(model, compression, **options)
            optimizer, ledger = sgd(model, 0.05), Ledger(model)
            for step in range(8):
                optimizer.zero_grad()
                for part in (model.maker, model.judge):
                    model.turn = [part]
                    ledger.owe(step)
                    loss_of(ddp, step).backward()
                ledger.pay()
                optimizer.step()
            ledger.check(state)


class Clears(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def steps_that_clear_gradients_have_applied_them():
    """A step that ends with zero_grad, or a hook of one optimizer that calls it."""
    for compression in LOSSY:
        ends = []
        for kind in (torch.optim.SGD, Clears, None):
            model, state, ddp, optimizer = fresh(compression)
            if kind is None:
                optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
            else:
                optimizer = kind(model.parameters(), lr=0.05)
            train(ddp, range(7), optimizer)
            assert_dropped_nothing(state)
            ends.append(weights_of(model))
        for other in ends[1:]:
            assert_equal(ends[0], other, compression)


def nothing_is_lost_before_the_first_step():
    """Passes that warm a program up are thrown away; updated by hand, all are applied.

    Also where an optimizer holds the parameters, and never steps.
    """
    for compression in LOSSY:
        for by_hand, holds in ((False, True), (True, False), (True, True)):
            model = net()
            ddp, state = hooked(model, compression)
            optimizer, ledger = sgd(model) if holds else None, Ledger(model)
            for step in range(9):
                warms_up = not by_hand and step < 3
                ddp.zero_grad()
                if warms_up:
                    (100 * loss_of(ddp, step)).backward()
                    continue
                ledger.owe(step)
                loss_of(ddp, step).backward()
                ledger.pay()
                if by_hand:
                    for parameter in model.parameters():
                        parameter.data -= 0.05 * parameter.grad
                else:
                    optimizer.step()
            ledger.check(state)


def nothing_else_is_lost():
    """Dense steps and choices of sizes among what is thrown away: all that was applied balances."""
    for compression in (*LOSSY, SHARED.using(every=3)):
        model, state, ddp, optimizer = fresh(compression)
        ledger = Ledger(model)
        for step in range(11):
            if step:  # of which an optimizer is known
                optimizer.zero_grad()
                (100 * loss_of(ddp, step + 50)).backward()
                if step % 3 == 0:
                    (100 * loss_of(ddp, step + 80)).backward()
            ledger.owe(step)
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            ledger.pay()
            optimizer.step()
        ledger.check(state)


def gradients_may_accumulate_over_exchanges():
    """Three passes and a step, all of them exchanged; every other time thrown away instead."""
    for compression in LOSSY:
        model, state, ddp, optimizer = fresh(compression)
        ledger = Ledger(model)
        ledger.owe(0)
        apply(ddp, optimizer, 0)
        ledger.pay()
        for step in range(3, 18, 3):
            applied = step % 2 == 1
            optimizer.zero_grad()
            if applied:
                ledger.owe(step, step + 1, step + 2)
            for own in range(step, step + 3):
                loss_of(ddp, own).backward()
            if applied:
                ledger.pay()
                optimizer.step()
        ledger.check(state)


def an_exception_is_a_gradient_thrown_away():
    """DDP refuses the next step by itself; with a new one the same state goes on."""
    for compression, in_the_middle in ((FFT, True), (SHARED, False), (SHARED, True), (CAST, False)):
        model, state, ddp, optimizer = fresh(compression)
        train(ddp, range(5), optimizer)
        before = memories(state)
        optimizer.zero_grad()
        if in_the_middle:
            handle = fails_in_the_middle(model[1])
        else:  # the last gradient of a pass
            handle = model[0].weight.register_hook(lambda gradient: 1 / 0)
        assert "zero" in message_of(lambda ddp=ddp: loss_of(ddp, 50).backward(), ZeroDivisionError)
        handle.remove()
        assert "prior iteration" in message_of(lambda ddp=ddp: loss_of(ddp, 51), RuntimeError)
        ddp = wrap(model, state)
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, 51).backward()
        after = memories(state)
        for name, left in before.items():
            assert torch.equal(left, after[name]), (compression, name)
        train(ddp, range(5, 8), optimizer)
        assert_alike(model)


def a_scaler_skips_for_each_optimizer_by_itself():
    """Overflow on one rank: all skip, and the memory is what it was, in the new scale.

    Also where a fused optimizer is called, and looks for Inf itself.
    """
    for compression, fused in ((FFT, False), (SHARED, False), (SHARED, True), (CAST, True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        both, skipped, scales = [], [], set()
        for _ in range(2):
            model = net()
            state = state_of(compression, model, scaler=scaler)
            optimizer = sgd(model, 0.05, fused=fused)
            both.append((model, state, wrap(model, state), optimizer, Ledger(model)))
        for step in range(9):
            scales.add(scaler.get_scale())
            for at, (model, _, ddp, optimizer, ledger) in enumerate(both):
                bad = at == 0 and step in (4, 5)
                if not bad:
                    ledger.owe(step)
                optimizer.zero_grad()
                # In one layer; what the others send is finite.
                weight, factor = model[-1].weight, float("inf") if bad and LAST else 1.0
                handle = weight.register_hook(lambda gradient, factor=factor: gradient * factor)
                scaler.scale(loss_of(ddp, step)).backward()
                handle.remove()
                if not fused:
                    scaler.unscale_(optimizer)
                    if not bad:
                        ledger.pay()
            before = [weights_of(model)[0] for model, *_ in both]
            for at, (model, _, _, optimizer, ledger) in enumerate(both):
                scaler.step(optimizer)
                skipped.append(torch.equal(model[0].weight, before[at]))
                if fused and not skipped[-1]:
                    ledger.pay()
            scaler.update()
        assert skipped == [False] * 8 + [True, False] * 2 + [False] * 6, skipped
        assert len(scales) >= 3, scales
        for _, state, _, _, ledger in both:
            # The memory of the last step is in the scale it had then.
            ledger.check(state, scaler.get_scale())


def ranks_that_decide_otherwise_are_an_error():
    """Found when parameters are compared: one rank alone throws a gradient away, and is told."""
    for compression in (FFT.using(check_every=5), SHARED.using(check_every=5)):
        model, _, ddp, optimizer = fresh(compression)

        def loop(model=model, ddp=ddp, optimizer=optimizer):
            for step in range(12):
                apply(ddp, optimizer, step)
                if step == 6:
                    before, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
                    optimizer.zero_grad()
                    loss_of(ddp, 50).backward()
                    if RANK:
                        optimizer.zero_grad()
                    optimizer.step()
                    with torch.no_grad():  # as if both had gone on alike
                        for parameter, weight in zip(model.parameters(), weights, strict=True):
                            parameter.copy_(weight)
                    optimizer.load_state_dict(before)

        said = said_by_all(loop)
        assert "gradients that were dropped" in said, said


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        hidden = checkpoint(self.second, self.first(x), use_reentrant=True)
        # One rank alone has a gradient of the last layer.
        return hidden + RANK * self.last(hidden.tanh())


def a_pass_inside_of_a_pass_is_no_new_one():
    """A reentrant checkpoint: gradients of zeros that this pass has sent are not dropped ones."""
    for compression in (*LOSSY, SHARED.using(check_every=1)):
        ddp, state = hooked(Reentrant(), compression)
        train(ddp, range(6))
        assert_dropped_nothing(state)


def assert_dropped_nothing(state):
    state.state_dict()
    assert state.engine.counted()[0][1] == "0", state.engine.counted()


def ranks_that_have_joined_are_not_asked():
    """One shadows the others, adds zeros and takes no steps, when parameters are compared.

    Its last gradients stay in .grad, and are not dropped ones.
    """
    for compression in (*LOSSY[:2], AutoCompression, LowRankCompression.using(warmup=3)):
        model, state, ddp, optimizer = fresh(compression.using(check_every=5))
        for steps, same_at in (((22, 13), (20, 10)), ((8, 5), None)):
            with Join([ddp]):
                train(ddp, range(steps[RANK > 0]), optimizer)
            assert same_at is None or state.engine.sameness.same_at == same_at[RANK > 0]
        if compression is not AutoCompression:
            assert_dropped_nothing(state)
        assert_alike(model)


CASES = [
    what_is_thrown_away_leaves_no_trace, one_that_was_frozen_first_is_asked_too,
    what_no_rank_used_in_a_pass_is_sent_once,
    steps_that_clear_gradients_have_applied_them,
    nothing_is_lost_before_the_first_step, nothing_else_is_lost,
    gradients_may_accumulate_over_exchanges, an_exception_is_a_gradient_thrown_away,
    a_scaler_skips_for_each_optimizer_by_itself, ranks_that_decide_otherwise_are_an_error,
    a_pass_inside_of_a_pass_is_no_new_one, ranks_that_have_joined_are_not_asked,
]  # fmt: skip
