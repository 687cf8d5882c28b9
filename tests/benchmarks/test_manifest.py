"""Each figure has a page, and the code that it measures has not changed since."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import manifest
import pytest

import sn_compress

ROOT = Path(__file__).resolve().parents[2]
# Results from before hashes of the code were kept: `python -m benchmarks --stale` lists them with
# their commands. Measured anew, each leaves this number; it never rises.
MEASURED_BEFORE = 62
COMMAND = "python -m benchmarks pool --json benchmarks/results/pool.json"


def entry(*arguments):
    """Call `python -m benchmarks`, whose file is benchmarks/__main__.py."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_figure_is_of_the_code_as_it_is_or_says_why_not():
    assert not (found := manifest.problems(manifest.load())), "\n".join(found)
    rows = manifest.load()["results"]
    unknown = [name for name, row in rows.items() if row["of"] and row["code"] is None]
    assert len(unknown) == MEASURED_BEFORE, "if it fell: lower MEASURED_BEFORE"


def test_commands_areas_and_pages_of_benchmarks_exist():
    whole = manifest.load()
    listed = entry("--list").stdout
    for name, row in whole["results"].items():
        for benchmark in re.findall(r"-m benchmarks (\w+)", row["command"] or ""):
            assert re.search(rf"^{benchmark}: .*\n    .*/{name}\b", listed, re.MULTILINE), name
        assert set(row["of"]) <= set(whole["areas"]), name
        assert not row["of"] or manifest.code_files(row, whole["areas"])
    lines = listed.splitlines()
    for name, where in zip(lines[::2], lines[1::2], strict=True):
        assert ".md" in where, f"{name}: no page has its command or a result of it; remove it"


@pytest.mark.parametrize(("suffix", "text", "same", "other"), [
    (
        ".py",
        'def f(a):\n    """Say."""\n    return g(a, "x")  # why\n',
        "def f(a):\n    return g(\n        a,\n        'x',\n    )\n",
        'def f(a):\n    return g(a, "y")\n',
    ),
    (
        ".cpp",
        'int f() { return 1; }  // one\nauto s = "//";\n',
        'int f()\n{\n  /* as\n ever */ return 1;\n}\nauto s = "//";',
        'int f() { return 1; }\nauto s = "/*";\n',
    ),
])  # fmt: skip
def test_only_what_runs_counts(suffix, text, same, other):
    assert manifest.code_of(text, suffix) == manifest.code_of(same, suffix)
    assert manifest.code_of(text, suffix) != manifest.code_of(other, suffix)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of one area, one page and one result that is of its code; returns its manifest."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "pool.json").write_text('[{"height": 1}]')
    (tmp_path / "pool.py").write_text("HEIGHT = 1\n")
    (tmp_path / "README.md").write_text("Rows: `benchmarks/results/pool.json`.")
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    monkeypatch.setattr(manifest, "RESULTS", results)
    monkeypatch.setattr(manifest, "MANIFEST", results / "manifest.json")
    for function in (manifest.page_texts, manifest.pages, manifest._digest):
        monkeypatch.setattr(manifest, function.__name__, function.__wrapped__)
    row = {"command": COMMAND, "of": ["pool"], "code": None}
    whole = {"areas": {"pool": ["pool.py"]}, "results": {"pool.json": row}}
    assert list(manifest.stale(whole)) == ["pool.json"]
    manifest.record(whole, "pool.json")
    manifest.save(whole)
    assert manifest.load() == whole
    assert not manifest.problems(whole)
    return whole


def test_changed_code_is_found_until_it_is_accepted(tree, tmp_path):
    (tmp_path / "pool.py").write_text("HEIGHT = 2\n")
    (found,) = manifest.problems(tree)
    assert "pool.json: pool changed since" in found
    assert f"run: {COMMAND}\n" in found
    row = tree["results"]["pool.json"]
    row["accepted"] = {"code": manifest.code_hash(row, tree["areas"]), "reason": "as low"}
    assert not manifest.problems(tree)
    (tmp_path / "pool.py").write_text("HEIGHT = 3\n")
    assert manifest.problems(tree) == [found]


def test_what_pages_results_and_rows_lack_is_found(tree, tmp_path):
    (tmp_path / "README.md").write_text("Rows: `benchmarks/results/other.json`.")
    names_none, on_no_page = manifest.problems(tree)
    assert names_none.startswith("README.md names benchmarks/results/other.json")
    assert on_no_page.startswith("no page names benchmarks/results/pool.json")
    (manifest.RESULTS / "pool.json").rename(manifest.RESULTS / "other.json")
    no_row, no_file = manifest.problems(tree)
    assert no_row.startswith("other.json has no row")
    assert no_file == f"pool.json of manifest.json is not there; run: {COMMAND}"
    (tmp_path / "pool.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"pool\.py of manifest\.json is not there"):
        manifest.problems({**tree, "results": {"other.json": tree["results"]["pool.json"]}})


def test_a_run_records_what_it_measured_whole(tree, tmp_path, monkeypatch):
    note = manifest.note
    assert f"that ran is {sn_compress.__file__}" in note("pool.json", "[]", COMMAND, 0)
    (tmp_path / "pool.py").write_text("HEIGHT = 2\n")
    monkeypatch.setattr(manifest, "find_spec", lambda package: None)
    assert "changed meanwhile" in note("pool.json", '[{"height": 2}]', COMMAND, 60)
    os.utime(tmp_path / "pool.py", (0, 0))
    assert "has rows from before" in note("pool.json", '[{"height": 1}, {}]', COMMAND, 60)
    assert "its command is" in note("pool.json", '[{"height": 2}]', f"{COMMAND} --quick", 60)
    assert "other.json is new" in note("other.json", "[]", COMMAND, 60)
    assert manifest.problems(manifest.load())
    assert "is recorded" in note("pool.json", '[{"height": 2}]', COMMAND, 60)
    assert not manifest.problems(manifest.load())
    assert manifest.load()["results"]["pool.json"]["took_s"] == 60


def test_the_entry_runs_by_name_and_refuses_what_is_none():
    assert "usage: pool.py" in entry("pool", "--help").stdout
    assert "no benchmark machine" in entry("machine").stderr
    assert "no.json has no row" in entry("--record", "no.json").stderr
    assert len(json.loads(manifest.MANIFEST.read_text())["results"]) > MEASURED_BEFORE
    assert entry("--stale").stdout.count("\n") == 2 * MEASURED_BEFORE
