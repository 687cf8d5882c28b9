"""Random training programs of torch on two ranks, their gradients compressed by DDP's hook.

A seed draws a network of modules.py, a loop and a compression. Both ranks must end each step with
the same bits, all finite. Where the compression drops next to nothing, weights stay beside those of
plain DDP, within what the hook can have left out (`bound`). What a program may do else: raise a
CompressError on both ranks. The second rank is a process that lives as long as the first one.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import modules
import numpy as np
import torch
import torch.distributed as dist
from modules import LAYERS, LENGTH, Net, fewest_layers, loss_of
from runner import Target, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

# Matrices of a thousand numbers are compressed as large ones are.
modules.WIDTH = WIDTH = 32
BATCH = 16
STEPS = 6
RATE = 0.01
# A rank whose peer has gone away gives up after this; a case takes a second or two.
PATIENCE_S = 20
# What is computed differs between ranks here, and so do the parameters that take part.
BY_RANK = ("by_value", "by_chance")
# Bits of a coefficient's mantissa in the mild settings of FFTCompression.
MANTISSA = 9


@dataclass(frozen=True)
class Program:
    """What a seed draws."""

    layers: tuple[str, ...]
    numbers: tuple[int, ...]
    form: str
    loop: str
    compression: str
    frozen: tuple[int, ...]
    view: bool
    static: bool


COMPRESSIONS: dict[str, Any] = {
    "fft": FFTCompression.using(check_every=3, theta=0.9, min_elements=64),
    "fft, blocks": FFTCompression.using(
        check_every=3, theta=0.7, block=128, min_elements=16, bits=6
    ),
    "fft, no feedback": FFTCompression.using(
        check_every=3, theta=0.5, feedback=False, min_elements=64
    ),
    "fft, mild": FFTCompression.using(
        check_every=3, theta=0.0, min_elements=64, bits=16, mantissa=MANTISSA
    ),
    "low rank": LowRankCompression.using(check_every=3, ratio=4, warmup=2, min_elements=64),
    "low rank, dense again": LowRankCompression.using(
        check_every=3, ratio=8, warmup=1, every=3, min_elements=16
    ),
    "low rank, mild": LowRankCompression.using(
        check_every=3, ratio=100, warmup=1000, min_elements=64
    ),
}


def drawn(seed: int) -> Program:
    """Return the program of a seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    names = tuple(str(layer) for layer in rng.choice(sorted(LAYERS.keys() - set(BY_RANK)), count))
    name = str(rng.choice(sorted(LOOPS)))
    return Program(
        layers=names,
        numbers=tuple(int(number) for number in rng.integers(2**31, size=count)),
        form=str(rng.choice(["tensor", "loss", "pair", "view", "mapping"])),
        loop=name,
        compression=str(rng.choice(sorted(COMPRESSIONS))),
        frozen=tuple(at for at in range(count) if rng.random() < 0.12),
        view=bool(rng.random() < 0.3),
        # Of several passes before a step, plain DDP with a static graph fails or waits for ever.
        static=bool(rng.random() < 0.2) and not name.startswith("accumulated"),
    )


class Training:
    """A network under DDP with its optimizers, and what a loop needs of it."""

    def __init__(self, program: Program, compression: Any) -> None:
        self.net = Net(program.layers, program.numbers, program.form)
        for at in program.frozen:
            self.net.layers[at].requires_grad_(False)
        self.ddp = DistributedDataParallel(
            self.net,
            find_unused_parameters=not program.static,
            static_graph=program.static,
            gradient_as_bucket_view=program.view,
        )
        if compression is not None:
            state = CompressionState(compression, named_parameters=self.net.named_parameters())
            self.ddp.register_comm_hook(state, compression_hook)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, RATE)
        # The norm of all that was given to the optimizer: `bound` is a share of it.
        self.norms = 0.0
        self.digests: list[str] = []

    def loss(self, at: int) -> torch.Tensor:
        """Return the loss of a step, of other rows on each rank."""
        torch.manual_seed(at)
        generator = torch.Generator().manual_seed(100 * at + dist.get_rank())
        return loss_of(self.ddp(torch.randn(BATCH, LENGTH, WIDTH, generator=generator)))

    def step(self) -> None:
        """Update, and note the weights."""
        gradients = [
            parameter.grad for parameter in self.net.parameters() if parameter.grad is not None
        ]
        self.norms += sum(float(gradient.abs().square().sum()) for gradient in gradients) ** 0.5
        self.optimizer.step()
        digest = hashlib.sha256()
        for parameter in self.net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.digests.append(digest.hexdigest())


LOOPS: dict[str, Callable[[Training], None]] = {}


def loop(run: Callable[[Training], None]) -> Callable[[Training], None]:
    """Register a loop by its name."""
    LOOPS[run.__name__] = run
    return run


@loop
def plain_steps(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(at).backward()
        training.step()


@loop
def zeros_kept(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad(set_to_none=False)
        training.loss(at).backward()
        training.step()


@loop
def accumulated(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        with training.ddp.no_sync():
            training.loss(10 + at).backward()
        training.loss(at).backward()
        training.step()


@loop
def accumulated_in_the_open(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(10 + at).backward()
        training.loss(at).backward()
        training.step()


@loop
def thrown_away(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(at).backward()
        training.step()
        (-10 * training.loss(20 + at)).backward()
        training.optimizer.zero_grad()


@loop
def rejected(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        (training.loss(at) * (1000 if at == 3 else 1)).backward()
        if at != 3:
            training.step()


@loop
def clipped(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(at).backward()
        nn.utils.clip_grad_norm_(training.net.parameters(), 0.1)
        training.step()


@loop
def evaluated(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        training.loss(at).backward()
        training.step()
        training.ddp.eval()
        with torch.no_grad():
            training.loss(30 + at)
        training.ddp.train()


@loop
def late_loss(training: Training) -> None:
    for at in range(STEPS):
        training.optimizer.zero_grad()
        (training.loss(at) * (at >= 3)).backward()
        training.step()


def bound(program: Program, norms: float) -> float:
    """Return how far weights may be from plain DDP's after a loop in a mild setting.

    A step of gradient descent adds RATE times the gradient. What the hook leaves out of a gradient
    is a part of it: half a unit of a coefficient's mantissa at most, on each of two ways (each
    rank's, and the mean's), and feedback only ever takes it back. Low rank in its dense steps and
    all that is not compressed differ by float32's rounding in a mean, some 2**-20 after a step's
    own sums. Both are doubled, as the next gradients follow from the weights.
    """
    part = 2.0**-MANTISSA if program.compression.startswith("fft") else 2.0**-20
    return 2 * RATE * part * norms + 1e-6


def one(program: Program) -> dict[str, Any]:
    """Run a program on this rank; return what came of it, for the other one to compare."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = Training(program, None)
        try:
            LOOPS[program.loop](plain)
        except RuntimeError as error:
            return {"outcome": f"plain DDP's own error: {str(error)[:40]}"}
        training = Training(program, COMPRESSIONS[program.compression])
        try:
            LOOPS[program.loop](training)
        except CompressError as error:
            return {"outcome": f"CompressError: {str(error)[:50]}"}
    weights = list(training.net.parameters())
    distance = sum(
        float((first.detach() - second.detach()).abs().square().sum())
        for first, second in zip(weights, plain.net.parameters(), strict=True)
    )
    return {
        "outcome": "alike",
        "digests": training.digests,
        "plain": plain.digests,
        "finite": is_finite(training.net),
        "plain_finite": is_finite(plain.net),
        "apart": distance**0.5,
        "norms": max(plain.norms, training.norms),
    }


def is_finite(net: nn.Module) -> bool:
    """Whether all weights are numbers."""
    return all(bool(torch.isfinite(p.detach().abs()).all()) for p in net.parameters())


class Peer:
    """The other rank, and the group with it; both are made anew after a fault."""

    current: Peer | None = None

    def __init__(self) -> None:
        folder = tempfile.mkdtemp()
        self.store = str(Path(folder) / "store")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer", self.store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        join(self.store, 0)

    @classmethod
    def get(cls) -> Peer:
        """Return the one there is, or a new one."""
        if cls.current is None:
            cls.current = cls()
        return cls.current

    def run(self, program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a program on both ranks; return what came of it on each."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(program)) + "\n")
        self.process.stdin.flush()
        own = ended(program)
        line = self.process.stdout.readline()
        return own, json.loads(line) if line else {"outcome": "the second rank has died"}

    def stop(self) -> None:
        """End the other rank and the group."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        type(self).current = None


def join(store: str, rank: int) -> None:
    """Make the group of two."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )


def ended(program: Program) -> dict[str, Any]:
    """Return what came of a program on this rank, an error of another kind included."""
    try:
        return one(program)
    except Exception as error:  # noqa: BLE001 - it is shown with its seed
        return {
            "outcome": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-1500:],
        }


def outcome(program: Program) -> str:
    """Run a program on both ranks; return what came of it, or raise."""
    peer = Peer.get()
    first, second = peer.run(program)
    if first["outcome"] != second["outcome"] or first["outcome"] != "alike":
        # One of them may still be in the middle of an exchange.
        peer.stop()
    if first["outcome"] != second["outcome"]:
        traces = (first.get("trace"), second.get("trace"))
        raise AssertionError(f"ranks end apart: {first['outcome']}; {second['outcome']}; {traces}")
    if first["outcome"].startswith(("CompressError", "plain DDP")):
        return first["outcome"]
    if first["outcome"] != "alike":
        raise AssertionError(f"{first['outcome']}\n{first['trace']}")
    if first["plain"] != second["plain"]:
        return "plain DDP's ranks differ"
    if not first["plain_finite"]:
        return "plain DDP's weights are not finite"
    if first["digests"] != second["digests"]:
        raise AssertionError("weights of the ranks differ")
    if not first["finite"]:
        raise AssertionError("weights are not finite where plain ones are")
    if program.compression.endswith("mild"):
        most = bound(program, first["norms"])
        if not first["apart"] <= most:
            raise AssertionError(f"weights are {first['apart']:.2e} from plain's, not {most:.2e}")
    return f"alike: {program.compression}"


def _fails(program: Program) -> bool:
    try:
        outcome(program)
    except AssertionError:
        return True
    return False


def case(seed: int) -> str:
    """One program."""
    program = drawn(seed)
    try:
        return outcome(program)
    except AssertionError as error:
        raise AssertionError(
            f"{fewest_layers(program, _fails)}\n  was {program}\n  {error}"
        ) from None


TARGETS = {"ranks": Target(case, full=2000, limit_s=15.0)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed is no answer
        join(sys.argv[2], 1)
        for line in sys.stdin:
            answers.write(json.dumps(ended(Program(**json.loads(line)))) + "\n")
            answers.flush()
        os._exit(0)
    main(TARGETS)
