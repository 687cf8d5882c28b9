"""All of the state where the model is: on the host beside it, and training as without a plan."""

import copy

import pytest
import torch
from torch import nn

from sn_memory import Device
from sn_memory.torch import HostState, PinnedState, plan

pytestmark = pytest.mark.usefixtures("counted_work")

LINK = Device("link", 5e10, 2e10, 1e11, 1e11, 0.0, launch_s=1e-5)


def blocks(device):
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)


def trained(model, optimizer, sample, *, clip=None, passes=1, steps=3):
    """Losses, and parameters at the end."""
    losses = []
    for step in range(steps):
        for number in range(passes):
            torch.manual_seed(10 * step + number)
            loss = model(sample + step).square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip:
            norms = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            losses.append(norms.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [it.detach().cpu().clone() for it in model.parameters()]


def assert_same(found, expected):
    """Of two trainings: the same losses and the same parameters, to the bit."""
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def planned(model, sample, budget, optimizer, state):
    return plan(
        model, sample, budget, optimizer=optimizer, state=state, device=LINK, profile=False,
        time_limit_s=0.5,
    )  # fmt: skip


def taught_by(mine, plain):
    """The optimizer of a planned model, and one of the plain model with the same state."""
    optimizer = next(iter(mine.sn_memory.state.parameters.values())).optimizer
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer, other


def state_on(device, update):
    """State beside a device, updated at this time."""
    if device.type == "cpu":
        return HostState(update=update)
    return PinnedState(device, update=update)


def both(device, budget, update, make=torch.optim.AdamW, **how):
    """Train a plain model and a planned one; return both, what each did, and the sample."""
    plain, sample = blocks(device), torch.randn(8, 16, 64, device=device)
    model = copy.deepcopy(plain)
    optimizer = make(model.parameters(), lr=1e-2)
    mine = planned(model, sample, budget, optimizer, state_on(device, update))
    assert set(mine.sn_memory.state.places.values()) & {"host", "state"}
    other = make(plain.parameters(), lr=1e-2)
    expected = trained(plain, other, sample, **how)
    return plain, mine, expected, trained(mine, optimizer, sample, **how), sample


@pytest.mark.parametrize(("budget", "update", "make"), [
    ("50%", "backward", torch.optim.SGD),
    ("35%", "backward", torch.optim.AdamW),
    ("50%", "step", torch.optim.AdamW),
    ("50%", "step", torch.optim.SGD),
])  # fmt: skip
def test_training_is_bit_equal(device, budget, update, make):
    _, _, expected, found, _ = both(device, budget, update, make)
    assert_same(found, expected)


def test_gradients_are_added_on_the_host(device):
    _, _, expected, found, _ = both(device, "50%", "step", passes=3)
    assert_same(found, expected)


def test_gradients_are_clipped_where_they_are(device):
    """Norms of gradients on two devices are summed in another order."""
    _, _, expected, found, _ = both(device, "50%", "step", torch.optim.SGD, clip=0.1)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for mine, plain in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine, plain, rtol=1e-5, atol=1e-7)


def test_a_model_is_evaluated_and_saved_as_ever(device):
    plain, mine, _, _, sample = both(device, "30%", "backward")
    plain.eval()
    mine.eval()
    with torch.no_grad():
        assert torch.allclose(mine(sample), plain(sample), atol=1e-5)
        assert mine(sample).device == sample.device
    own = mine.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(own[name].cpu(), value.cpu()), name


def test_a_model_is_made_on_the_host(device):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.BatchNorm1d(64))
    held = state_on(device, "backward")
    held.hold(model)
    assert {it.device.type for it in model.buffers()} == {device.type}
    for layer in model:
        layer.reset_parameters()
    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sample = torch.randn(8, 64, device=device)
    mine = planned(model, sample, "60%", optimizer, held)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    assert_same(trained(mine, optimizer, sample), trained(plain, other, sample))


def test_a_state_is_saved_and_loaded(device):
    """Into a plain optimizer, and back: the same training."""
    plain, mine, _, _, sample = both(device, "50%", "backward")
    optimizer, other = taught_by(mine, plain)
    plain.load_state_dict({name: value.cpu() for name, value in mine.state_dict().items()})
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_same(trained(mine, optimizer, sample), trained(plain, other, sample))


def test_another_shape_is_planned_with_the_state_where_it_is(device):
    plain, mine, _, _, _ = both(device, "50%", "backward")
    optimizer, other = taught_by(mine, plain)
    sample = torch.randn(5, 12, 64, device=device)
    assert_same(trained(mine, optimizer, sample), trained(plain, other, sample))


# Its `device` is that of its first parameter, which may rest on the host.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_a_language_model_trains_and_writes(device):
    """One of transformers, whose embedding is its last product's weight as well."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config).to(device)
    model, ids = copy.deepcopy(plain), torch.randint(1, 512, (4, 64), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    given = {"input_ids": ids, "labels": ids}
    mine = planned(model, given, "40%", optimizer, state_on(device, "backward"))
    for step in range(3):
        losses = []
        for each, by in ((mine, optimizer), (plain, other)):
            torch.manual_seed(step)
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            by.step()
            by.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    written = [
        each.eval().generate(ids[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        for each in (mine, plain)
    ]
    assert torch.equal(*written)
