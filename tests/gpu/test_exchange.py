"""The hook of DDP and FSDP2's replicas where the tensors are: nothing lost, nothing elsewhere."""

import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.ops.fixed_point import Digits, word_sum
from sn_compress.torch.ddp import CompressionState, compression_hook

CLASSES = {
    "fft": FFTCompression.using(theta=0.9),
    "dct": FFTCompression.using(theta=0.9, transform="dct"),
    "low rank": LowRankCompression.using(ratio=20, warmup=1),
    "auto": AutoCompression.using(ratio=20, warmup=1),
}
STEPS = 5


def net(device, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 8))
    return model.to(device, dtype)


def inputs(step, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, generator=generator).to(device, dtype)


def wrapped(model, compression):
    state = CompressionState(compression, named_parameters=model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def own(model, x):
    """Gradients without DDP, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = model(x).float().square().mean()
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_what_a_step_drops_is_in_the_memory(alone, device, name, dtype):
    """Sent so far and what waits are all gradients so far, of every tensor."""
    model = net(device, dtype)
    ddp, state = wrapped(model, CLASSES[name])
    due = {it: torch.zeros_like(p, dtype=torch.float64) for it, p in model.named_parameters()}
    paid = {it: tensor.clone() for it, tensor in due.items()}
    for step in range(STEPS):
        x = inputs(step, device, dtype)
        for it, gradient in own(model, x).items():
            due[it] += gradient
        model.zero_grad()
        ddp(x).float().square().mean().backward()
        for it, parameter in model.named_parameters():
            assert parameter.grad.device == parameter.device
            assert parameter.grad.dtype == dtype
            paid[it] += parameter.grad
    dropped = 0.0
    for it, total in due.items():
        kept = torch.zeros_like(total)
        if state.engine.exchange.remembers(it):
            kept = (
                torch.as_tensor(state.engine.exchange.residual(it))
                .to(device)
                .view_as(total)
                .double()
            )
        # Roundings of float32, and of each step's mean to bfloat16, which is not remembered.
        bound = 1e-4 if dtype == torch.float32 else STEPS * 2.0**-8
        assert (paid[it] + kept - total).norm() <= bound * total.norm() + 1e-12, it
        dropped += float(kept.norm())
    # One rank alone decides for plain at once: nothing is dropped then.
    assert (dropped > 0) == (name != "auto")


@pytest.mark.parametrize("name", ["fft", "low rank"])
def test_a_state_goes_from_one_device_to_the_other(alone, device, name):
    """Saved where the tensors are, loaded on the CPU: the same memories, bit for bit."""
    model = net(device)
    ddp, state = wrapped(model, CLASSES[name])
    for step in range(3):
        ddp(inputs(step, device)).square().mean().backward()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "sent": state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    other = net("cpu")
    other.load_state_dict(saved["model"])
    loaded = CompressionState(CLASSES[name], named_parameters=other.named_parameters())
    loaded.load_state_dict(saved["sent"])
    names = [it for it, _ in model.named_parameters() if state.engine.exchange.remembers(it)]
    assert names
    for it in names:
        first, second = (
            torch.as_tensor(each.engine.exchange.residual(it)).cpu() for each in (state, loaded)
        )
        assert torch.equal(first.view(torch.int32), second.view(torch.int32)), it


@pytest.mark.parametrize("name", ["fft", "low rank"])
def test_replicas_of_fsdp2(alone, device, name):
    """FSDP2's own reduction, and ours over one replica, of the same gradients and the memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from sn_compress.torch.fsdp import compress_replicas

    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
    model = net(device)
    plain = own(model, inputs(0, device))
    fully_shard(model, mesh=mesh["shard"])
    state = compress_replicas(model, CLASSES[name], mesh["replicate"])
    model(inputs(0, device)).square().mean().backward()
    for it, parameter in model.named_parameters():
        got, kept = parameter.grad.full_tensor(), 0.0
        assert got.device.type == device.type
        if state.engine.exchange.remembers(it):
            kept = torch.as_tensor(state.engine.exchange.residual(it)).to(device).view_as(got)
        assert (got + kept - plain[it]).norm() <= 1e-4 * plain[it].norm() + 1e-12, it


@pytest.mark.parametrize("ranks", [1, 8, 43])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 1000, 2**16 + 1])
def test_integers_are_those_of_numpy(device, ranks, count):
    """Digits and checksums decide what ranks agree on: bit for bit, wherever they are made."""
    digits, generator = Digits.of(ranks, fine=False), torch.Generator().manual_seed(count)
    most = digits.limit
    values = torch.randint(-most, most + 1, (count,), generator=generator, dtype=torch.int32)
    words = digits.pack(values.to(device))
    assert words.device.type == device.type
    expected = digits.pack(values.numpy())
    assert words.cpu().numpy().tobytes() == expected.tobytes()
    assert torch.equal(digits.unpack(words, count).cpu(), values)
    if len(expected) > 1:  # a round has a header of more words than one
        assert int(word_sum(words)) == int(word_sum(expected))
