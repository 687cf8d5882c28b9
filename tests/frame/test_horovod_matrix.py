"""The matrix of builds: what cannot be had says why, what was built stays, the page is of it."""

import json

import horovod_matrix
import pytest
from horovod_matrix import Cell

FACTS = {
    "python": "3.11.7",
    "torch": "2.15.0",
    "torch_cuda": "13.2",
    "tensorflow": None,
    "standard": 20,
    "moves": ["Gloo", "NCCL"],
    "ranks": 2,
    "built": {
        "toolkit": "CUDA 13.2, of wheels", "jobs": 2, "seconds": 126.4, "cpu_seconds": 240.2
    },
}  # fmt: skip


@pytest.fixture
def three(monkeypatch, tmp_path):
    """Three cells, a folder and a result file; `run(*args)` runs the matrix."""
    cells = tuple(Cell("2.15.0", True, python) for python in ("8.1", "8.2", "8.3"))
    monkeypatch.setattr(horovod_matrix, "CELLS", cells)
    path = tmp_path / "result.json"

    def run(*args):
        return horovod_matrix.main(["--result", str(path), "--folder", str(tmp_path / "it"), *args])

    return cells, run, path


def test_it_goes_on_where_it_stopped(three, monkeypatch, capsys):
    """A result is written as its cell ends; built ones stay, failed ones are tried again."""
    cells, run, path = three
    assert run() == 0
    assert {row["state"] for row in json.loads(path.read_text())} == {"cannot"}
    assert "Cannot: no Python 8.3 on this machine: torch 2.15.0 CUDA" in capsys.readouterr().out
    path.unlink()
    measured, fails = [], {cells[1]}

    def measure(cell, folder, args):
        measured.append(cell)
        if cell == cells[2] and len(measured) == 3:
            raise KeyboardInterrupt
        state = {"state": "failed", "why": "x"} if cell in fails else {"state": "built"}
        return {"cell": cell.name, "facts": FACTS, "seconds": 1, **state}

    monkeypatch.setattr(horovod_matrix, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [row["state"] for row in json.loads(path.read_text())] == ["built", "failed"]
    assert run() == 1
    fails.clear()
    assert run() == 0
    assert measured == [*cells, cells[1], cells[2], cells[1]]
    assert run(cells[0].name, "--again") == 0
    assert measured[-1] == cells[0]


def test_the_table_tells_what_was_built_and_why_not(three):
    cells, _, _ = three
    rows = {cells[0].name: {"state": "built", "facts": FACTS}}
    rows[cells[1].name] = {"state": "cannot", "why": "x"}
    lines = horovod_matrix.table(rows).splitlines()
    first = "| 3.11.7 | 2.15.0 CUDA 13.2 |  | 20 | CUDA 13.2, of wheels | Gloo, NCCL | torch "
    assert lines[2] == first + "| 126 | 240 |"
    assert lines[4] == "Cannot: x: torch 2.15.0 CUDA (Python 8.2)."
    assert lines[6:] == ["Not tried: torch 2.15.0 CUDA (Python 8.3)."]


def test_the_page_is_made_of_the_result_file(monkeypatch, tmp_path, capsys):
    assert horovod_matrix.main(["--check"]) == 0, capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(f"before\n{horovod_matrix.START}\nold\n{horovod_matrix.END}\nafter\n")
    monkeypatch.setattr(horovod_matrix, "PAGE", page)
    assert horovod_matrix.main(["--check"]) == 1
    assert horovod_matrix.main(["--table"]) == 0
    assert horovod_matrix.main(["--check"]) == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
