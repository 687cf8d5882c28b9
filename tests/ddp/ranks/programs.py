"""One rank: programs that people write around DDP, one function a case.

Run as `programs.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails.
"""

import copy
import io
import pickle

import torch
import torch.distributed as dist
from cases import RANK, RANKS, OfType, message_of, process_group, run, said_by_all, same_on_all
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

FFT = FFTCompression.using(theta=0.9, check_every=5)
LOW = LowRankCompression.using(ratio=20, warmup=3, check_every=5)
LOSSY = (FFT, LOW)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def wrap(model, compression, *, named=True, group=None, **options):
    ddp = DistributedDataParallel(model, process_group=group, **options)
    names = model.named_parameters() if named else None
    state = CompressionState(compression, named_parameters=names)
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def batch(step, size=16):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randn(size, 64, generator=generator)


def loss_of(model, step):
    x = batch(step)
    return (model(x) - x).square().mean()


def copies_of_a_model_are_made():
    """Averaged, copied, pickled: a copy of DDP has no hook, and a state in its place is refused."""
    for named in (True, False):
        model = net()
        ddp, state = wrap(model, FFT, named=named)
        loss_of(ddp, 0).backward()
        average = AveragedModel(ddp)
        twin = copy.deepcopy(ddp)
        read = pickle.loads(pickle.dumps(ddp))
        file = io.BytesIO()
        torch.save(ddp, file)
        for other in (twin, average.module, read):
            assert torch.equal(other.module[0].weight, model[0].weight)
            other(batch(1)).sum().backward()
        loss_of(ddp, 1).backward()
        average.update_parameters(ddp)
        for made in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            again = DistributedDataParallel(net())
            again.register_comm_hook(made, compression_hook)
            said = message_of(lambda model=again: loss_of(model, 0).backward())
            assert "copy of a CompressionState" in said, said
            assert "load_state_dict" in said, said


def steps_that_perturb_first(perturbed):
    """SAM as torch recommends it: each rank goes up by its own gradient, then takes it back."""
    for compression in LOSSY:
        model = net()
        ddp, state = wrap(model, compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            old = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            perturbed(ddp, model, step)
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
        assert all(same_on_all(p) for p in model.parameters())


def ranks_that_perturb_apart_are_not_told_to_differ():
    def under_no_sync(ddp, model, step):
        with ddp.no_sync():
            loss_of(ddp, step).backward()

    steps_that_perturb_first(under_no_sync)
    steps_that_perturb_first(lambda ddp, model, step: loss_of(model, step).backward())


def ranks_that_have_joined_are_not_asked():
    """One shadows the others, and takes no steps, when parameters are compared."""
    for compression in (*LOSSY, AutoCompression.using(check_every=5)):
        model = net()
        ddp, state = wrap(model, compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([ddp]):
            for step in range(22 if RANK == 0 else 13):
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                optimizer.step()
        assert state.engine.sameness.same_at == (20 if RANK == 0 else 10)


def a_mean_over_those_that_have_not_joined_is_refused():
    model = net()
    ddp, _ = wrap(model, FFT)

    def train():
        with Join([ddp], divide_by_initial_world_size=False):
            loss_of(ddp, 0).backward()

    said = said_by_all(train)
    assert "divide_by_initial_world_size=False" in said, said


def differences_are_still_found():
    """Whoever updates: an optimizer, an optimizer of shards, a loop by hand."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def by_hand(model):
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    def by(optimizer):
        return lambda model: optimizer.step()

    for damaged in (False, True):
        # ZeRO sends all parameters from their owners, the damage away with them.
        for kind in ("sgd", "two", "by hand") if damaged else ("sgd", "zero", "two", "by hand"):
            model = net()
            ddp, state = wrap(model, FFT)
            if kind == "sgd":
                update = by(torch.optim.SGD(model.parameters(), lr=0.1))
            elif kind == "zero":
                update = by(
                    ZeroRedundancyOptimizer(
                        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
                    )
                )
            elif kind == "two":
                halves = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]

                def update(model, halves=halves):
                    for each in halves:
                        each.step()
            else:
                update = by_hand

            def train(ddp=ddp, model=model, update=update, damaged=damaged):
                for step in range(12):
                    model.zero_grad()
                    loss_of(ddp, step).backward()
                    update(model)
                    if damaged and step == 6 and RANK == RANKS - 1:
                        with torch.no_grad():
                            model[0].weight[0, 0] += 1e-3

            if damaged:
                said = said_by_all(train)
                assert "different parameters after step 10" in said, (kind, said)
                assert "same after step 5" in said, (kind, said)
                assert "0.weight" in said, (kind, said)
            else:
                train()
                assert state.engine.sameness.same_at == 10, (kind, state.engine.sameness.same_at)


def an_unfrozen_parameter_is_compared():
    """DDP knows nothing of it, so it drifts apart, as in plain DDP; it has to be told."""
    for named in (True, False):
        model = net()
        model[0].weight.requires_grad = False
        ddp, _ = wrap(model, FFT, named=named)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(ddp=ddp, model=model, optimizer=optimizer):
            for step in range(12):
                model[0].weight.requires_grad = step >= 3
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                optimizer.step()

        said = said_by_all(train)
        assert "0.weight" in said, said
        assert "requires gradients now" in said, said


def several_evaluations_a_step_are_refused():
    model = net()
    ddp, _ = wrap(model, FFT)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(ddp, 0)
        loss.backward()
        return loss

    said = said_by_all(lambda: optimizer.step(closure))
    assert "LBFGS" in said, said
    # A closure that is called once is an ordinary step.
    model = net()
    ddp, _ = wrap(model, FFT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        optimizer.step(closure)
    assert all(same_on_all(p) for p in model.parameters())


def the_group_is_that_of_ddp():
    """Two trainings at once, each with ranks of its own, and a state that was given no group."""
    halves = [dist.new_group(list(range(half, RANKS, 2))) for half in (0, 1)]
    own = halves[RANK % 2]
    found = []
    for group in (own, None):
        model = net()
        ddp = DistributedDataParallel(model, process_group=own)
        state = CompressionState(FFT, group, named_parameters=model.named_parameters())
        ddp.register_comm_hook(state, compression_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
        assert state.ranks == dist.get_world_size(own)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*found)
    assert not same_on_all(found[0])
    model = net()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(CompressionState(FFT, own), compression_hook)
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
    """Real and imaginary parts, as a last axis; alone and among real ones."""
    exact = FFTCompression.using(theta=0.0, values="fp16")
    for dtype in (torch.cfloat, torch.cdouble):
        plain = DistributedDataParallel(Spectral(dtype))
        loss_of(plain, 0).backward()
        for compression in (exact, *LOSSY):
            model = Spectral(dtype)
            ddp, state = wrap(model, compression)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(12):
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                if step == 0 and compression is exact:
                    for p, q in zip(model.parameters(), plain.module.parameters(), strict=True):
                        # Half precision rounds by 2**-11 relative; two ranks' norms may differ.
                        assert (p.grad - q.grad).norm() <= 2**-8 * q.grad.norm()
                assert all(same_on_all(p.grad) for p in model.parameters())
                optimizer.step()
            assert all(same_on_all(p) for p in model.parameters())
            assert state.report()["tensors"] == (3 if dtype == torch.cfloat else 2)
            saved = copy.deepcopy(state.state_dict())
            other = Spectral(dtype)
            resumed = CompressionState(compression, named_parameters=other.named_parameters())
            resumed.load_state_dict(saved)
            ours = resumed.state_dict()["layout"]["w"]
            assert ours == ([0, 1, 2] if dtype.is_complex else [0, 1]), ours


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).to(torch.bfloat16)

    def forward(self, x):
        return self.second(self.first(x).to(torch.bfloat16)).float()


def a_static_graph_of_two_types_goes_on():
    """Its first pass hands over a bucket a type, each as the first of several."""
    for model in (TwoTypes, Spectral):
        for compression in LOSSY:
            ddp, state = wrap(model(), compression, static_graph=True)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(8):
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                assert all(same_on_all(p.grad) for p in ddp.parameters())
                optimizer.step()
            assert state.report()["steps"] == 8, state.report()


RIGHT = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip


def every_type_is_averaged_or_refused():
    """Those that train under plain DDP over Gloo; the others raise there, and with the hook."""
    exact = FFTCompression.using(theta=0.0, values="fp16")
    types = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    assert types > RIGHT
    for dtype in sorted(types, key=str):
        try:
            plain = DistributedDataParallel(OfType(dtype))
            loss_of(plain, 0).backward()
        except (RuntimeError, NotImplementedError):
            assert_refused(dtype)
            continue
        assert dtype in RIGHT, dtype
        for compression in (exact, *LOSSY):
            ddp, _ = wrap(OfType(dtype), compression)
            for _ in range(2):
                ddp.zero_grad()
                loss_of(ddp, 0).backward()
                assert all(same_on_all(p.grad) for p in ddp.parameters()), dtype
            if compression is exact:
                for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
                    # Half precision rounds by 2**-11, bfloat16 by 2**-8; two ranks' norms differ.
                    room = 2**-5 if dtype == torch.bfloat16 else 2**-8
                    assert (p.grad - q.grad).norm() <= room * q.grad.norm(), dtype


def assert_refused(dtype):
    assert dtype not in RIGHT, dtype
    try:
        ddp, _ = wrap(OfType(dtype), LOSSY[0])
        loss_of(ddp, 0).backward()
    except (RuntimeError, NotImplementedError):
        return
    raise AssertionError(f"{dtype} trains with the hook, and not without")


CASES = [
    copies_of_a_model_are_made, ranks_that_perturb_apart_are_not_told_to_differ,
    ranks_that_have_joined_are_not_asked, a_mean_over_those_that_have_not_joined_is_refused,
    differences_are_still_found, an_unfrozen_parameter_is_compared,
    several_evaluations_a_step_are_refused, the_group_is_that_of_ddp,
    complex_parameters_are_averaged, a_static_graph_of_two_types_goes_on,
    every_type_is_averaged_or_refused,
]  # fmt: skip

if __name__ == "__main__":
    with process_group():
        run(CASES)
