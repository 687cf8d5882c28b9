"""What other people's loops get: the hook on their model, a rank's memory in their checkpoints.

One rank in this process; whole loops on two are the recipes (tests/docs/test_code_blocks.py).
"""

import gc
import sys
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import optimizer  # noqa: E402

from sn_compress import (  # noqa: E402
    CompressError,
    FFTCompression,
    LowRankCompression,
    MissingExtra,
    UncalledWarning,
)
from sn_compress.codecs import registry  # noqa: E402
from sn_compress.schedule import Constant, Warmup  # noqa: E402
from sn_compress.torch import integrations  # noqa: E402
from sn_compress.torch.ddp import CompressionState, compression_hook  # noqa: E402
from sn_compress.torch.integrations import attach  # noqa: E402
from sn_compress.torch.outcomes import Outcomes  # noqa: E402

SMALL = LowRankCompression.using(ratio=20, warmup=1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def train(ddp, steps=3):
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        sgd.zero_grad()
        ddp(torch.ones(4, 64)).square().mean().backward()
        sgd.step()


# A state that nothing calls


def test_a_state_that_is_not_registered_is_found_out(alone):
    ddp = DistributedDataParallel(net())
    state = CompressionState(SMALL, named_parameters=ddp.module.named_parameters(), warn_after=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(ddp, 2)
    with pytest.warns(UncalledWarning, match="3 steps in which nothing called the hook") as said:
        train(ddp, 5)
    assert len(said) == 1
    assert state.report()["steps"] == 0


def test_one_that_is_called_no_longer_is_found_out(alone):
    ddp = DistributedDataParallel(net())
    named = ddp.module.named_parameters()
    state = CompressionState(SMALL, named_parameters=named, warn_after=2)
    ddp.register_comm_hook(state, compression_hook)
    train(ddp, 6)  # while it is called, a warning is an error
    with pytest.warns(UncalledWarning):
        train(ddp.module, 2)


def test_steps_of_another_optimizer_do_not_count(alone):
    held = CompressionState(SMALL, named_parameters=net().named_parameters(), warn_after=1)
    train(net(), 3)
    del held


def test_a_step_that_raised_is_over(alone):
    """Backward passes behind it are in no step, and steps of other optimizers are no inner ones."""
    model = net()
    state = CompressionState(SMALL.using(check_every=1), named_parameters=model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)
    first = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        ddp(torch.ones(4, 64)).square().mean().backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.step(closure)
    train(ddp, 3)
    assert state.engine.sameness.same_at == 3


def test_two_models_that_take_turns_are_two_steps(alone):
    models = {"maker": net(), "judge": net()}
    named = [(f"{key}.{n}", p) for key, m in models.items() for n, p in m.named_parameters()]
    state = CompressionState(SMALL, named_parameters=named)
    both = [DistributedDataParallel(model) for model in models.values()]
    for ddp in both:
        ddp.register_comm_hook(state, compression_hook)
    for _ in range(3):
        for ddp in both:
            train(ddp, 1)
    assert state.report()["steps"] == 6


def followed(model):
    outcomes = Outcomes()
    for name, parameter in model.named_parameters():
        outcomes.follow(name, parameter)
    return outcomes


@pytest.mark.parametrize("watch", [lambda model: CompressionState(SMALL), followed])
def test_what_is_dead_leaves_no_hook_behind(alone, watch):
    gc.collect()  # what other tests have left
    before, model = len(optimizer._global_optimizer_post_hooks), net()
    watching = watch(model)
    assert len(optimizer._global_optimizer_post_hooks) == before + 1
    del watching
    assert len(optimizer._global_optimizer_post_hooks) == before
    model(torch.ones(4, 64)).sum().backward()


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_warn_after_is_a_number_of_steps(alone, value):
    with pytest.raises(CompressError, match="whole number of steps"):
        CompressionState(SMALL, warn_after=value)


# The hook on somebody's model, the memory in somebody's folder


def test_attach_takes_what_ddp_has(alone):
    ddp = DistributedDataParallel(net(), find_unused_parameters=True)
    state = attach.attach(ddp, SMALL, "a test")
    assert state.engine._find_unused
    ddp(torch.ones(4, 64)).sum().backward()
    assert state.report()["steps"] == 1


def test_one_process_is_said():
    with pytest.warns(UncalledWarning, match="the Trainer trains in one process"):
        assert attach.attach(net(), SMALL, "the Trainer") is None


def test_another_strategy_is_refused(alone, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(CompressError, match="Lightning trains a Sequential on 4 ranks"):
        attach.attach(net(), SMALL, "Lightning")


def test_a_memory_goes_to_a_folder_and_back(alone, tmp_path):
    ddp = DistributedDataParallel(net())
    state = attach.attach(ddp, SMALL, "a test")
    train(ddp)
    attach.save(state, tmp_path / "checkpoint-3")
    assert [it.name for it in (tmp_path / "checkpoint-3").iterdir()] == ["compression-rank0.pt"]
    other = attach.attach(DistributedDataParallel(net()), SMALL, "a test")
    attach.load(other, tmp_path / "checkpoint-3")
    first, second = state.state_dict(), other.state_dict()
    assert str(first) == str(second)
    assert "tensor" in str(first["shared"])


def test_of_two_ranks_one_takes_the_mean(alone, tmp_path):
    ddp = DistributedDataParallel(net())
    state = attach.attach(ddp, SMALL, "a test")
    train(ddp)
    saved = state.state_dict()
    for rank in range(2):
        torch.save(saved | {"ranks": 2, "rank": rank}, tmp_path / f"compression-rank{rank}.pt")
    attach.load(state, tmp_path)
    (tmp_path / "compression-rank1.pt").unlink()
    with pytest.raises(CompressError, match=r"saved by 2 ranks and has no compression-rank1\.pt"):
        attach.load(state, tmp_path)


def test_a_compiled_model_is_the_one_inside(alone):
    ddp = DistributedDataParallel(net())
    state = attach.attach(torch.compile(ddp, backend="eager"), SMALL, "a test")
    train(ddp)
    assert state.report()["steps"] == 3


def test_models_of_one_accelerator_have_files_of_their_own(alone, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    models = [DistributedDataParallel(net()) for _ in range(2)]
    states = [integrations.compress_accelerated(accelerator, ddp, SMALL) for ddp in models]
    for ddp, steps in zip(models, (2, 3), strict=True):
        train(ddp, steps)
    saved = [str(state.state_dict()) for state in states]
    assert saved[0] != saved[1]
    accelerator.save_state(str(tmp_path))
    for ddp in models:
        train(ddp)
    accelerator.load_state(str(tmp_path))
    assert [str(state.state_dict()) for state in states] == saved
    # One that has gone is saved no more, and another one may take its place.
    del ddp, states
    models[0] = DistributedDataParallel(net())
    state = integrations.compress_accelerated(accelerator, models[0], SMALL)
    train(models[0], 4)
    accelerator.save_state(str(tmp_path))
    assert sorted(it.name for it in tmp_path.glob("compression*")) == [
        "compression-1-rank0.pt", "compression-rank0.pt",
    ]  # fmt: skip
    assert str(torch.load(tmp_path / "compression-rank0.pt")) == str(state.state_dict())


@pytest.mark.parametrize("names", ["module.", "_orig_mod.", None])
def test_a_memory_of_other_names_is_refused(alone, names):
    ddp, model = DistributedDataParallel(net()), net()
    state = attach.attach(ddp, SMALL, "a test")
    train(ddp)
    named = names and [(names + name, it) for name, it in model.named_parameters()]
    other = CompressionState(SMALL, named_parameters=named, warn_after=0)
    with pytest.raises(CompressError, match=r"'0\.weight', '2\.weight', which the model"):
        other.load_state_dict(state.state_dict())
    assert not other.engine.shared.tensors


def test_going_back_to_a_checkpoint_without_a_memory_begins_anew(alone, tmp_path):
    for compression in (SMALL, FFTCompression.using(theta=Warmup(5, Constant(0.9)))):
        ddp = DistributedDataParallel(net())
        state = attach.attach(ddp, compression, "a test")
        empty = str(state.state_dict())
        train(ddp)
        assert str(state.state_dict()) != empty
        with pytest.warns(UncalledWarning, match="which starts empty"):
            attach.load(state, tmp_path)
        assert str(state.state_dict()) == empty
        train(ddp)


@pytest.mark.parametrize("kind", ["fft", "low rank", "dense steps"])
def test_a_gradient_that_waits_is_in_no_saved_state(alone, kind):
    """As a discriminator's behind the generator's step: a run that resumes has no `.grad`."""
    chosen = {
        "fft": FFTCompression.using(theta=0.9),
        "low rank": SMALL,
        "dense steps": LowRankCompression.using(ratio=20, warmup=1, every=3),
    }[kind]
    ddp = DistributedDataParallel(net())
    state = attach.attach(ddp, chosen, "a test")
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def saved():
        return registry.map_tree(torch.Tensor, torch.Tensor.tolist, state.state_dict())

    differed = False  # not after a dense step, which leaves nothing out
    for seed in range(8):
        torch.manual_seed(seed)
        ddp(torch.randn(4, 64)).square().mean().backward()
        waiting = saved()
        if seed % 2:
            sgd.zero_grad()
            assert saved() == waiting
        else:
            sgd.step()
            differed |= saved() != waiting
            sgd.zero_grad()
    assert differed


def test_a_checkpoint_of_lightning_without_a_memory_is_said(alone):
    pytest.importorskip("lightning")
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(model=DistributedDataParallel(net())), precision_plugin=None
    )
    callback = integrations.LightningCompression(SMALL)
    callback.on_load_checkpoint(trainer, None, {})
    with pytest.warns(UncalledWarning, match="starts empty"):
        callback.on_train_start(trainer, None)
    train(trainer.strategy.model)
    callback.on_train_start(trainer, None)  # a second training, from no checkpoint
    saved = [callback.state.state_dict()]
    callback.on_load_checkpoint(trainer, None, {"sn_compress": saved})
    callback.on_train_start(trainer, None)
    assert str(callback.state.state_dict()) == str(saved[0])


def test_log_report_writes_scalars():
    found = []
    writer = SimpleNamespace(add_scalar=lambda *of: found.append(of))
    integrations.log_report(writer, {"ratio": 12.5, "steps": 3}, 7)
    assert found == [("compression/ratio", 12.5, 7), ("compression/steps", 3.0, 7)]


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, f"{integrations.__name__}.accelerate", raising=False)
    monkeypatch.delitem(vars(integrations), "compress_accelerated", raising=False)
    with pytest.raises(MissingExtra, match="compress_accelerated needs accelerate, which is not"):
        _ = integrations.compress_accelerated
    assert issubclass(MissingExtra, ImportError)
