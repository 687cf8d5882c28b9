"""FSDP2's own collectives in fewer bytes: gradients in 4, 8 or 16 bits, parameters in 8.

    shards = compress_shards(model)                 # after the last fully_shard
    shards.report()                                 # bytes sent, and how many times fewer

FSDP2 all-gathers a module's parameters before it runs, and reduce-scatters its gradients
afterwards; from torch 2.13 on both can be replaced (`set_custom_all_gather`,
`set_custom_reduce_scatter`). Each block of values has a scale, its largest magnitude, as in ZeRO++
(Wang et al. 2023, arXiv 2306.10209, sections 3.1 and 3.3). Gradients may also be sent as floats,
bf16 or fp8 (`ops/casts.py`).

*Gradients* are sent to the rank that owns the shard, in one all-to-all, and summed there in
float32; the owner's own part is exact. Rounding is stochastic, so the expected gradient is the
exact one; there is no error feedback, because every rank would have to keep residuals of the full
gradient, the very memory that sharding saves (docs/decisions/0099).

*Parameters* are rounded to nearest when they are gathered. The shards that the optimizer updates
keep full precision; all ranks, including the owner, compute with the rounded values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import CompressError
from ..ops.casts import Cast
from .fsdp import param_group
from .process_group import all_gather, reduce_scatter

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = {4: 64, 8: 256}  # elements per scale: 4.5 and 8.125 bits per element in total
_LEVELS = {4: 7, 8: 127}  # on each side of zero
_MANTISSA = {"bf16": 7, "fp8": 3}  # bits kept of float32's 23
_KEY = 0x9E3779B97F4A7C15  # odd, so that every step and rank has a different seed


@dataclass(frozen=True)
class BlockCodec:
    """Encodes rows of floats as bytes: a float32 scale per block, and a code per element.

    bits : 4 or 8
    """

    bits: Literal[4, 8]

    def nbytes(self, n: int) -> int:
        """Number of bytes of a row of n elements."""
        blocks = math.ceil(n / _BLOCK[self.bits])
        return blocks * (4 + _BLOCK[self.bits] * self.bits // 8)

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Encode [r, n] floats, n at least 1, as [r, nbytes(n)] uint8.

        generator : for stochastic rounding, which is unbiased; None: round to nearest
        A block with NaN or Inf is decoded as NaN.
        """
        size, levels = _BLOCK[self.bits], _LEVELS[self.bits]
        count, n = rows.shape
        blocks = nn.functional.pad(rows.float(), (0, -n % size)).view(count, -(-n // size), size)
        scales = blocks.abs().amax(2, keepdim=True) / levels
        # A block of zeros has a scale of zero; its codes must be zero.
        codes = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
        if generator is not None:
            noise = torch.rand(
                codes.shape, generator=generator, dtype=torch.float32, device=codes.device
            )
            codes = (codes + noise).floor_()  # rounds up with the probability of the fraction
        else:
            codes = codes.round_()
        # For non-finite values any code will do, as their scale is not finite.
        codes = codes.nan_to_num_(0.0).clamp_(-levels, levels).to(torch.int8)
        packed = codes.view(torch.uint8)
        if self.bits == 4:
            packed = (packed[..., ::2] & 15) | (packed[..., 1::2] << 4)
        return torch.cat([scales.view(torch.uint8), packed], 2).view(count, self.nbytes(n))

    def decode(self, words: torch.Tensor, n: int) -> torch.Tensor:
        """Decode the result of `encode` to [r, n] float32."""
        size = _BLOCK[self.bits]
        blocks = words.view(words.shape[0], -(-n // size), 4 + size * self.bits // 8)
        scales = blocks[..., :4].contiguous().view(torch.float32)
        packed = blocks[..., 4:]
        if self.bits == 4:
            # Shift left, then right as signed numbers, to extend the sign.
            low = (packed << 4).view(torch.int8) >> 4
            packed = torch.stack([low, packed.contiguous().view(torch.int8) >> 4], 3).flatten(2)
        else:
            packed = packed.contiguous().view(torch.int8)
        # Zero times a non-finite scale is NaN.
        values = packed.to(torch.float32) * scales
        return values.view(words.shape[0], values.shape[1] * size)[:, :n]


@dataclass(frozen=True)
class FloatCodec:
    """Encodes rows of floats as smaller floats, see `ops.casts`; same interface as BlockCodec.

    dtype : "bf16" or "fp8"
    """

    dtype: Literal["bf16", "fp8"]

    def nbytes(self, n: int) -> int:
        """Number of bytes of a row of n elements."""
        cast = Cast(self.dtype)
        return cast.nbytes(cast.padded(n))

    def encode(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Encode [r, n] floats as [r, nbytes(n)] uint8, rounded stochastically; fp8: Inf to NaN."""
        cast, (count, n) = Cast(self.dtype), rows.shape
        padded = nn.functional.pad(rows.float(), (0, cast.padded(n) - n))
        # Stochastic rounding: add noise below the bits kept, then truncate. Scales are powers of
        # two, so an fp8 block keeps the same mantissa bits.
        step = 1 << 23 - _MANTISSA[self.dtype]
        noise = torch.randint(
            step, padded.shape, generator=generator, device=rows.device, dtype=torch.int32
        )
        cut = ((padded.view(torch.int32) + noise) & -step).view(torch.float32)
        values = torch.where(padded.isfinite(), cut, padded)
        return cast.encode(values.view(-1)).view(count, self.nbytes(n))

    def decode(self, words: torch.Tensor, n: int) -> torch.Tensor:
        """Decode the result of `encode` to [r, n] float32."""
        return Cast(self.dtype).decode(words.reshape(-1)).view(words.shape[0], -1)[:, :n].float()


class _Comm:
    """Base of the collectives that FSDP2 calls instead of its own."""

    def __init__(self, shards: CompressedShards) -> None:
        self._shards = shards

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Called by FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)


class _ReduceScatter(_Comm):
    def __init__(self, shards: CompressedShards, codec: BlockCodec | FloatCodec) -> None:
        super().__init__(shards)
        self._codec = codec

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write the sum, or mean, of the ranks' inputs [ranks * n] to output [n]; for FSDP2."""
        shards, n, ranks = self._shards, output_tensor.numel(), group.size()
        if not shards.takes(output_tensor) or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            nbytes = (ranks - 1) * n * input_tensor.element_size()
            shards.count("gradients", nbytes, nbytes)
            return reduce_scatter(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        rows = input_tensor.view(ranks, n)
        words = self._codec.encode(rows, shards.random(input_tensor.device))
        received = torch.empty_like(words)
        dist.all_to_all_single(received, words, group=group)
        rank_here = group.rank()
        # In rank order: the same bits however the collective ran.
        total = torch.zeros(n, dtype=torch.float32, device=rows.device)
        for rank, row in enumerate(received):
            total += rows[rank_here] if rank == rank_here else self._codec.decode(row[None], n)[0]
        if op == dist.ReduceOp.AVG:
            total /= ranks
        output_tensor.copy_(total)
        sent = (ranks - 1) * words.shape[1]
        shards.count("gradients", sent, (ranks - 1) * n * input_tensor.element_size())
        return None


class _AllGather(_Comm):
    _codec = BlockCodec(8)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Write all ranks' inputs [n] to output [ranks * n], which contains input; for FSDP2."""
        shards, n, ranks = self._shards, input_tensor.numel(), group.size()
        nbytes = (ranks - 1) * n * input_tensor.element_size()
        if not shards.takes(input_tensor):
            shards.count("parameters", nbytes, nbytes)
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        words = self._codec.encode(input_tensor[None])
        gathered = words.new_empty(ranks * words.shape[1])
        all_gather(gathered, words.view(-1), group=group)
        output_tensor.view(ranks, n).copy_(self._codec.decode(gathered.view(ranks, -1), n))
        shards.count("parameters", (ranks - 1) * words.shape[1], nbytes)
        return None


class CompressedShards:
    """State of `compress_shards` for a model: bytes sent, and the number of random draws.

    min_elements : a rank's part of a module below this size is not compressed
    """

    def __init__(self, min_elements: int) -> None:
        self.min_elements = min_elements
        self._drawn = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._bytes = {"gradients": [0, 0], "parameters": [0, 0]}

    def takes(self, part: torch.Tensor) -> bool:
        """Whether a rank's part of a module can be compressed and is worth it."""
        return part.dtype in _FLOATS and part.numel() >= self.min_elements

    def random(self, device: torch.device) -> torch.Generator:
        """Return a generator seeded for the next reduction, per rank; equal in a resumed run."""
        generator = self._generators.setdefault(device, torch.Generator(device))
        self._drawn += 1
        return generator.manual_seed((self._drawn * _KEY + dist.get_rank()) % 2**63)

    def count(self, what: str, sent: int, plain: int) -> None:
        """Count bytes this rank sent to others, and what it would have sent uncompressed."""
        self._bytes[what][0] += sent
        self._bytes[what][1] += plain

    def report(self) -> dict[str, float]:
        """Return the bytes this rank has sent so far, and the ratio to uncompressed.

        gradient_bytes, gradient_ratio, parameter_bytes, parameter_ratio
        """
        result: dict[str, float] = {}
        for what, (sent, plain) in self._bytes.items():
            name = what.removesuffix("s")
            result |= {f"{name}_bytes": sent, f"{name}_ratio": plain / sent if sent else 1.0}
        return result

    def state_dict(self) -> dict[str, int]:
        """Return what is needed to resume bit by bit; the same on all ranks."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load what state_dict returned, on any number of ranks."""
        drawn = state.get("drawn") if isinstance(state, dict) else None
        if not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0:
            raise CompressError(
                f"got {state!r} as the state of compress_shards; expected what state_dict() "
                "returned. Load it unchanged."
            )
        self._drawn = drawn


def compress_shards(
    model: nn.Module,
    *,
    gradients: Literal[4, 8, "bf16", "fp8"] | None = 4,
    parameters: Literal[8] | None = 8,
    min_elements: int = 1024,
) -> CompressedShards:
    """Make all FSDP2 modules of a model reduce gradients and gather parameters in fewer bytes.

    model : after the last fully_shard
    gradients : bits per gradient element, or the float type it is cast to; None: uncompressed
    parameters : bits per parameter element in the gathered parameters; None: uncompressed
    min_elements : a rank's part of a module below this size is not compressed
    Returns an object with `report`, `state_dict` and `load_state_dict`.

    Source: ZeRO++ (arXiv 2306.10209), with stochastic rounding instead of its two-hop sum.

    Raises CompressError for a model without FSDP2 modules, and for other numbers of bits.
    """
    if gradients not in (4, 8, *_MANTISSA, None) or parameters not in (8, None):
        raise CompressError(
            f"compress_shards got gradients={gradients!r}, parameters={parameters!r}; expected 4, "
            "8, 'bf16', 'fp8' or None, and 8 or None."
        )
    if not isinstance(min_elements, int) or min_elements < 1:
        raise CompressError(f"min_elements={min_elements!r}; expected a whole number from 1 up")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded = [module for module in modules if param_group(module) is not None]
    if not sharded:
        raise CompressError(
            f"compress_shards got a {type(model).__qualname__} without a module of FSDP2; expected "
            "one after fully_shard. Call fully_shard(model) first."
        )
    if not hasattr(sharded[0], "set_custom_reduce_scatter"):
        raise CompressError(
            f"torch {torch.__version__} cannot replace FSDP2's collectives; expected 2.13 or "
            "later. Update torch, or train without compress_shards."
        )
    shards = CompressedShards(min_elements)
    for module in sharded:
        if gradients is not None:
            codec = FloatCodec(gradients) if isinstance(gradients, str) else BlockCodec(gradients)
            module.set_custom_reduce_scatter(_ReduceScatter(shards, codec))
        if parameters is not None:
            module.set_custom_all_gather(_AllGather(shards))
    return shards
