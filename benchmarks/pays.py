"""Does compression pay? README's table, and predicted steps compared with measured ones.

    python -m benchmarks pays                  README's tables, by `sn_compress.predict`
    python -m benchmarks pays --write          the same, written into README
    python -m benchmarks pays --measure        steps over shaped links, and predicted ones; as
                                               root, needs iproute2; about six minutes

**The table** takes computing from publications (benchmarks/published.py), bytes from the shapes of
the parameters, and the codec from rates of one core, measured once and kept in
`sn_compress.prediction.predict`; so it is the same on every machine. With one GPU a rank a codec
on it lies between one core's and one that takes no time, and both are told. Among nodes of eight
GPUs the first number is with the codec as measured once on an H200, and all-reduces are by trees.

**Measured steps** are DDP's, two Gloo ranks, each in a namespace behind a link (shaped_links.py),
ways in turn step by step: of the transformer of benchmarks/language.py, trained for real, and of
ResNet-50's shapes with given gradients, where computing is the V100's, as a sleep. What predict is
told comes from the same two processes: seconds of a step without DDP, and rates of the codec.
"""

from __future__ import annotations

import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ddp_ranks import about, as_rank, run_ranks
from ddp_ways import wrapped
from hook_seconds import normal_gradients
from language import Language, batch, loss_of
from published import step_on
from resnet50_gradients import FixedGradients
from rows_file import flags, load, save
from shaped_links import NoLinksError, ShapedLinks
from tables import markdown, put_into
from timing import interleave
from torch import nn

from sn_compress.prediction.cost import INSIDE, Layer, Link, Route, Step, layers, step
from sn_compress.prediction.predict import Prediction, predict, routes_by_method
from sn_compress.prediction.rates import FREE, RECORDED, Rates, measure_rates
from sn_compress.settings import Settings
from sn_compress.text_table import text_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/pays.json"
RANKS = 8
NODES, GPUS = 16, 8  # of the last row
LINKS = {"0.1": 0.1, "1": 1, "10": 10, "25": 25, "100": 100, "NVLink": 2400}  # Gbit/s each way
A100_GPT2_S = 0.135  # a micro-batch by torch.compile: README of nanoGPT, December 2022
OURS = ("LowRankCompression", "FFTCompression")
WAYS = {
    "plain": "plain", "fp16": "fp16", "low rank 100": "LowRankCompression",
    "gather": "FFTCompression",
}  # fmt: skip
DENSE, SETTLE = 1, 4


def cases() -> dict[str, tuple[str, float]]:
    """What is computed, in words: a model of `prediction.layers`, and seconds of a step."""
    alexnet, resnet = (step_on("v100", model) for model in ("alexnet", "resnet50"))
    assert alexnet is not None
    assert resnet is not None
    return {
        "AlexNet, 512 images on a V100": ("alexnet", alexnet.seconds),
        "ResNet-50, 128 images on a V100": ("resnet50", resnet.seconds),
        "GPT-2 small, 0.135 s on an A100": ("gpt2-small", A100_GPT2_S),
    }


def prediction(model: str, gbit: float, compute_s: float, rates: Rates) -> Prediction:
    """What predict says, with the exchange beside the backward pass."""
    return predict(
        layers(model), ranks=RANKS, link=Link.of_gbit(gbit), rates=rates,
        compute_s=round(1e3 * compute_s) / 1e3, overlap=True,
    )  # fmt: skip


def best(model: str, gbit: float, compute_s: float, rates: Rates) -> float:
    """Times plain of the faster of ours."""
    predicted = prediction(model, gbit, compute_s, rates)
    return max(predicted.row(method).speedup for method in OURS)


def of_nodes(gbit: float) -> Link:
    """Between nodes of GPUs."""
    return Link.of_gbit(gbit, gpus=GPUS, inside=INSIDE["nvlink"], tree=True)


@cache
def _node_routes(rates: Rates) -> dict[str, list[Route]]:
    model = layers("gpt2-small")
    return routes_by_method(model, ranks=NODES * GPUS, gpus=GPUS, settings=Settings(), rates=rates)


def best_of_nodes(gbit: float, rates: Rates) -> float:
    """Times plain of the fastest of ours, flat or by nodes: GPT-2 small on nodes of GPUs."""
    seconds = {
        way: step(
            routes, ranks=NODES * GPUS, link=of_nodes(gbit), compute_s=A100_GPT2_S, overlap=True
        ).seconds
        for way, routes in _node_routes(rates).items()
    }
    ours = (seconds[way] for name in OURS for way in (name, f"{name} by nodes"))
    return seconds["plain"] / min(ours)


def cell(slow: float, fast: float) -> str:
    """Times plain, from a core's codec to a free one; what gains less than 5 % is a no."""
    if fast < 1.05:
        return "no"
    low = "no" if slow < 1.05 else f"{slow:.1f}"
    return f"{low} to {fast:.1f}" if low != f"{fast:.1f}" else low


def tables() -> str:
    """README's tables, in Markdown."""
    core = RECORDED["core"]
    names = [f"{name} Gbit/s" if name != "NVLink" else name for name in LINKS]
    lines = [
        [name, *(cell(best(*of, core), best(*of, FREE)) for of in asked)]
        for name, (model, seconds) in cases().items()
        for asked in [[(model, gbit, seconds) for gbit in LINKS.values()]]
    ]
    gpu = RECORDED["h200"]
    of_gpus = (cell(best_of_nodes(gbit, gpu), best_of_nodes(gbit, FREE)) for gbit in LINKS.values())
    lines.append([f"GPT-2 small, {NODES} nodes of {GPUS} A100s", *of_gpus])
    times_plain = markdown([f"{RANKS} ranks", *names], lines)
    lines = []
    for name, (model, seconds) in cases().items():
        predicted = prediction(model, 1, seconds, core)
        limits = [predicted.row(method) for method in OURS]
        cells = [
            f"{limit.break_even_gbit:.1f} Gbit/s; against fp16 {limit.break_even_fp16_gbit:.1f}"
            for limit in limits
        ]
        lines.append([name.partition(",")[0], *cells])
    predicted = predict(
        layers("gpt2-small"), ranks=NODES * GPUS, link=of_nodes(1), rates=gpu,
        compute_s=A100_GPT2_S, overlap=True,
    )  # fmt: skip
    limits = [predicted.row(f"{name} by nodes") for name in OURS]
    cells = [
        f"{limit.break_even_gbit:.0f} Gbit/s; against fp16 {limit.break_even_fp16_gbit:.0f}"
        for limit in limits
    ]
    lines.append([f"GPT-2, {NODES} nodes of {GPUS}, codec on an H200", *cells])
    head = ["break-even link, codec on a core", *(f"`{name}`" for name in OURS)]
    return f"{times_plain}\n\n{markdown(head, lines)}"


class Way:
    """One way's training in a rank; "alone" has no DDP."""

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.job = job
        own = job["model"] == "transformer"
        self.net: nn.Module = Language() if own else FixedGradients(normal_gradients(job["model"]))
        self.ddp = self.net if name == "alone" else wrapped(name, self.net, dense=DENSE)[0]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    def step(self) -> float:
        """Seconds of a step that all ranks begin together."""
        torch.distributed.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        if self.job["sleep_s"]:
            time.sleep(self.job["sleep_s"])
            loss = self.ddp()
        else:
            loss = loss_of(self.ddp, *batch(2, 16, self.generator))
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: rates of the codec, then all ways in turns."""
    rates = measure_rates(Settings(), clock=time.process_time)
    steps = {name: Way(name, job).step for name in ["alone", *WAYS]}
    taken = interleave(steps, job["steps"], settle=SETTLE, rotate=True)
    return {"rates": vars(rates), "taken": taken}


def rows_of(job: dict[str, Any], by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way: measured seconds of the slower rank, and predict's."""
    step_s = {
        name: statistics.median(map(max, *(rank["taken"][name] for rank in by_rank)))
        for name in ["alone", *WAYS]
    }
    rates = {
        name: statistics.fmean(r["rates"][name] for r in by_rank) for name in by_rank[0]["rates"]
    }
    return [
        {"model": job["model"], "gbit": job["gbit"], "way": way, "ranks": len(by_rank)}
        | {"step_s": step_s[way], "compute_s": step_s["alone"], "steps": job["steps"]}
        | {"rates": rates}
        | about(__file__)
        for way in WAYS
    ]


def shapes_of(model: str) -> list[Layer]:
    """The parameters of a measured model."""
    if model != "transformer":
        return layers(model)
    with torch.device("meta"):
        return [Layer(name, tuple(p.shape)) for name, p in Language().named_parameters()]


def predicted_step(row: dict[str, Any]) -> Step:
    """What predict says of a measured row, told what was measured beside it."""
    predicted = predict(
        shapes_of(row["model"]), ranks=row["ranks"], link=Link.of_gbit(row["gbit"]),
        rates=Rates(**row["rates"]), compute_s=row["compute_s"],
    )  # fmt: skip
    return predicted.row(WAYS[row["way"]]).step


def measured(rows: list[dict[str, Any]]) -> str:
    """Rows as people read them."""
    cells = []
    for row in rows:
        of = predicted_step(row)
        times = [row["step_s"], of.seconds, of.seconds / row["step_s"]]
        times += [row["compute_s"], of.codec_s, of.exchange_s]
        cells.append([row["model"], row["gbit"], row["way"], *times])
    head = (
        "model",
        "Gbit/s",
        "way",
        "s a step",
        "predicted",
        "ratio",
        "computing",
        "codec",
        "exchange",
    )
    return text_table(head, cells, ("", "", "", ".3f", ".3f", ".2f", ".3f", ".3f", ".3f"))


def main() -> None:
    """Print, write or measure."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--write", action="store_true", help="write the tables into README")
    parser.add_argument("--measure", action="store_true", help="measure steps over shaped links")
    parser.add_argument("--models", nargs="+", default=["transformer", "resnet50"])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    if not args.measure:
        if args.write:
            put_into(ROOT / "README.md", "pays", tables())
        print(f"{tables()}\n")
        print(measured(load(args.json)))
        return
    rows = load(args.json)
    for model in args.models:
        resnet = step_on("v100", model)
        for gbit in args.gbit:
            job = {"model": model, "gbit": gbit, "steps": args.steps}
            job |= {"sleep_s": resnet.seconds if resnet else 0.0}
            print(f"{model}, {gbit:g} Gbit/s", flush=True)
            try:
                with ShapedLinks(2, gbit) as links:
                    by_rank = run_ranks(__file__, job, ranks=2, timeout_s=1800, links=links)
            except NoLinksError as why:
                raise SystemExit(str(why)) from None
            rows = [row for row in rows if (row["model"], row["gbit"]) != (model, gbit)]
            rows += rows_of(job, by_rank)
            save(args.json, rows)
    print(measured(rows))


if __name__ == "__main__" and not as_rank(work):
    main()
