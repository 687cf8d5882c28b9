"""The study of compressed activations: what is planned, how rivals round, and one short run."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def study():
    """The script, where torch is."""
    pytest.importorskip("torch")
    import activations

    return activations


def test_plan_has_no_run_twice_and_seeds_for_the_headline_only(study):
    runs = study.plan([0, 1], ["cnn", "resnet"], None)
    assert len(set(runs)) == len(runs) == 2 * len(study.RIVALS) + 2 * (1 + 3) + 2 * (1 + 1)
    assert {run.method for run in runs if run.seed == 1} == set(study.HEADLINE)


@pytest.mark.parametrize(("method", "worst"), [("nearest 2", 1 / 6), ("nearest 4", 1 / 30)])
def test_rounding_to_nearest_is_within_half_a_step(study, method, worst):
    import torch

    x = np.random.default_rng(0).uniform(-1, 1, 1000).astype(np.float32)
    off = np.abs(study.Rounded(method).lossy(x) - x)
    assert worst * 0.9 < off.max() / 2 <= worst * 1.001
    kept = study.rounded(method)(torch.from_numpy(x), look=True)
    assert kept.nbytes == 125 * int(method[-1]) + 32


def test_fp8_has_three_bits_of_mantissa(study):
    x = np.random.default_rng(0).uniform(0.1, 1, 1000).astype(np.float32)
    off = np.abs(study.Rounded("fp8").lossy(x) / x - 1)
    assert 2.0**-5 < off.max() <= 2.0**-4 * 1.001


@pytest.mark.parametrize("method", [("plain", None), ("ours", 9.0), ("nearest 2", None)])
def test_a_short_run_ends_in_a_row(study, method):
    import torch

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(128, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (128,), generator=generator)
    run = study.Run("cnn", method[0], method[1], 0, 3)
    row = study.train(run, {"train": (images, labels), "t10k": (images, labels)})
    assert row["ratio"] >= (method[1] or 1)
    assert 0 <= row["accuracy"] <= 100
    if method[0] == "ours":
        # What is held is the compressed tensors, the loss and its own saved ones.
        assert row["held_bytes"] <= row["plain_bytes"] / 9 + 64 * 1024
        assert row["held_bytes"] < row["peak_bytes"]
    text = study.table([row | {"seed": 0}])
    assert f"| cnn, 3 steps | {method[0]}" in text


def test_a_peak_is_measured_in_a_row():
    pytest.importorskip("torch")
    import activations_memory

    row = activations_memory.row_of("transformer", 4, 1)
    assert row["compressed_bytes"] < row["saved_bytes"] / 4
    assert row["peak_bytes"] < 0.8 * row["plain_peak_bytes"]
    assert "| transformer | 4 bits | " in activations_memory.table([row])


def test_bytes_are_those_of_the_allocator_without_gradients_of_weights():
    torch = pytest.importorskip("torch")
    import activations_networks as networks
    from _peaks import activation_bytes

    nn = torch.nn
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8), nn.Linear(8, 16))
    x, size = torch.randn(128, 64), 128 * 256 * 4
    calls = networks.losses(net, x, ("plain", "ours", "checkpoint", "nearest", "fp8"))
    found = {name: activation_bytes(loss, list(net.parameters())) for name, loss in calls.items()}
    small = 16 * 128 * 8 * 4  # results of the last layers and of the loss
    held, most = found["plain"]
    assert size <= held <= size + small
    assert held + size <= most <= held + 2 * size + small
    grids = size // 4 // 256 * 8  # two floats for 256 elements
    assert size // 8 <= found["nearest"][0] - grids <= size // 8 + small
    assert size // 4 <= found["fp8"][0] <= size // 4 + small
    assert found["ours"][0] <= size // 8 + small
    assert size <= found["checkpoint"][0] <= size + small  # the second segment's input
    for form, error in ((networks.Nearest, 0.25), (networks.Float8, 0.25)):
        assert float((form(x).restore() - x).abs().max()) < error
    rows = [
        {
            "net": "AlexNet",
            "method": name,
            "images": 1,
            "held_bytes": a,
            "peak_bytes": b,
            "step_s": 1.0,
        }
        for name, (a, b) in found.items()
    ]
    assert "| AlexNet, 1 images | plain | 0.1 | 1.0 |" in networks.table(rows)


def test_bytes_of_a_keras_net_are_counted_once():
    pytest.importorskip("tensorflow")
    import activations_tensorflow

    model = activations_tensorflow.network(0)
    # ReLUs of 24 x 28 x 28, 48 x 14 x 14, 64 x 4 x 4 and 128; pooled 24 x 14 x 14, 48 x 7 x 7.
    signs, inputs, pooled = 18816 + 9408 + 1024 + 128, 4704 + 2352 + 1024 + 128, 4704 + 2352
    plain = 64 * 4 * (18816 + 9408 + inputs)
    assert activations_tensorflow.saved_bytes(model, None) == plain
    compressed = 64 * (signs / 8 + pooled / 4 + inputs * (4 / 8 + 6 / 256))
    kinds = activations_tensorflow.LINEAR
    bits = {it.path: 4 for it in model.layers if type(it).__name__ in kinds}
    assert activations_tensorflow.saved_bytes(model, bits) == pytest.approx(compressed, abs=1)
    # The first layer's input is the user's: its bits count for nothing.
    assert len(bits) == 5
    first = next(iter(bits))
    assert activations_tensorflow.saved_bytes(model, bits | {first: 8}) == int(compressed)
    plain = {"kept": "plain", "bits": [], "ratio": 1.0, "accuracy": 90.0, "step_s": 0.01}
    chosen = {"kept": "budget", "bits": [8, 4], "ratio": 9.0, "accuracy": 89.5, "step_s": 0.02}
    text = activations_tensorflow.table(
        [
            plain | {"seed": 0, "peak_bytes": None},
            chosen | {"seed": 0, "peak_bytes": 2**20},
            plain | {"seed": 1, "peak_bytes": None},
            chosen | {"seed": 1, "peak_bytes": 2**21, "ratio": 10.0, "bits": [4, 4]},
        ]
    )
    row = "| budget | 4 4, 8 4 | 9.0 to 10.0 | 89.5, 89.5 | 0.50, 0.50 | 2.0 | 20 |"
    assert row in text


def test_a_keras_peak_is_measured_in_a_row():
    pytest.importorskip("tensorflow")
    import activations_memory_tensorflow

    from sn_memory.tensorflow.memory import has_statistics

    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    row = activations_memory_tensorflow.row_of("CNN", (8, False), 1)
    assert row["peak_bytes"] < 0.7 * row["plain_peak_bytes"]
    assert "| CNN | 8 bits | " in activations_memory_tensorflow.table([row])
