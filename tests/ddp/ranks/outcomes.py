"""One rank: what becomes of gradients that are thrown away, held, applied; one function a case.

Run as `outcomes.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails.
"""

import contextlib
import copy

import torch
from behave import LOSSY, Ledger, local_gradients, loss_of, net, wrap
from cases import RANK, RANKS, process_group, run, same_on_all
from torch import nn

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState

COMPRESSED = ("0.weight", "2.weight", "4.weight", "5.weight")


def made(compression, **options):
    model = net()
    state = CompressionState(compression, named_parameters=model.named_parameters(), **options)
    return model, state, wrap(model, state), torch.optim.SGD(model.parameters(), lr=0.05)


def memories(state):
    state.state_dict()  # between passes
    return {
        name: state.exchange.residual(name) for name in COMPRESSED if state.exchange.remembers(name)
    }


def apply(ddp, optimizer, step):
    optimizer.zero_grad()
    loss_of(ddp, step).backward()
    optimizer.step()


def loop(way, ddp, optimizer, step):
    """One pass more than its gradients are used for."""
    model = ddp.module
    if way == "none after":
        (-loss_of(ddp, step + 50)).backward()
        optimizer.zero_grad()
    elif way == "zeros after":
        (-loss_of(ddp, step + 50)).backward()
        optimizer.zero_grad(set_to_none=False)
    elif way == "by the model, before":
        model.zero_grad()
        (1e4 * loss_of(ddp, step + 50)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        model.zero_grad()
    elif way == "a step on nothing":
        model.zero_grad()
        loss_of(ddp, step + 50).backward()
        model.zero_grad()
        optimizer.step()
    elif way == "two of them, and one alone":
        for extra in (50, 60):
            optimizer.zero_grad()
            loss_of(ddp, step + extra).backward()
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, step + 70).backward()
    else:
        assert way == "never"


def what_is_thrown_away_leaves_no_trace():
    """To the bit, whatever it was and however it goes: weights and memories."""
    ways = [
        "none after", "zeros after", "by the model, before", "a step on nothing",
        "two of them, and one alone",
    ]  # fmt: skip
    for compression in LOSSY:
        found = {}
        for way in ("never", *ways):
            model, state, ddp, optimizer = made(compression)
            for step in range(8):
                apply(ddp, optimizer, step)
                if step >= 3:  # behind the dense steps, which count as they come
                    loop(way, ddp, optimizer, step)
            apply(ddp, optimizer, 8)
            found[way] = [*(p.detach().clone() for p in model.parameters())], memories(state)
        for way in ways:
            for one, other in zip(found[way][0], found["never"][0], strict=True):
                assert torch.equal(one, other), (compression, way)
            for name, left in found["never"][1].items():
                assert (found[way][1][name] == left).all(), (compression, way, name)
                assert left.any()


def nothing_else_is_lost():
    """Dense steps and choices of sizes among what is thrown away: all that was applied balances."""
    for compression in (*LOSSY, LowRankCompression.using(warmup=2, ratio=20.0, every=3)):
        model, state, ddp, optimizer = made(compression)
        ledger = Ledger(model)
        for step in range(14):
            if step:  # of which an optimizer is known
                optimizer.zero_grad()
                (100 * loss_of(ddp, step + 50)).backward()
                if step % 3 == 0:
                    (100 * loss_of(ddp, step + 80)).backward()
            ledger.owe(local_gradients(model, [step]))
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            ledger.pay()
            optimizer.step()
        memories(state)
        ledger.check(state)


def gradients_may_accumulate_over_exchanges():
    """Three passes and a step, all of them exchanged; every other time thrown away instead."""
    for compression in LOSSY:
        model, state, ddp, optimizer = made(compression)
        ledger = Ledger(model)
        apply(ddp, optimizer, 0)
        ledger.owe(local_gradients(net(), [0]))
        ledger.pay()
        for step in range(3, 30, 3):
            thrown = step % 2 == 0
            optimizer.zero_grad()
            if not thrown:
                ledger.owe(local_gradients(model, range(step, step + 3)))
            for own in range(step, step + 3):
                loss_of(ddp, own).backward()
            if not thrown:
                ledger.pay()
                optimizer.step()
        memories(state)
        ledger.check(state)


def an_exception_is_a_gradient_thrown_away():
    class BrokenError(Exception):
        pass

    def fail(_):
        raise BrokenError

    for compression in LOSSY:
        model, state, ddp, optimizer = made(compression)
        for step in range(5):
            apply(ddp, optimizer, step)
        before = copy.deepcopy(memories(state))
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(fail)  # the last one of a pass
        with contextlib.suppress(BrokenError):
            loss_of(ddp, 50).backward()
        handle.remove()
        ddp = wrap(model, state)
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, 51).backward()
        for name, left in memories(state).items():
            assert (left == before[name]).all(), (compression, name)
        apply(ddp, optimizer, 5)


def a_scaler_skips_for_each_optimizer_by_itself():
    """Also where a fused optimizer is called, and looks for Inf itself."""
    for fused in (False, True):
        for compression in LOSSY:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            both = []
            for _ in range(2):
                model, state, ddp, _ = made(compression, scaler=scaler)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
                both.append((model, state, ddp, optimizer, Ledger(model)))
            skipped = []
            for step in range(9):
                for at, (model, _, ddp, optimizer, ledger) in enumerate(both):
                    bad = at == 0 and step in (4, 5)
                    if not bad:
                        ledger.owe(local_gradients(model, [step]))
                    optimizer.zero_grad()
                    weight = model[-1].weight
                    handle = weight.register_hook(lambda gradient: gradient * float("inf"))
                    if not (bad and RANK == RANKS - 1):
                        handle.remove()
                    scaler.scale(loss_of(ddp, step)).backward()
                    handle.remove()
                before = [model[0].weight.detach().clone() for model, *_ in both]
                for at, (model, _, _, optimizer, ledger) in enumerate(both):
                    scaler.step(optimizer)
                    skipped.append(torch.equal(model[0].weight, before[at]))
                    if not skipped[-1]:
                        ledger.pay()
                scaler.update()
            assert skipped == [False] * 8 + [True, False] * 2 + [False] * 6, skipped
            for _, state, _, _, ledger in both:
                memories(state)
                ledger.check(state, scaler.get_scale())


def ranks_that_decide_otherwise_are_an_error():
    """Found when parameters are compared: one rank alone throws a gradient away, and is told."""
    for compression in (FFTCompression.using(check_every=5), LOSSY[1].using(check_every=5)):
        model, _, ddp, optimizer = made(compression)
        said = ""
        try:
            for step in range(12):
                apply(ddp, optimizer, step)
                if step == 6:
                    before = copy.deepcopy(optimizer.state_dict())
                    weights = [p.detach().clone() for p in model.parameters()]
                    optimizer.zero_grad()
                    loss_of(ddp, 50).backward()
                    if RANK:
                        optimizer.zero_grad()
                    optimizer.step()
                    with torch.no_grad():  # as if both had gone on alike
                        for parameter, weight in zip(model.parameters(), weights, strict=True):
                            parameter.copy_(weight)
                    optimizer.load_state_dict(before)
        except CompressError as error:
            said = str(error)
        assert "gradients that were dropped" in said, said


def a_pass_inside_of_a_pass_is_no_new_one():
    """A reentrant checkpoint: gradients of zeros that this pass has sent are not dropped ones."""
    from torch.utils.checkpoint import checkpoint

    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.last = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            hidden = checkpoint(self.second, self.first(x), use_reentrant=True)
            # One rank alone has a gradient of the last layer.
            return hidden + RANK * self.last(hidden.tanh())

    for compression in (*LOSSY, LOSSY[1].using(check_every=1)):
        model = Reentrant()
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp, optimizer = wrap(model, state), torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            apply(ddp, optimizer, step)
        state.state_dict()
        assert state.engine.counted()[0][1] == "0", state.engine.counted()


def a_rank_that_has_joined_drops_nothing():
    """Join: it adds zeros, and its last gradients stay in .grad; the others go on and step."""
    from torch.distributed.algorithms.join import Join

    for compression in (LOSSY[0], LOSSY[1].using(check_every=3)):
        model, state, ddp, optimizer = made(compression)
        for _ in range(2):
            with Join([ddp]):
                for step in range(8 if RANK else 5):
                    apply(ddp, optimizer, step)
        state.state_dict()
        assert state.engine.counted()[0][1] == "0", state.engine.counted()
        assert all(same_on_all(parameter) for parameter in model.parameters())


CASES = [
    what_is_thrown_away_leaves_no_trace, nothing_else_is_lost,
    gradients_may_accumulate_over_exchanges, an_exception_is_a_gradient_thrown_away,
    a_scaler_skips_for_each_optimizer_by_itself, ranks_that_decide_otherwise_are_an_error,
    a_pass_inside_of_a_pass_is_no_new_one, a_rank_that_has_joined_drops_nothing,
]  # fmt: skip

if __name__ == "__main__":
    with process_group():
        run(CASES)
