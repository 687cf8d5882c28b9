"""Loops of training that users write, for the networks of modules.py, and what they see of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from modules import LENGTH, WIDTH, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 64
STEPS = 2
# Loops that write, between the passes, what a backward pass may read.
WRITTEN_BETWEEN = ("input_written_between", "biases_changed_between", "buffers_changed_between")


class Log:
    """All that a user of a loop could see, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[tuple[str, Any]] = []

    def add(self, name: str, value: Any) -> None:
        self.seen.append((name, value.detach().clone() if torch.is_tensor(value) else value))

    def state(self, at: object) -> None:
        """Note gradients, buffers, parameters, counters and what is drawn next."""
        for name, parameter in self.model.named_parameters():
            self.add(f"{at}: gradient of {name}", parameter.grad)
            self.add(f"{at}: parameter {name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.add(f"{at}: buffer {name}", buffer)
        for name, module in self.model.named_modules():
            if hasattr(module, "calls"):
                self.add(f"{at}: calls of {name}", module.calls)
        self.add(f"{at}: random", torch.rand(()))


def batch(at: int, size: int = BATCH) -> torch.Tensor:
    """Return the input of a step."""
    generator = torch.Generator().manual_seed(1000 + at)
    return torch.randn(size, LENGTH, WIDTH, generator=generator)


def forward(model: nn.Module, log: Log, at: int, **more: Any) -> torch.Tensor:
    """Return the loss of a step, its dropout drawn alike for both models."""
    torch.manual_seed(at)
    loss = loss_of(model(batch(at, **more)))
    log.add(f"{at}: loss", loss)
    return loss


def update(model: nn.Module) -> None:
    """Take a step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)


LOOPS: dict[str, Callable[[nn.Module, Log], None]] = {}


def loop(run: Callable[[nn.Module, Log], None]) -> Callable[[nn.Module, Log], None]:
    """Register a loop by its name."""
    LOOPS[run.__name__] = run
    return run


@loop
def plain_steps(model: nn.Module, log: Log) -> None:
    for at in range(STEPS + 1):
        model.zero_grad()
        forward(model, log, at).backward()
        log.state(at)
        update(model)


@loop
def thrown_away(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        forward(model, log, at)
        log.state("thrown away")
        forward(model, log, at + 10).backward()
        log.state(at)


@loop
def evaluated(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        forward(model, log, at).backward()
        with torch.no_grad():
            forward(model, log, at + 10)
        model.eval()
        with torch.no_grad():
            forward(model, log, at + 20)
        forward(model, log, at + 30).backward()
        log.state(at)
        model.train()


@loop
def two_forwards(model: nn.Module, log: Log) -> None:
    (forward(model, log, 0) + forward(model, log, 1)).backward()
    log.state(0)
    first, second = forward(model, log, 2), forward(model, log, 3)
    first.backward()
    log.state(1)
    second.backward()
    log.state(2)


@loop
def accumulated(model: nn.Module, log: Log) -> None:
    for at in range(4):
        forward(model, log, at).backward()
        log.state(at)
        if at % 2:
            update(model)
            model.zero_grad(set_to_none=at == 1)


@loop
def retained(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    loss.backward(retain_graph=True)
    log.state("first")
    loss.backward()
    log.state("second")


@loop
def retained_for_parts(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for part in (wanted[::2], wanted[1::2]):
        for gradient in torch.autograd.grad(loss, part, retain_graph=True, allow_unused=True):
            log.add("part", gradient)
    loss.backward()
    log.state(0)


@loop
def of_the_input(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        x = batch(at).requires_grad_()
        torch.manual_seed(at)
        loss_of(model(x)).backward()
        log.add("input", x.grad)
        log.state(at)


@loop
def penalty(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        x = batch(at).requires_grad_()
        torch.manual_seed(at)
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        log.add("first", gradient)
        (loss + gradient.square().sum()).backward()
        log.state(at)


@loop
def hessian_vector(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    total = sum(gradient.abs().square().sum() for gradient in first if gradient is not None)
    log.add("total", total)
    for gradient in torch.autograd.grad(total, wanted, allow_unused=True):
        log.add("second", gradient)


@loop
def parameters_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    loss.backward()
    log.state(0)


@loop
def swapped_and_back_between(model: nn.Module, log: Log) -> None:
    # As an average of weights is evaluated. Left swapped, torch itself takes these for the step's.
    loss = forward(model, log, 0)
    own = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    with torch.no_grad():
        forward(model, log, 1)
    for parameter, data in zip(model.parameters(), own, strict=True):
        parameter.data = data
    loss.backward()
    log.state(0)


@loop
def biases_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(1.0)
    loss.backward()
    log.state(0)


@loop
def buffers_changed_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(2)
    loss.backward()
    log.state(0)


@loop
def other_parameters(model: nn.Module, log: Log) -> None:
    others = {name: value.detach() * 1.5 for name, value in model.named_parameters()}
    for value in others.values():
        value.requires_grad_()
    torch.manual_seed(0)
    loss = loss_of(torch.func.functional_call(model, others, (batch(0),)))
    log.add("loss", loss)
    for gradient in torch.autograd.grad(loss, list(others.values()), allow_unused=True):
        log.add("other", gradient)
    log.state(0)


@loop
def frozen_later(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    for at, parameter in enumerate(model.parameters()):
        if at % 3 == 0:
            parameter.requires_grad_(not parameter.requires_grad)
    forward(model, log, 1).backward()
    log.state(1)


@loop
def frozen_between(model: nn.Module, log: Log) -> None:
    loss = forward(model, log, 0)
    for at, parameter in enumerate(model.parameters()):
        if at % 3 == 0:
            parameter.requires_grad_(False)
    loss.backward()
    log.state(0)


@loop
def hooks_of_modules(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    inner = [module for module in model.modules() if module is not model]
    for module in (inner[0], inner[-1]):
        module.register_forward_hook(
            lambda module, args, out: out * 2 if torch.is_tensor(out) else None
        )
    forward(model, log, 1).backward()
    log.state(1)


@loop
def hooks_of_the_model(model: nn.Module, log: Log) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    forward(model, log, 0).backward()
    log.state(0)
    model.register_forward_hook(lambda module, args, out: log.add("called", True))
    forward(model, log, 1).backward()
    log.state(1)


@loop
def hooks_of_gradients(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    model.head.weight.register_post_accumulate_grad_hook(
        lambda weight: log.add("ready", weight.grad)
    )
    model.head.register_full_backward_hook(lambda module, into, out: log.add("head", out[0]))
    forward(model, log, 1).backward()
    log.state(1)


@loop
def smaller_batches(model: nn.Module, log: Log) -> None:
    for at, size in enumerate((BATCH, 13, BATCH, 1)):
        model.zero_grad()
        forward(model, log, at, size=size).backward()
        log.state(at)


@loop
def autocast_around(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(model, log, at)
        loss.backward()
        log.state(at)


@loop
def loaded(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    forward(model, log, 1).backward()
    log.state(1)


@loop
def copied(model: nn.Module, log: Log) -> None:
    forward(model, log, 0).backward()
    other = copy.deepcopy(model)
    log.model = other
    forward(other, log, 1).backward()
    log.state("copy")
    log.model = model
    log.state("own")


@loop
def checkpointed_as_a_whole(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        torch.manual_seed(at)
        x = batch(at).requires_grad_()
        loss_of(checkpoint(model, x, use_reentrant=False)).backward()
        log.add("input", x.grad)
        log.state(at)


@loop
def saved_on_the_host(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            loss = forward(model, log, at)
        loss.backward()
        log.state(at)


@loop
def input_written_between(model: nn.Module, log: Log) -> None:
    x = batch(0)
    torch.manual_seed(0)
    loss = loss_of(model(x))
    x.mul_(2)
    loss.backward()
    log.state(0)


@loop
def output_written(model: nn.Module, log: Log) -> None:
    torch.manual_seed(0)
    out = model(batch(0))
    out = out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    out.mul_(2)
    log.add("out", out)
    out.square().mean().backward()
    log.state(0)


@loop
def part_of_the_output(model: nn.Module, log: Log) -> None:
    for at in range(STEPS):
        torch.manual_seed(at)
        out = model(batch(at))
        used = (
            out["hidden"] if isinstance(out, dict) else out[-1] if isinstance(out, tuple) else out
        )
        used.sum().backward()
        log.state(at)
