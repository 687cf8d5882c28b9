"""MkDocs hook of the site, named in mkdocs.yml.

    make docs

Pages stay plain Markdown, whose relative links also work on a code host. So this hook inserts
README into the start page at its marker, makes pages of CONTRIBUTING and CHANGELOG, copies files
outside of docs/ to which pages link to source/, lists the decisions, and draws Mermaid flowcharts,
which would otherwise need an external script.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
README = "<!-- README -->"
# Pages of the site that are files outside docs/, by their path in the repository.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*\]\()([^)\s]+)(\))")
_FLOWCHART = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```", re.MULTILINE | re.DOTALL)
Spans = list[tuple[int, int]]


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in docs/, the list of decisions, and linked files."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    listed = "\n".join(_decisions())
    text = (
        f"# Decisions\n\nHalf a page each: what was decided, why, and what was tried.\n\n{listed}\n"
    )
    files.append(File.generated(config, "decisions/index.md", content=text))
    for path in sorted(_linked_sources()):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links for the site, and replace flowcharts by pictures."""
    uri = page.file.src_uri
    source = {uri: path for path, uri in PAGES.items()}.get(uri, f"docs/{uri}")
    text = moved(markdown, source, uri)
    if README in text:
        text = text.replace(
            README, moved((ROOT / "README.md").read_text("utf-8"), "README.md", uri)
        )
    return _FLOWCHART.sub(lambda match: flowchart(match[1]), text)


def moved(text: str, source: str, uri: str) -> str:
    """Return the text of a file with its relative links changed to those of the site.

    source : the file's path in the repository
    uri : the page's, in the site
    """
    code = [match.span() for match in _CODE.finditer(text)]

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        label = _LINK.sub(link, match[1][:-2]) + "](" if "](" in match[1][:-2] else match[1]
        if not target or re.match(r"[a-z]+:", target) or _inside(match.start(2), code):
            return label + match[2] + match[3]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = _site_uri(path)
        return f"{label}{posixpath.relpath(to, posixpath.dirname(uri) or '.')}{mark}{anchor})"

    return _LINK.sub(link, text)


def _site_uri(path: str) -> str:
    """Return the site's URI of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def _inside(place: int, spans: Spans) -> bool:
    return any(start <= place < end for start, end in spans)


def _decisions() -> Iterator[str]:
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({path.name})"


def _linked_sources() -> set[str]:
    """Yield the files outside docs/ to which a page links."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / path for path in ("README.md", *PAGES))]
    linked = set()
    for page in pages:
        text = _CODE.sub("", page.read_text("utf-8"))
        for target in (match[2].partition("#")[0] for match in _LINK.finditer(text)):
            if target and not re.match(r"[a-z]+:", target):
                path = (page.parent / target).resolve().relative_to(ROOT).as_posix()
                if _site_uri(path) == f"source/{path}" and (ROOT / path).is_file():
                    linked.add(path)
    return linked


def flowchart(text: str) -> str:
    """Return an acyclic flowchart as SVG in the colours of the page.

    text : lines `n0["label"]` and `n0 --> n1`, as scripts/architecture.py writes them
    """
    labels = dict(re.findall(r'(\w+)\["([^"]*)"\]', text))
    arrows = re.findall(r"(\w+) --> (\w+)", text)
    level = dict.fromkeys(labels, 0)
    for _ in labels:  # as many rounds as the longest way may have arrows
        for one, other in arrows:
            level[other] = max(level[other], level[one] + 1)
    rows = [[n for n in labels if level[n] == at] for at in range(max(level.values()) + 1)]
    wide, high, gap = 205, 28, 56
    width = max(map(len, rows)) * (wide + 20)
    at = {}
    for number, row in enumerate(rows):
        space = width / len(row)
        for place, name in enumerate(row):
            at[name] = ((place + 0.5) * space, number * (high + gap) + 1)
    parts = []
    for one, other in arrows:
        (x, y), (u, v) = at[one], at[other]
        parts.append(f'<path d="M{x:.0f} {y + high:.0f} L{u:.0f} {v - 3:.0f}"/>')
    for name, (x, y) in at.items():
        parts.append(f'<rect x="{x - wide / 2:.0f}" y="{y:.0f}" width="{wide}" height="{high}"/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}">{escape(labels[name])}</text>')
    alt_text = f"Flowchart of {len(labels)} files: who asks whom"
    return (
        f'<div class="flowchart"><svg viewBox="0 0 {width} {len(rows) * (high + gap) - gap + 4}" '
        f'role="img" aria-label="{alt_text}"><defs><marker id="tip" viewBox="0 0 6 6" refX="5" '
        'refY="3" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L6 3 L0 6 z"/>'
        "</marker></defs>"
        f"{''.join(parts)}</svg></div>"
    )
