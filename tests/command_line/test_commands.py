"""The command line: one rule of exit codes, sentences for mistakes, the same answers as JSON."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import example_graphs
import pytest

import sn_compress
import sn_memory
from sn_cli import main as command_line
from sn_cli.main import main
from sn_cli.memory.graphs import EXAMPLES, read_graph
from sn_memory import Plan
from sn_memory.graph.liveness import peak
from sn_memory.plan.policies import policy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, and in it a plan of the example alexnet."""
    monkeypatch.chdir(tmp_path)
    policy("liveness")(read_graph("alexnet"), budget_bytes=None).to_json("plan.json")
    return tmp_path


def run(capsys, *words):
    """(exit code, standard output, standard error) of one command."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as end:  # of argparse
        code = end.code
    return code, *capsys.readouterr()


def model_of(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text(text)
    return f"{path}:made"


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


# Answers


def test_a_plan_is_found_written_and_checked(files, capsys):
    words = ["memory", "plan", "alexnet", "--budget", "0.9", "--deterministic", "--quiet"]
    words += ["--time-limit", "0.5"]
    code, out, err = run(capsys, *words, "-o", "out.json")
    assert (code, err) == (0, "")
    assert "gap" in out
    plan, graph = Plan.from_json("out.json"), read_graph("alexnet")
    assert plan.peak_bytes <= plan.budget_bytes == int(0.9 * peak(graph).bytes)
    code, out, _ = run(capsys, "memory", "check", "alexnet", "out.json")
    assert (code, out[:5]) == (0, "yes: ")
    found = json.loads(run(capsys, *words, "--json")[1])
    assert (found["answer"], found["peak_bytes"]) == ("yes", plan.peak_bytes)


def test_no_is_an_answer_and_no_mistake(files, capsys):
    over = ["memory", "plan", "alexnet", "--budget", "10B", "--planner", "liveness", "--quiet"]
    code, out, err = run(capsys, *over, "--json")
    found = json.loads(out)
    assert (code, found["answer"]) == (1, "no")
    assert found["peak_bytes"] > found["budget_bytes"] == 10
    assert found["why"] in err
    wrong = json.loads(Path("plan.json").read_text())
    wrong["actions"] = wrong["actions"][1:]
    Path("wrong.json").write_text(json.dumps(wrong))
    checked = ["memory", "check", "alexnet", "wrong.json"]
    code, out, _ = run(capsys, *checked)
    assert (code, out[:4]) == (1, "no: ")
    assert json.loads(run(capsys, *checked, "--json")[1])["answer"] == "no"
    reported = ["memory", "report", "alexnet", "wrong.json", "--against", "none"]
    assert run(capsys, *reported)[0] == 1
    Path("two.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\n")
    code, _, err = run(capsys, "memory", "pack", "two.csv", "--capacity", "7", "--quiet")
    assert code == 1
    assert "proved to be impossible" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "plan", "nobody", "--budget", "60%"], "examples alexnet"),
        (["memory", "plan", "alexnet", "--budget", "lots"], 'or a part as "60%"'),
        (["memory", "plan", "alexnet", "--budget", "60%", "--techniques", "hope"], "'hope'"),
        (["memory", "plan", "alexnet", "--budget", "60%", "--time-limit", "nan"], "above 0"),
        (["memory", "check", "alexnet", "none.json"], "none.json: No such file"),
        (["memory", "report", "alexnet", "plan.json", "--against", "nobody"], "'nobody'"),
        (["memory", "pack", "none.csv"], "none.csv: No such file"),
        (["memory", "estimate", "none.py"], "script.py:function"),
        (["memory", "estimate", "none.py:f"], "no file none.py"),
        (["memory", "estimate", "none.such:f"], "no file and no module none.such"),
        (["memory", "estimate", "none.json"], "cannot be read as JSON"),
        (["memory", "plan", "alexnet"], "neither --budget nor --device"),
        (["memory", "plan", "alexnet", "--device", "h10"], "Did you mean 'h100'?"),
        (["compress", "predict", "--ranks", "1000000000", "--gbit", "1"], "1,048,576 ranks"),
        (["compress", "predict", "--nodes", "2", "--gbit", "1", "--inside", "usb"], "nvlink, pcie"),
        (["compress", "predict", "--nodes", "2", "--gbit", "1", "--inside", "-1"], "above 0"),
        (["compress", "predict", "--ranks", "2", "--gbit", "1", "--gpus", "2"], "say --nodes"),
        (["compress", "gossip", "--ranks", "6", "--topology", "hypercube"], "power of two"),
    ],
)  # fmt: skip
def test_mistakes_end_with_two_and_one_sentence(files, capsys, words, said):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("sn: ")
    assert said in err
    assert not re.search(r"\w(Error|Exception)\b", err), "no class of Python in what people read"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["memory"],
        ["memory", "plan"],
        ["memory", "fly"],
        ["compress", "predict", "--model", "resnet50", "--ranks", "many", "--gbit", "1"],
        ["compress", "predict", "--gbit", "1"],
        ["compress", "predict", "--ranks", "8", "--nodes", "1", "--gbit", "1"],
    ],
)
def test_usage_is_two(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("usage: sn")


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [("--gbit", "0", "a number above 0"), ("--gbit", "nan", "a number above 0"),
     ("--latency-us", "nan", "a number, 0 or more"), ("--compute-ms", "-5", "a number, 0 or more"),
     ("--ranks", "0", "1, 2, 3 ..."), ("--nodes", "0", "1, 2, 3 ..."), ("--gpus", "0", "1, 2, 3"),
     ("--cores", "-1", "1, 2, 3 ...")],
)  # fmt: skip
def test_a_number_is_refused_by_the_name_of_its_flag(capsys, flag, value, expected):
    of = [] if flag in ("--ranks", "--nodes") else ["--nodes", "2"]
    code, out, err = run(capsys, "compress", "predict", *of, "--gbit", "1", f"{flag}={value}")
    assert (code, out) == (2, "")
    assert f"argument {flag}: got {value!r}, expected {expected}" in err


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere/p.json", "the folder nowhere does not exist"), (".", "is a folder"),
     ("p/", "is a folder")],
)  # fmt: skip
def test_where_results_go_is_looked_at_before_the_work(files, capsys, monkeypatch, path, said):
    def worked(*_, **__):
        raise AssertionError("the work was begun")

    monkeypatch.setattr("sn_cli.memory.plan.plan_graph", worked)
    code, _, err = run(capsys, "memory", "plan", "alexnet", "--budget", "1", "-o", path)
    assert code == 2
    assert said in err
    monkeypatch.setattr("sn_cli.compress.predict.measure_rates", worked)
    asked = ["compress", "predict", "--model", "alexnet", "--ranks", "8", "--gbit", "1", "--plot"]
    assert run(capsys, *asked, f"{path}/x.png" if path != "." else "x.txt")[0] == 2


def test_a_folder_that_cannot_be_written_is_said_before_the_work(files, capsys, monkeypatch):
    # The superuser may write everywhere, so the question is answered for him.
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, _, err = run(capsys, "memory", "plan", "alexnet", "--budget", "1", "-o", "p.json")
    assert code == 2
    assert "no permission" in err


def test_a_picture_without_matplotlib_is_refused_before_the_work(files, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flag in ("-o", "--png"):
        code, _, err = run(capsys, "memory", "report", "alexnet", "plan.json", flag, "x.png")
        assert code == 2
        assert "superneurons[report]" in err


def test_a_fault_of_ours_is_no_no(files, monkeypatch, capsys):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(command_line, "main", broken)
    with pytest.raises(SystemExit) as end:
        command_line.script()
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err  # with its traceback: this one is for us
    assert "please report" in err


# What there is


def test_versions_are_those_of_the_project(capsys):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert sn_compress.__version__ == sn_memory.__version__ == version
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out == f"sn_compress {version}, sn_memory {version}\n"


def test_shipped_graphs_are_named_and_as_the_script_makes_them(capsys):
    code, out, _ = run(capsys, "memory", "plan", "--help")
    assert code == 0
    shown = " ".join(out.split())
    assert all(name in shown for name in EXAMPLES)
    texts = example_graphs.texts()
    assert set(texts) == set(EXAMPLES)
    for name, text in texts.items():
        path = ROOT / "sn_cli" / "graphs" / f"{name}.json"
        assert path.read_text() == text, "run scripts/example_graphs.py"


def test_a_file_goes_before_an_example_of_its_name(files):
    Path("unet").write_text(Path(ROOT, "sn_cli/graphs/alexnet.json").read_text())
    assert read_graph("unet").name == read_graph("alexnet").name


def test_methods_names_codecs_and_back_ends(capsys):
    code, out, _ = run(capsys, "compress", "methods", "--json")
    found = json.loads(out)
    assert code == 0
    by_name = {row["name"]: row for row in found["codecs"]}
    assert "grace" in by_name["topk"]["presets"]
    assert "transform" in by_name["fft"]["settings"]
    assert "transform" not in by_name["dct"]["settings"]  # its name sets it
    assert set(found["backends"]) == {"cpu", "cuda"}
    _, out, _ = run(capsys, "compress", "methods")
    assert all(name in out for name in by_name)


def test_predict_as_text_and_as_json(capsys, tmp_path):
    words = ["compress", "predict", "--model", "alexnet", "--ranks", "8", "--gbit", "1"]
    words += ["--codec", "free"]
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert re.search(r"^plain +\d", out, re.MULTILINE)
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, *words, "--json", "--plot", tmp_path / "x.png")
    rows = {row["method"]: row for row in json.loads(out)["methods"]}
    assert rows["plain"]["speedup"] == 1
    assert rows["LowRankCompression"]["speedup"] > 10
    assert is_picture(tmp_path / "x.png")


def test_predict_of_nodes(capsys, tmp_path, monkeypatch):
    words = ["compress", "predict", "--model", "alexnet", "--nodes", "2", "--gpus", "4"]
    words += ["--gbit", "1", "--codec", "free"]
    code, out, _ = run(capsys, *words, "--inside", "nvlink")
    assert code == 0
    assert "2 nodes of 4 ranks, 3600 Gbit/s inside, all-reduces by trees" in out
    assert re.search(r"^LowRankCompression by nodes +\d", out, re.MULTILINE)
    grown = re.findall(r"^([\d,]+) +\d+\.\d +", out, re.MULTILINE)
    assert (grown[0], grown[-1]) == ("4", "16,384")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sn_cli.compress.predict.MOST_GPUS", 16)
    code, out, _ = run(capsys, *words, "--inside", "64", "--json", "--plot", tmp_path / "x.png")
    found = json.loads(out)
    assert found["link"]["inside"]["bytes_per_s"] == 8e9
    assert [row["gpus"] for row in found["gpus"]] == [4, 8, 16]
    for row in found["gpus"]:
        # As many bytes in fewer messages.
        assert row["tree"]["plain_s"] <= row["ring"]["plain_s"]
        assert row["ring"]["step_s"] <= row["ring"]["plain_s"]
    assert found["gpus"][1]["tree"]["fastest"] != "plain"
    assert is_picture(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("allocator", "device", "line"),
    [
        ("torch", [], "by torch's allocator (default settings)"),
        ("tensorflow", ["--device", "h100"], "by TensorFlow's allocator (one region)"),
        # On a host nothing is reserved.
        ("tensorflow", [], None),
        ("none", ["--device", "h100"], None),
    ],
)
def test_what_an_allocator_reserves(files, capsys, monkeypatch, allocator, device, line):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    # A device has other speeds; what the step takes without a plan is as the file states it.
    graph = replace(read_graph("alexnet"), allocator=allocator, unplanned_peak_bytes=1 << 40)
    graph.to_json("graph.json")
    # A device has a budget of its own.
    words = ["memory", "plan", "graph.json", *(device or ["--budget", "100%"])]
    code, out, _ = run(capsys, *words, "--time-limit", "1", "--quiet", "-o", "reserved.json")
    assert code == 0
    plan = Plan.from_json("reserved.json")
    assert not device or plan.budget_bytes > 70 * (1 << 30)
    assert plan.baseline_peak_bytes == 1 << 40
    assert (line in out) if line else ("reserved" not in out)
    assert (plan.reserved_peak_bytes or plan.peak_bytes) >= plan.peak_bytes
    assert line is None or plan.allocator in line


def test_a_report_as_json(files, capsys):
    words = ["memory", "report", "alexnet", "plan.json", "--against", "liveness", "--json"]
    code, out, err = run(capsys, *words)
    found = json.loads(out)
    assert code == 0
    assert "planners 0 of 1" in err
    for rows in (found["layers"], found["owners"]):
        assert found["after"]["peak_bytes"] == sum(row["bytes"] for row in rows)
    assert [row["planner"] for row in found["plans"]] == ["liveness", "liveness"]


# Models


def test_does_it_fit_and_the_graph_of_a_model(tmp_path, capsys):
    pytest.importorskip("torch")
    model = ROOT / "examples" / "torch_memory.py"
    code, out, _ = run(capsys, "memory", "estimate", f"{model}:step", "--budget", "1G")
    assert code == 0
    assert out.splitlines()[-1].startswith("yes: a step holds")
    code, out, _ = run(capsys, "memory", "estimate", f"{model}:step", "--budget", "1M", "--json")
    found = json.loads(out)
    assert code == 1
    assert not found["fits"]
    assert found["optimizer_bytes"] == 0  # of SGD without momentum
    assert found["batch"] == 64
    out_file = tmp_path / "graph.json"
    words = ["memory", "export", f"{model}:step", "--times", "computed", "-o", out_file, "--quiet"]
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert read_graph(str(out_file)).ops


WIDE = """
import copy, torch
def made(batch=2, sequence=64):
    with torch.device("meta"):
        layers = [torch.nn.Linear(1024, 1024), torch.nn.GELU()] * 6
        return torch.nn.Sequential(*map(copy.deepcopy, layers)), torch.empty(batch, sequence, 1024)
"""


@pytest.mark.slow
def test_the_largest_batch_on_a_device_that_is_not_here(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    words = (
        "memory estimate", "--device L4 --optimizer adamw --sequence 4096 --batch 1..4096",
        "--cards 1..2 --dtype bf16 --time-limit 0.3 --quiet",
    )  # fmt: skip
    first, *rest = (word for part in words for word in part.split())
    command = [first, rest[0], model_of(tmp_path, WIDE), *rest[1:]]
    code, out, err = run(capsys, *command, "--json", "--picture", tmp_path / "fit.png")
    assert code == 0, err
    (fit,) = json.loads(out)["fits"]
    ways = {it["name"]: it for it in fit["ways"]}
    plain = ways["plain"]
    assert fit["device"] == "l4"
    assert 0 < plain["batch"] < 4096
    assert plain["allocated_bytes"] <= plain["reserved_bytes"] <= fit["room_bytes"]
    assert sum(plain["bytes"].values()) == plain["allocated_bytes"]
    assert plain["tokens_per_s"] == pytest.approx(plain["batch"] * 4096 / plain["seconds"])
    planned = [ways[f"plan, +{it} % time"]["batch"] for it in (5, 10, 20)]
    assert plain["batch"] <= planned[0] <= planned[1] <= planned[2]
    assert planned[2] > plain["batch"]
    offloaded = ways["plan, +10 % time, offload"]
    assert offloaded["pinned_bytes"] >= 0
    assert ways["2 cards, FSDP2"]["bytes"]["parameters"] == plain["bytes"]["parameters"] // 2
    assert is_picture(tmp_path / "fit.png")


def test_the_state_of_the_optimizer_on_the_host_of_a_device(tmp_path, capsys):
    pytest.importorskip("torch")
    command = ["memory", "estimate", model_of(tmp_path, WIDE), "--device", "l4", "--quiet"]
    words = "--optimizer adamw --batch 4 --sequence 256 --time-limit 0.2 --state host --json"
    parameters = 6 * (1024 + 1) * 1024 * 4
    for speed, who in ((1000, "host"), (0.1, "device")):
        code, out, err = run(capsys, *command, *words.split(), "--host-speed", speed)
        assert code == 0, err
        ways = {it["name"]: it for it in json.loads(out)["fits"][0]["ways"]}
        plain, state = ways["plain"], ways["state on the host"]
        both = ways["parameters and state on the host"]
        assert state["pinned_bytes"] in (2 * parameters, 4 * parameters)
        # With an update by the host, a gradient is there as well.
        assert both["pinned_bytes"] == (4 if who == "host" else 3) * parameters
        assert state["allocated_bytes"] < plain["allocated_bytes"] - parameters
        assert both["allocated_bytes"] < state["allocated_bytes"]
        count = 12 if who == "host" else 0
        assert f"{count} of 12 parameters are updated by the host" in both["note"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--state", "host", "--device", "l4"], "without --optimizer"),
        (["--state", "host", "--optimizer", "adam"], "name of a device"),
        (["--host-speed", "0"], "expected a number above 0"),
    ],
)
def test_state_on_the_host_of_nothing(words, says, tmp_path, capsys):
    pytest.importorskip("torch")
    code, _, err = run(capsys, "memory", "estimate", model_of(tmp_path, WIDE), *words)
    assert code == 2
    assert says in err


def test_a_batch_that_does_not_fit_is_a_no(tmp_path, capsys):
    pytest.importorskip("torch")
    words = ["--device", "l4", "--quiet", "--batch", "1000000", "--time-limit", "0.1"]
    code, out, _ = run(capsys, "memory", "estimate", model_of(tmp_path, WIDE), *words)
    assert code == 1
    assert "none" in out


def test_a_batch_here_resizes_a_sample_that_takes_none(tmp_path, capsys):
    """Before, without --device, --batch and --sequence were ignored where no function took them."""
    pytest.importorskip("torch")
    text = "import torch\ndef made():\n    return torch.nn.Linear(8, 8), torch.ones(64, 8)\n"
    model = ["memory", "estimate", model_of(tmp_path, text), "--json", "--quiet"]
    for flags, batch in (([], 64), (["--batch", "4"], 4)):
        code, out, err = run(capsys, *model, *flags)
        assert code == 0, err
        found = json.loads(out)
        assert (found["batch"], found["inputs_bytes"]) == (batch, batch * 32)
    code, _, err = run(capsys, *model, "--sequence", "4")
    assert (code, "no parameter `sequence`" in err) == (2, True)


def test_a_module_and_a_configuration_name_a_model(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "models_of_mine.py").write_text(WIDE)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "memory", "estimate", "models_of_mine:made", "--quiet")
    assert (code, "activations" in out) == (0, True), err
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["memory", "estimate", "config.json", "--sequence", "128", "--batch", "2", "--json"]
    code, out, err = run(capsys, *words, "--quiet", "--optimizer", "adam")
    found = json.loads(out)
    assert (code, found["batch"]) == (0, 2), err
    assert found["inputs_bytes"] == 2 * 128 * 8
    code, _, err = run(capsys, "memory", "estimate", "config.json", "--sequence", "2048", "--quiet")
    assert code == 2
    assert "has 1024 positions; got a sequence of 2048" in err
    (tmp_path / "config.json").write_text('{"format": "x"}')
    assert "no model_type" in run(capsys, "memory", "estimate", "config.json")[2]


def test_a_keras_model_fits_or_not(tmp_path, capsys):
    pytest.importorskip("tensorflow")
    text = (
        "import keras, tensorflow as tf\n"
        "def made():\n"
        "    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])\n"
        "    return model, tf.TensorSpec((2, 8)), 'adam'\n"
    )
    model = ["memory", "estimate", model_of(tmp_path, text)]
    code, out, _ = run(capsys, *model, "--budget", "1k")
    assert code == 0, out
    assert run(capsys, *model, "--budget", "100")[0] == 1
    # What is this small is not among the ops of a graph.
    wide = text.replace("(8,)", "(512,)").replace("(4)", "(512, 'relu')").replace("2, 8", "64, 512")
    model = ["memory", "estimate", model_of(tmp_path, wide)]
    code, out, _ = run(capsys, *model, "--device", "h100", "--json")
    found = json.loads(out)
    assert (code, found["device"]) == (0, "h100")
    assert found["seconds"] > 0
    assert "not modelled" in found["notes"][0]
    code, out, _ = run(capsys, *model, "--device", "h100", "--json", "--optimizer", "sgd")
    assert json.loads(out)["optimizer_bytes"] < found["optimizer_bytes"]
    # These were ignored.
    for flag in ("--batch 4", "--cards 2", "--dtype bf16", "--amp", "--picture x.png"):
        code, _, err = run(capsys, *model, "--device", "h100", *flag.split())
        assert (code, flag.split()[0] in err) == (2, True), flag
    sized = text.replace("made()", "made(batch)").replace("(2, 8)", "(batch, 8)")
    model = ["memory", "estimate", model_of(tmp_path, sized), "--device", "h100"]
    code, _, err = run(capsys, *model, "--batch", "4..8")
    assert (code, "several sizes" in err) == (2, True)
    assert "The batch is 1; --batch asks for another." in run(capsys, *model)[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(): pass\n", "has no function made; it has other"),
        ("def made(): return 1\n", "returned a int, expected a tuple"),
        ("def made(): return 1, 2\n", "a int as model"),
        ("def made(): return 1, 2, 3, 4\n", "expected a tuple"),
        ("def made(): return {}['x']\n", "KeyError: 'x'\nsn: made of"),
        ("def made():\n", "gave no model"),
        # Not the yes that a script's own exit code would be.
        ("raise SystemExit\n", "gave no model"),
    ],
)
def test_a_script_that_gives_no_model_is_told_what_it_gave(tmp_path, capsys, text, said):
    code, _, err = run(capsys, "memory", "estimate", model_of(tmp_path, text))
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("words", "where", "code", "said"),
    [
        ("memory report alexnet plan.json --quiet", "| cat", 0, ""),
        ("compress methods", ">/dev/full", 2, "sn: standard output: No space left on device\n"),
        ("compress methods", ">&-", 0, ""),
        ("memory plan alexnet --budget 90% --deterministic", ">/dev/null 2>&-", 0, ""),
    ],
)
def test_what_cannot_be_written_to_is_no_fault_of_ours(files, words, where, code, said):
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m sn_cli {words} {where}",
        shell=True, executable="/bin/bash", stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr == said


def test_the_module_runs_and_says_how_far_it_is(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sn_cli", "memory", "plan", "alexnet", "--budget", "90%",
         "--deterministic", "--time-limit", "0.5"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )  # fmt: skip
    assert "peak" in done.stdout
    assert re.search(r"search [\d.]+ of 0.5 \(\d+%", done.stderr), done.stderr
