"""One rank of FSDP2 whose shards travel in fewer bytes."""

import copy
import io
import warnings

import torch
import torch.distributed as dist
from cases import LAST, RANK, RANKS, assert_equal, gathered, message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sn_memory.torch
from sn_compress import LowRankCompression
from sn_compress.torch.fsdp import compress_replicas
from sn_compress.torch.fsdp_shards import compress_shards


def net(seed=0, blocks=2):
    torch.manual_seed(seed)
    first = [
        nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96)) for _ in range(blocks)
    ]
    return nn.Sequential(*first, nn.LayerNorm(96), nn.Linear(96, 10))


def sharded(model=None, **options):
    model = model or net()
    for block in list(model)[:-2]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, 96, generator=generator)
    way = torch.randn(96, 10, generator=torch.Generator().manual_seed(7))
    return x, (x @ way).argmax(1)


def loss_of(model, step, rank=RANK):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def whole(model, gradients=False):
    """Parameters, or their gradients, as one vector; the same on every rank."""
    tensors = [p.grad if gradients else p for p in model.parameters()]
    return torch.cat([t.full_tensor().detach().flatten() for t in tensors])


def mean_gradient(step):
    """Of all ranks' batches, by plain autograd."""
    model = net()
    for rank in range(RANKS):
        (loss_of(model, step, rank) / RANKS).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient(model, step=0):
    model.zero_grad()
    loss_of(model, step).backward()
    return whole(model, gradients=True)


def train(model, steps, rate=0.1, kind=torch.optim.SGD):
    optimizer = kind(model.parameters(), lr=rate)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def gradients_are_the_mean_and_unbiased():
    """Each is off by the rounding of its bits, and the mean of many is the exact one."""
    due = mean_gradient(0)
    for bits, error, times in ((8, 0.02, 1), (4, 0.25, 40), ("bf16", 0.006, 1), ("fp8", 0.08, 1)):
        model = sharded()
        shards = compress_shards(model, gradients=bits, parameters=None)
        found = [gradient(model) for _ in range(times)]
        one = (found[0] - due).norm() / due.norm()
        # The mean of 40 is off by a sixth of what one is off by.
        many = (torch.stack(found).mean(0) - due).norm() / due.norm()
        assert one < error, (bits, one)
        assert times == 1 or many < one / 5, (bits, one, many)
        assert shards.report()["parameter_ratio"] == 1.0


def bytes_are_what_is_said():
    model = sharded(net(blocks=3))
    shards = compress_shards(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of collectives that torch has renamed
        train(model, range(3))
    report = shards.report()
    # 4.5 bits of 32; 8.125 of 32, of what a module gathers before and behind its forward pass.
    assert 6.5 < report["gradient_ratio"] < 7.2, report
    assert 3.7 < report["parameter_ratio"] < 4.0, report
    for dtype, size in (("bf16", lambda n: 2 * n), ("fp8", lambda n: -(-n // 256) * 257)):
        model = sharded(net(blocks=3))
        shards = compress_shards(model, gradients=dtype, parameters=None)
        train(model, range(3))
        # Of each block a rank sends three parts of a quarter; the last two layers are too small.
        block = 50 * 96 + 50 + 24 * 200 + 24
        plain = 4 * sum(-(-p.numel() // (RANKS * p[0].numel())) * p[0].numel()
                        for p in list(net().parameters())[-4:])  # fmt: skip
        assert shards.report()["gradient_bytes"] == 3 * 3 * (3 * size(block) + plain)


def a_model_learns_as_with_plain():
    curves = []
    for bits in (None, 4, "fp8"):
        model = sharded()
        if bits:
            compress_shards(model, gradients=bits)
        train(model, range(60), 3e-3, torch.optim.AdamW)
        losses = torch.tensor([float(loss_of(model, 1000 + k)) for k in range(4)])
        dist.all_reduce(losses)
        curves.append(float(losses.mean()) / RANKS)
    plain, *ours = curves
    assert max(ours) < plain + 0.05, curves
    assert plain < 2.0, curves


def forward_passes_are_alike_on_all_ranks():
    """The owner of a shard computes with the rounded values, too."""
    model = sharded()
    compress_shards(model)
    x, _ = batch(0, rank=0)
    every = gathered(model(x))
    assert all(torch.equal(every[0], other) for other in every)
    exact = net()(x)
    assert 0 < (every[0] - exact).norm() < 0.05 * exact.norm()


def shards_keep_all_bits():
    """A step of a rate of zero leaves parameters as they were."""
    model = sharded()
    before = whole(model)
    compress_shards(model)
    train(model, range(2), rate=0.0)
    assert torch.equal(whole(model), before)


def in_every_way_people_train():
    """Accumulation, clipping, and precisions: finite, and the same as one sum of batches."""
    model = sharded()
    compress_shards(model, gradients=8)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        (loss_of(model, step) / 3).backward()
    due = sum(mean_gradient(step) for step in range(3)) / 3
    found = whole(model, gradients=True)
    assert (found - due).norm() < 0.05 * due.norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    assert abs(norm - found.norm()) < 1e-4 * norm
    due = mean_gradient(0)
    for reduced in ({"reduce_dtype": torch.float32}, {}):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **reduced)
        model = sharded(mp_policy=policy)
        compress_shards(model, gradients=8)
        assert (gradient(model) - due).norm() < 0.08 * due.norm()


def not_a_number_arrives():
    """Where it came from one rank: a loss scaler is to see it."""
    for bits, bad in ((4, "nan"), (4, "inf"), ("bf16", "inf"), ("fp8", "nan"), ("fp8", "inf")):
        model = sharded()
        compress_shards(model, gradients=bits)
        (loss_of(model, 0) * (float(bad) if LAST else 1.0)).backward()
        assert not whole(model, gradients=True).isfinite().all()
        assert gradient(model).isfinite().all(), "gone afterwards"


def a_run_goes_on_bit_by_bit():
    model, file = sharded(), io.BytesIO()
    shards = compress_shards(model)
    train(model, range(3))
    torch.save(shards.state_dict(), file)
    file.seek(0)
    weights = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    train(model, range(3, 6))
    again = sharded(net(seed=1))
    again.load_state_dict(weights)
    resumed = compress_shards(again)
    resumed.load_state_dict(torch.load(file))
    train(again, range(3, 6))
    assert torch.equal(whole(model), whole(again))


def with_replicas_by_low_rank():
    """Shards inside, replicas across: both travel compressed."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh["shard"])
    shards = compress_shards(model, gradients=8, parameters=None)
    low_rank = LowRankCompression.using(ratio=4, warmup=1)
    replicas = compress_replicas(model, low_rank, mesh["replicate"])
    train(model, range(4))
    assert shards.report()["gradient_ratio"] > 3
    assert replicas.report()["ratio_after_warmup"] > 2


def with_a_plan_of_memory():
    """The same model planned by sn_memory trains as without a plan, to the bit."""
    # Many rows, so that activations are most of what a step holds.
    samples = [torch.cat([batch(step)[0] for step in range(t, t + 64)]) for t in range(2)]
    found = []
    for planned in (False, True):
        model = net(blocks=3)
        if planned:
            model = sn_memory.torch.plan(model, samples[0], "80%", profile=False)
        model = fully_shard(model)
        compress_shards(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in samples:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(whole(model))
    assert_equal(found[:1], found[1:])


def what_is_wrong_is_an_error():
    for call, words in (
        (lambda: compress_shards(net()), "without a module of FSDP2"),
        (lambda: compress_shards(sharded(), gradients=2), "gradients=2"),
        (lambda: compress_shards(sharded(), gradients="fp4"), "gradients='fp4'"),
        (lambda: compress_shards(sharded(), parameters=4), "parameters=4"),
        (lambda: compress_shards(sharded(), min_elements=0), "min_elements=0"),
        (lambda: compress_shards(sharded()).load_state_dict({}), "state_dict()"),
    ):
        assert words in message_of(call), message_of(call)


CASES = [
    gradients_are_the_mean_and_unbiased, bytes_are_what_is_said, a_model_learns_as_with_plain,
    forward_passes_are_alike_on_all_ranks, shards_keep_all_bits, in_every_way_people_train,
    not_a_number_arrives, a_run_goes_on_bit_by_bit, with_replicas_by_low_rank,
    with_a_plan_of_memory, what_is_wrong_is_an_error,
]  # fmt: skip
