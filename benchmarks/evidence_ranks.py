"""One rank for evidence_compress.py: a tiny net trained by each class with each seam.

Started by evidence_compress.py, as a rank of torch.distributed or of Horovod. All is seeded and on
one thread, so the bits of the parameters after STEPS steps are those of the code and the machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 50
RATE, MOMENTUM = 0.05, 0.9
# Of reports: seconds, which no two runs have alike.
SECONDS = {"codec_s", "exchange_s", "plain_step_s", "trial_step_s"}
Rows = Iterator[dict[str, Any]]
LOW_RANK = {"ratio": 20, "warmup": 3, "every": 12}
# Name, class, settings.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "fft": ("FFTCompression", {}),
    "fft, paper": ("FFTCompression", {"mode": "paper", "theta": 0.9}),
    "fft, one block": ("FFTCompression", {"block": None, "theta": 0.9}),
    "low rank": ("LowRankCompression", LOW_RANK),
    "low rank, large": ("LowRankCompression", {"ratio": 50, "warmup": 2}),
}


def compression(name: str) -> Any:
    """Return a class of CLASSES, new."""
    cls, settings = CLASSES[name]
    return getattr(import_module("sn_compress"), cls).using(**settings)


def bits(parts: Any) -> str:
    """Return a digest of the float32 bits of arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part, dtype="<f4").tobytes())
    return digest.hexdigest()[:16]


def numbers(report: dict[str, Any]) -> dict[str, float]:
    """Return a report without its seconds."""
    return {name: float(value) for name, value in report.items() if name not in SECONDS}


# --- torch


def torch_net() -> Any:
    """Return a net with an embedding, convolutions, matrices and vectors."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(300, 64)
            self.first = nn.Conv2d(4, 32, 3, padding=1)
            self.second = nn.Conv2d(32, 48, 3, padding=1)
            self.third = nn.Linear(48 * 16, 96)
            self.last = nn.Linear(96, 10)

        def forward(self, x: Any) -> Any:
            x = self.words(x).view(-1, 4, 4, 4)
            x = self.second(torch.tanh(self.first(x))).flatten(1)
            return self.last(torch.tanh(self.third(torch.tanh(x))))

    torch.manual_seed(0)
    return Net()


def torch_loss(model: Any, generator: Any) -> Any:
    """Return the loss of the next batch; each rank's generator gives other batches."""
    import torch

    x = torch.randint(0, 300, (8, 1), generator=generator)
    y = torch.randint(0, 10, (8,), generator=generator)
    return torch.nn.functional.cross_entropy(model(x), y)


def torch_trained(model: Any, optimizer: Any, rank: int, forward: Any = None) -> Callable[[], None]:
    """Train for STEPS steps; return what does one more."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank)

    def step() -> None:
        optimizer.zero_grad()
        torch_loss(forward or model, generator).backward()
        optimizer.step()

    for _ in range(STEPS):
        step()
    return step


def torch_sgd(model: Any) -> Any:
    """Return the optimizer of all torch seams."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def torch_bits(model: Any) -> str:
    """Return the digest of a model's parameters, those of this rank if they are sharded."""
    local = [getattr(p.detach(), "to_local", p.detach)() for p in model.parameters()]
    return bits(tensor.numpy() for tensor in local)


def hooked(name: str) -> tuple[Any, Any, Any]:
    """Return a net, DDP around it, and the state of its hook."""
    from torch.nn.parallel import DistributedDataParallel

    seam = import_module("sn_compress.torch.ddp")
    model = torch_net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.15)  # several buckets
    named = list(model.named_parameters())
    state = seam.CompressionState(compression(name), named_parameters=named)
    ddp.register_comm_hook(state, seam.compression_hook)
    return model, ddp, state


def ddp() -> Rows:
    """Train under DDP's hook; what two ranks send is counted from the collectives themselves."""
    import torch.distributed as dist
    from collectives import collectives, sent_bytes

    for name in CLASSES:
        model, wrapped, state = hooked(name)
        step = torch_trained(model, torch_sgd(model), dist.get_rank(), wrapped)
        row = {"key": name, "bits": torch_bits(model), "report": numbers(state.report())}
        if dist.get_world_size() == 2:  # among more, payloads go to owners of blocks
            sent = collectives(step)
            row |= {"collectives": len(sent), "sent_bytes": sent_bytes(sent, 2)}
        yield row


def fsdp() -> Rows:
    """Train under FSDP2, replicated over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    compress_replicas = import_module("sn_compress.torch.fsdp").compress_replicas
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shard"))
    for name in ("fft", "low rank"):
        model = torch_net()
        for part in (model.second, model.third, model):
            fully_shard(part, mesh=mesh["shard"])
        state = compress_replicas(model, compression(name), mesh["replicas"])
        torch_trained(model, torch_sgd(model), dist.get_rank())
        yield {"key": name, "bits": torch_bits(model), "report": numbers(state.report())}


def gossip() -> Rows:
    """Train by gossip over torch.distributed; each rank has weights of its own."""
    import torch.distributed as dist

    codec = import_module("sn_compress").codec
    optimizer_of = import_module("sn_compress.torch.gossip").GossipOptimizer
    ways: dict[str, dict[str, Any]] = {
        "weights": {},
        "weights, not overlapped": {"overlap": False},
        "weights, top-k": {"codec": codec("topk", theta=0.98)},
        "weights, fft": {"codec": codec("fft", theta=0.9, bits=4)},
    }
    for name, settings in ways.items():
        model = torch_net()
        optimizer = optimizer_of(torch_sgd(model), group=dist.group.WORLD, **settings)
        torch_trained(model, optimizer, dist.get_rank())
        own = torch_bits(model)
        optimizer.consensus()
        yield {"key": name, "bits": own, "consensus": torch_bits(model)}


def horovod() -> Rows:
    """Train with Horovod's torch optimizer."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    for name in CLASSES:
        model, cls = torch_net(), compression(name)
        optimizer = hvd.DistributedOptimizer(
            torch_sgd(model), named_parameters=model.named_parameters(), compression=cls
        )
        torch_trained(model, optimizer, hvd.rank())
        yield {"key": name, "bits": torch_bits(model), "report": numbers(cls.report(optimizer))}


# --- what a step of DDP needs


def closure() -> Rows:
    """Our modules in a process that did three steps with low rank: none is imported before."""
    import torch.distributed as dist

    model, wrapped, _ = hooked("low rank")
    _three_steps(model, wrapped, dist.get_rank())
    ours = sorted(name for name in sys.modules if name.partition(".")[0].startswith("sn_"))
    yield {"key": "DDP, low rank, three steps", "count": len(ours), "modules": ours}


def depth() -> Rows:
    """The most calls of ours on the stack, generators counted, where arithmetic begins.

    That is in the first function of `ops/` on the stack, or where the C++ extension is called;
    checksums of what was made are no arithmetic of a tensor.
    """
    import torch.distributed as dist

    for name in ("low rank", "fft"):
        model, wrapped, _ = hooked(name)
        step = _three_steps(model, wrapped, dist.get_rank())
        step()  # in which low rank chooses its sizes: for once, and no tensor's arithmetic
        deepest: list[str] = []

        def follow(frame: Any, event: str, called: Any) -> None:
            nonlocal deepest
            module = str(frame.f_globals.get("__name__", ""))
            arithmetic = "sn_compress._core" in str(getattr(called, "__module__", ""))
            ours = arithmetic or module.startswith("sn_compress.ops")
            if event != "c_call" or not ours or module == "sn_compress.ops.checksum":
                return
            stack = []
            while frame is not None:
                module = str(frame.f_globals.get("__name__", ""))
                # Comprehensions have no frame of their own from Python 3.12 on.
                if module.startswith("sn_compress") and frame.f_code.co_name[-5:] != "comp>":
                    stack.append(f"{module.removeprefix('sn_compress.')}:{frame.f_code.co_name}")
                frame = frame.f_back
            stack.reverse()
            inner = [at for at, name in enumerate(stack) if name.startswith("ops.")]
            stack = stack[: inner[0] + 1] if inner else stack
            if len(stack) > len(deepest):
                deepest = stack

        sys.setprofile(follow)
        step()
        sys.setprofile(None)
        yield {"key": name, "depth": len(deepest), "stack": deepest}


def _three_steps(model: Any, wrapped: Any, rank: int) -> Callable[[], None]:
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    optimizer = torch_sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        torch_loss(wrapped, generator).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


# --- TensorFlow


def tensorflow_data(rank: int) -> tuple[Any, Any]:
    """Return STEPS batches of 8 of this rank."""
    rng = np.random.default_rng(1 + rank)
    x = rng.standard_normal((STEPS * 8, 96)).astype(np.float32)
    return x, rng.integers(0, 10, STEPS * 8)


def tape() -> Rows:
    """Train with DistributedGradientTape, step by step and in a tf.function."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    memory_of = import_module("sn_compress.tensorflow.tape").memory_of
    tf.config.threading.set_intra_op_parallelism_threads(1)
    shapes = {"first": (96, 128), "second": (128, 96), "last": (96, 10), "bias": (10,)}
    xs, ys = tensorflow_data(hvd.rank())
    for name in ("fft", "fft, paper", "low rank"):
        for traced in (False, True):
            rng, cls = np.random.default_rng(0), compression(name)
            net = {
                key: tf.Variable(rng.standard_normal(shape) / 10, dtype=tf.float32, name=key)
                for key, shape in shapes.items()
            }
            speeds = [tf.Variable(tf.zeros_like(variable)) for variable in net.values()]

            def step(x: Any, y: Any, net: Any = net, speeds: Any = speeds, cls: Any = cls) -> None:
                with hvd.DistributedGradientTape(tf.GradientTape(), compression=cls) as tape:
                    inner = tf.tanh(tf.tanh(x @ net["first"]) @ net["second"])
                    logits = inner @ net["last"] + net["bias"]
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                    loss = tf.reduce_mean(losses)
                gradients = tape.gradient(loss, list(net.values()))
                for variable, speed, gradient in zip(net.values(), speeds, gradients, strict=True):
                    speed.assign(MOMENTUM * speed + gradient)
                    variable.assign_sub(RATE * speed)

            run = tf.function(step) if traced else step
            for at in range(0, 8 * STEPS, 8):
                run(tf.constant(xs[at : at + 8]), tf.constant(ys[at : at + 8]))
            yield {
                "key": f"{name}, {'traced' if traced else 'eager'}",
                "bits": bits(variable.numpy() for variable in net.values()),
                "report": numbers(memory_of(cls).report()),
            }


def keras() -> Rows:
    """Train a Keras model with `fit`."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    seam = import_module("sn_compress.tensorflow.keras")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    xs, ys = tensorflow_data(hvd.rank())
    for name in ("fft", "low rank"):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(128, "tanh"), keras.layers.Dense(96), keras.layers.Dense(10)]
        model, cls = keras.Sequential([keras.Input((96,)), *layers]), compression(name)
        optimizer = seam.DistributedOptimizer(
            keras.optimizers.SGD(RATE, momentum=MOMENTUM), compression=cls
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        model.fit(xs, ys, batch_size=8, shuffle=False, verbose=0)
        yield {
            "key": name,
            "bits": bits(model.get_weights()),
            "report": numbers(cls.report(optimizer)),
        }


def keras_gossip() -> Rows:
    """Train a Keras model by gossip."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    codec = import_module("sn_compress").codec
    optimizer_of = import_module("sn_compress.tensorflow.gossip").GossipOptimizer
    tf.config.threading.set_intra_op_parallelism_threads(1)
    xs, ys = tensorflow_data(hvd.rank())
    ways: dict[str, dict[str, Any]] = {
        "weights": {},
        "weights, not overlapped": {"overlap": False},
        "weights, top-k": {"codec": codec("topk", theta=0.98)},
    }
    for name, settings in ways.items():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(128, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((96,)), *layers])
        optimizer = optimizer_of(keras.optimizers.SGD(RATE, momentum=MOMENTUM), **settings)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        model.fit(xs, ys, batch_size=8, shuffle=False, verbose=0)
        yield {"key": name, "bits": bits(model.get_weights())}


GLOO = {function.__name__: function for function in (ddp, fsdp, gossip, closure, depth)}
HOROVOD: dict[str, tuple[Callable[[], Rows], str]] = {
    "horovod": (horovod, "horovod.torch"),
    "tape": (tape, "horovod.tensorflow"),
    "keras": (keras, "horovod.tensorflow"),
    "keras_gossip": (keras_gossip, "horovod.tensorflow"),
}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a seam, in a rank of torch.distributed."""
    return {"rows": list(GLOO[job["seam"]]())}


def horovod_rank(seam: str, folder: Path) -> None:
    """Write the rows of a seam, in a rank of Horovod."""
    rows, library = HOROVOD[seam]
    hvd = import_module(library)
    hvd.init()
    (folder / f"rank{hvd.rank()}.json").write_text(json.dumps({"rows": list(rows())}), "utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "--horovod":
        horovod_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        import_module("ddp_ranks").as_rank(work)
