"""What both packages do, on Fashion-MNIST, in a few minutes: a table and a picture.

    python examples/demo.py

1. Two ranks of torch's DDP behind a link of 100 Mbit/s train the same steps, plain and with
   LowRankCompression: seconds and accuracy. The link is made of network namespaces, which needs
   root and iproute2; where there are none it says so, and ranks talk over the loopback.
2. A network trains without a limit of memory, fails under one, and trains under the same limit with
   a plan of sn_memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import _demo_picture

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "examples"
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import ddp_ranks  # noqa: E402  (folders that are no packages)
import fetch_fashion_mnist  # noqa: E402
import shaped_links  # noqa: E402

from sn_compress.base.text_table import text_table  # noqa: E402
from sn_memory.base.sizes import show_bytes  # noqa: E402

SETTLED = 15  # steps from which on a step is what it costs: the first ten are sent whole


def behind_a_link(args):
    """Train plain and compressed; what each rank found, and in words what was between them."""
    reason = shaped_links.why_not()
    between = f"a link of {args.mbit:g} Mbit/s" if not reason else "the loopback, no slow link"
    if reason:
        print(f"   No link can be shaped here: {reason}.", flush=True)
        print("   Both train over the loopback: what fewer bytes gain does not show.", flush=True)
    found = {}
    for name, ratio in (("plain", 0), ("compressed", args.ratio)):
        print(f"   {name}: {args.steps} steps on 2 ranks, over {between}", flush=True)
        job = {"steps": args.steps, "ratio": ratio, "every": max(1, args.steps // 12)}
        with nullcontext() if reason else shaped_links.ShapedLinks(2, args.mbit / 1e3) as links:
            script = str(HERE / "_demo_link.py")
            try:
                ranks = ddp_ranks.run_ranks(script, job, ranks=2, timeout_s=900, links=links)
            except RuntimeError as error:
                raise SystemExit(f"a rank failed: {error}") from None
        found[name] = in_parts(ranks)
        print(f"   {found[name]['total_s']:.0f} s, {found[name]['accuracy']:.1f} %", flush=True)
    return found, between


def in_parts(ranks):
    """Of both ranks: the seconds of a step by what they went into, and how the training went."""
    settled = [rank["seconds"][SETTLED:] or rank["seconds"] for rank in ranks]
    step_s = statistics.median(map(max, *settled))
    report = ranks[0]["report"]
    computing = statistics.median(s for rank in ranks for s in rank["computing"])
    codec = min(report.get("codec_s", 0.0), step_s)
    return {
        "step_s": step_s,
        "computing_s": min(computing, step_s - codec),
        "codec_s": codec,
        # What no computing and no codec hides: waiting for the link, and for the other rank.
        "exchange_s": max(step_s - computing - codec, 0.0),
        "total_s": ranks[0]["curve"][-1][0],
        "curve": ranks[0]["curve"],
        "accuracy": ranks[0]["curve"][-1][1],
        "ratio": report.get("ratio_after_warmup", 1.0),
        "bytes": report.get("payload_bytes"),
    }


def within_a_limit(args):
    """Train without a limit, then plain and planned under one; what each of them told."""
    sizes = ["--batch", args.batch, "--depth", args.depth]
    print(f"   no limit: {args.few} steps, to see what it takes", flush=True)
    free = one_process("plain", *sizes, "--steps", args.few)
    base, top = free["base"], max(size for _, size in free["curve"])
    limit = int(base + args.share * (top - base))
    print(f"   it takes {show_bytes(top)}; under a limit of {show_bytes(limit)}:", flush=True)
    plain = one_process("plain", *sizes, "--steps", args.few, "--limit", limit)
    print(f"   plain: {plain['ended'] or 'it trained: the limit is not kept here'}", flush=True)
    limits = ["--limit", limit, "--beside", int(1.15 * free["beside"])]
    planned = one_process("planned", *sizes, "--steps", args.planned_steps, *limits)
    if planned["ended"]:
        raise SystemExit(f"the planned training failed, too: {planned['ended']}")
    same = planned["losses"][: args.few] == free["losses"][: args.few]
    words = "the same to the bit" if same else "NOT the same"
    print(f"   planned: trains; its losses are {words} as without a limit", flush=True)
    return {
        "free": free, "plain": plain, "planned": planned, "limit": limit, "top": top, "same": same
    }  # fmt: skip


def one_process(way, *flags):
    """Run one training of the second part by itself; what it told, or how it was killed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "told.json"
        command = [sys.executable, HERE / "_demo_memory.py", way, out, *flags]
        # What is given back goes back to the kernel, in all runs alike: the limit counts it.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
        env["OMP_NUM_THREADS"] = "1"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
        if out.exists():
            return json.loads(out.read_text())
    if done.returncode < 0 or "bad_alloc" in done.stderr:
        # Killed, or its C++ found no memory where Python cannot catch it.
        why = f"killed by signal {-done.returncode}"
        return {"ended": why, "losses": [], "curve": [], "seconds": [], "base": 0}
    raise SystemExit(f"{done.stdout}{done.stderr}\n{way} training ended with {done.returncode}")


def tables(link, between, memory):
    """Both results as text."""
    rows = [
        [name, it["total_s"], 1e3 * it["step_s"], 1e3 * it["computing_s"], 1e3 * it["codec_s"],
         1e3 * it["exchange_s"], it["ratio"], it["accuracy"]]
        for name, it in link.items()
    ]  # fmt: skip
    head = ("over " + between, "seconds", "ms/step", "computing", "codec", "waiting", "ratio", "%")
    first = text_table(head, rows, ("", ".1f", ".1f", ".1f", ".1f", ".1f", ".1f", ".2f"))
    planned, plain = memory["planned"], memory["plain"]
    top = max((size for _, size in planned["curve"]), default=0)
    rows = [
        ["no limit", show_bytes(memory["top"]), f"{memory['free']['losses'][-1]:.3f}", ""],
        ["plain, limited", show_bytes(memory["limit"]), "", plain["ended"] or "trained"],
        ["planned, limited", show_bytes(top), f"{planned['losses'][-1]:.3f}",
         f"{len(planned['losses'])} steps"],
    ]  # fmt: skip
    lines = [f"{a:<18}{b:>12}{c:>10}  {d}" for a, b, c, d in [("", "memory", "loss", "")] + rows]
    return first, "\n".join(line.rstrip() for line in lines)


def main():
    """Run both parts, print the tables, draw the picture."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--steps", type=int, default=300, help="of the first part")
    flags.add_argument("--mbit", type=float, default=100, help="of the link")
    flags.add_argument("--ratio", type=float, default=50, help="how many times fewer bytes")
    flags.add_argument("--share", type=float, default=0.55, help="of what plain takes, the limit")
    flags.add_argument("--batch", type=int, default=256, help="of the second part")
    flags.add_argument("--depth", type=int, default=20, help="convolutions of the second part")
    flags.add_argument("--planned-steps", type=int, default=12, help="of the second part")
    flags.add_argument("--data", help="folder of Fashion-MNIST's four .gz files")
    flags.add_argument(
        "--out", type=Path, default=ROOT / "demo-results", help="where demo.png goes"
    )
    flags.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    args = flags.parse_args()
    args.few = 3
    if args.quick:
        args.steps, args.planned_steps, args.batch, args.depth = 20, 4, 64, 10
    if args.data:
        os.environ["FASHION_MNIST_DIR"] = args.data
    try:
        found = fetch_fashion_mnist.find()
    except FileNotFoundError as error:
        raise SystemExit(f"{error}. {fetch_fashion_mnist.HELP}") from None
    if found is None:
        raise SystemExit(f"Fashion-MNIST is nowhere. {fetch_fashion_mnist.HELP}")
    args.out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    print("1. Two ranks behind a slow link", flush=True)
    link, between = behind_a_link(args)
    print("2. A network that does not fit", flush=True)
    memory = within_a_limit(args)
    _demo_picture.draw(link, between, memory, args.out / "demo.png")
    first, second = tables(link, between, memory)
    print(f"\n{first}\n\n{second}\n\n{args.out / 'demo.png'}")
    if not memory["same"]:
        raise SystemExit("planned losses are not those without a limit; please report it")


if __name__ == "__main__":
    main()
