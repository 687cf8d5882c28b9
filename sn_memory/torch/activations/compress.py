"""compress_activations: keep the tensors that autograd saves in far fewer bytes.

A controller chooses bits between steps; each forward pass packs all saved tensors (saving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ... import settings
from ...activations import Controller
from ...activations.saved import (
    Cost,
    Saved,
    cheapest_reruns,
    compressed_bytes,
    packing_of,
    rates_of,
)
from ...base.sizes import parse_bytes
from ..errors import TraceError
from ..model.modes import transformed, warn
from ..model.snapshot import set_value
from ..model.step import SideEffects, restore_rng_state
from ..model.wrapping import is_in_compiled
from ..modules.state import RunState
from .rerun import Layer, Run, is_sequential, layer_of, runs_of
from .saving import BY_IMAGES, RUN, Call, Input, Pass, coverage_of, now, storages_of, weight_of
from .treatments import Compressor, copy_seconds, offloadable

# Not rerun: their saved tensors are packed with a grid for each row, while their input is not.
_NORMS: Final = (torch.nn.modules.instancenorm._InstanceNorm, torch.nn.GroupNorm)


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
    """Compress what `model` saves for the backward pass, until closed.

    Parameters
    ----------
    model
        Trained eagerly; compiled models are refused.
    error
        Acceptable deviation of a weight's gradient, as a fraction of its momentum's mean magnitude
        (of the gradient's, without an optimizer). For Adam both are taken in units of its step.
    budget
        Alternative to `error`: bytes that saved tensors may take, "500 MiB" for example.
    bits
        Alternative to both: 1, 2, 4 or 8 for all inputs of linear and convolution layers.
    optimizer
        Its momentum is read: SGD's momentum_buffer, or exp_avg and exp_avg_sq.
    form
        "fixed" rounds stochastically; "paper" to nearest within a tolerance, entropy-coded (needs
        `error`).
    seed, threads
        Of the codec.
    settings
        Further settings of Controller: every, start_bits, nonlinear_bits ...

    Returns
    -------
    CompressedActivations
        Already active; leaving it as a context manager ends it, as does `close()`.

    Raises
    ------
    TraceError
        If the model is compiled, or planned.
    ValueError
        If not exactly one of error, budget and bits is passed, or a setting is invalid.
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
            "saves tensors that it creates itself. Compress the model that torch.compile was given."
        )
    if hasattr(model, "sn_memory"):
        raise TraceError(
            f"compress_activations: got a planned {type(model).__name__}, whose plan decides what "
            "is kept for the backward pass; expected one without a plan. Compress the model that "
            "was given to plan(), and train that one."
        )
    if form not in ("fixed", "paper") or (form == "paper" and error is None):
        raise ValueError(
            f"compress_activations: form={form!r}; expected fixed, or paper together with error="
        )
    if "recompute" in settings:
        raise ValueError(
            "compress_activations: got recompute=; what runs again is chosen here. For a budget of "
            "the whole step with exact gradients, write instead: "
            "model = sn_memory.torch.plan(model, sample, budget)"
        )
    budget_bytes = None if budget is None else parse_bytes(budget)
    controller = Controller(error=error, budget_bytes=budget_bytes, bits=bits, **settings)
    return CompressedActivations(model, controller, optimizer, form, seed, threads)


class CompressedActivations:
    """Hooks on a model, and what they have observed.

    controller : chooses the bits; `controller.rows()` has the statistics of each tensor
    saved : statistics of the last forward pass
    rerun : paths of modules, and attention calls, that are recomputed in the backward pass from
        their input, of which only that is kept: by the first pass's measurements, this frees bytes
        at fewer seconds than packing
    offloaded : keys of tensors that are in host memory until the backward pass, because copies
        there and back free a byte at fewer seconds than packing; none if the model runs on the host
    by_images : paths of layers that take some images of a batch at a time, and run again in the
        backward pass: those whose gradients take more bytes than all that is held compressed
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
        self.current: Pass | None = None  # the running forward pass
        self._step = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._warned = self._nothing_watched = False
        self._gathered: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._magnitudes: dict[torch.nn.Parameter, float] = {}
        self._watched: list[Any] = []
        self.rerun: list[str] = []
        self.by_images: list[str] = []
        self.offloaded: list[str] = []
        self._layers: dict[torch.nn.Module, Layer | None] = {}  # None: called more than once
        self._forwards: list[tuple[torch.nn.Module, Any, Any]] = []  # the previous one, and ours
        self._inputs: dict[str, list[Input]] = {}  # of modules that could be rerun, in first pass
        self._attention: dict[str, float] = {}  # attention calls that are rerun: see Pass
        # Per running module: its device, its start time, and what it may have changed.
        self._running: list[tuple[torch.nn.Module, torch.device, float, SideEffects]] = []
        self._forward_s: dict[str, float] = {}
        self.price = 0.0
        """Seconds that packing takes for each byte it frees, measured in the first pass."""
        # Hooks run in this order: the pass begins before the model itself is entered, and ends
        # after it is left. `_leave` also runs if a forward raises, to take its name off the path.
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
        """Remove the hooks from the model. Compressed tensors can still be decompressed."""
        for handle in [*self._handles, *self._watched]:
            handle.remove()
        self._handles, self._watched = [], []
        for module, before, ours in self._forwards:
            if vars(module).get("forward") is not ours:
                continue  # wrapped again since; the wrapper calls ours, which calls the original
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._forwards = []

    def report(self) -> str:
        """Return bytes saved, and a row per tensor: bits, predicted and measured error."""
        rerun = f"run again from their input: {', '.join(self.rerun)}\n" if self.rerun else ""
        if self.by_images:
            rerun += f"run again, some images at a time: {', '.join(self.by_images)}\n"
        price = (
            f"packing and unpacking take {self.price * 2**30:.3g} s for each GiB that they free; "
            f"offloaded: {', '.join(self.offloaded) or 'nothing'}\n"
        )
        return f"{self.saved}\n{price}{rerun}{self.controller.report()}"

    # The forward pass: start and end, and the path of modules.

    def _begin(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        # torch.export, which apoptosis uses, records what is computed, not what is saved.
        if torch.compiler.is_exporting():
            return
        self._check_eager()
        if self.current is not None or not self.active or not torch.is_grad_enabled():
            return
        if transformed():
            if not self._warned:
                self._warned = True
                warn(
                    f"nothing that {type(self.model).__name__} saves is compressed inside "
                    "torch.func or forward-mode AD, which look at its own forward pass."
                )
            return
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            raise TraceError(
                f"compress_activations is at work on {type(self.model).__name__}, and packs "
                "values, of which a traced step has none. Call its close() before, or trace "
                "another copy."
            )
        self.refresh()
        watch = self._watch if self.controller.due(self._step) else None
        self._step += 1
        resident = [*self.model.parameters(), *self.model.buffers(), args, kwargs]
        self.current = Pass(
            self.compressor, storages_of(resident), watch, self._attention,
            frozenset(self.offloaded), first=self._step == 1,
        )  # fmt: skip
        self.current.__enter__()

    def _end(self, *_: object) -> None:
        # If a submodule calls the model again, the pass ends with the outer call.
        if self.current is None or self.current.path:
            return
        self.current.__exit__()
        self.saved = self.current.saved
        if self._step == 1:
            self._choose_reruns(self.current)
        # Budgets must be checked even if no weight's gradient is watched.
        self._nothing_watched = self.current.watch is not None and not self._watched
        self.current = None

    def _check_eager(self) -> None:
        if self.active and is_in_compiled():
            raise TraceError(
                f"torch.compile is at work on {type(self.model).__name__}, or on a part of it, "
                "with compress_activations: compiled code saves tensors that it creates itself. "
                "Use one of the two; close() ends compressing."
            )

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._check_eager()
        if self.current is None:
            return
        name = self._names.get(module, "")
        self.current.path.append(name)
        if self._step == 1 and _has_one_input(module, args, kwargs):
            self._inputs.setdefault(name, []).append(self.current.input_of(args[0]))
            start = now(args[0].device) - self.current.packing_s
            # Attributes that it assigns are discarded in a rerun.
            held = [value for part in module.modules() for value in vars(part).values()]
            effects = SideEffects([args[0]], held)
            self._running.append((module, args[0].device, start, effects))

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self.current is None or not self.current.path:
            return
        name = self.current.path.pop()
        if self._step == 1 and self.current.is_innermost():
            layer = layer_of(module, args, result, self.current.has_saved)
            self._layers[module] = None if module in self._layers else layer
        if self._running and self._running[-1][0] is module:
            _, device, start, effects = self._running.pop()
            seconds = now(device) - self.current.packing_s - start
            self._forward_s[name] = self._forward_s.get(name, 0.0) + max(0.0, seconds)
            if effects.changed():
                self.current.decided.update((*self.current.path, name))

    # Reruns: e.g. a GELU of seven ops, attention, a two-layer perceptron.

    def _choose_reruns(self, first: Pass) -> None:
        """Choose what to rerun: where this takes fewer seconds per freed byte than packing.

        Ranks with other measurements may choose differently: the gradients of all weights that they
        exchange, and their order, do not depend on it. With `settings.deterministic` the bytes that
        a module saves are used in place of its seconds.
        """
        # The cost of packing.
        rates = rates_of(first.timed)
        every = packing_of(first.timed, rates)
        freed = every.plain_bytes - every.held_bytes
        self.price = every.seconds / freed if freed > 0 else 0.0
        # Candidates for reruns, and their cost.
        candidates = {
            name: (self._forward_s[name], self._inputs[name])
            for name in self._inputs
            if name not in first.decided and not isinstance(self.model.get_submodule(name), _NORMS)
        }
        candidates |= first.attended
        kept = {
            place: packing_of([saved for saved in first.timed if place in saved.within], rates)
            for place in candidates
        }
        again = {
            place: Cost(
                (kept[place].plain_bytes if settings.deterministic else seconds)
                + rates.get("", 0.0) * sum(x.nbytes for x in inputs if x.packed),
                kept[place].plain_bytes,
                self._least(inputs),
            )
            for place, (seconds, inputs) in candidates.items()
        }
        for place in [path for path in candidates if path in self._inputs]:
            if next(self.model.get_submodule(place).children(), None) is None:
                continue
            # In a rerun, all that its parts save is held at once. Also, its saved bytes do not show
            # how long its products take.
            if settings.deterministic or kept[place].plain_bytes >= every.held_bytes:
                del again[place]
        # Candidates for offloading. With bytes in place of seconds a link cannot be compared.
        memories = {} if settings.deterministic else offloadable(first.timed)
        byte_s = copy_seconds(first.device) if memories else 0.0
        for key, saved in memories.items():
            kept[key] = packing_of(saved, rates)
            again[key] = Cost(byte_s * kept[key].plain_bytes, kept[key].plain_bytes, 0.0)
        # The choice.
        budget, saving = self.controller.budget_bytes, dict[str, float]()

        def freed_by(saving: Iterable[str]) -> float:
            return sum(kept[path].held_bytes - again[path].held_bytes for path in saving)

        def fits(saving: Iterable[str]) -> bool:
            return self.controller.held_at(4) - freed_by(saving) <= (budget or 0)

        if budget is None or every.plain_bytes > budget:
            within, ends = _is_within, None if budget is None else fits
            saving = cheapest_reruns(kept, again, self.price, within=within, fits=ends)
        moved = (memories[place] for place in saving if place in memories)
        self.offloaded = [saved.key for group in moved for saved in group]
        for key in self.offloaded:
            self.controller.forget(key)
        held = every.held_bytes - freed_by(saving)
        # Chosen first, as layers that process some images at a time are rerun that way only.
        self._choose_images(first, max(held, self.controller.budget_bytes or 0))
        for place in (path for path in candidates if path in saving):
            if not any(path == place or _is_within(path, place) for path in self.by_images):
                self._let_rerun(place, kept[place].plain_bytes, candidates[place][1], first)
        self._inputs = {}

    def _choose_images(self, first: Pass, least_bytes: float) -> None:
        """Let layers with gradients larger than all else held process some images at a time."""
        for module in list(self.model.modules()):
            chains = runs_of(module, self._layers, least_bytes) if is_sequential(module) else []
            runs = [run for layers in chains if (run := self._run_of(layers, first)) is not None]
            if runs:
                self._put_forward(module, self._sequential, {run.layers[0]: run for run in runs})
        self._layers = {}

    def _run_of(self, layers: list[torch.nn.Module], first: Pass) -> Run | None:
        """Return a run of these layers if processing some images at a time needs less memory."""
        seen = [step for layer in layers if (step := self._layers[layer]) is not None]
        names, x = [self._names[layer] for layer in layers], seen[0].x
        saved = [tensor for tensor in first.timed if not tensor.within.isdisjoint(names)]
        # The input is kept exactly, as rounding it changes what ReLUs and poolings select: a
        # gradient was 12 % off (decision 106).
        first_input = replace(self._inputs[names[0]][0], packed=False)
        growth = max(max(step.x.numel(), step.y.numel()) for step in seen) / x.numel()
        plain_bytes = sum(tensor.plain_bytes for tensor in saved)
        plain_bytes -= seen[-1].y.nbytes * seen[-1].saved  # a later layer may save it, too
        run = Run(layers, names, x.dim(), growth, plain_bytes / x.numel())
        # The gradients of the run's input and output are held in full.
        ends = x.nbytes + seen[-1].y.nbytes
        if (
            len(run.parts(x)) == 1
            or ends >= max(step.gradients_bytes for step in seen)
            or self._least([first_input]) > sum(tensor.held_bytes for tensor in saved)
        ):
            return None
        self.by_images += names
        for name in names:
            self.controller.forget(name)
        first.foresee({f"{names[0]}/{RUN}/0": first_input})
        return run

    def _sequential(
        self,
        sequential: torch.nn.Sequential,
        forward: Callable[..., Any],
        runs: dict[torch.nn.Module, Run],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call layers one after the other, and runs of them on some images at a time."""
        current = self.current
        if current is None or kwargs or not torch.is_grad_enabled() or not current.is_innermost():
            return forward(*args, **kwargs)
        (x,), layers = args, list(sequential)
        while layers:
            run = runs.get(layers[0])
            count = len(run.layers) if run else 1
            if run and layers[:count] == run.layers and run.takes(x):
                call = Call(RUN, current.place(RUN, run.names[0]), (), {})
                with current.saving_input(run.plain_bytes * x.numel(), call, BY_IMAGES, count):
                    x = run(x)
            else:
                count, x = 1, layers[0](x)
            del layers[:count]
        return x

    def _put_forward(
        self, module: torch.nn.Module, forward: Callable[..., Any], *more: Any
    ) -> None:
        ours = partial(forward, module, module.forward, *more)
        self._forwards.append((module, vars(module).get("forward"), ours))
        module.forward = ours

    def _let_rerun(self, place: str, plain_bytes: float, inputs: list[Input], first: Pass) -> None:
        """Rerun a module, or an attention call, in the backward pass from now on."""
        plain = plain_bytes / sum(call.elements for call in inputs)
        self.rerun.append(place)
        self.controller.forget(place or "model")
        if place in first.attended:
            self._attention[place] = plain
            first.foresee({f"{place}/{slot}": call for slot, call in enumerate(inputs)})
            return
        module = self.model.get_submodule(place)
        self._put_forward(module, self._again, plain)
        places = (f":{count}" if count > 1 else "" for count in range(1, len(inputs) + 1))
        keys = (f"{place or 'model'}/input{index}/0" for index in places)
        first.foresee(dict(zip(keys, inputs, strict=True)))

    def _least(self, inputs: list[Input]) -> int:
        """Return the bytes of inputs that are kept compressed, or as they are."""
        bits = self.controller.nonlinear_bits
        return sum(
            compressed_bytes(tensor.elements, bits) + tensor.row_bytes
            if tensor.packed
            else 0
            if tensor.left_alone or tensor.memory.exact
            else tensor.memory.nbytes
            for tensor in inputs
        )

    def _again(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        plain: float,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a module so that only its input is kept, and rerun it in the backward pass.

        `plain` are the bytes that autograd would save for it per element of its input.
        """
        current = self.current
        if current is None or not torch.is_grad_enabled() or not args or not _is_float(args[0]):
            return forward(*args, **kwargs)
        if not current.is_innermost():  # an outer checkpoint will rerun it, outside of our pass
            return forward(*args, **kwargs)
        name = self._names.get(module) or type(module).__name__
        with current.saving_input(plain * args[0].numel()):
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                context_fn=lambda: (nullcontext(), RunState({name: module})),
                **kwargs,
            )

    # Statistics: sums of squared gradients of layers' outputs, and the yardstick.

    def _watch(self, op: Call, result: Any) -> None:
        weight = weight_of(op)
        if weight is None or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        shape = tuple(result.shape)
        channels = 1 if op.name.startswith("conv") else len(shape) - 1
        about = {
            "outputs": shape[channels],
            "coverage": coverage_of(op, result, weight),
        }

        keys = op.lossy  # a hook that refers to the call would keep its arguments alive

        def arrived(gradient: torch.Tensor) -> None:
            exact = gradient.detach().float()
            for key in keys:
                self._gathered[key] = about | {"energy": float(exact.square().sum())}
                self._weights[key] = weight

        def magnitude(gradient: torch.Tensor) -> None:
            self._magnitudes[weight] = float(gradient.detach().float().abs().mean())
            once.remove()  # a weight with a hook cannot be saved

        once = weight.register_hook(magnitude)
        self._watched += [result.register_hook(arrived), once]

    def refresh(self) -> None:
        """Choose bits from the gathered statistics now rather than in the next forward pass."""
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
        """Return the mean magnitude of momentum; for Adam that of its step times sqrt(mean(v)).

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

        `loss` runs a forward pass of the model and returns the value to differentiate; it is called
        once without compression and `repeats` times with it. Random states, including those of
        devices, Python and NumPy, and buffers are restored each time. The standard deviations go
        into the controller's rows.
        """
        names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}

        def gradients() -> list[torch.Tensor | None]:
            with restore_rng_state():
                exact = torch.autograd.grad(loss(), list(names.values()), allow_unused=True)
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                set_value(buffer, before)
            return list(exact)

        # All passes have the same random numbers and buffers, so that only rounding differs.
        self.active = False
        try:
            plain = gradients()
        finally:
            self.active = True
        for _ in range(repeats):
            for name, compressed, exact in zip(names, gradients(), plain, strict=True):
                if compressed is not None and exact is not None:
                    errors[name].append(compressed - exact)
        stacked = {name: torch.stack(own) for name, own in errors.items() if own}
        by_weight = {id(p): name for name, p in names.items()}
        for key, weight in self._weights.items():
            name = by_weight.get(id(weight))
            if name in stacked:
                self.controller.observe_error(key, float(stacked[name].double().std()))
        return stacked


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _has_one_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a module takes one float tensor and nothing else, so that it can be rerun."""
    return not kwargs and len(args) == 1 and _is_float(args[0])


def _is_within(place: str, module: str) -> bool:
    """Whether a module, or a call in one, is within another module."""
    return not module or place.startswith((f"{module}.", f"{module}/"))
