"""Neurons merged on the device: outputs stay, tensors and the optimizer's state stay there."""

import pytest
import torch
from shrinking import IMAGES, ROUNDING, apoptosis, convolutions, duplicate, train

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": torch.optim.Adam,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_duplicates_go_and_nothing_else_changes(device, kind):
    model, sample = convolutions().to(device), torch.randn(IMAGES, device=device)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, sample)
    duplicate(model, ["0", "1"], 1, 3)
    shrink = apoptosis(model, optimizer)
    expected = model(sample).detach()
    (merged,) = shrink.step().merged
    assert (merged.before - merged.after, model[0].out_channels) == (1, 5)
    assert (model(sample) - expected).abs().max() <= ROUNDING * expected.abs().max()
    for name, parameter in model.named_parameters():
        assert parameter.device.type == device.type, name
        for value in optimizer.state[parameter].values():
            if torch.is_tensor(value) and value.dim():
                assert (value.shape, value.device) == (parameter.shape, parameter.device), name
    train(model, optimizer, sample)
    assert all(it.isfinite().all() for it in model.parameters())
