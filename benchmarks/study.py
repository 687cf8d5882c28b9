"""Which method loses least accuracy at equal received bytes? Eight ranks, two nets, three seeds.

    python benchmarks/study.py            what is missing of the whole study, hours on two cores
    python benchmarks/study.py --quick    one short run of most methods: does it all run?

Every rank's gradient and every payload is real; the ranks are simulated (benchmarks/simulated.py).
A finished run is saved at once and not done again, so the study may be stopped and started at
will. The whole study also writes its tables into docs/accuracy.md and its picture to docs/study.png.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _study_methods import Shapes, build, plain_received
from accuracy import load, save
from machine import commit, machine
from nets import NETS, fashion_mnist
from simulated import SMALLEST, Exchange, Plain, exchange_gradients, rank_gradients

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/study.json"
RANKS, BATCH = 8, 8  # images per rank and step
# Chosen on plain runs only, by the loss at the end of a run and by seed 3, which is not studied.
RATES = {("cnn", "sgd"): 0.05, ("cnn", "adam"): 2e-3, ("transformer", "adam"): 2e-3}
STEPS = {"cnn": 2500, "transformer": 2500}


@dataclass(frozen=True)
class Run:
    """What one run is; two runs with equal fields give equal results."""

    net: str
    optimizer: str
    method: str
    ratio_asked: float | None
    seed: int
    steps: int
    rate: float


def learning_rate(step: int, steps: int) -> float:
    """Linear up over a thirtieth of the run, then down to zero along a cosine; the peak is 1."""
    warm = max(1, steps // 30)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(run: Run) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    net = NETS[run.net]().to(memory_format=torch.channels_last)
    momentum = 0.0 if run.method == "dgc" else 0.9  # DGC has it in its codec
    optimizer: torch.optim.Optimizer
    if run.optimizer == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=run.rate, momentum=momentum)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=run.rate)
    parameters = dict(net.named_parameters())
    shapes: Shapes = {
        name: tuple(p.shape)
        for name, p in parameters.items()
        if p.numel() >= SMALLEST
    }
    exchanges = build(run.method, shapes, RANKS, run.ratio_asked, run.steps)
    small: dict[str, Exchange] = {name: Plain() for name in parameters if name not in shapes}
    images, labels = fashion_mnist("train")
    shuffle = torch.Generator().manual_seed(run.seed)
    order = torch.empty(0, dtype=torch.long)
    losses = []
    start = time.process_time()
    for step in range(run.steps):
        if len(order) < RANKS * BATCH:
            order = torch.randperm(len(images), generator=shuffle)
        rows, order = order[: RANKS * BATCH], order[RANKS * BATCH :]
        x = images[rows].view(RANKS, BATCH, *images.shape[1:])
        gradients, loss = rank_gradients(net, x, labels[rows].view(RANKS, BATCH))
        losses.append(loss)
        exchange_gradients(net, gradients, exchanges | small)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * learning_rate(step, run.steps)
        optimizer.step()
    seconds = time.process_time() - start
    test_images, test_labels = fashion_mnist("t10k")
    with torch.inference_mode():
        answers = torch.cat([net(part).argmax(1) for part in test_images.split(500)])
    received = sum(e.received for e in exchanges.values())
    sent = sum(e.sent for e in exchanges.values())
    plain = plain_received(shapes, RANKS, run.steps)
    others = sum(e.received for e in small.values())
    elements = sum(math.prod(s) for s in shapes.values())
    return asdict(run) | {
        "ratio_received": round(plain / received, 2),
        "ratio_sent": round(4 * elements * run.steps / sent, 2),
        "ratio_with_small": round((plain + others) / (received + others), 2),
        "accuracy": round(100 * (answers == test_labels).double().mean().item(), 2),
        "train_loss": round(float(np.mean(losses[-(run.steps // 10) :])), 4),
        "seconds": round(seconds, 1),  # of one core
    }
