"""Show both packages on Fashion-MNIST, in about two minutes: two tables and a picture.

    python examples/demo.py

1. Two ranks of torch's DDP over a link of 100 Mbit/s train the same steps three times: plain,
   with FFTCompression, and with LowRankCompression. The link is made of network namespaces, which
   need root and iproute2; without them the ranks use the loopback, and the demo says so.
2. A network trains without a memory limit, runs out of memory under one, and trains under the same
   limit with a plan of sn_memory.
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
sys.path += [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import ddp_ranks  # noqa: E402  (folders that are no packages)
import fetch_fashion_mnist  # noqa: E402
import shaped_links  # noqa: E402

from sn_compress.text_table import text_table  # noqa: E402
from sn_memory.base.sizes import show_bytes  # noqa: E402

# By name: the compression (None for plain DDP) and its settings: FFT with its defaults, and low
# rank at the same number of bytes.
METHODS = {
    "plain": (None, {}),
    "FFTCompression": ("FFTCompression", {}),
    "LowRankCompression": ("LowRankCompression", {"ratio": 50}),
}
STEP_PARTS = ("step", "computing", "codec", "exchange")
WARMUP = 15  # steps excluded from the median: the first ten are sent uncompressed
UNLIMITED_STEPS = 3


def train_behind_a_link(args):
    """Train with each method; return the results by name, and a description of the link."""
    reason = shaped_links.why_not()
    between = "the loopback, no slow link" if reason else f"a link of {args.mbit:g} Mbit/s"
    if reason:
        print(f"   No link can be shaped here: {reason}.", flush=True)
        print("   All train over the loopback, where fewer bytes save no time.", flush=True)
    results = {}
    for name, (compression, settings) in METHODS.items():
        print(f"   {name}: {args.steps} steps on 2 ranks, over {between}", flush=True)
        job = {"steps": args.steps, "compression": compression, "settings": settings}
        job["accuracy_every"] = max(1, args.steps // 12)
        with nullcontext() if reason else shaped_links.ShapedLinks(2, args.mbit / 1e3) as links:
            script = str(HERE / "_demo_link.py")
            try:
                ranks = ddp_ranks.run_ranks(script, job, ranks=2, timeout_s=900, links=links)
            except RuntimeError as error:
                raise SystemExit(f"a rank failed: {error}") from None
        results[name] = summary(ranks)
        print(f"   {results[name]['total_s']:.0f} s, {results[name]['accuracy']:.1f} %", flush=True)
    return results, between


def summary(ranks):
    """Summarize both ranks: the parts of a step's seconds, bytes, and the accuracy over time."""
    seconds = [rank["seconds"][WARMUP:] or rank["seconds"] for rank in ranks]
    step_s = statistics.median(map(max, *seconds))
    report = ranks[0]["report"]
    computing_s = statistics.median(s for rank in ranks for s in rank["computing"])
    codec_s = min(report.get("codec_s", 0.0), step_s)
    return {
        "step_s": step_s,
        "computing_s": min(computing_s, step_s - codec_s),
        "codec_s": codec_s,
        # The rest of the step: waiting for the link and the other rank.
        "exchange_s": max(step_s - computing_s - codec_s, 0.0),
        "total_s": ranks[0]["curve"][-1][0],
        "curve": ranks[0]["curve"],
        "accuracy": ranks[0]["curve"][-1][1],
        "ratio": report.get("ratio_after_warmup", 1.0),
    }


def train_under_a_limit(args):
    """Train without a limit, then plain and planned under one; return the result of each."""
    sizes = ["--batch", args.batch, "--depth", args.depth]
    print(f"   no limit: {UNLIMITED_STEPS} steps", flush=True)
    free = run_alone("plain", *sizes, "--steps", UNLIMITED_STEPS)
    if free["error"]:
        raise SystemExit(f"training without a limit failed: {free['error']}")
    needs = free["base"] + free["step_bytes"]
    limit = free["base"] + free["reserve"] + int(args.budget * free["step_bytes"])
    if limit > 0.9 * needs:
        raise SystemExit(
            f"a limit with room for kernels' scratch is {show_bytes(limit)}, and plain training "
            f"needs {show_bytes(needs)}: too close to show anything; use a larger --batch"
        )
    print(f"   plain needs {show_bytes(needs)}; the limit is {show_bytes(limit)}", flush=True)
    plain = run_alone("plain", *sizes, "--steps", UNLIMITED_STEPS, "--limit", limit)
    print(
        f"   plain, limited: {plain['error'] or 'trained; the limit is ignored here'}", flush=True
    )
    steps = args.planned_steps
    print(f"   planned, limited: {steps} steps", flush=True)
    planned = run_alone("planned", *sizes, "--steps", steps, "--limit", limit)
    if planned["error"]:
        same = None
        print(f"   planned, limited: failed: {planned['error']}", flush=True)
    else:
        # A shorter run compares the steps it has.
        common = min(steps, UNLIMITED_STEPS)
        same = planned["losses"][:common] == free["losses"][:common]
        equal = "bit-equal to" if same else "NOT equal to"
        print(f"   planned: trains; its losses are {equal} those without a limit", flush=True)
    return {
        "free": free, "plain": plain, "planned": planned, "needs": needs, "limit": limit,
        "same": same,
    }  # fmt: skip


def run_alone(mode, *flags):
    """Run one training of the second part in a separate process; return its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, HERE / "_demo_memory.py", mode, out, *flags]
        # Return freed tensors to the kernel immediately: the limit counts what malloc keeps.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
        env["OMP_NUM_THREADS"] = "1"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
        if out.exists():
            return json.loads(out.read_text())
    if done.returncode < 0 or "bad_alloc" in done.stderr or "MemoryError" in done.stderr:
        # C++ ran out of memory where Python cannot catch it, or Python could not exit cleanly.
        error = "out of memory" if done.returncode > 0 else f"killed by signal {-done.returncode}"
        return {"error": error, "losses": [], "curve": [], "seconds": []}
    raise SystemExit(f"{done.stdout}{done.stderr}\n{mode} training exited with {done.returncode}")


def link_table(link, between):
    """Return the first result as text."""
    rows = [
        [name, result["total_s"], *(1e3 * result[f"{part}_s"] for part in STEP_PARTS),
         result["ratio"], result["accuracy"]]
        for name, result in link.items()
    ]  # fmt: skip
    head = ("over " + between, "seconds", "ms/step", "computing", "codec", "waiting", "ratio", "%")
    return text_table(head, rows, ("", ".1f", ".1f", ".1f", ".1f", ".1f", ".1f", ".2f"))


def memory_table(memory):
    """Return the second result as text."""
    rows = [
        ["no limit", show_bytes(memory["needs"]), loss_of(memory["free"]), ""],
        *(
            [f"{mode}, limited", show_bytes(memory["limit"]), loss_of(run), outcome(run)]
            for mode, run in (("plain", memory["plain"]), ("planned", memory["planned"]))
        ),
    ]
    lines = [f"{a:<18}{b:>12}{c:>10}  {d}" for a, b, c, d in [("", "memory", "loss", ""), *rows]]
    return "\n".join(line.rstrip() for line in lines)


def loss_of(result):
    """Return the last loss, or an empty string if there is none."""
    return f"{result['losses'][-1]:.3f}" if result["losses"] else ""


def outcome(result):
    """Describe how a run under the limit ended."""
    return result["error"] or f"{len(result['losses'])} steps"


def main():
    """Run both parts, print the tables, draw the picture."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--steps", type=int, default=150, help="steps of the first part")
    flags.add_argument("--mbit", type=float, default=100, help="rate of the link, in Mbit/s")
    flags.add_argument("--budget", type=float, default=0.4, help="plan's share of plain's memory")
    flags.add_argument("--batch", type=int, default=256, help="batch size of the second part")
    flags.add_argument("--depth", type=int, default=20, help="convolutions of the second part")
    flags.add_argument("--planned-steps", type=int, default=10, help="steps of the planned run")
    flags.add_argument("--part", choices=["link", "memory"], help="run only this part, no picture")
    flags.add_argument("--data", help="folder with Fashion-MNIST's four .gz files")
    flags.add_argument(
        "--out", type=Path, default=ROOT / "demo-results", help="folder for demo.png"
    )
    flags.add_argument("--quick", action="store_true", help="a few steps, to check that it runs")
    args = flags.parse_args()
    if args.quick:
        args.steps, args.planned_steps = 20, 2
    if args.data:
        os.environ["FASHION_MNIST_DIR"] = args.data
    try:
        data = fetch_fashion_mnist.find()
    except FileNotFoundError as error:
        raise SystemExit(f"{error}. {fetch_fashion_mnist.HELP}") from None
    if data is None:
        raise SystemExit(f"Fashion-MNIST was not found. {fetch_fashion_mnist.HELP}")
    args.out.mkdir(parents=True, exist_ok=True)  # fail before the work, not after it
    link = memory = None
    results = []
    if args.part != "memory":
        print("1. Two ranks behind a slow link", flush=True)
        link, between = train_behind_a_link(args)
        results.append(link_table(link, between))
    if args.part != "link":
        print("2. A network that does not fit", flush=True)
        memory = train_under_a_limit(args)
        results.append(memory_table(memory))
    if link and memory:
        _demo_picture.draw(link, between, memory, args.out / "demo.png")
        results.append(str(args.out / "demo.png"))
    print("\n" + "\n\n".join(results), flush=True)
    if memory and memory["planned"]["error"]:
        raise SystemExit("the planned training failed under the limit; please report it")
    if memory and not memory["same"]:
        raise SystemExit("planned losses differ from those without a limit; please report it")


if __name__ == "__main__":
    main()
