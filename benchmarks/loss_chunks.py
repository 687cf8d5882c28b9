"""A loss over a large vocabulary, whole and in chunks: peak, seconds, how far numbers differ.

    python benchmarks/loss_chunks.py [--json FILE] [--quick] [--framework torch|tensorflow]
                                     [--hidden N ...] [--times N]

The end of a language model: `rows` hidden states of width `hidden`, a product with 128 k tokens,
cross entropy, both passes. Whole and chunked steps alternate; seconds are CPU seconds of the
process, medians. Peaks are of live storages (torch) or of what TensorFlow's allocator gave out,
with hidden states, weight and their gradients; differences are the largest over the largest of the
plain value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import commit, machine

ROWS, VOCABULARY, HIDDEN = 2048, 131072, (256, 512)
CHUNKS = (8, 16, 32)
TIMES = 5


def in_turn(steps: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Median CPU seconds of each, run in turn after one round to warm up."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(times + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if turn:
                took[name].append(time.process_time() - began)
    return {name: statistics.median(it) for name, it in took.items()}


def of_torch(rows: int, vocabulary: int, hidden: int, times: int) -> list[dict[str, Any]]:
    """Rows for torch."""
    import torch

    from sn_memory.torch import StorageTracker, chunked_cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(rows, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,))

    def step(chunks: int | None) -> Any:
        states.grad = weight.grad = None
        if chunks is None:
            loss = torch.nn.functional.cross_entropy(states @ weight.T, target)
        else:
            loss = chunked_cross_entropy(states, weight, target, chunks=chunks)
        loss.backward()
        return loss.detach()

    steps = {str(it or "whole"): (lambda it=it: step(it)) for it in (None, *CHUNKS)}
    peaks, values = {}, {}
    for name, run in steps.items():
        states.grad = weight.grad = None
        with StorageTracker([states, weight, target]) as tracker:
            loss = run()
        peaks[name] = tracker.peak_bytes
        values[name] = [loss, states.grad.clone(), weight.grad[:4096].clone()]
    return [
        {"chunks": name, "peak_bytes": peaks[name], "cpu_s": took, "differs": [
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(values[name], values["whole"], strict=True)
        ]}
        for name, took in in_turn(steps, times).items()
    ]  # fmt: skip


def of_tensorflow(rows: int, vocabulary: int, hidden: int, times: int) -> list[dict[str, Any]]:
    """Rows for TensorFlow."""
    import tensorflow as tf

    from sn_memory.tensorflow import AllocatorPeak, chunked_cross_entropy

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.random.set_seed(0)
    states = tf.Variable(tf.random.normal((rows, hidden)))
    kernel = tf.Variable(tf.random.normal((hidden, vocabulary)) / hidden**0.5)
    target = tf.random.uniform((rows,), 0, vocabulary, tf.int32)

    def made(chunks: int | None) -> Callable[[], Any]:
        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                if chunks is None:
                    logits = tf.matmul(states, kernel)
                    loss = tf.reduce_mean(
                        tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
                    )
                else:
                    loss = chunked_cross_entropy(states, kernel, target, chunks=chunks)
            return loss, *tape.gradient(loss, [states, kernel])

        return step

    steps = {str(it or "whole"): made(it) for it in (None, *CHUNKS)}
    peaks, values = {}, {}
    for name, run in steps.items():
        run()
        with AllocatorPeak() as peak:
            found = run()
        peaks[name] = peak.peak_bytes
        values[name] = [it.numpy() for it in (found[0], found[1], found[2][:, :4096])]
        del found
    return [
        {"chunks": name, "peak_bytes": peaks[name], "cpu_s": took, "differs": [
            float(abs(one - other).max() / abs(other).max())
            for one, other in zip(values[name], values["whole"], strict=True)
        ]}
        for name, took in in_turn(steps, times).items()
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, one turn")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--times", type=int, default=TIMES)
    args = parser.parse_args(argv)
    make = of_torch if args.framework == "torch" else of_tensorflow
    found: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
    for hidden in args.hidden[:1] if args.quick else args.hidden:
        sizes = (64, 1024) if args.quick else (ROWS, VOCABULARY)
        rows = make(*sizes, hidden, 1 if args.quick else args.times)
        whole = rows[0]
        for row in rows:
            row |= {
                "framework": args.framework, "rows": sizes[0], "vocabulary": sizes[1],
                "hidden": hidden, "of_peak": row["peak_bytes"] / whole["peak_bytes"],
                "of_seconds": row["cpu_s"] / whole["cpu_s"], "commit": commit(),
                "machine": machine(),
            }  # fmt: skip
            print(
                f"{args.framework} hidden {hidden} chunks {row['chunks']:>5} "
                f"{row['peak_bytes'] / 2**20:8.1f} MiB {row['of_peak']:5.1%} "
                f"{row['cpu_s']:7.3f} s {row['of_seconds']:5.2f}x {row['differs']}",
                flush=True,
            )
        found += rows
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
