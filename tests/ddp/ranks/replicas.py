"""One rank of four: FSDP2 over two of them, our averages over the pairs of replicas."""

import contextlib

import torch
import torch.distributed as dist
from cases import FFT, RANKS, TYPES, OfType, batch, message_of, same_on_all, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.fsdp import compress_replicas

LOW = LowRankCompression.using(ratio=20, warmup=2)
# Nothing lost but by rounding: all bins in 16 bits; rank one and all that is left sums to the mean.
EXACT = FFTCompression.using(theta=0.0, values="fp16", min_elements=1)
MESH = None


def start():
    global MESH
    MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Uneven shards: 97 rows, 3 rows (2 and 1), one row (one and none)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 97), nn.Tanh(), nn.Linear(97, 64))
        self.sides = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 3)
        self.gate = nn.Linear(64, 1)

    def forward(self, x, side=None):
        x = self.body(x)
        chosen = self.sides if side is None else self.sides[side : side + 1]
        x = sum(layer(x) for layer in chosen)
        return self.head(x) * self.gate(x).sigmoid()


def sharded(over, **options):
    """Two modules of FSDP2, one of which holds layers of many kinds."""
    model = Net()
    fully_shard(model.body, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def ours(compression, **options):
    model = sharded(MESH["shard"], **options)
    return model, compress_replicas(model, compression, MESH["replicate"])


def loss_of(model, step, side=None):
    inputs = batch(step, 16)
    return (model(inputs, side) - inputs[:, :3].tanh()).square().mean()


def train(model, steps):
    optimizer = sgd(model, 0.3)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def whole(model):
    return {name: it.full_tensor().detach() for name, it in model.named_parameters()}


def assert_alike(model):
    for name, value in whole(model).items():
        assert torch.isfinite(value).all(), name
        assert same_on_all(value), name


def loss_over_all(model):
    with torch.no_grad():
        total = torch.stack([loss_of(model, 10_000 + each) for each in range(8)]).mean()
    model.reshard()
    dist.all_reduce(total)
    return total.item() / RANKS


def gradients(model):
    named = model.named_parameters()
    return {name: it.grad.full_tensor() for name, it in named if it.grad is not None}


def close(model, stock, tolerance=2**-8):
    """EXACT rounds to 2**-11; replicas' gradients may cancel down to a part of their norms."""
    a, b = gradients(model), gradients(stock)
    assert a.keys() == b.keys()
    for name, want in b.items():
        found, want = (
            torch.view_as_real(it) if it.is_complex() else it.float() for it in (a[name], want)
        )
        error = (found - want).norm()
        assert error <= tolerance * want.norm(), (name, error, want.norm())


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
    assert len(state.engine.exchange.tensors["body.0.weight"].shape) == 2, "a vector"
    assert_alike(model)


def every_class_ends_with_the_same_bits():
    for compression in (FFT, AutoCompression.using(ratio=20)):
        model, state = ours(compression)
        train(model, range(4))
        assert state.report()["steps"] == 4
        assert_alike(model)


def the_mean_is_that_of_torch():
    """Uneven and empty shards, padding between them, and reductions in bfloat16."""
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for options, tolerance in (({}, 2**-8), (half, 0.04)):
        stock, (model, state) = sharded(MESH, **options), ours(EXACT, **options)
        for each in (stock, model):
            loss_of(each, 0).backward()
        close(model, stock, tolerance)
        assert state.report()["frequencies"] > 0
    model, state = ours(LOW, **half)
    train(model, range(5))
    assert state.report()["low_rank"] == 4
    assert_alike(model)


def passes_may_wait_for_the_average():
    """set_requires_all_reduce and set_requires_gradient_sync, as torch's all-reduce has them."""
    for hold in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        stock, (model, state) = sharded(MESH), ours(EXACT)
        for each in (stock, model):
            for step in range(3):
                getattr(each, hold)(step == 2)
                loss_of(each, step).backward()
        close(model, stock)
        assert state.report()["steps"] == 1, (hold, state.report())


def parameters_may_have_no_gradient():
    """Another one in every pass; what is remembered of the one that sits out waits."""
    stock, (model, _) = sharded(MESH), ours(EXACT)
    for each in (stock, model):
        loss_of(each, 0, side=1).backward()
    assert model.sides[0].weight.grad is None
    close(model, stock)
    model, state = ours(LOW)
    train(model, range(4))
    waits = state.engine.exchange.residual("sides.0.weight")
    assert waits.any()
    loss_of(model, 4, side=1).backward()
    assert (state.engine.exchange.residual("sides.0.weight") == waits).all()
    frozen, _ = ours(LOW)
    frozen.sides[0].weight.requires_grad_(False)
    train(frozen, range(4))


def what_is_thrown_away_leaves_no_trace():
    """A pass whose gradients are set to None or zero; and one that accumulates is applied."""
    for compression in (LOW, FFT):
        found = {}
        for way in ("never", "none", "zeros", "accumulates"):
            model, state = ours(compression)
            optimizer = sgd(model, 0.3)
            for step in range(6):
                optimizer.zero_grad()
                for _ in range(1 + (way == "accumulates")):
                    loss_of(model, step).backward()
                optimizer.step()
                if step >= 3 and way in ("none", "zeros"):
                    optimizer.zero_grad()
                    loss_of(model, 50 + step, side=step % 2).backward()
                    optimizer.zero_grad(set_to_none=way == "none")
            state.state_dict()
            left = torch.from_numpy(state.engine.exchange.residual("sides.0.weight")).clone()
            found[way] = {**whole(model), "left": left}
        for name, value in found["never"].items():
            for way in ("none", "zeros"):
                assert torch.equal(found[way][name], value), (compression, way, name)
        assert not torch.equal(found["accumulates"]["left"], found["never"]["left"])


def resumed_run_is_bit_equal():
    straight, _ = ours(LOW)
    train(straight, range(8))
    first, state = ours(LOW)
    train(first, range(4))
    saved = state.state_dict()
    assert set(saved["shared"]["tensors"]) <= {name for name, _ in Net().named_parameters()}
    again, state = ours(LOW)
    with torch.no_grad():
        for new, old in zip(again.parameters(), first.parameters(), strict=True):
            new.copy_(old)
    state.load_state_dict(saved)
    train(again, range(4, 8))
    for name, value in whole(again).items():
        assert torch.equal(value, whole(straight)[name]), name


def the_mesh_of_shards_is_refused():
    """More bad input is in bad_input.py, on two ranks, of which none is sharded."""
    shard = MESH["shard"]
    said = message_of(lambda: compress_replicas(sharded(shard), LOW, shard))
    assert "hold other shards" in said, said


RIGHT = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def every_type_is_averaged_or_refused():
    """As torch's FSDP2 and Gloo do without us; modules of one type each, as FSDP2 wants."""
    for dtype in TYPES:
        found = []
        for over in (MESH, MESH["shard"]):
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                model = OfType(dtype)
                fully_shard(model.layer, mesh=over)
                fully_shard(model, mesh=over)
                if over is not MESH:
                    compress_replicas(model, EXACT, MESH["replicate"])
                model(batch(0)).square().mean().backward()
                found.append(model)
        assert len(found) == 2 * (dtype in RIGHT), dtype
        if found:
            stock, model = found
            close(model, stock, 2**-5 if dtype == torch.bfloat16 else 2**-8)


CASES = [
    low_rank_learns_as_plain_does, every_class_ends_with_the_same_bits, the_mean_is_that_of_torch,
    passes_may_wait_for_the_average, parameters_may_have_no_gradient,
    what_is_thrown_away_leaves_no_trace, resumed_run_is_bit_equal, the_mesh_of_shards_is_refused,
    every_type_is_averaged_or_refused,
]  # fmt: skip
