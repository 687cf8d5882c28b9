"""Memory handed out: the statistics of TensorFlow's own allocator.

With oneDNN, as TensorFlow is released for x86, the CPU's allocator counts like a GPU's: every
block of 256 KiB and more that a tensor or a kernel got, as large as it was handed out. What was
asked for is in allocations.py. Without oneDNN there are no statistics, and nothing is measured.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import TraceError


class AllocatorPeak:
    """The most bytes that the allocator of a device had given out while the context was open.

    Attributes
    ----------
    start_bytes, peak_bytes
        Given out at the start, and the most until now.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from sn_memory.tensorflow import AllocatorPeak
    >>> with AllocatorPeak() as found:
    ...     x = tf.random.uniform((1024, 1024))
    >>> found.peak_bytes - found.start_bytes >= 2**22
    True
    """

    def __init__(self, device: str = "CPU:0") -> None:
        if not has_statistics(device):
            raise TraceError(
                f"the allocator of {device} keeps no statistics, so nothing can be measured. On a "
                "CPU, start TensorFlow with TF_ENABLE_ONEDNN_OPTS=1."
            )
        self.device = device
        self.start_bytes = self.peak_bytes = 0

    def __enter__(self) -> AllocatorPeak:
        tf.config.experimental.reset_memory_stats(self.device)
        self.start_bytes = int(tf.config.experimental.get_memory_info(self.device)["current"])
        return self

    def __exit__(self, *_: Any) -> None:
        self.peak_bytes = int(tf.config.experimental.get_memory_info(self.device)["peak"])


def has_statistics(device: str) -> bool:
    """Say whether the allocator of a device counts."""
    try:
        before = tf.config.experimental.get_memory_info(device)["current"]
    except ValueError:
        return False
    # With the system's allocator below, there are statistics, and they stay at zero.
    with tf.device(device):
        block = tf.zeros((1 << 20,), tf.uint8)
    counted = int(tf.config.experimental.get_memory_info(device)["current"]) > int(before)
    del block
    return counted
