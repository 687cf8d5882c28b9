"""What the documents show is true: Python runs, shell commands and links name what exists.

The Python blocks of a page are one program. Where a page uses Horovod, that program runs on two
ranks, and may assume what every user of Horovod has: `hvd` (initialised), `torch`, `model`, `opt`;
unless it imports a Horovod of its own. Recipes that torchrun starts are run by it, on two ranks,
one after the other in the same processes: importing what they use takes longer than they do.
A block that cannot run has a line `<!-- not run: why -->` above it.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TORCHRUN = [
    ROOT / f"docs/recipes/{name}.md" for name in ("hugging_face", "accelerate", "lightning")
]
# Pages whose program takes more than five seconds, but for the first page and those of one seam.
SLOW = {
    f"docs/{name}.md"
    for name in (
        "tensorflow_memory", "torch_memory", "tensorflow", "activations", "apoptosis", "gossip",
        "recipes/keras", "recipes/tensorboard",
    )
}  # fmt: skip
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
SHELL = ("sh", "bash", "shell", "console")

HOROVOD_USER = """
import horovod.torch as hvd, torch
hvd.init()
torch.manual_seed(0)
model, sample = torch.nn.Linear(64, 64), torch.ones(2, 64)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
ONE_STEP = """
model(sample).sum().backward()
opt.step()
"""


def blocks(page, *languages):
    """Yield (first line's number, text) of each block of these languages that is to be run."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        above = text[: found.start()].rstrip().rpartition("\n")[2]
        if found[1] in languages and not above.startswith("<!-- not run: "):
            yield text.count("\n", 0, found.start(2)) + 1, found[2]


def program(page):
    """Return the page's Python, each line at the number it has in the page."""
    lines = []
    for start, text in blocks(page, "python", "py"):
        lines += [""] * (start - 1 - len(lines))
        lines += text.splitlines()
    return "\n".join(lines)


def having(*languages):
    """Pages with blocks of these languages, as parameters."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if page.exists() and any(blocks(page, *languages))
    ]


def programs():
    """Pages with a program of Python that torchrun does not start, as parameters."""
    pages = [it.values[0] for it in having("python", "py") if it.values[0] not in TORCHRUN]
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    assert set(names) >= SLOW
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for page, name in zip(pages, names, strict=True)
    ]


def test_every_recipe_for_torchrun_is_run_by_it():
    pages = {
        page for page in PAGES if "torchrun --nproc-per-node 2 train.py" in page.read_text("utf-8")
    }
    asked = {page for page in pages if page.parent.name == "recipes" and program(page)}
    assert asked == set(TORCHRUN)


@pytest.mark.slow
def test_recipes_run_on_two_ranks(tmp_path):
    pytest.importorskip("lightning")
    runs = [f"exec(compile({program(page)!r}, {str(page)!r}, 'exec'))\n" for page in TORCHRUN]
    script = tmp_path / "recipes.py"
    script.write_text("".join(runs) + "print('all ran', flush=True)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("all ran") == 2


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    target = tmp_path / "first_steps.ipynb"
    target.write_bytes((ROOT / "examples/first_steps.ipynb").read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", str(target)],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": PATHS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in nbformat.read(target, 4).cells if cell.cell_type == "code"]
    said = ["".join(str(out) for out in cell.outputs) for cell in cells]
    assert all(said)
    assert "bit-equal" in "".join(said)


@pytest.mark.parametrize("page", programs())
def test_python_runs(page, request, tmp_path):
    source = program(page)
    if re.search(r"\b(tensorflow|keras)\b", source):
        request.getfixturevalue("with_tensorflow")
    # Errors then name the page and its line.
    run = f"exec(compile({source!r}, {str(page)!r}, 'exec'))\n"
    script = tmp_path / "page.py"
    if re.search(r"\bhvd\b|\bhorovod\b", source):
        alone = "import horovod" in source
        step = "" if alone or "hvd.DistributedOptimizer" not in source else ONE_STEP
        # Ranks begin in the project's folder; what a page writes is not to lie there.
        begin = f"import os; os.chdir({str(tmp_path)!r})\n"
        script.write_text(begin + ("" if alone else HOROVOD_USER) + run + step)
        request.getfixturevalue("horovodrun")(2, script).check()
    else:
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{run}")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", having(*SHELL))
def test_shell_names_what_exists(page, check_command):
    for _, text in blocks(page, *SHELL):
        text = re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
        syntax = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert syntax.returncode == 0, f"{syntax.stderr} in\n{text}"
        for line in text.replace("\\\n", " ").splitlines():
            check_command(shlex.split(line, comments=True))


def test_links_lead_somewhere():
    lost = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            whole = re.match(r"[a-z]+:|#", target)
            if not whole and not (page.parent / target.partition("#")[0]).exists():
                lost.append(f"{page.relative_to(ROOT)}: {target} is not there")
    assert not lost
