"""The table of versions under which the tests were run."""

import json
import sys

import pytest
import tested_versions


def test_the_page_has_what_was_found():
    rows = json.loads(tested_versions.RESULT.read_text())
    assert tested_versions.table(rows) in tested_versions.PAGE.read_text(encoding="utf-8")
    # What continuous integration runs.
    assert any(
        row["torch"] == "2.13.0+cpu" and row["tensorflow"] and row["horovod"] for row in rows
    )
    assert all(row["failed"] == 0 for row in rows)


@pytest.mark.slow
def test_an_interpreter_is_run_and_kept(tmp_path, monkeypatch, capsys):
    page, result = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text(f"before\n{tested_versions.START}\n{tested_versions.END}\nafter\n")
    monkeypatch.setattr(tested_versions, "PAGE", page)
    monkeypatch.setattr(tested_versions, "RESULT", result)
    one = tmp_path / "test_one.py"
    one.write_text("def test_well(): pass\n\ndef test_ill(): assert 0\n")
    arguments = f"{one} -p no:cacheprovider -c /dev/null --rootdir {tmp_path}"
    for _ in range(2):
        assert tested_versions.main([sys.executable, "--pytest", arguments]) == 0
    (row,) = json.loads(result.read_text())
    assert (row["passed"], row["failed"]) == (1, 1)
    assert "test_ill" in capsys.readouterr().out
    assert f"| {row['torch']} |" in page.read_text()
    with pytest.raises(SystemExit, match="no test passed"):
        tested_versions.main([sys.executable, "--pytest", str(tmp_path / "nothing.py")])
