"""What the documents show is true: Python runs, shell commands and links name what exists.

The Python blocks of a page are one program. Where a page uses Horovod, that program runs on two
ranks, and may assume what every user of Horovod has: `hvd` (initialised), `torch`, `model`, `opt`;
unless it imports a Horovod of its own.
A block that cannot run has a line `<!-- not run: why -->` above it.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

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


@pytest.mark.parametrize("page", having("python", "py"))
def test_python_runs(page, request, tmp_path):
    source = program(page)
    # Errors then name the page and its line.
    run = f"exec(compile({source!r}, {str(page)!r}, 'exec'))\n"
    script = tmp_path / "page.py"
    if re.search(r"\bhvd\b|\bhorovod\b", source):
        alone = "import horovod" in source
        step = "" if alone or "hvd.DistributedOptimizer" not in source else ONE_STEP
        script.write_text(("" if alone else HOROVOD_USER) + run + step)
        request.getfixturevalue("horovodrun")(2, script).check()
    else:
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{run}")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", having("sh", "bash", "shell", "console"))
def test_shell_names_what_exists(page, check_command):
    for _, text in blocks(page, "sh", "bash", "shell", "console"):
        text = re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
        syntax = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert syntax.returncode == 0, f"{syntax.stderr} in\n{text}"
        for line in text.replace("\\\n", " ").splitlines():
            check_command(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{target} is not there"
