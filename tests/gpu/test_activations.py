"""Compressed activations of a model on the device: gradients near, fewer bytes, in place."""

import copy

import pytest
import torch
from torch import nn

import sn_memory
from sn_memory.torch import compress_activations
from sn_memory.torch.activations import packing, treatments
from sn_memory.torch.target.accelerator import is_apart


def net(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)


@pytest.mark.parametrize("bits", [4, 8])
def test_gradients_are_near_and_where_they_belong(device, bits):
    model = net(device)
    plain, sample = copy.deepcopy(model), torch.randn(32, 3, 16, 16, device=device)
    plain(sample).square().mean().backward()
    with compress_activations(model, bits=bits) as compressed:
        model(sample).square().mean().backward()
        assert compressed.saved.ratio > 2
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert own.grad.device == own.device, name
        off = (own.grad - expected.grad).norm() / expected.grad.norm()
        # A step of a group's range is 2**-bits of it; a range is some six standard deviations.
        assert off <= 6 * 2.0**-bits, (name, float(off))
    # The last layer's bias is a sum of what was not compressed.
    assert torch.allclose(model[-1].bias.grad, plain[-1].bias.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_have_the_bits_of_the_host(device, dtype):
    """Triton's kernels on a device against the array code on the host, which tests hold to C++."""
    if device.type != "cuda":
        pytest.skip("Triton compiles for a GPU only; elsewhere its interpreter is tested")
    assert packing.kernels(device) is not None
    torch.manual_seed(0)
    for n in (1, 255, 257, 2**20 + 1):
        values = torch.randn(n).relu().to(dtype)
        for bits in (1, 2, 4, 8):
            host = packing.pack(values, bits, (1, 2))
            made = packing.pack(values.to(device), bits, (1, 2))
            for part in ("bases", "steps", "codes"):
                assert torch.equal(getattr(made, part).cpu(), getattr(host, part)), (n, bits, part)
            back = packing.unpack(made, n, bits, dtype).cpu()
            assert torch.equal(back, packing.unpack(host, n, bits, dtype)), (n, bits)


def test_a_budget_is_kept(device):
    model, sample = net(device), torch.randn(32, 3, 16, 16, device=device)
    with compress_activations(model, bits=8) as compressed:
        model(sample).sum().backward()
        plain_bytes = compressed.saved.plain_bytes
    with compress_activations(model, budget=plain_bytes // 8) as compressed:
        for _ in range(2):
            model(sample).sum().backward()
        assert compressed.saved.compressed_bytes <= plain_bytes // 8


def perceptrons(device):
    block = (nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    torch.manual_seed(0)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in block)).to(device)


def gradients(model, sample):
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    model(sample).square().mean().backward()
    return [weight.grad.cpu() for weight in model.parameters()]


@pytest.mark.parametrize("how", [{"bits": 8}, {"budget": "1 MiB"}], ids=["bits", "budget"])
def test_activations_are_offloaded_where_copies_take_less_than_packing(device, how, monkeypatch):
    """All of them, if a copy takes next to nothing: gradients are those of plain torch."""
    if not is_apart(device):
        pytest.skip("the memory of this device is the host's")
    monkeypatch.setattr(sn_memory.settings, "deterministic", False)
    monkeypatch.setattr(treatments, "transfer_speeds", lambda block: (1e15, 1e15))
    model, sample = perceptrons(device), torch.randn(4096, 64, device=device)
    plain = gradients(model, sample)
    with compress_activations(model, **how) as compressed:
        gradients(model, sample)
        ours = gradients(model, sample)
    ways = {name: (count, nbytes) for name, count, nbytes in compressed.saved.ways}
    assert ways["offloaded"] == (len(compressed.offloaded), compressed.saved.plain_bytes)
    assert len(compressed.offloaded) == 23  # of 24 layers all but the first, whose input stays
    assert "offloaded: 23/linear/0, 22/dropout/0" in compressed.report()
    assert not compressed.saved.compressed_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_activations_are_not_offloaded_where_copies_take_longer(device, monkeypatch):
    monkeypatch.setattr(sn_memory.settings, "deterministic", False)
    monkeypatch.setattr(treatments, "transfer_speeds", lambda block: (1e3, 1e3))
    model, sample = perceptrons(device), torch.randn(4096, 64, device=device)
    with compress_activations(model, bits=8) as compressed:
        for _ in range(2):
            gradients(model, sample)
    assert not compressed.offloaded
    assert "offloaded: nothing" in compressed.report()
