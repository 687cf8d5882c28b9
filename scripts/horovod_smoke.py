"""Check that a new Horovod averages: `horovodrun -np 2 python horovod_smoke.py torch`."""

from __future__ import annotations

import sys


def check_torch() -> None:
    """Average over the ranks through horovod.torch."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    mean = hvd.allreduce(torch.full((3,), float(hvd.rank())), name="smoke.torch")
    expected = (hvd.size() - 1) / 2
    if mean.tolist() != [expected] * 3:
        raise SystemExit(f"torch allreduce gave {mean.tolist()}, expected {expected} three times")


def check_tensorflow() -> None:
    """Average over the ranks through horovod.tensorflow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    mean = hvd.allreduce(tf.fill([3], float(hvd.rank())), name="smoke.tensorflow")
    expected = (hvd.size() - 1) / 2
    if mean.numpy().tolist() != [expected] * 3:
        raise SystemExit(f"tensorflow allreduce gave {mean.numpy()}, expected {expected}")


if __name__ == "__main__":
    framework = sys.argv[1]
    {"torch": check_torch, "tensorflow": check_tensorflow}[framework]()
    print(f"smoke {framework} ok", flush=True)
