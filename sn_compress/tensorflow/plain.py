"""Tensors that go uncompressed, in a type that Horovod reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_as_written = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True)
class Cast:
    """A tensor that went uncompressed in a type Horovod can reduce."""

    dtype: tf.DType

    @_as_written
    def finish(self, reduced: Any) -> Any:
        return tf.cast(reduced, self.dtype)


def wire_type(tensor: Any) -> Any:
    """As what a tensor that is not compressed travels: Horovod reduces no bfloat16."""
    return tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype


class Plain:
    """A compression of Horovod's that only makes a type of what Horovod cannot reduce: bfloat16."""

    @staticmethod
    @_as_written
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        wire = wire_type(tensor)
        return (
            (tensor, None) if wire == tensor.dtype else (tf.cast(tensor, wire), Cast(tensor.dtype))
        )

    @staticmethod
    @_as_written
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Called by Horovod."""
        return tensor if ctx is None else ctx.finish(tensor)
