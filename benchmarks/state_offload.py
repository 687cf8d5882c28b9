"""AdamW training of a model whose parameters, gradients and state are larger than a hard limit.

    python -m benchmarks state_offload [--json FILE] [--rounds 2] [--steps 5] [--limit 240]

Each way trains in a process of its own, in turn. The limit is RLIMIT_DATA, of anonymous private
memory: so many MiB beside those of a process that has imported everything and planned a toy. Who
asks for more is refused it and dies. (A limit by cgroup would count the page cache as well, which
the system takes back.)

    plain       without a limit; and with it, where it has to die
    memmap      by hand: parameters and state are np.memmap, AdamW of each parameter runs in a hook
                as soon as its gradient is there
    backward    sn_memory.torch.plan(..., state=HostState(folder, update="backward"))
    step        the same with update="step", the default: gradients wait for optimizer.step()
    copied      as backward, and updates are made of copies, not in place
    disk        as copied, and pages that were read or written are dropped from the page cache

Losses are held against those of `plain`, bit by bit. Resident bytes are the most that samples of
/proc/self/status saw: anonymous, and mapped from files.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import command, origin
from rows_file import flags, save
from torch import nn
from trials import Watch, fresh, last_row, status

import sn_memory.torch

WAYS = ("plain", "memmap", "backward", "step", "copied", "disk")
LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCH = 4, 640, 10, 4096, 128, 2
MIB = 1 << 20


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.inside(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Language(nn.Module):
    """A small GPT-2 that returns its loss; the embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.words(numbers) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), numbers[:, 1:].flatten())


def batches(count: int) -> list[torch.Tensor]:
    """Numbers of words, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (BATCH, LENGTH), generator=generator) for _ in range(count)]


def initialised(model: nn.Module) -> nn.Module:
    """The same values wherever the parameters lie."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


class Memmap:
    """Offload as written by hand: everything is mapped, each parameter is updated in a hook."""

    def __init__(self, model: nn.Module, folder: str) -> None:
        self.folder, self.count = folder, 0
        for parameter in dict.fromkeys(model.parameters()):
            with torch.no_grad():
                shape = parameter.shape
                torch.utils.swap_tensors(parameter, nn.Parameter(self.mapped(tuple(shape))))
            optimizer = torch.optim.AdamW([parameter])
            parameter.register_post_accumulate_grad_hook(self.hook(optimizer))

    def mapped(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.count += 1
        path = Path(self.folder) / f"{self.count}"
        return torch.from_numpy(np.memmap(path, np.float32, "w+", shape=shape))

    def hook(self, optimizer: torch.optim.Optimizer) -> Any:
        def update(parameter: torch.Tensor) -> None:
            optimizer.step()
            parameter.grad = None
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                if not hasattr(state[name], "is_mapped"):
                    state[name] = self.mapped(tuple(parameter.shape)).copy_(state[name])
                    state[name].is_mapped = True

        return update


def warm_up(folder: str) -> None:
    """Let everything be imported that any way imports later: it is no memory of the training."""
    with torch.device("meta"):
        toy = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    held = sn_memory.torch.HostState(folder)
    held.hold(toy)
    optimizer = torch.optim.AdamW(toy.parameters())
    settings = {"optimizer": optimizer, "state": held, "time_limit_s": 0.5}
    sn_memory.torch.plan(toy, torch.zeros(2, 8), "90%", **settings)(
        torch.zeros(2, 8)
    ).sum().backward()
    optimizer.step()


def child(way: str, steps: int, limit: int, budget: int, folder: str) -> dict[str, Any]:
    """Train in this process."""
    torch.set_num_threads(1)
    warm_up(folder)
    before = status()
    if limit:
        most = before["VmData"] + limit * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch = Watch()
    with torch.device("meta"):
        model: nn.Module = Language()
    result: dict[str, Any] = {}
    sample, optimizer = batches(1)[0], None
    if way == "memmap":
        Memmap(model, folder)
        initialised(model)
    elif way == "plain":
        initialised(model.to_empty(device="cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        held = sn_memory.torch.HostState(
            folder,
            keep_cached=way != "disk",
            in_place=way not in ("copied", "disk"),
            update="step" if way == "step" else "backward",
        )
        initialised(held.hold(model))
        optimizer = torch.optim.AdamW(model.parameters())
        began = time.perf_counter()
        model = sn_memory.torch.plan(
            model, sample, f"{budget}MiB", optimizer=optimizer, state=held,
            time_limit_s=10,
        )  # fmt: skip
        record = model.sn_memory
        result |= {
            "planning_s": time.perf_counter() - began,
            "predicted_peak_mib": record.plan.peak_bytes / MIB,
            "places": {place: list(record.state.places.values()).count(place)
                       for place in ("device", "state", "host")},
            "says": repr(record.state).replace(str(held.where), "a folder"),
        }  # fmt: skip
    parameters = sum(parameter.numel() for parameter in model.parameters())
    losses, seconds = [], []
    for numbers in batches(steps):
        began = time.perf_counter()
        loss = model(numbers)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    most = watch.end()
    return result | {
        "losses": [loss.hex() for loss in losses],
        "seconds": seconds,
        "parameters": parameters,
        "anonymous_mib": (most["RssAnon"] - before["RssAnon"]) / MIB,
        "mapped_mib": (most["RssFile"] - before["RssFile"]) / MIB,
        "data_mib": (most["VmData"] - before["VmData"]) / MIB,
    }


def run(way: str, args: argparse.Namespace, limit: int) -> dict[str, Any]:
    """Train in a new process; what it found, or how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"child": way, "steps": args.steps, "limit": limit, "budget": args.budget,
                 "folder": folder}  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        # Memory that is given back is not kept by the allocator: in all ways alike.
        env = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "OMP_NUM_THREADS": "1"}
        ended = fresh(__file__, *words, env=env)
    if ended.returncode == 0:
        result: dict[str, Any] = last_row(ended)
        return result
    errors = ended.stderr.strip().splitlines()
    return {"died": errors[-1][:200] if errors else f"signal {-ended.returncode}"}


def main() -> None:
    """Run each way in turn, and write the rows."""
    parser = flags(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=240, help="MiB")
    parser.add_argument("--budget", type=int, default=130, help="budget of the plan, MiB")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.steps, args.limit, args.budget, args.folder)))
        return
    rows: list[dict[str, Any]] = []
    common = {"command": command(__file__), **origin(),
              "limit_mib": args.limit, "budget_mib": args.budget}  # fmt: skip
    died = run("plain", args, args.limit)
    print("plain within the limit:", died)
    by_way: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            one = run(way, args, 0 if way == "plain" else args.limit)
            by_way[way].append(one)
            print(way, one)
    plain = by_way["plain"]
    for way, runs in by_way.items():
        alive = [run for run in runs if "losses" in run]
        ratios = [
            statistics.median(run["seconds"][1:]) / statistics.median(other["seconds"][1:])
            for run, other in zip(runs, plain, strict=True)
            if "seconds" in run
        ]
        row = common | {"way": way, "limited": way != "plain", "runs": len(alive)}
        if alive:
            middle = [statistics.median(run["seconds"][1:]) for run in alive]
            row |= {
                key: value for key, value in alive[-1].items() if key not in ("seconds", "losses")
            }
            row |= {
                "step_s": statistics.median(middle), "of_plain": statistics.median(ratios),
                "equal": all(run["losses"] == plain[0]["losses"] for run in alive),
                "losses": alive[-1]["losses"],
                "anonymous_mib": max(run["anonymous_mib"] for run in alive),
                "mapped_mib": max(run["mapped_mib"] for run in alive),
            }  # fmt: skip
        else:
            row |= {"died": runs[-1].get("died", "")}
        rows.append(row)
    rows.append(common | {"way": "plain", "limited": True, "runs": 0, "died": died.get("died", "")})
    save(args.json, rows)


if __name__ == "__main__":
    main()
