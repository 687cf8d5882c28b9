"""Discovery of regions and observation of a step: passes of the model on a sample.

The model runs once, and each called module is offered to the tracer with its arguments, from the
outside in, until one can be traced. A refusal with its reason is a break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..eager.replay import overwritten
from ..errors import TraceError, first_line
from ..model.guards import OF_TORCH, recorded_reads
from ..model.modes import Forwards
from ..model.signature import Arguments
from ..model.snapshot import version_of
from ..trace.record import Layouts
from ..trace.trace import Trace
from .choose import Timeline
from .plans import inner_bytes
from .region import (
    Alike,
    Arriving,
    Break,
    Region,
    TracedCall,
    as_written,
    structure,
    traced_call,
    wants_gradient,
)

# After this many refused kinds of calls a module is not tried again: a kind is a form of its
# arguments, and each attempt runs a part of the module under fake tensors.
_REFUSALS = 8
# Groups of modules that keep less than this part of what all keep run unplanned: an autograd node
# costs some fifty microseconds.
_WORTH = 1 / 512


class Finder:
    """Finds regions while the model runs.

    model : the plain model
    layouts, arriving, shared : observed layouts of kernels' results; observed layouts of gradients,
        per path; structures of modules whose inputs were observed to be used by other ops as well.
    settings : of `traced_call`

    regions : the regions found, by path
    refused : per path that is not a region, the reason
    calls : paths and kinds of the calls in the last pass, in order
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Layouts,
        arriving: Mapping[str, Arriving],
        shared: Set[Hashable],
        **settings: Any,
    ) -> None:
        self._model, self._arriving, self._shared = model, arriving, shared
        self._settings = {"layouts": layouts, **settings}
        self.regions: dict[str, Region] = {}
        self.refused: dict[str, str] = {}
        self.calls: list[tuple[str, TracedCall]] = []
        self._paths = {module: path for path, module in reversed([*model.named_modules()])}
        # By structure, and by layouts of gradients or the path of a module that cannot share.
        self._alike: dict[tuple[Hashable, str | tuple[Any, ...]], Alike] = {}
        # Why modules of a structure were refused, and how often.
        self._why: dict[Hashable, list[str]] = {}
        self._inside = False
        # Inputs and outputs of regions, which must not be changed in place after the call.
        self._borders: list[tuple[str, torch.Tensor, int]] = []
        self._forwards = Forwards({})

    @property
    def kept_bytes(self) -> int:
        """Bytes that the calls of the last pass keep if nothing runs again."""
        return sum(kind.plans[0].kept_bytes for _, kind in self.calls)

    @property
    def groups(self) -> list[Alike]:
        """The distinct groups of regions that are alike."""
        return [*{id(region.alike): region.alike for region in self.regions.values()}.values()]

    def look(self, arguments: Arguments) -> None:
        """Run the model and find regions; those of earlier passes stay."""
        self.calls.clear()
        self._borders.clear()
        args, kwargs = arguments
        modules = [module for module, path in self._paths.items() if path]
        self._forwards = Forwards({module: self._offering(module) for module in modules})
        with torch.enable_grad(), self._forwards:
            self._model(*args, **kwargs)
        for path, shadow, version in self._borders:
            if version_of(shadow) != version:
                self._drop(path, "a tensor at its border is changed in place after its call")
        self._borders.clear()
        often = Counter(path for path, _ in self.calls)
        for path, kind in [*self.calls]:
            if often[path] > 1 and overwritten(kind.traced.captured):
                self._drop(path, "it writes over a buffer that it reads, and is called again")

    def _drop(self, path: str, why: str) -> None:
        if path in self.regions:
            del self.regions[path]
        self.refused.setdefault(path, why)
        self.calls = [call for call in self.calls if call[0] != path]

    def siblings(self) -> None:
        """Add regions for modules that no pass called, if modules that are alike are regions."""
        called = {*self.regions, *self.refused}
        inside = tuple(f"{path}." for path in called)
        # The layouts of their gradients are unknown: assume those of the first that is alike.
        first: dict[Hashable, tuple[Alike, Arriving]] = {}
        for (form, arriving), alike in self._alike.items():
            if alike.kinds and not isinstance(arriving, str):
                first.setdefault(form, (alike, dict(arriving)))
        for module, path in self._paths.items():
            known = first.get(structure(module)) if path not in called else None
            if path and known is not None and not path.startswith(inside):
                self.regions[path] = Region(path, *known)

    def _offering(self, module: torch.nn.Module) -> Callable[..., Any]:
        path, original = self._paths[module], module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside or as_written() or not wants_gradient(module, (args, kwargs)):
                return original(*args, **kwargs)
            with self._forwards.away():
                traced = self._kind(path, module, (args, kwargs))
            if traced is None:
                return original(*args, **kwargs)
            self.calls.append((path, traced))
            self._inside = True
            try:
                # No backward pass follows, so what autograd saves is dropped.
                with saved_tensors_hooks(lambda _: None, _no_backward):
                    returned = original(*args, **kwargs)
            finally:
                self._inside = False
            self._at_border(path, (args, kwargs, returned))
            return returned

        return forward

    def _at_border(self, path: str, tree: Any) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                # An alias without memory that shares the version counter.
                shadow = tensor.detach()
                shadow.data = shadow.new_empty(0)
                self._borders.append((path, shadow, version_of(tensor)))

    def _kind(self, path: str, module: torch.nn.Module, arguments: Arguments) -> TracedCall | None:
        if path in self.refused:
            return None
        region = self.regions.get(path)
        key = structure(module)
        if region is None:
            arriving = self._arriving.get(path, {})
            shared_key = key, tuple(sorted(arriving.items()))
            region = Region(path, self._alike.setdefault(shared_key, Alike()), arriving)
        signature, _, _ = region.lookup(module, arguments)
        if signature is None:
            self._refuse(path, "an argument is neither a tensor nor hashable. Pass tensors.")
            return None
        if signature in region.alike.kinds:
            known = region.alike.kinds[signature]
            if known is not None:
                self.regions[path] = region
            return known
        refusals = self._why.get(key, [])
        if len(refusals) >= _REFUSALS or (refusals and not next(module.children(), None)):
            self._refuse(path, refusals[-1])
            return None
        try:
            traced = self._traced(
                module,
                arguments,
                arriving=region.arriving,
                shares_inputs=key in self._shared,
                **self._settings,
            )
        except TraceError as error:
            self._why.setdefault(key, []).append(str(error))
            self._refuse(path, str(error))
            return None
        except Exception as error:  # noqa: BLE001 - on any error this module runs unplanned
            self._refuse(path, f"{type(error).__name__}: {first_line(error)}")
            return None
        if traced.captured.recording.constants or _own_tensors(module):
            # Constants of the trace, and tensors in attributes, are specific to this module.
            region = Region(path, self._alike.setdefault((key, path), Alike()), region.arriving)
        kind = TracedCall.of(traced, arguments)
        region.add(module, arguments, signature, kind)
        self.regions[path] = region
        return kind

    def _traced(self, module: torch.nn.Module, arguments: Arguments, **settings: Any) -> Trace:
        """Trace a call; refuse one that reads attributes of modules outside, e.g. in a hook."""
        with recorded_reads(self._model) as reads:
            traced = traced_call(module, arguments, **settings)
        inside = {*module.modules()}
        for module_read, names in zip(self._model.modules(), reads(), strict=True):
            foreign = names - {"training"}
            if module_read not in inside and foreign:
                path = self._paths[module_read] or "the model"
                raise TraceError(
                    f"it reads {', '.join(sorted(foreign)[:3])} of {path}, which is no part of it "
                    "and may change from step to step. Pass it as an argument."
                )
        return traced

    def _refuse(self, path: str, why: str) -> None:
        # A refusal does not override a region that an earlier call made.
        if path not in self.regions:
            self.refused.setdefault(path, why)

    def leave_small(self, calls: Sequence[tuple[str, TracedCall]]) -> None:
        """Drop regions whose calls keep next to nothing: they run unplanned."""
        groups = self.groups
        kept_bytes = {id(group): 0 for group in groups}
        for path, kind in calls:
            kept_bytes[id(self.regions[path].alike)] += inner_bytes(kind.traced.graph)
        for group in groups:
            if kept_bytes[id(group)] <= _WORTH * sum(kept_bytes.values()):
                group.kinds = dict.fromkeys(group.kinds)
        for path, region in [*self.regions.items()]:
            if not region.alike.traced:
                del self.regions[path]
        if not self.regions:
            raise TraceError("its regions keep next to nothing for the backward pass")

    def breaks(self, saved: Callable[[str], int], model_reason: str) -> tuple[Break, ...]:
        """Return the modules that are not regions and save something outside of regions, by size.

        saved : returns the bytes that a module, given by path, saves for the backward pass
        model_reason : why the model itself cannot be traced
        """
        why = ({"": model_reason} if model_reason else {}) | self.refused
        by_reason: dict[str, Break] = {}
        for path, text in why.items():
            inside = [inner for inner in why if inner != path and _within(inner, path)]
            # All enclosing modules repeat a refusal: the break is in the innermost.
            if any(why[inner] == text for inner in inside):
                continue
            direct = [inner for inner in (*self.regions, *inside) if _within(inner, path)]
            outermost = [p for p in direct if not any(_within(p, other) for other in direct)]
            kept_bytes = max(0, saved(path) - sum(map(saved, outermost)))
            known = by_reason.get(text)
            if known is None:
                by_reason[text] = Break(path, text, kept_bytes)
            else:
                by_reason[text] = Break(known.module, text, known.kept_bytes + kept_bytes)
        # A break that keeps nothing costs nothing; the model's own says why there are regions.
        costly = [entry for entry in by_reason.values() if entry.kept_bytes or not entry.module]
        return tuple(sorted(costly, key=lambda entry: -entry.kept_bytes))


def _own_tensors(module: torch.nn.Module) -> bool:
    """Whether modules have tensors that are neither parameters nor buffers."""
    return any(
        isinstance(leaf, torch.Tensor)
        for submodule in module.modules()
        for name, value in submodule.__dict__.items()
        if name not in OF_TORCH
        for leaf in tree_leaves(value)
    )


def _no_backward(_: Any) -> Any:
    raise TraceError("the forward pass differentiates itself through a region")


def _within(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


class StepObserver:
    """Records the bytes held outside of regions at each moment of a measured step.

    look : runs an op, after which the tracker calls `heard`
    gradients : returns the current bytes of the parameters' gradients
    """

    def __init__(self, look: Callable[[], object], gradients: Callable[[], int]) -> None:
        self._look, self._gradients_now = look, gradients
        self._gradients: list[int] = []
        self._live = self._most = 0
        self._outside: list[int] = []
        self._running = 0
        self._waiting_bytes = 0
        self.calls: list[tuple[str, TracedCall, int]] = []
        self._forward: list[int] = []
        self._backward: dict[int, int] = {}
        self._over: set[int] = set()
        # Per call the last node of its backward pass; paths of calls that share an input.
        self._last: dict[int, Any] = {}
        self.shared: set[str] = set()

    def heard(self, live_bytes: int) -> None:
        """Record the live bytes after an op."""
        self._live = live_bytes
        if not self._running:
            self._most = max(self._most, live_bytes)

    def begins(self, path: str, kind: TracedCall, plan: int) -> int:
        """Record that the forward pass of a call begins; return the call's number."""
        self._forward.append(self._enter())
        self.calls.append((path, kind, plan))
        return len(self.calls) - 1

    def ended(self, call: int, outputs: Sequence[torch.Tensor], sections: int) -> None:
        """Record that the forward pass of a call has ended, and hook its backward pass."""
        self._waiting_bytes += self._kept(call)
        self._leave()
        if not outputs:
            return
        first: Any = outputs[0].grad_fn
        last = first
        for _ in range(sections - 1):
            # The last input of a section is the token of the section that follows it.
            last = last.next_functions[-1][0]
        self._last[call] = last
        first.register_prehook(lambda gradients: self._begins_back(call, gradients))
        last.register_hook(lambda *_: self._ended_back(call))

    def returned(self, outputs: Sequence[torch.Tensor]) -> None:
        """After the forward pass, record the calls whose inputs other nodes use as well."""
        edges: Counter[tuple[Any, int]] = Counter()
        waiting = [output.grad_fn for output in outputs]
        seen = {*waiting}
        while waiting:
            node: Any = waiting.pop()
            inputs = [edge for edge in node.next_functions if edge[0] is not None]
            edges.update(inputs)
            new = {edge[0] for edge in inputs} - seen
            seen |= new
            waiting += new
        for call, last in self._last.items():
            edge_counts = Counter(edge for edge in last.next_functions if edge[0] is not None)
            # A node with `variable` accumulates a parameter's gradient: that is not an input.
            if any(
                edges[edge] > count and not hasattr(edge[0], "variable")
                for edge, count in edge_counts.items()
            ):
                self.shared.add(self.calls[call][0])
        self._last.clear()

    def _begins_back(self, call: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if call in self._backward:
            return
        self._backward[call] = moment = self._enter()
        # The region's plan counts those in the traced layout, which it does not copy.
        planned = self.calls[call][1].traced.captured.output_gradients
        self._outside[moment] -= sum(
            gradient.nbytes
            for gradient in gradients
            if gradient is not None
            and gradient.untyped_storage().nbytes() == gradient.nbytes
            and any(view.shows(gradient) for view in planned)
        )

    def _ended_back(self, call: int) -> None:
        if call in self._over:
            return
        self._over.add(call)
        self._waiting_bytes -= self._kept(call)
        self._leave()

    def _kept(self, call: int) -> int:
        _, kind, plan = self.calls[call]
        return kind.plans[plan].kept_bytes

    def _enter(self) -> int:
        self._look()
        self._outside += [
            max(0, self._most - self._waiting_bytes),
            max(0, self._live - self._waiting_bytes),
        ]
        self._gradients += [self._gradients_now()] * 2
        self._running += 1
        return len(self._outside) - 1

    def _leave(self) -> None:
        self._running -= 1
        self._most = 0
        self._look()

    def timeline(self) -> Timeline:
        """Return the moments of the step that has ended."""
        outside = [*self._outside, max(0, self._most - self._waiting_bytes)]
        count = len(outside)
        return Timeline(
            np.array(outside, dtype=np.int64),
            np.array(self._forward, dtype=np.int64),
            np.array([self._backward.get(i, count) for i in range(len(self.calls))], np.int64),
            # The last moment counts new gradients in addition to those before it.
            np.array([*self._gradients, *self._gradients[-1:]], dtype=np.int64),
        )
