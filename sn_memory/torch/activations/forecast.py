"""The peak of a step with compressed activations, before it runs; and beside what is measured.

What is saved in fewer bytes is not what the peak falls by: some tensor is always decompressed, and
early layers have larger gradients than late ones. So the step itself is run, hooks and second runs
included, on tensors that have sizes and no values.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._pytree import tree_map_only

from ...activations import Controller, Peaks
from ..compress.compressor import Compressor
from ..compress.treatments import Exact, Kept, Layout, Lossy, Shape, Window
from ..errors import TraceError
from ..model.step import restore_step, run_step
from ..trace.fake_step import fake_step
from ..trace.trace import call_arguments


class Compressing(Protocol):
    """What is asked of CompressedActivations: model, compressor, whether it is at work."""

    model: torch.nn.Module
    compressor: Compressor
    active: bool


def predicted_peak(compressed: Compressing, sample: Any) -> int:
    """Return the peak of a step on a sample; nothing is allocated."""
    before = compressed.compressor
    compressed.compressor = _BlankCompressor(before)
    try:
        return fake_step(compressed.model, call_arguments(sample)).peak_bytes
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{error.func} makes the course of the model depend on values, so its memory cannot be "
            "told before. Run a step and measure it: verify(sample)."
        ) from error
    finally:
        compressed.compressor = before


def peaks(compressed: Compressing, sample: Any) -> Peaks:
    """Run a step with and without compression, after it was predicted."""
    model, arguments = compressed.model, call_arguments(sample)
    predicted = predicted_peak(compressed, sample)

    def measured() -> int:
        with restore_step(model, arguments):
            return run_step(model, model, arguments).peak_bytes

    compressed.active = False
    try:
        plain = measured()
    finally:
        compressed.active = True
    held = [*model.parameters(), *model.buffers()]
    tree_map_only(torch.Tensor, held.append, arguments)
    sizes = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in held}
    return Peaks(plain, predicted, measured(), sum(sizes.values()))


class _Blank:
    """What a compressed tensor takes, and what it becomes."""

    fits, variance, nonzero = True, 0.0, 1.0

    def __init__(self, nbytes: int, bits: int = 1) -> None:
        self.buffer, self.nbytes, self.bits = torch.empty(nbytes, dtype=torch.uint8), nbytes, bits

    def restore(self, layout: Layout) -> torch.Tensor:
        return torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
        )

    def mask(self) -> _Blank:
        return self

    def through(self, _: torch.Tensor, layout: Layout) -> torch.Tensor:
        return self.restore(layout)


class _Silent:
    """A controller that is asked and told nothing."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        if name.startswith("observe") or name == "overflowed":
            return lambda *_, **__: None
        return getattr(self._controller, name)


class _BlankCompressor(Compressor):
    """Compresses tensors without values: into as many bytes as others took."""

    blank = True

    def __init__(self, real: Compressor) -> None:
        controller = cast(Controller, _Silent(real.controller))
        super().__init__(controller, real.form, real.seed, real.threads)

    def rounded(self, tensor: torch.Tensor, bits: int, tolerance: float, form: str) -> Lossy:
        n = tensor.numel()
        return cast(Lossy, _Blank(-(-n * bits // 8) + 6 * -(-n // 256), bits))

    def holds_two(self, tensor: torch.Tensor, key: str) -> bool:
        return self.controller.other_bytes(key) is not None

    def sign(self, tensor: torch.Tensor, key: str) -> Kept:
        return _Blank(-(-tensor.numel() // 8))

    def exact(self, tensor: torch.Tensor, kind: str, window: Window | None, key: str) -> Kept:
        whole = tensor.numel() * tensor.element_size()
        if kind == "shape":
            return Shape()
        if kind in ("sign", "mask") or (kind == "integers" and tensor.dtype == torch.bool):
            return _Blank(-(-tensor.numel() // 8))
        if kind == "integers":
            seen = self.controller.other_bytes(key)
            return _Blank(whole if seen is None else min(seen, whole))
        return Exact(tensor)
