"""One rank: gradients travel in buckets laid out from the order of the parameters."""

import time
from contextlib import contextmanager
from functools import partial

import horovod.torch as hvd
import horovod.torch.optimizer
import nets
import torch
from cases import message_of
from nets import assert_alike, assert_equal, batch, vector
from torch import nn

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.collective import Buckets
from sn_compress.torch import horovod as rim
from sn_compress.torch.under_horovod.memory import Pending, memory_of

SHARED = LowRankCompression.using(ratio=8, warmup=2)
GATHER = FFTCompression.using(theta=0.9)
WAYS = {"low rank": SHARED, "fft": GATHER}


def wrap(model, way=SHARED, **options):
    return nets.wrap(model, way, **{"lr": 0.05, **options})


def sides(number, size=48):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(number))


def step(net, optimizer, number, *, backwards=False):
    """One in which each layer has a loss of its own: the order of the gradients is free."""
    x = batch(number, 8, net[0].in_features)
    losses = [(side(x) * (1 + at)).square().mean() for at, side in enumerate(net)]
    optimizer.zero_grad()
    sum(losses[::-1] if backwards else losses).backward()
    optimizer.step()


def train(net, optimizer, steps):
    for number in steps:
        step(net, optimizer, number)


@contextmanager
def small_buckets():
    """Of some four layers each."""
    rim.Buckets = partial(Buckets, full=9000)
    try:
        yield
    finally:
        rim.Buckets = Buckets


@contextmanager
def counted(*others):
    """Names of our own collectives handed to Horovod, and of those of other modules' functions."""
    own = [(hvd, name) for name in ("allreduce_async", "allreduce_async_", "allgather_async")]
    names, inner = [], {each: getattr(*each) for each in (*own, *others)}

    def around(send):
        def noted(tensor, *args, name=None, **options):
            names.append(name)
            return send(tensor, *args, name=name, **options)

        return noted

    for each, send in inner.items():
        setattr(*each, around(send))
    try:
        yield names
    finally:
        for each, send in inner.items():
            setattr(*each, send)


def biases(number):
    """Layers of 48, each with a bias, which travels plain."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(48, 48) for _ in range(number))


def what_is_plain_shares_a_collective_of_its_bucket():
    """One more than there are rounds; in dense steps too, and not in the first one, nor in groups.

    A step has three at most: of FFTCompression one gathers, and one counts the ranks before, as a
    gather cannot join. A rank that computes in another order, or has no gradient for some, files
    the same.
    """
    for way in WAYS:
        net = biases(40)
        optimizer = wrap(net, WAYS[way])
        found = []
        for number in range(6):
            with counted() as names:
                step(net, optimizer, number, backwards=hvd.rank() == 1)
            own = set(optimizer._parameter_names.values())
            plain = [it for it in names if it.endswith("torch.float32") or it in own]
            found.append(len([it for it in plain if not it.endswith("weight")]))
        assert found[2:] == [1] * 4, (way, found, names)
        assert len(names) <= 3, (way, names)
        assert FFTCompression.report(optimizer)["tensors"] == 40
        optimizer.zero_grad()
        used = list(net)[: 40 - 7 * hvd.rank()]
        sum(side(torch.ones(1, 48)).square().sum() for side in used).backward()
        optimizer.step()
        assert_alike(net)


def what_is_plain_has_the_mean_that_horovod_gives_it():
    """In each type that travels, and with predivision; other types, and a sum, too."""
    for dtype, close, options in (
        (torch.float32, 1e-6, {}),
        (torch.float32, 1e-6, {"gradient_predivide_factor": 2.0}),
        (torch.float32, 1e-6, {"op": hvd.Sum}),
        (torch.float16, 1e-2, {}),
        (torch.bfloat16, 2e-2, {}),
        (torch.float64, 1e-6, {}),
    ):
        net = biases(4).to(dtype)
        optimizer = wrap(net, lr=0.0, **options)
        for number in range(4):
            optimizer.zero_grad()
            whole = [
                (torch.arange(48.0) * (at + 1) + number + 3 * hvd.rank()).to(dtype)
                for at in range(4)
            ]
            sum((side.bias * it).sum() for side, it in zip(net, whole, strict=True)).backward()
            optimizer.synchronize()
            for side, it in zip(net, whole, strict=True):
                others = hvd.allgather(it.double()[None], name="others")
                mean = others.sum(0) if "op" in options else others.mean(0)
                assert torch.allclose(side.bias.grad.double(), mean, rtol=close), (dtype, number)


def the_order_of_the_gradients_changes_no_bit():
    """Nor where ranks compute in different orders."""
    for way in WAYS.values():
        ends = []
        for backwards in (False, True, hvd.rank() == 1):
            with small_buckets():
                net = sides(10)
                optimizer = wrap(net, way)
                for number in range(5):
                    step(net, optimizer, number, backwards=backwards)
                assert len(memory_of(optimizer).buckets.members) == 3
            assert_alike(net)
            ends.append(vector(net))
        assert_equal(ends[1:], [ends[0]] * 2)


def a_sparse_embedding_beside_holds_its_bucket_back():
    """It travels as without us, and is in the report."""
    for way in WAYS.values():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(512, 48, sparse=True), nn.Linear(48, 48), nn.Tanh())
        optimizer, rows = wrap(net, way), 50 + hvd.rank()
        for number in range(5):
            torch.manual_seed(10 * number + hvd.rank())
            optimizer.zero_grad()
            net(torch.randperm(512)[:rows]).square().mean().backward()
            assert net[0].weight.grad.is_sparse
            optimizer.step()
        report = FFTCompression.report(optimizer)
        assert (report["tensors"], report["steps"]) == (1, 5), report
        gathered = rows * (8 + 4 * 48)  # an index of 8 bytes and a row
        assert report["dense_bytes"] == gathered + 4 * 48 * 49, report
        if way is GATHER:
            sent = gathered + 4 * 48 + memory_of(optimizer).engine.codec.payload_bytes(48 * 48)
            assert report["payload_bytes"] == sent, report
        assert_alike(net)


def break_off(net, optimizer, number):
    """In the middle of the backward pass, with some buckets on their way."""
    hook = net[2].weight.register_hook(lambda gradient: 1 / 0)
    try:
        step(net, optimizer, number)
    except ZeroDivisionError:
        optimizer.load_state_dict(optimizer.state_dict())  # as Horovod wants it
    else:
        raise AssertionError("the backward pass was to fail")
    hook.remove()
    optimizer.zero_grad()
    hvd.barrier()
    time.sleep(0.2)  # what Horovod has under way itself of that step comes to its end


def a_step_that_broke_off_is_as_if_it_had_never_been():
    """In dense steps, in the one in which sizes travel, and in those between.

    What gathers goes on, with all ranks alike.
    """
    for way in WAYS.values():
        ends = []
        for broken in ((), (1, 2, 3)):
            with small_buckets():
                net = sides(10)
                optimizer = wrap(net, way)
                for number in range(5):
                    if number in broken:
                        break_off(net, optimizer, 100 + number)
                        # One rank has looked whether words have arrived, the other has not.
                        time.sleep(0.05 * hvd.rank())
                    step(net, optimizer, number)
            assert_alike(net)
            ends.append(vector(net))
        assert way is GATHER or torch.equal(*ends)


def what_has_arrived_before_it_is_asked_for_is_no_step_that_broke_off():
    """On one rank all rounds are over before the first mean is asked for, on the other none is."""

    def waits(under_way):  # for three: what the other rank waits for is on its way
        return len(under_way) == 3 and not all(each.ended for each in under_way)

    with polling(1, waits, limit_s=0.3):  # some rounds are left for the end of the step
        for way in (SHARED, GATHER):
            with small_buckets():
                net = sides(10)
                optimizer = wrap(net, way)
                train(net, optimizer, range(6))
            assert memory_of(optimizer)._broken == 0
            assert_alike(net)


@contextmanager
def polling(rank, waits, *, limit_s):
    """One rank looks for what has arrived for as long as it `waits`, the others never do."""
    inner = Pending.poll

    def patient(pending):
        until = time.monotonic() + limit_s
        while waits(pending._exchanges.values()) and time.monotonic() < until:
            inner(pending)

    Pending.poll = patient if hvd.rank() == rank else lambda pending: None
    try:
        yield
    finally:
        Pending.poll = inner


def break_off_ahead(net, optimizer, ahead):
    """One rank has sent off a round that the others never come to."""

    def waits(under_way):
        return under_way and not any(it.round for it in under_way)

    with polling(ahead, waits, limit_s=0.5):
        break_off(net, optimizer, 100)
    rounds = [it.round for it in memory_of(optimizer).pending._exchanges.values()]
    assert any(rounds) == (hvd.rank() == ahead), rounds


def what_a_step_left_behind_is_not_taken_for_another_optimizers():
    """Its optimizer is gone."""
    with small_buckets():
        for number in range(3):
            net = sides(10)
            optimizer = wrap(net)
            train(net, optimizer, range(4))
            assert_alike(net)
            break_off_ahead(net, optimizer, number % 2)
            del net, optimizer


def what_a_step_left_behind_is_over_when_a_rank_joins():
    """Else it is carried out for the rank that joins, and one that does not know of it crashes."""
    with small_buckets():
        for one_rank_ahead in (True, False):
            net = sides(10)
            optimizer = wrap(net)
            train(net, optimizer, range(3))
            # Twice: the second time under names that Horovod's cache has not seen.
            for _ in range(2):
                if one_rank_ahead:
                    break_off_ahead(net, optimizer, 0)
                else:
                    break_off(net, optimizer, 100)
            with_a_rank_that_joins(net, optimizer, 3, 7 if hvd.rank() else 5)


def with_a_rank_that_joins(net, optimizer, start, end):
    """Steps of which ranks have unlike many, and one of all behind them, from the last's state."""
    train(net, optimizer, range(start, end))
    last = hvd.join()
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    FFTCompression.synchronize(optimizer, root_rank=last)
    step(net, optimizer, 7)
    assert_alike(net)


def a_rank_that_has_joined_is_asked_for_nothing():
    """It adds zeros to the sums of three buckets, also in the step in which sizes travel."""
    with small_buckets():
        net = sides(10)
        optimizer = wrap(net, SHARED.using(every=4))
        for _ in range(2):  # epochs
            with_a_rank_that_joins(net, optimizer, 0, 2 + 3 * hvd.rank())


def a_gather_is_refused_once_a_rank_has_joined():
    """On every other rank, before anything is gathered; Horovod itself goes on."""
    for way in (GATHER, GATHER.using(scatter=False)):
        net = sides(3)
        optimizer = wrap(net, way)
        train(net, optimizer, range(5))
        if hvd.rank():
            said = message_of(partial(step, net, optimizer, 5))
            assert "another rank called hvd.join()" in said, said
            assert "use LowRankCompression" in said, said
        hvd.join()
        net = sides(3)  # Horovod's hooks are still on the other's, and wait for its step
        optimizer = wrap(net, way)
        train(net, optimizer, range(6, 9))
        assert_alike(net)
        call = partial(hvd.allreduce, torch.ones(64, 64), name="call", compression=way)
        call()
        if hvd.rank():
            said = message_of(call)
            assert said.startswith("call: another rank called hvd.join()"), said
        hvd.join()


def a_parameter_added_after_the_start_is_refused():
    for way in (SHARED, GATHER):
        net, late = sides(2), nn.Linear(48, 48)
        optimizer = wrap(net, way)
        step(net, optimizer, 0)
        optimizer.add_param_group({"params": list(late.parameters())})
        said = message_of(partial(step, net, optimizer, 1))
        assert "(48, 48) is trained, but Horovod does not reduce it: it was added" in said, said
        optimizer._handles.clear()


def stand_ins(net, optimizer, steps):
    """For each step how many of Horovod's own all-reduces of parameters were started."""
    own, found = set(optimizer._parameter_names.values()), []
    for number in range(steps):
        with counted((horovod.torch.optimizer, "allreduce_async_")) as names:
            step(net, optimizer, number)
        found.append(sum(name in own for name in names))
    return found


def from_the_second_step_on_nothing_stands_in_for_a_gradient():
    for name, way in WAYS.items():
        net = sides(10)
        optimizer = wrap(net, way)
        first = [10] if name == "fft" else [10, 10]  # dense steps are Horovod's own
        found = stand_ins(net, optimizer, 5)
        assert found == first + [0] * (5 - len(first)), (name, found)
        # Ranks that come begin with stand-ins, so all do.
        FFTCompression.synchronize(optimizer, root_rank=0)
        assert stand_ins(net, optimizer, 3) == [10, 0, 0]
        assert_alike(net)


def a_rank_that_waits_sleeps():
    """Also for what travels plain, beside buckets and after them."""
    for way in WAYS.values():
        net = biases(4)
        optimizer = wrap(net, way)
        train(net, optimizer, range(4))
        hvd.barrier()
        # Of the thread that waits: Horovod's own talks to the other rank a thousand times a second.
        before, start = time.thread_time(), time.monotonic()
        if hvd.rank() == 1:
            time.sleep(1.5)
        step(net, optimizer, 4)
        spent, passed = time.thread_time() - before, time.monotonic() - start
        assert passed > 1.4
        assert spent < 0.5 * passed, (spent, passed)  # stock Horovod: about all of it
        assert_alike(net)


CASES = [
    from_the_second_step_on_nothing_stands_in_for_a_gradient, a_rank_that_waits_sleeps,
    the_order_of_the_gradients_changes_no_bit, a_sparse_embedding_beside_holds_its_bucket_back,
    a_step_that_broke_off_is_as_if_it_had_never_been, a_parameter_added_after_the_start_is_refused,
    what_has_arrived_before_it_is_asked_for_is_no_step_that_broke_off,
    what_a_step_left_behind_is_over_when_a_rank_joins, a_rank_that_has_joined_is_asked_for_nothing,
    a_gather_is_refused_once_a_rank_has_joined,
    what_a_step_left_behind_is_not_taken_for_another_optimizers,
    what_is_plain_shares_a_collective_of_its_bucket,
    what_is_plain_has_the_mean_that_horovod_gives_it,
]  # fmt: skip
