"""FSDP2's own collectives in fewer bytes: gradients in 4, 8 or 16 bits, parameters in blocks of 8.

    shards = compress_shards(model)                 # after the last fully_shard
    shards.report()                                 # bytes sent, and what torch would have sent

FSDP2 gathers a module's parameters before it runs, and scatters sums of its gradients behind it;
with torch 2.13 both can be replaced (`set_custom_all_gather`, `set_custom_reduce_scatter`). Blocks
of values have a scale each, their largest magnitude, as in ZeRO++ (Wang et al. 2023, arXiv
2306.10209, sections 3.1 and 3.3). Gradients may also be floats, bf16 or fp8 (`ops/casts.py`).

*Gradients* are handed to the rank that owns the shard, in one all-to-all, and summed there in
float32, the owner's own as they are. They are rounded at random, so that the expected gradient is
the exact one; nothing is remembered. What was left out of a whole gradient would have to be kept by
every rank, which is what sharding saves (docs/decisions/0099).

*Parameters* are rounded to nearest where they are gathered. The shards that the optimizer updates
keep all bits; all ranks, the owner too, compute with the rounded values.
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
_BLOCK = {4: 64, 8: 256}  # elements of a scale: 4.5 and 8.125 bits an element with it
_LEVELS = {4: 7, 8: 127}  # on each side of zero
_MANTISSA = {"bf16": 7, "fp8": 3}  # bits, of 23
_KEY = 0x9E3779B97F4A7C15  # odd, so that steps and ranks have seeds of their own


@dataclass(frozen=True)
class BlockCodec:
    """Rows of floats as bytes: a float32 scale a block, and a code an element.

    bits : 4 or 8
    """

    bits: Literal[4, 8]

    def nbytes(self, n: int) -> int:
        """Bytes of a row of n elements."""
        blocks = math.ceil(n / _BLOCK[self.bits])
        return blocks * (4 + _BLOCK[self.bits] * self.bits // 8)

    def encode(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """[r, n] of floats, n at least 1, as [r, nbytes(n)] uint8.

        generator : rounds at random with it, the expected value the exact one; None: to nearest
        A block with NaN or Inf comes back as NaN.
        """
        size, levels = _BLOCK[self.bits], _LEVELS[self.bits]
        count, n = rows.shape
        blocks = nn.functional.pad(rows.float(), (0, -n % size)).view(count, -(-n // size), size)
        scales = blocks.abs().amax(2, keepdim=True) / levels
        # Zeros have a scale of zero, and are to be codes of zero.
        codes = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
        if generator is not None:
            noise = torch.rand(
                codes.shape, generator=generator, dtype=torch.float32, device=codes.device
            )
            codes = (codes + noise).floor_()  # up as often as what is cut off is of a step
        else:
            codes = codes.round_()
        # Of what is not finite any code will do, as its scale is not finite.
        codes = codes.nan_to_num_(0.0).clamp_(-levels, levels).to(torch.int8)
        packed = codes.view(torch.uint8)
        if self.bits == 4:
            packed = (packed[..., ::2] & 15) | (packed[..., 1::2] << 4)
        return torch.cat([scales.view(torch.uint8), packed], 2).view(count, self.nbytes(n))

    def decode(self, words: torch.Tensor, n: int) -> torch.Tensor:
        """What `encode` made as [r, n] float32."""
        size = _BLOCK[self.bits]
        blocks = words.view(words.shape[0], -(-n // size), 4 + size * self.bits // 8)
        scales = blocks[..., :4].contiguous().view(torch.float32)
        packed = blocks[..., 4:]
        if self.bits == 4:
            # Shifted up and down again as signed numbers, which carries the sign along.
            low = (packed << 4).view(torch.int8) >> 4
            packed = torch.stack([low, packed.contiguous().view(torch.int8) >> 4], 3).flatten(2)
        else:
            packed = packed.contiguous().view(torch.int8)
        # Zero times a scale that is not finite is NaN.
        values = packed.to(torch.float32) * scales
        return values.view(words.shape[0], values.shape[1] * size)[:, :n]


@dataclass(frozen=True)
class FloatCodec:
    """Rows of floats as smaller floats, see `ops.casts`; called as a BlockCodec is.

    dtype : "bf16" or "fp8"
    """

    dtype: Literal["bf16", "fp8"]

    def nbytes(self, n: int) -> int:
        """Bytes of a row of n elements."""
        cast = Cast(self.dtype)
        return cast.nbytes(cast.padded(n))

    def encode(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """[r, n] of floats as [r, nbytes(n)] uint8, rounded at random; Inf is NaN in fp8."""
        cast, (count, n) = Cast(self.dtype), rows.shape
        padded = nn.functional.pad(rows.float(), (0, cast.padded(n) - n))
        # Noise below the bits that stay, and a cut: up as often as what is cut is of a step. A
        # scale is a power of two, so that these are also the bits that stay of a block of fp8.
        step = 1 << 23 - _MANTISSA[self.dtype]
        noise = torch.randint(
            step, padded.shape, generator=generator, device=rows.device, dtype=torch.int32
        )
        cut = ((padded.view(torch.int32) + noise) & -step).view(torch.float32)
        values = torch.where(padded.isfinite(), cut, padded)
        return cast.encode(values.view(-1)).view(count, self.nbytes(n))

    def decode(self, words: torch.Tensor, n: int) -> torch.Tensor:
        """What `encode` made as [r, n] float32."""
        return Cast(self.dtype).decode(words.reshape(-1)).view(words.shape[0], -1)[:, :n].float()


class _Comm:
    """What FSDP2 calls in the place of a collective of its own."""

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
        """Write the sum, or mean, of the ranks' input [ranks * n] to output [n]; for FSDP2."""
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
        # In order of the ranks: the same bits however the collective ran.
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
        """Write all ranks' input [n] to output [ranks * n], which contains it; for FSDP2."""
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
    """What `compress_shards` keeps of a model: bytes sent, and how often it has drawn numbers.

    min_elements : of a rank's part of a module below which it travels as it is
    """

    def __init__(self, min_elements: int) -> None:
        self.min_elements = min_elements
        self._drawn = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._bytes = {"gradients": [0, 0], "parameters": [0, 0]}

    def takes(self, part: torch.Tensor) -> bool:
        """Whether a rank's part of a module is worth compressing, and can be."""
        return part.dtype in _FLOATS and part.numel() >= self.min_elements

    def random(self, device: torch.device) -> torch.Generator:
        """The generator of the next reduction: its own on each rank, equal in a resumed run."""
        generator = self._generators.setdefault(device, torch.Generator(device))
        self._drawn += 1
        return generator.manual_seed((self._drawn * _KEY + dist.get_rank()) % 2**63)

    def count(self, what: str, sent: int, plain: int) -> None:
        """Count bytes that this rank has sent to others, and would have sent uncompressed."""
        self._bytes[what][0] += sent
        self._bytes[what][1] += plain

    def report(self) -> dict[str, float]:
        """Bytes that this rank has sent so far, and how many times fewer than uncompressed.

        gradient_bytes, gradient_ratio, parameter_bytes, parameter_ratio
        """
        result: dict[str, float] = {}
        for what, (sent, plain) in self._bytes.items():
            name = what.removesuffix("s")
            result |= {f"{name}_bytes": sent, f"{name}_ratio": plain / sent if sent else 1.0}
        return result

    def state_dict(self) -> dict[str, int]:
        """All that a run goes on from bit by bit; the same on all ranks."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what state_dict returned, on any number of ranks."""
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
    """Let all FSDP2 modules of a model reduce gradients and gather parameters in fewer bytes.

    model : after the last fully_shard
    gradients : bits of an element of a gradient, or the float it becomes; None: as torch sends them
    parameters : bits of an element of a parameter where a module computes with it; None: all
    min_elements : of a rank's part of a module below which it travels as it is
    Returns what has `report`, `state_dict` and `load_state_dict`.

    Source: ZeRO++ (arXiv 2306.10209), with random rounding in the place of its two-hop sum.

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
