"""DDP over a shaped link: seconds of a step and seconds to a loss, every way alternating.

    python -m benchmarks shaped_ddp            as root; needs iproute2; about eight minutes
    python -m benchmarks shaped_ddp --report   the table of what has been measured

The transformer of benchmarks/ddp_step.py, trained for real with AdamW on the same text; two Gloo
ranks, each in a namespace behind a link of --gbit (benchmarks/shaped_links.py). All ways are
trained in the same two processes and alternate step by step, so that other load on the machine
affects all of them; each way's clock runs only during its own steps. Bytes are those that the
namespace's interface counts, headers included. The loss is that of held-out text.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import about, as_rank, measured, run_ranks
from ddp_ways import wrapped
from language import Language, batch, loss_of
from rows_file import flags, load, replaced, save
from shaped_links import NoLinksError, ShapedLinks, clean, leftovers

from sn_compress.text_table import text_table

RESULTS = Path(__file__).resolve().parent / "results/shaped_ddp.json"
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
WAYS = ("plain", "fp16", "powersgd 4", "low rank 50", "low rank 150", "gather")
SETTINGS = ("gbit", "train_steps", "target", "batch", "length", "rate", "width", "layers", "seed")
DENSE = 10  # uncompressed steps at first, of every way but the gather
SETTLE = DENSE + 5  # steps before the ones whose seconds and bytes are told
LOOKS = 40  # times the loss is taken
HELD_OUT = 64  # sequences of it


class Way:
    """One way's training in a rank."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        self.name, self.job = name, job
        torch.manual_seed(job["seed"])
        self.net = Language(job["width"], job["layers"])
        self.ddp, _ = wrapped(name, self.net, dense=DENSE)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=job["rate"])
        self.generator = torch.Generator().manual_seed(1000 * job["seed"] + dist.get_rank())
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.curve: list[tuple[int, float, float]] = []  # steps, seconds, loss

    def step(self) -> None:
        """Train one step, which all ranks begin together."""
        job = self.job
        tokens, following = batch(job["batch"], job["length"], self.generator)
        warm = min(1.0, (len(self.seconds) + 1) / max(1, job["train_steps"] // 10))
        self.optimizer.param_groups[0]["lr"] = job["rate"] * warm
        dist.barrier()
        before, start = int(COUNTER.read_text()), time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.ddp, tokens, following).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        # A rank ends its step when it has received: what it sent may wait in the bucket still,
        # and is counted when the other rank has it. The barrier is a few hundred bytes.
        dist.barrier()
        self.sent.append(int(COUNTER.read_text()) - before)

    def look(self) -> None:
        """Take the loss of held-out text; no clock runs."""
        own = torch.Generator().manual_seed(0)
        tokens, following = batch(HELD_OUT, self.job["length"], own, held_out=True)
        with torch.inference_mode():
            loss = loss_of(self.net, tokens, following).item()
        self.curve.append((len(self.seconds), sum(self.seconds), loss))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: train all ways."""
    ways = [Way(name, job) for name in job["ways"]]
    every = max(1, job["train_steps"] // LOOKS)
    for step in range(1, job["train_steps"] + 1):
        turn = step % len(ways)
        for way in ways[turn:] + ways[:turn]:
            way.step()
            if step % every == 0 or step == job["train_steps"]:
                way.look()
    return {
        way.name: {"seconds": way.seconds, "sent": way.sent, "curve": way.curve} for way in ways
    }


def rows_of(job: dict[str, Any], by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per way from what both ranks found; seconds are the slower rank's."""
    rows = []
    for way in job["ways"]:
        ranks = [rank[way] for rank in by_rank]
        steps = list(map(max, *(rank["seconds"][SETTLE:] for rank in ranks)))
        sent = [size for rank in ranks for size in rank["sent"][SETTLE:]]
        curve = ranks[0]["curve"]
        reached = [(taken, seconds) for taken, seconds, loss in curve if loss <= job["target"]]
        row = {"way": way, **{name: job[name] for name in SETTINGS}, "ranks": job["ranks"]}
        row |= {"step_s": round(statistics.median(steps), 4)}
        row["bytes_per_step"] = round(statistics.median(sent))  # TCP sends some of it again
        row["steps_to_target"], row["seconds_to_target"] = reached[0] if reached else (None, None)
        row |= {"seconds": curve[-1][1], "loss": round(curve[-1][2], 4), "curve": curve}
        rows.append(row | about(__file__))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, a table per commit, link and seed."""
    lines = []
    keys = ("commit", "gbit", "train_steps", "batch", "length", "seed", "target", "width", "layers")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        group = [row for row in rows if tuple(row[k] for k in keys) == key]
        lines += [
            f"\ncommit {key[0]}, {key[1]:g} Gbit/s, {group[0]['ranks']} ranks, {key[2]} steps of "
            f"{key[3]} x {key[4]} tokens a rank, seed {key[5]}, load {group[-1]['load']:.1f}",
        ]
        plain = next((row for row in group if row["way"] == "plain"), None)
        cells = []
        for row in group:
            reached = row["seconds_to_target"]
            faster = plain["step_s"] / row["step_s"] if plain else None
            sooner = None
            if plain and plain["seconds_to_target"] and reached:
                sooner = plain["seconds_to_target"] / reached
            never = "never" if reached is None else reached
            kb, steps = row["bytes_per_step"] / 1e3, row["steps_to_target"]
            cells.append([row["way"], row["step_s"], faster, kb, never, sooner, steps, row["loss"]])
        reach = f"s to {key[6]:g}"
        head = ("way", "s/step", "x plain", "kB/step", reach, "x plain", "steps", "loss")
        lines.append(text_table(head, cells, ("", ".3f", ".2f", ".1f", ".1f", ".2f", "", ".3f")))
    return "\n".join(lines)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart; a row replaces that of an equal key."""
    return tuple(row[name] for name in ("way", "commit", *SETTINGS))


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--clean", action="store_true", help="clean up after a killed run")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--target", type=float, default=3.4, help="held-out loss, nats per token")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--length", type=int, default=16, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    if args.clean:
        clean(leftovers())
        return
    if args.train_steps <= SETTLE and not args.report:
        parser.error(f"--train-steps {args.train_steps}; expected more than {SETTLE}, which settle")
    rows = load(args.json)
    wanted = [(gbit, seed) for gbit in args.gbit for seed in args.seeds]
    for gbit, seed in [] if args.report else wanted:
        job = {name: getattr(args, name, None) for name in SETTINGS} | {"gbit": gbit, "seed": seed}
        if all(measured(rows, job | {"way": way}) for way in args.ways):
            continue
        job |= {"ways": args.ways}
        print(f"{gbit:g} Gbit/s, seed {seed}", flush=True)
        try:
            with ShapedLinks(2, gbit) as links:
                by_rank = run_ranks(__file__, job, ranks=2, timeout_s=3600, links=links)
        except NoLinksError as why:
            raise SystemExit(str(why)) from None
        new = rows_of(job | {"ranks": 2}, by_rank)
        rows = replaced(rows, new, key_of)
        save(args.json, rows)
    print(table(rows))


if __name__ == "__main__" and not as_rank(work):
    main()
