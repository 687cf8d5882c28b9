"""One rank of four: FSDP2 over two of them, our averages over the pairs of replicas.

Run as `replicas.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails.
"""

import contextlib

import torch
import torch.distributed as dist
from cases import RANK, RANKS, OfType, message_of, process_group, run, same_on_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.fsdp import compress_replicas

LOW = LowRankCompression.using(ratio=20, warmup=2)
# Nothing lost but by rounding: all bins in 16 bits; rank one and all that is left sums to the mean.
EXACT = FFTCompression.using(theta=0.0, values="fp16", min_elements=1)


class Net(nn.Module):
    """Uneven shards: 97 rows, 3 rows (2 and 1), one row (one and none)."""

    def __init__(self, inner=97):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, inner), nn.Tanh(), nn.Linear(inner, 64))
        self.sides = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 3)
        self.gate = nn.Linear(64, 1)

    def forward(self, x, side=None):
        x = self.body(x)
        chosen = self.sides if side is None else self.sides[side : side + 1]
        x = sum(layer(x) for layer in chosen)
        return self.head(x) * self.gate(x).sigmoid()


def sharded(over, inner=97, **options):
    """Two modules of FSDP2, one of which holds layers of many kinds."""
    model = Net(inner)
    fully_shard(model.body, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def ours(compression, **options):
    model = sharded(MESH["shard"], **options)
    return model, compress_replicas(model, compression, MESH["replicate"])


def batch(step, rank=RANK):
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs[:, :3].tanh()


def loss_of(model, step, side=None):
    inputs, targets = batch(step)
    return (model(inputs, side) - targets).square().mean()


def train(model, steps, lr=0.3):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def whole(model):
    return {name: it.full_tensor().detach() for name, it in model.named_parameters()}


def loss_over_all(model):
    with torch.no_grad():
        total = torch.stack([loss_of(model, 10_000 + each) for each in range(8)]).mean()
    model.reshard()
    dist.all_reduce(total)
    return total.item() / RANKS


def close(a, b, tolerance=2**-8):
    """EXACT rounds to 2**-11; replicas' gradients may cancel down to a part of their norms."""
    assert a.keys() == b.keys()
    for name, want in b.items():
        error = (a[name].float() - want.float()).norm()
        assert error <= tolerance * want.float().norm(), (name, error, want.norm())


def gradients(model):
    return {name: it.grad.full_tensor() for name, it in model.named_parameters()}


def low_rank_learns_as_plain_does():
    stock = sharded(MESH)
    first = loss_over_all(stock)
    train(stock, range(30))
    plain = loss_over_all(stock)
    model, state = ours(LOW)
    train(model, range(30))
    lossy = loss_over_all(model)
    assert first - lossy > 0.85 * (first - plain), (first, plain, lossy)
    report = state.report()
    # body.0, body.2 and two sides; the rest travels whole in 16 bits.
    assert report["low_rank"] == 4, report
    assert report["frequencies"] == 0, report
    assert report["tensors"] == report["low_rank"] + report["whole"], report
    assert report["steps"] == 30, report
    assert report["ratio"] > 5, report
    assert len(state.exchange.tensors["body.0.weight"].shape) == 2, "a vector"
    for name, value in whole(model).items():
        assert same_on_all(value), name


def every_class_ends_with_the_same_bits():
    for compression in (FFTCompression.using(theta=0.9), AutoCompression.using(ratio=20)):
        model, state = ours(compression)
        train(model, range(4))
        assert state.report()["steps"] == 4
        for name, value in whole(model).items():
            assert same_on_all(value), name


def the_mean_is_that_of_torch():
    """Uneven and empty shards, padding between them, and reductions in bfloat16."""
    for policy, tolerance in (
        (None, 2**-8),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 0.04),
    ):
        options = {"mp_policy": policy} if policy else {}
        stock, (model, state) = sharded(MESH, **options), ours(EXACT, **options)
        for each in (stock, model):
            loss_of(each, 0).backward()
        close(gradients(model), gradients(stock), tolerance)
        assert state.report()["frequencies"] > 0
        model, state = ours(LOW, **options)
        train(model, range(5))
        assert state.report()["low_rank"] == 4
        for name, value in whole(model).items():
            assert torch.isfinite(value).all(), name
            assert same_on_all(value), name


def passes_may_wait_for_the_average():
    """set_requires_all_reduce and set_requires_gradient_sync, as torch's all-reduce has them."""
    for hold in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        stock, (model, state) = sharded(MESH), ours(EXACT)
        for each in (stock, model):
            for step in range(3):
                getattr(each, hold)(step == 2)
                loss_of(each, step).backward()
        close(gradients(model), gradients(stock))
        assert state.report()["steps"] == 1, (hold, state.report())


def parameters_may_have_no_gradient():
    """Another one in every pass; what is remembered of the one that sits out waits."""
    stock, (model, _) = sharded(MESH), ours(EXACT)
    for each in (stock, model):
        loss_of(each, 0, side=1).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert found["sides.0.weight"] is None
    close(
        {n: g.full_tensor() for n, g in found.items() if g is not None},
        {n: p.grad.full_tensor() for n, p in stock.named_parameters() if p.grad is not None},
    )
    model, state = ours(LOW)
    train(model, range(4))
    waits = state.exchange.residual("sides.0.weight")
    assert waits.any()
    loss_of(model, 4, side=1).backward()
    assert (state.exchange.residual("sides.0.weight") == waits).all()
    frozen, _ = ours(LOW)
    frozen.sides[0].weight.requires_grad_(False)
    train(frozen, range(4))


def what_is_thrown_away_leaves_no_trace():
    """A pass whose gradients are set to None or zero; and one that accumulates is applied."""
    for compression in (LOW, FFTCompression.using(theta=0.9)):
        found = {}
        for way in ("never", "none", "zeros", "accumulates"):
            model, state = ours(compression)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            for step in range(7):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if way == "accumulates":
                    loss_of(model, step).backward()
                optimizer.step()
                if step >= 3 and way in ("none", "zeros"):
                    optimizer.zero_grad()
                    loss_of(model, 50 + step, side=step % 2).backward()
                    optimizer.zero_grad(set_to_none=way == "none")
            state.state_dict()
            left = torch.from_numpy(state.exchange.residual("sides.0.weight"))
            found[way] = {**whole(model), "left": left}
        for name, value in found["never"].items():
            for way in ("none", "zeros"):
                assert torch.equal(found[way][name], value), (compression, way, name)
        assert not torch.equal(found["accumulates"]["left"], found["never"]["left"])


def resumed_run_is_bit_equal():
    straight, _ = ours(LOW)
    train(straight, range(12))
    first, state = ours(LOW)
    train(first, range(6))
    saved = state.state_dict()
    assert set(saved["shared"]["tensors"]) <= {name for name, _ in Net().named_parameters()}
    again, state = ours(LOW)
    with torch.no_grad():
        for new, old in zip(again.parameters(), first.parameters(), strict=True):
            new.copy_(old)
    state.load_state_dict(saved)
    train(again, range(6, 12))
    for name, value in whole(again).items():
        assert torch.equal(value, whole(straight)[name]), name


def bad_input_is_told():
    """More of it is in bad_input.py, on two ranks."""
    shard, replicate = MESH["shard"], MESH["replicate"]
    for call, words in (
        (lambda: compress_replicas(LOW, Net(), replicate), "as model; expected a module"),
        (lambda: compress_replicas(sharded(shard), LOW, MESH), "a mesh of 2 dimensions"),
        (lambda: compress_replicas(sharded(shard), LOW, shard), "hold other shards"),
    ):
        assert words in message_of(call), (words, message_of(call))


def every_type_is_averaged_or_refused():
    """As torch's FSDP2 and Gloo do without us; modules of one type each, as FSDP2 wants."""
    right = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    right |= {torch.complex64, torch.complex128}
    types = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    for dtype in sorted(types, key=str):
        found = []
        for compressed in (False, True):
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                model = OfType(dtype)
                fully_shard(model.layer, mesh=MESH["shard"] if compressed else MESH)
                fully_shard(model, mesh=MESH["shard"] if compressed else MESH)
                if compressed:
                    compress_replicas(model, EXACT, MESH["replicate"])
                model(batch(0)[0]).square().mean().backward()
                found.append(gradients(model))
        assert len(found) == 2 * (dtype in right), dtype
        if found:
            plain, mean = (
                {
                    name: torch.view_as_real(it) if it.is_complex() else it
                    for name, it in each.items()
                }
                for each in found
            )
            close(mean, plain, 2**-5 if dtype == torch.bfloat16 else 2**-8)


CASES = [
    low_rank_learns_as_plain_does, every_class_ends_with_the_same_bits, the_mean_is_that_of_torch,
    passes_may_wait_for_the_average, parameters_may_have_no_gradient,
    what_is_thrown_away_leaves_no_trace, resumed_run_is_bit_equal, bad_input_is_told,
    every_type_is_averaged_or_refused,
]  # fmt: skip

if __name__ == "__main__":
    with process_group():
        MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        run(CASES)
