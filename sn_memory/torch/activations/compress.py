"""compress_activations: what autograd saves for the backward pass, in far fewer bytes.

Between steps a controller chooses bits; in each forward pass all that is saved is compressed
(saving.py), and in some of them watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from ...activations import Controller
from ...base.errors import PlanWarning
from ...base.sizes import parse_bytes
from ..errors import TraceError
from ..model.modes import transformed
from .saving import Call, Pass, Saved, coverage_of, storages_of, weight_of
from .treatments import Compressor


def compress_activations(
    model: torch.nn.Module,
    *,
    error: float | None = None,
    budget: float | str | None = None,
    bits: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    form: Literal["fixed", "paper"] = "fixed",
    seed: int = 0,
    threads: int = 1,
    **settings: Any,
) -> CompressedActivations:
    """Keep what `model` saves for the backward pass compressed, until closed.

    Parameters
    ----------
    model
        Trained eagerly; compiled models are refused.
    error
        Acceptable deviation of a weight's gradient, as a fraction of its momentum's mean magnitude
        (of the gradient's, without an optimizer). For Adam both are taken in units of its step.
    budget
        Instead: bytes that saved tensors may take, "500 MiB" for example.
    bits
        Instead: 1, 2, 4 or 8 for all inputs of linear and convolution layers.
    optimizer
        Where momentum is read; SGD's momentum_buffer, or exp_avg and exp_avg_sq.
    form
        "fixed" rounds at random; "paper" to nearest within a tolerance,
        entropy-coded (needs `error`).
    seed, threads
        Of the codec.
    settings
        Further ones of Controller: every, start_bits, nonlinear_bits, theory ...

    Returns
    -------
    CompressedActivations
        At work already; a context manager that ends it, as does `close()`.

    Raises
    ------
    TraceError
        If the model is compiled.
    ValueError
        If not exactly one of error, budget and bits is given, or a setting is illegal.
    BudgetError
        From the second forward pass on, if saved tensors do not fit.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch import compress_activations
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> with compress_activations(model, bits=2) as compressed:
    ...     model(torch.randn(256, 64)).sum().backward()
    >>> compressed.saved.ratio > 9
    True
    """
    if hasattr(model, "_orig_mod"):
        raise TraceError(
            "compress_activations: got a compiled model; expected an eager one, as compiled code "
            "saves tensors of its own making. Compress the model that torch.compile was given."
        )
    if form not in ("fixed", "paper") or (form == "paper" and error is None):
        raise ValueError(
            f"compress_activations: form={form!r}; expected fixed, or paper together with error="
        )
    if "recompute" in settings:
        raise ValueError(
            "compress_activations: got recompute=; here nothing runs again. For modules that do, "
            "and keep a budget of the whole step with exact gradients, write instead: "
            "model = sn_memory.torch.plan(model, sample, budget)"
        )
    budget_bytes = None if budget is None else parse_bytes(budget)
    controller = Controller(error=error, budget_bytes=budget_bytes, bits=bits, **settings)
    return CompressedActivations(model, controller, optimizer, form, seed, threads)


class CompressedActivations:
    """Hooks on a model, and what they have seen.

    Attributes
    ----------
    controller
        Chooses the bits; `controller.rows()` has what is known of each tensor.
    saved
        Of the last forward pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        controller: Controller,
        optimizer: torch.optim.Optimizer | None = None,
        form: str = "fixed",
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        self.model, self.controller, self.optimizer = model, controller, optimizer
        self.compressor = Compressor(controller, form, seed, threads)
        self.saved = Saved(0, 0, 0)
        self.active = True
        self.current: Pass | None = None
        """The pass that saves just now."""
        self._step = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._warned = self._nothing_watched = False
        self._gathered: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._magnitudes: dict[torch.nn.Parameter, float] = {}
        self._watched: list[Any] = []
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def __enter__(self) -> CompressedActivations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the model. What was compressed can still be decompressed."""
        for handle in [*self._handles, *self._watched]:
            handle.remove()
        self._handles, self._watched = [], []

    def report(self) -> str:
        """Return bytes saved, and a row per tensor: bits, predicted and measured error."""
        return f"{self.saved}\n{self.controller.report()}"

    # The forward pass: what is entered, the path of modules.

    def _begin(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.current is not None or not self.active or not torch.is_grad_enabled():
            return
        if transformed():
            self._warn_uncompressed()
            return
        self.refresh()
        watch = self._watch if self.controller.due(self._step) else None
        self._step += 1
        there = [*self.model.parameters(), *self.model.buffers(), args, kwargs]
        self.current = Pass(self.compressor, storages_of(there), watch)
        self.current.__enter__()

    def _warn_uncompressed(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"nothing that {type(self.model).__name__} saves is compressed inside torch.func "
                "or forward-mode AD, which look at its own forward pass.",
                PlanWarning,
                stacklevel=6,
            )

    def _end(self, *_: object) -> None:
        # Called by a module of its own, the model ends where its outer call does.
        if self.current is None or self.current.path:
            return
        self.current.__exit__()
        self.saved = self.current.saved
        # A budget is kept where no gradient of a weight is waited for, too.
        self._nothing_watched = self.current.watch is not None and not self._watched
        self.current = None

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.current is not None:
            self.current.path.append(self._names.get(module, ""))

    def _leave(self, *_: object) -> None:
        if self.current is not None and self.current.path:
            self.current.path.pop()

    # Statistics: sums of squares of what arrives at a layer's output, and the yardstick.

    def _watch(self, op: Call, result: Any) -> None:
        weight = weight_of(op)
        if weight is None or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        shape = tuple(result.shape)
        channels = 1 if op.name.startswith("conv") else len(shape) - 1
        about = {
            "outputs": shape[channels],
            "terms": result.numel() // max(shape[channels], 1),
            "coverage": coverage_of(op, result, weight),
        }

        keys = op.lossy  # not the call itself, which holds its arguments

        def arrived(gradient: torch.Tensor) -> None:
            exact = gradient.detach().float()
            for key in keys:
                self._gathered[key] = about | {
                    "energy": float(exact.square().sum()),
                    "mean": float(exact.abs().mean()),
                }
                self._weights[key] = weight

        def magnitude(gradient: torch.Tensor) -> None:
            self._magnitudes[weight] = float(gradient.detach().float().abs().mean())

        self._watched.append(result.register_hook(arrived))
        self._watched.append(weight.register_hook(magnitude))

    def refresh(self) -> None:
        """Choose bits now from what was gathered; otherwise the next forward pass does."""
        if not self._gathered and not self._nothing_watched:
            return
        self._nothing_watched = False
        for key, about in self._gathered.items():
            yardstick = self._yardstick(self._weights[key])
            self.controller.observe_gradient(key, yardstick=yardstick, **about)
        for handle in self._watched:
            handle.remove()
        self._watched = []
        self._gathered = {}
        self.controller.refresh()

    def _yardstick(self, weight: torch.nn.Parameter) -> float:
        """Mean magnitude of momentum; for Adam that of its step, times the root of the mean of v.

        Entries that never had a gradient have no step, and no error either.
        """
        state = self.optimizer.state.get(weight, {}) if self.optimizer is not None else {}
        if "exp_avg_sq" in state:
            square = state["exp_avg_sq"].float()
            unit = torch.where(square > 0, square.rsqrt(), torch.zeros_like(square))
            return float((state["exp_avg"].float().abs() * unit).mean() * square.mean().sqrt())
        if state.get("momentum_buffer") is not None:
            return float(state["momentum_buffer"].float().abs().mean())
        return self._magnitudes.get(weight, 0.0)

    def measure(
        self, loss: Callable[[], torch.Tensor], repeats: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the errors of the weights' gradients, [repeats, ...] by parameter name.

        `loss` runs a forward pass of the model and returns what is to be differentiated; it is
        called once without compression and `repeats` times with. Random numbers and buffers
        are put back each time. The deviations go into the controller's rows.
        """
        names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}

        def gradients() -> list[torch.Tensor | None]:
            with torch.random.fork_rng(devices=[]):
                found = torch.autograd.grad(loss(), list(names.values()), allow_unused=True)
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            return list(found)

        self.active = False
        try:
            plain = gradients()
        finally:
            self.active = True
        for _ in range(repeats):
            for name, compressed, exact in zip(names, gradients(), plain, strict=True):
                if compressed is not None and exact is not None:
                    errors[name].append(compressed - exact)
        stacked = {name: torch.stack(each) for name, each in errors.items() if each}
        by_weight = {id(p): name for name, p in names.items()}
        for key, weight in self._weights.items():
            name = by_weight.get(id(weight))
            if name in stacked:
                self.controller.observe_error(key, float(stacked[name].double().std()))
        return stacked
