"""The examples: short enough to read, they run on real ranks, and the demo ends as promised."""

import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCH = EXAMPLES / "torch_fashion_mnist.py"
KERAS = EXAMPLES / "keras_fashion_mnist.py"
LOOP = EXAMPLES / "tensorflow_fashion_mnist.py"
OURS = re.compile("FFTCompression|LowRankCompression|AutoCompression|sn_memory|together[.]")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder like Fashion-MNIST's, of 2,560 images that are easy to tell apart."""
    folder = tmp_path_factory.mktemp("fashion-mnist")
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (10, 28, 28))
    for part, n in (("train", 2560), ("t10k", 500)):
        labels = random.integers(0, 10, n).astype(np.uint8)
        images = (patterns[labels] + random.integers(0, 56, (n, 28, 28))).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            packed = gzip.compress(header + array.tobytes(), compresslevel=1)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(packed)
    return folder


@pytest.fixture
def modules(monkeypatch):
    """Import from examples/ and benchmarks/, which are no packages."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def run_alone(*command, **settings):
    words = [sys.executable, *map(str, command)]
    usual = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 250}
    return subprocess.run(words, **(usual | settings))


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", [TORCH, KERAS, LOOP], ids=["torch", "keras", "tensorflow"])
def test_example_is_short_and_marks_our_lines(example):
    lines = example.read_text().splitlines()
    assert len(lines) < 110
    ours = [line for line in lines if OURS.search(line)]
    assert len(ours) >= 3
    assert all(line.endswith("# <- sn") for line in ours)


@pytest.mark.usefixtures("with_tensorflow")
@pytest.mark.horovod
@pytest.mark.parametrize(
    ("example", "flags"),
    [(KERAS, []), pytest.param(LOOP, ["--budget", "95%"], marks=pytest.mark.slow)],
    ids=["keras", "a loop of its own, within a budget"],
)
def test_tensorflow_learns_on_two_ranks(horovodrun, data, tmp_path, example, flags):
    history = tmp_path / "history.json"
    flags = ["--compression", "fft", "--epochs", 2, "--data", data, "--history", history, *flags]
    horovodrun(2, example, *flags, timeout=200).check()
    seen = json.loads(history.read_text())
    assert seen["loss"][-1] < seen["loss"][0] / 2, seen["loss"]
    assert seen["test"] > 0.9  # the made-up images are easy to tell apart
    assert seen.get("steps", 2 * 20) == 2 * 20
    assert seen["ratio"] > 20


@pytest.mark.slow
@pytest.mark.horovod
@pytest.mark.parametrize("method", ["fft", "lowrank"])
def test_loss_falls_on_two_ranks(horovodrun, data, tmp_path, method):
    history = tmp_path / "history.json"
    flags = ["--compression", method, "--epochs", 2, "--data", data, "--history", history]
    run = horovodrun(2, TORCH, *flags).check()
    seen = json.loads(history.read_text())
    assert seen["ranks"] == 2
    assert len(seen["loss"]) == 2 * (2560 // 128)
    # Ten classes guessed at random have a loss of ln 10 = 2.3 and an accuracy of 10 %.
    assert np.mean(seen["loss"][:3]) > 2
    # Error feedback makes fft arrive later: 40 steps are few.
    assert np.mean(seen["loss"][-5:]) < {"fft": 1.8, "lowrank": 1.3}[method]
    assert seen["accuracy"][-1] > 50
    assert seen["seconds"] > 0
    # Ten of lowrank's 40 steps are dense.
    least, most = {"lowrank": (3.8, 4), "fft": (40, 50)}[method]
    assert least <= seen["dense_bytes"] / seen["payload_bytes"] <= most
    assert run.stdout.count("test accuracy") == 2, "only rank 0 speaks"


@pytest.mark.horovod
@pytest.mark.parametrize(("method", "ratio"), [("fp16", 2), ("lowrank", 1)])
def test_runs_alone(horovodrun, data, tmp_path, method, ratio):
    """Horovod's own way, and ours, which has nothing to compress there."""
    history = tmp_path / "history.json"
    flags = ["--limit", 640, "--epochs", 1, "--data", data, "--history", history]
    done = run_alone(TORCH, "--compression", method, *flags)
    assert done.returncode == 0, done.stderr
    seen = json.loads(history.read_text())
    assert seen["ranks"] == 1
    assert seen["dense_bytes"] == ratio * seen["payload_bytes"]
    assert np.mean(seen["loss"][-3:]) < np.mean(seen["loss"][:3])


@pytest.mark.parametrize(
    ("command", "where"),
    [
        pytest.param([TORCH], "--data", marks=pytest.mark.horovod, id="example"),
        pytest.param([EXAMPLES / "demo.py", "--quick"], "FASHION_MNIST_DIR", id="demo"),
    ],
)
def test_missing_data_says_what_to_do(request, tmp_path, command, where):
    if "demo" not in request.node.callspec.id:
        request.getfixturevalue("horovodrun")
    done = run_alone(*command, "--data", tmp_path)
    assert done.returncode == 1
    assert "train-images-idx3-ubyte.gz" in done.stderr
    assert where in done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_demo_ends_with_tables_and_picture(data, tmp_path):
    pytest.importorskip("matplotlib")
    done = run_alone(EXAMPLES / "demo.py", "--quick", "--data", data, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # Either there is a link, or it says why there is none.
    shaped = "over a link of 100 Mbit/s" in done.stdout
    assert shaped or "No link can be shaped here: " in done.stdout
    numbers = r"(?: +\d+\.\d){5} +"
    assert re.search(rf"^plain{numbers}1\.0 +\d+\.\d\d$", done.stdout, re.MULTILINE)
    for method in ("FFTCompression", "LowRankCompression"):
        row = re.search(rf"^{method}{numbers}(\d+\.\d) +\d+\.\d\d$", done.stdout, re.MULTILINE)
        assert float(row[1]) > 40
    check_memory_table(done.stdout)
    assert is_picture(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def check_memory_table(printed):
    """Plain fails under the limit, which the kernel enforces for every user; planned trains."""
    assert re.search(r"^plain, limited +\S+ \S+ .*(memory|killed)", printed, re.MULTILINE)
    assert re.search(r"^planned, limited +\S+ \S+ +\d\.\d{3}  2 steps$", printed, re.MULTILINE)
    assert "its losses are bit-equal to those without a limit" in printed


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "ALL"])
def test_memory_demo_runs_in_a_tree_without_bytecode(data, tmp_path, isa):
    """Compiling modules leaves a heap with holes, as in the first run of a fresh clone."""
    tree = tmp_path / "clone"
    for folder in ("sn_compress", "sn_memory", "examples", "benchmarks", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "results", "out")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    flags = ["--part", "memory", "--quick", "--data", data, "--out", tmp_path]
    done = run_alone(tree / "examples" / "demo.py", *flags, cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tree.rglob("*.pyc")), "the modules of the copy were compiled"
    check_memory_table(done.stdout)


def test_demo_draws_its_picture_when_the_planned_run_fails(modules, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import demo
    import fetch_fashion_mnist

    run = {"step_s": 1.0, "computing_s": 0.5, "codec_s": 0.1, "exchange_s": 0.4, "total_s": 2.0,
           "curve": [(0.0, 10.0), (2.0, 80.0)], "accuracy": 80.0, "ratio": 50.0}  # fmt: skip
    link = dict.fromkeys(demo.METHODS, run)
    free = {"base": 2**20, "step_bytes": 2**29, "reserve": 2**26, "losses": [2.0, 1.5, 1.0],
            "seconds": [1.0] * 3, "curve": [(0.0, 2**20), (1.0, 2**29)], "error": None}  # fmt: skip
    failed = free | {"losses": [], "curve": [], "error": "can't allocate memory"}
    runs = iter([free, failed, failed])
    monkeypatch.setattr(demo, "train_behind_a_link", lambda args: (link, "a link"))
    monkeypatch.setattr(demo, "run_alone", lambda *flags: next(runs))
    monkeypatch.setattr(fetch_fashion_mnist, "find", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="planned training failed"):
        demo.main()
    assert "planned, limited" in capsys.readouterr().out
    assert is_picture(tmp_path / "demo.png")


def test_missing_horovodrun_says_what_to_do(modules, monkeypatch, tmp_path):
    import _launch

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="make setup"):
        _launch.find_horovodrun()


def test_study_does_only_what_is_missing(modules, monkeypatch, tmp_path, capsys):
    import _launch
    import accuracy

    calls = []

    def train(*flags, title):
        calls.append(flags)
        size = 400 if flags[1] == "none" else 10
        epochs = flags[flags.index("--epochs") + 1]
        history = {"ranks": 2, "seconds": 1.0, "loss": [2.0, 1.0] * epochs}
        return history | {"accuracy": [90.0] * epochs, "dense_bytes": 400, "payload_bytes": size}

    monkeypatch.setattr(_launch, "train", train)
    path = tmp_path / "rows.json"
    command = ["accuracy.py", "--json", str(path), "--epochs", "2", "--seeds"]
    for seeds in (["0"], ["0", "1"]):  # of the second time, seed 0 is there already
        monkeypatch.setattr(sys, "argv", [*command, *seeds])
        accuracy.main()
        assert len(calls) == 4 * len(seeds)
    rows = json.loads(path.read_text())
    assert len(rows) == 8
    assert not any(isinstance(value, list | dict) for row in rows for value in row.values())
    assert len(json.loads(path.with_suffix(".curves.json").read_text())) == 16
    shown = capsys.readouterr().out
    assert "| theta 0.9 | 90.00 ± 0.00 | +0.00 ± 0.00 | 1.500 | 10 | 40.0 |" in shown


def test_study_fills_a_page_and_draws(modules, tmp_path):
    import _accuracy_report as report
    from tables import put_into

    page, text = tmp_path / "page.md", "before\n<!-- accuracy:start -->\n{}\n<!-- accuracy:end -->"
    page.write_text(text.format("old") + "\nafter\n")
    put_into(page, "accuracy", "new")
    assert page.read_text() == text.format("new") + "\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="accuracy:start"):
        put_into(page, "accuracy", "new")

    pytest.importorskip("matplotlib")
    rows, curves = [], []
    for method, theta, block in report.METHODS.values():
        key = {"method": method, "theta": theta, "block": block, "seed": 0}
        rows.append(key | {"payload_bytes": 400 if theta is None else 10})
        curves += [key | {"epoch": epoch, "accuracy": 80.0 + epoch} for epoch in (1, 2, 3)]
    report.picture(rows, curves, tmp_path / "picture.png")
    assert is_picture(tmp_path / "picture.png")


def number(pattern, printed):
    found = re.search(pattern, printed)
    assert found, printed
    return float(found[1].replace(",", ""))


@pytest.mark.horovod
@pytest.mark.slow
def test_gossip_learns_on_two_ranks(horovodrun, data):
    example = EXAMPLES / "torch_gossip.py"
    run = horovodrun(2, example, "--codec", "--epochs", 2, "--data", data).check()
    assert number(r"epoch 2: test accuracy ([\d.]+) %", run.stdout) > 90
    assert number(r"([\d.]+) times fewer", run.stdout) > 20


@pytest.mark.usefixtures("with_tensorflow")
@pytest.mark.horovod
@pytest.mark.slow
def test_keras_gossip_learns_on_two_ranks(horovodrun, data):
    example = EXAMPLES / "keras_gossip.py"
    run = horovodrun(2, example, "--epochs", 4, "--data", data, timeout=200).check()
    assert number(r"epoch 4: test accuracy ([\d.]+) %", run.stdout) > 90
    assert number(r"([\d.]+) times fewer", run.stdout) == 1
    assert number(r"last consensus ([\d.]+)", run.stdout) < 0.5


@pytest.mark.slow
def test_apoptosis_shrinks_and_still_learns(data):
    flags = ["--width", 128, "--every", 20, "--epochs", 2, "--tolerance", 0.05, "--data", data]
    done = run_alone(EXAMPLES / "torch_apoptosis.py", *flags, "--steady")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 20: 1\.weight 128 -> \d+ neurons", done.stdout), done.stdout
    accuracy = number(r"with apoptosis: ([\d.]+) %", done.stdout)
    assert accuracy > 90  # the made-up images are easy to tell apart
    parameters = number(r"with apoptosis: [\d.]+ %, ([\d,]+) parameters", done.stdout)
    assert parameters < 0.7 * (785 * 128 + 129 * 128 + 129 * 10)
    assert number(r"exported and rebuilt: ([\d.]+) %", done.stdout) == accuracy


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "layer"),
    [("torch_together.py", r"7\.weight"), ("keras_together.py", "hidden/kernel")],
    ids=["torch", "keras"],
)
def test_compression_plan_and_apoptosis_in_one_script(request, horovodrun, data, script, layer):
    if "keras" in script:
        request.getfixturevalue("with_tensorflow")
    flags = ["--width", 64, "--every", 5, "--epochs", 1, "--tolerance", 0.1, "--data", data]
    run = horovodrun(2, EXAMPLES / script, *flags, "--steady", timeout=280).check()
    assert re.search(rf"step 5: .*{layer} 64 -> \d+.*MB a step", run.stdout), run.stdout
    # The made-up images are easy to tell apart.
    assert number(r"epoch 1: ([\d.]+) %", run.stdout) > 60
    parameters = number(r"epoch 1: [\d.]+ %, ([\d,]+) parameters", run.stdout)
    assert parameters < 160 + 4640 + 1569 * 64 + 65 * 10
