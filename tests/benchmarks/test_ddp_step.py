"""The benches of DDP: small forms of each run, count what is sent, and print their rows."""

from __future__ import annotations

import json
import re
import sys

import pytest
import shaped_links

pytest.importorskip("torch.distributed")

import ddp_ranks
import ddp_step
import resnet50_step
import shaped_ddp
from language import Language

SMALL = ["--width", "32", "--layers", "1"]
ONCE = ["--ranks", 2, "--rounds", 1, "--steps", 1, "--width", 8, "--classes", 10]


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(script, *flags)`: what the script's command prints."""

    def command(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        script.main()
        return capsys.readouterr().out

    return command


def row_of(printed, way):
    """The fields of a way's line in a table, behind its name."""
    pattern = re.compile(rf"(^|\s){way}\s+[-+\d]")
    (line,) = filter(pattern.search, printed.splitlines())
    return line.partition(way)[2].split()


@pytest.mark.slow
def test_ddp_step_tells_what_each_way_adds_and_sends(run, tmp_path):
    path, ways = tmp_path / "rows.json", ["plain", "fp16", "powersgd 4", "low rank 50", "gather"]
    flags = ["--runs", 1, "--rounds", 1, "--steps", 1, *SMALL, "--json", path, "--ways", *ways]
    printed = run(ddp_step, *flags)
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert list(rows) == ways
    size = 4 * rows["plain"]["parameters"]
    assert [rows[way]["sent_bytes"] for way in ("plain", "fp16")] == [size, size // 2]
    assert size / rows["low rank 50"]["sent_bytes"] == pytest.approx(50, rel=0.1)
    for way in ways:
        cpu, added = map(float, row_of(printed, way)[:2])
        assert cpu == pytest.approx(rows[way]["cpu_ms"], abs=0.06)
        assert added == pytest.approx(rows[way]["added_cpu_ms"], abs=0.06)
        assert rows[way]["cpu_ms"] > 0
        assert rows[way]["command"].startswith("python -m benchmarks ddp_step --runs 1")
    assert rows["plain"]["added_cpu_ms"] == 0
    for way in ("low rank 50", "gather"):
        assert f"{way} adds no more than powersgd 4: " in printed
    assert run(ddp_step, "--report", "--json", path).strip() in printed


@pytest.mark.slow
def test_resnet50_step_tells_ratio_collectives_and_ops(run, tmp_path):
    path = tmp_path / "rows.json"
    flags = ["--seams", "ddp", "--layouts", "keras", *ONCE, "--json", path]
    printed = run(resnet50_step, *flags)
    shapes = resnet50_step.shapes_of(8, 10)
    rival = resnet50_step.rival_of(shapes)
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert list(rows) == ["plain", resnet50_step.OURS, rival]
    told = resnet50_step.powersgd_bytes(shapes, int(rival.split()[1]))
    assert rows[rival]["sent_bytes"] == told
    assert rows["plain"]["ratio"] == 1
    assert rows[resnet50_step.OURS]["ratio"] > 1
    assert rows[resnet50_step.OURS]["collectives"] > 0
    for way in rows:
        assert float(row_of(printed, way)[0]) == pytest.approx(rows[way]["ratio"], abs=0.06)
    assert row_of(printed, rival)[-1] == "n/a"  # only ours is counted


@pytest.mark.horovod
@pytest.mark.slow
def test_resnet50_step_counts_what_is_handed_to_horovod(run, tmp_path):
    pytest.importorskip("horovod")
    path = tmp_path / "rows.json"
    run(resnet50_step, "--seams", "horovod", "--layouts", "torch", *ONCE, "--json", path)
    plain, ours = json.loads(path.read_text())
    shapes = resnet50_step.shapes_of(8, 10)
    assert plain["way"] == "plain"
    assert plain["collectives"] == len(shapes)  # one each, before Horovod fuses them
    assert plain["sent_bytes"] == 4 * plain["elements"]
    assert ours["way"] == resnet50_step.OURS
    assert 1 < ours["ratio"] < 110
    assert ours["sent_bytes"] < plain["sent_bytes"] / 10


@pytest.mark.slow
def test_shaped_ddp_trains_every_way_behind_the_link(run, tmp_path):
    if reason := shaped_links.why_not():
        pytest.skip(reason)
    path, ways = tmp_path / "rows.json", ["plain", "low rank 50"]
    flags = ["--gbit", 0.05, "--train-steps", 17, "--target", 7.9, *SMALL, "--json", path]
    size = 4 * sum(p.numel() for p in Language(32, 1).parameters())
    # The gradient, the headers of its packets, and what TCP sends again where the bucket dropped it
    # or the other end was late: a fourth on a busy machine, more than all of it was seen on
    # one with a load of 16. Counted twice it would be above 2 each time.
    for _ in range(3):
        path.unlink(missing_ok=True)
        printed = run(shaped_ddp, *flags, "--ways", *ways)
        plain, ours = json.loads(path.read_text())
        assert size < plain["bytes_per_step"]
        if plain["bytes_per_step"] < 2 * size:
            break
    assert plain["bytes_per_step"] < 2 * size
    assert [plain["way"], ours["way"]] == ways
    assert ours["bytes_per_step"] < plain["bytes_per_step"] / 10
    # At 6.25 MB/s, less what the bucket lets through at once.
    assert plain["step_s"] > (size - 262144) / 6.25e6
    for way, row in zip(ways, (plain, ours), strict=True):
        assert row["seconds_to_target"] == row["curve"][row["steps_to_target"] - 1][1]
        assert float(row_of(printed, way)[0]) == pytest.approx(row["step_s"], abs=6e-4)


def test_a_rank_that_fails_is_told_and_the_others_are_ended():
    with pytest.raises(RuntimeError, match=r"ValueError.*no way"):
        ddp_ranks.run_ranks(
            ddp_step.__file__,
            {"ways": ["powersgd no way"], "batch": 2, "length": 4, "width": 32, "layers": 1},
            ranks=1,
            timeout_s=100,
        )
