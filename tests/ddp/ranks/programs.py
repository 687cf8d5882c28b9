"""One rank: programs that people write around DDP, one function a case."""

import copy
import io
import pickle
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases import (
    EXACT,
    LAST,
    RANK,
    RANKS,
    TYPES,
    Ledger,
    OfType,
    apply,
    assert_alike,
    assert_equal,
    batch,
    hooked,
    loss_of,
    message_of,
    said_by_all,
    same_on_all,
    sgd,
    state_of,
    train,
    weights_of,
    wrap,
)
from outcomes import Turns
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch import process_group
from sn_compress.torch.ddp import CompressionState
from sn_compress.torch.outcomes import live_objects

FFT = FFTCompression.using(theta=0.9, check_every=5)
LOW = LowRankCompression.using(ratio=20, warmup=3, check_every=5)
LOSSY = (FFT, LOW)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def copies_of_a_model_are_made():
    """Averaged, copied, pickled: a copy of DDP has no hook, and a state in its place is refused."""
    for named in (True, False):
        model = net()
        state = state_of(FFT, model) if named else CompressionState(FFT)
        ddp = wrap(model, state)
        loss_of(ddp, 0).backward()
        average = AveragedModel(ddp)
        torch.save(ddp, io.BytesIO())
        for other in (copy.deepcopy(ddp), average.module, pickle.loads(pickle.dumps(ddp))):
            assert torch.equal(other.module[0].weight, model[0].weight)
            other(batch(1)).sum().backward()
        loss_of(ddp, 1).backward()
        average.update_parameters(ddp)
        for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            twin = wrap(net(), again)
            said = message_of(lambda twin=twin: loss_of(twin, 0).backward())
            assert "copy of a CompressionState" in said, said
            assert "load_state_dict" in said, said


def under_no_sync(ddp, step):
    with ddp.no_sync():
        loss_of(ddp, step).backward()


def of_the_model(ddp, step):
    loss_of(ddp.module, step).backward()


def ranks_that_perturb_apart_are_not_told_to_differ():
    """SAM as torch recommends it: each rank goes up by its own gradient, then takes it back."""
    for compression, perturb in zip(LOSSY, (under_no_sync, of_the_model), strict=True):
        model = net()
        ddp, state = hooked(model, compression)
        optimizer = sgd(model)
        for step in range(12):
            old = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            perturb(ddp, step)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=0.05)
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            with torch.no_grad():
                for p, q in zip(model.parameters(), old, strict=True):
                    p.copy_(q)
            optimizer.step()
        assert state.engine.sameness.same_at == 10, state.engine.sameness.same_at
        assert_alike(model)


def a_mean_over_those_that_have_not_joined_is_refused():
    ddp, _ = hooked(net(), FFT)

    def loop():
        with Join([ddp], divide_by_initial_world_size=False):
            loss_of(ddp, 0).backward()

    said = said_by_all(loop)
    assert "divide_by_initial_world_size=False" in said, said


def by_one(model):
    return sgd(model).step


def by_shards(model):
    adam = torch.optim.Adam
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adam, lr=0.01).step


def by_two(model):
    first, second = sgd(model[0]), sgd(model[2])

    def update():
        first.step()
        second.step()

    return update


def by_hand(model):
    @torch.no_grad()
    def update():
        for p in model.parameters():
            p -= 0.1 * p.grad

    return update


def differences_are_still_found():
    """Whoever updates: an optimizer, an optimizer of shards, a loop by hand."""

    def loop(ddp, update, damages):
        for step in range(12):
            ddp.zero_grad()
            loss_of(ddp, step).backward()
            update()
            if damages and step == 6 and LAST:
                with torch.no_grad():
                    ddp.module[0].weight[0, 0] += 1e-3

    for kind in (by_shards, by_one, by_two, by_hand):
        model = net()
        ddp, state = hooked(model, FFT)
        loop(ddp, kind(model), damages=False)
        assert state.engine.sameness.same_at == 10, (kind, state.engine.sameness.same_at)
        if (
            kind is by_shards
        ):  # it sends all parameters from their owners, the damage away with them
            continue
        model = net()
        said = said_by_all(partial(loop, hooked(model, FFT)[0], kind(model), damages=True))
        for words in ("different parameters after step 10", "same after step 5", "0.weight"):
            assert words in said, (kind, said)
        assert "requires gradients now" not in said, said


def an_unfrozen_parameter_is_compared():
    """DDP knows nothing of it, so it drifts apart, as in plain DDP; it has to be told."""
    for named in (True, False):
        model = net()
        model[0].weight.requires_grad = False
        ddp = wrap(model, state_of(FFT, model) if named else CompressionState(FFT))
        optimizer = sgd(model)
        train(ddp, range(3), optimizer)
        model[0].weight.requires_grad = True
        said = said_by_all(partial(train, ddp, range(3, 12), optimizer))
        assert "0.weight" in said, said
        assert "requires gradients now" in said, said


def several_evaluations_a_step_are_refused():
    """A closure that is called once is an ordinary step."""

    def closure(ddp):
        ddp.zero_grad()
        loss = loss_of(ddp, 0)
        loss.backward()
        return loss

    model = net()
    ddp, _ = hooked(model, FFT)
    optimizer = sgd(model)
    for _ in range(7):
        optimizer.step(partial(closure, ddp))
    assert_alike(model)
    ddp, _ = hooked(net(), FFT)
    lbfgs = torch.optim.LBFGS(ddp.parameters(), lr=0.1)
    said = said_by_all(partial(lbfgs.step, partial(closure, ddp)))
    assert "LBFGS" in said, said


def the_group_is_that_of_ddp():
    """Two trainings at once, each with ranks of its own, and a state that was given no group."""
    halves = [dist.new_group(list(range(half, RANKS, 2))) for half in (0, 1)]
    own = halves[RANK % 2]
    found = []
    for group in (own, None):
        model = net()
        state = state_of(FFT, model, group)
        train(wrap(model, state, process_group=own), range(7))
        assert state.ranks == dist.get_world_size(own)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*found)
    assert not same_on_all(found[0])
    ddp = wrap(net(), CompressionState(FFT, own))
    said = message_of(lambda: loss_of(ddp, 0).backward())
    assert "process_group" in said, said
    assert f"{list(range(RANKS))}" in said, said


class Spectral(nn.Module):
    def __init__(self, dtype=torch.cfloat):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.o = nn.Linear(64, 128), nn.Linear(128, 64)
        self.w = nn.Parameter(torch.randn(65, 64, dtype=dtype) * 0.1)
        self.b = nn.Parameter(torch.randn(65, dtype=dtype) * 0.1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        w = (self.w.mean(1) + self.b).to(torch.cfloat)
        return self.o(torch.fft.irfft(torch.fft.rfft(h) * w, n=128) + h)


def complex_parameters_are_averaged():
    """Real and imaginary parts, as a last axis; of two precisions, of which one is compressed."""
    for dtype, tensors in ((torch.cfloat, 3), (torch.cdouble, 2)):
        for compression in LOSSY:
            model = Spectral(dtype)
            ddp, state = hooked(model, compression)
            train(ddp, range(8))
            assert_alike(model)
            assert state.report()["tensors"] == tensors
            resumed = state_of(compression, Spectral(dtype))
            resumed.load_state_dict(state.state_dict())
            assert resumed.state_dict()["layout"]["w"] == [0, 1, 2]


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).to(torch.bfloat16)

    def forward(self, x):
        return self.second(self.first(x).to(torch.bfloat16)).float()


def a_static_graph_of_two_types_goes_on():
    """Its first pass hands over a bucket a type, each as the first of several; a new DDP, too."""
    for model in (TwoTypes, Spectral):
        for compression in LOSSY:
            ddp, state = hooked(model(), compression, static_graph=True, bucket_cap_mb=25)
            for steps in (6, 12):
                train(ddp, range(6))
                assert_alike(ddp)
                assert state.report()["steps"] == steps, state.report()
                ddp = wrap(ddp.module, state, static_graph=True, bucket_cap_mb=25)


def a_model_is_wrapped_anew_while_the_old_ddp_lives():
    """The hook goes by the options of the one that calls it; the old one has none of them."""
    for compression in LOSSY:
        model = TwoTypes()
        state = state_of(compression, model)
        old = [wrap(model, state, bucket_cap_mb=25)]
        train(old[0], range(4))
        train(wrap(model, state, bucket_cap_mb=25, static_graph=True), range(3))
        assert state.report()["steps"] == 7, state.report()
        model = net()  # and where both are made before either is used, and take turns
        state = state_of(compression, model)
        both = [wrap(model, state), wrap(model, state)]
        with patch.object(process_group, "live_objects", wraps=live_objects) as searches:
            for step in range(10):
                train(both[(step + 1) % 2], [step])
        assert searches.call_count <= 4, "DDP makes new buckets once"
        assert_alike(model)
        model = Turns()
        state, optimizer, ledger = state_of(compression, model), sgd(model, 0.05), Ledger(model)
        for steps, unused in ((range(4), False), (range(4, 12), True)):
            ddp = wrap(model, state, find_unused_parameters=unused)
            old.append(ddp)
            for step in steps:
                optimizer.zero_grad()
                for part in (model.maker, model.judge):
                    model.turn = [part] if unused else [model.maker, model.judge]
                    ledger.owe(step)
                    loss_of(ddp, step).backward()
                ledger.pay()
                optimizer.step()
        ledger.check(state)
        assert_alike(model)


def a_whole_step_may_be_compiled():
    """Its backward pass runs eagerly, and dynamo would trace the hook that it calls."""
    for compression in LOSSY:
        ends = []
        for update in (apply, torch.compile(apply, backend="eager")):
            ddp, _ = hooked(net(), compression, bucket_cap_mb=25)
            optimizer = sgd(ddp)
            for step in range(7):
                update(ddp, optimizer, step)
            ends.append(weights_of(ddp))
        assert_equal(*ends)


def the_default_type_is_the_users():
    """Loops set it for what they make themselves."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        for compression in LOSSY:
            model = net().float()
            ddp, _ = hooked(model, compression)
            optimizer = sgd(model)
            for step in range(5):
                optimizer.zero_grad()
                ddp(batch(step).float()).square().mean().backward()
                optimizer.step()
            assert_alike(model)
    finally:
        torch.set_default_dtype(torch.float32)


RIGHT = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip


def every_type_is_averaged_or_refused():
    """Those that train under plain DDP over Gloo; the others raise there, and with the hook."""
    assert set(TYPES) > RIGHT

    def backward(dtype, compression=None):
        model = OfType(dtype)
        ddp = hooked(model, compression)[0] if compression else DistributedDataParallel(model)
        loss_of(ddp, 0).backward()
        return ddp

    for dtype in TYPES:
        if dtype not in RIGHT:
            for way in (None, FFT):
                message_of(lambda dtype=dtype, way=way: backward(dtype, way))
            continue
        plain = backward(dtype)
        for compression in (EXACT, *LOSSY):
            ddp = backward(dtype, compression)
            if compression is EXACT:
                for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
                    # Half precision rounds by 2**-11, bfloat16 by 2**-8; two ranks' norms differ.
                    room = 2**-5 if dtype == torch.bfloat16 else 2**-8
                    assert (p.grad - q.grad).norm() <= room * q.grad.norm(), dtype
            ddp.zero_grad()
            loss_of(ddp, 1).backward()
            assert all(same_on_all(p.grad) for p in ddp.parameters()), dtype


CASES = [
    copies_of_a_model_are_made, ranks_that_perturb_apart_are_not_told_to_differ,
    a_mean_over_those_that_have_not_joined_is_refused,
    differences_are_still_found, an_unfrozen_parameter_is_compared,
    several_evaluations_a_step_are_refused, the_group_is_that_of_ddp,
    complex_parameters_are_averaged, a_static_graph_of_two_types_goes_on,
    a_model_is_wrapped_anew_while_the_old_ddp_lives, a_whole_step_may_be_compiled,
    the_default_type_is_the_users, every_type_is_averaged_or_refused,
]  # fmt: skip
