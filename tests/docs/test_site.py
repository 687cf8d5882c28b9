"""The site: built strictly, whole without a network, every link and anchor there."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("material")
docs_site = pytest.importorskip("docs_site")
import docs_docstrings  # noqa: E402 - a neighbour of docs_site

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")


class Page(HTMLParser):
    """Of a page its anchors, its links, and what a browser loads to show it."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_pages_are_whole_without_a_network(site):
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 80
    lost = []
    for path, page in pages.items():
        foreign = [it for it in page.loads if re.match(r"(https?:)?//", it)]
        assert not foreign, f"{path.name} loads {foreign}"
        for target in {*page.links, *page.loads}:
            if re.match(r"[a-z]+:", target) or path.name == "404.html":
                continue
            name, _, anchor = unquote(target).partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists():
                lost.append(f"{path.relative_to(site)}: {target} is not there")
            elif anchor and there in pages and anchor not in pages[there].ids:
                lost.append(f"{path.relative_to(site)}: {target} has no such anchor")
    assert not lost, "\n".join(lost)


@pytest.mark.slow
def test_the_start_is_readme_and_the_reference_is_there(site):
    start = (site / "index.html").read_text("utf-8")
    for title in re.findall(r"^## (.*)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE):
        assert title in start
    api = "".join(path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    for name in ("CompressionState", "LightningCompression", "plan_graph", "StorageTracker"):
        assert f'.{name}"' in api, name
    assert "::: " not in api
    assert (site / "search" / "search_index.js").stat().st_size > 100_000


def test_links_go_where_things_are_in_the_site():
    moved = docs_site.moved
    text = "[a](docs/ddp.md#how) ![b](docs/step.png) [c](LICENSE) [d](https://x.y) `[e](docs/f.md)`"
    assert moved(text, "README.md", "index.md") == (
        "[a](ddp.md#how) ![b](step.png) [c](source/LICENSE) [d](https://x.y) `[e](docs/f.md)`"
    )
    assert moved("[a](../../CHANGELOG.md)", "docs/recipes/x.md", "recipes/x.md") == (
        "[a](../changelog.md)"
    )


def test_a_flowchart_has_all_its_boxes_and_arrows():
    drawn = docs_site.flowchart('n0["a"]\nn1["b<c"]\nn2["d"]\nn0 --> n1\nn0 --> n2\nn1 --> n2\n')
    assert drawn.count("<rect") == 3
    assert drawn.count('<path d="M') == 3 + 1  # and the tip
    assert "b&lt;c" in drawn


def test_docstrings_become_lists():
    text = (
        "Do.\n\nParameters\n----------\nx, y : numbers,\n    two\n\nRaises CompressError if none."
    )
    assert docs_docstrings.markdown(text) == (
        "Do.\n\n**Parameters**\n\n- `x`, `y`: numbers, two\n\nRaises CompressError if none."
    )


@pytest.mark.skipif(not HADOLINT.exists(), reason="no hadolint: pip install -e .[dev]")
def test_the_dockerfile_is_clean():
    done = subprocess.run(
        [str(HADOLINT), str(ROOT / "examples/Dockerfile")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.slow
def test_search_works_from_the_file_system(site):
    """Chromium prints the page after its scripts ran; `?q=` makes Material search at once."""
    done = subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--virtual-time-budget=20000", f"file://{site}/index.html?q=gossip"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert 'class="md-search-result__item"' in done.stdout
