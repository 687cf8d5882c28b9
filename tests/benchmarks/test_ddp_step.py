"""The benches of DDP: small forms of each run, count what is sent, and print their rows."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
import shaped_links

pytest.importorskip("torch.distributed")

import collectives
import ddp_ranks
import ddp_step
import ddp_ways
import resnet50_gradients
import resnet50_horovod
import resnet50_step
import shaped_ddp
import torch
import torch.distributed as dist
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


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def row_of(printed, way):
    """The fields of a way's line in a table, behind its name."""
    pattern = re.compile(rf"(^|\s){way}\s+[-+\d]")
    (line,) = filter(pattern.search, printed.splitlines())
    return line.partition(way)[2].split()


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


def test_a_collective_of_horovod_of_unknown_bytes_is_refused():
    grouped = "horovod_torch_grouped_allreduce_async_torch_FloatTensor"
    alltoall = "horovod_torch_alltoall_async_torch_FloatTensor"
    library = SimpleNamespace(**{grouped: lambda *a: 7, alltoall: lambda *a: 8})
    sent, values = resnet50_horovod.Sent(library), torch.ones(3)
    assert getattr(library, alltoall)(values, 1) == 8
    assert sent.found == []
    sent.on = True
    assert getattr(library, grouped)([values, values]) == 7
    assert sent.found == [("allreduce", 24)]
    with pytest.raises(ValueError, match="alltoall"):
        getattr(library, alltoall)(values)


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


def test_what_is_measured_is_measured_once_a_commit(monkeypatch):
    rows = [{"way": "plain", "run": 0, "commit": "abc"}, {"way": "plain", "run": 0, "commit": "d+"}]
    for commit, there in (("abc", True), ("d+", False), ("e", False)):
        monkeypatch.setattr(ddp_ranks, "commit", lambda commit=commit: commit)
        assert ddp_ranks.measured(rows, {"way": "plain", "run": 0}) == there
        assert not ddp_ranks.measured(rows, {"way": "plain", "run": 1})


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.half, torch.bfloat16, torch.double],
    ids=str,
)
def test_collectives_are_counted_in_bytes_of_every_type(alone, dtype):
    values = torch.ones(5, dtype=dtype)
    # torch 2.13 gave it another name, and warns under the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def step():
        dist.all_reduce(values)
        dist.barrier()
        gather(torch.empty_like(values), values)
        dist.all_gather([torch.empty_like(values)], values)

    size = values.nbytes
    found = collectives.collectives(step)
    assert found == [("allreduce", size), ("allgather", size), ("allgather", size)]
    assert collectives.sent_bytes(found, 4) == 1.5 * size + 2 * 3 * size


def test_a_collective_of_unknown_bytes_is_refused(alone):
    with pytest.raises(ValueError, match="gloo:broadcast"):
        collectives.collectives(lambda: dist.broadcast(torch.ones(5), 0))


def test_ops_of_a_hook_are_counted_where_torch_computes_the_product():
    def hook(state, bucket):
        return state(torch.ones(2, 2))

    for compute, found in ((lambda x: (x @ x).add_(1), 2.0), (torch.neg, None)):
        count = ddp_ways.OpCount()
        counted = count.around(hook)
        counted(compute, None)
        assert not count.ops
        count.on = True
        for _ in range(3):
            counted(compute, None)
        # Making the operand is an op of the hook, too.
        assert count.buckets == 3
        assert count.a_bucket() == (found and found + 1)


def test_keras_layout_has_the_same_values():
    values = resnet50_gradients.gradient((6, 4, 3, 2), seed=1, rank=0)
    moved = resnet50_step.in_layout(values, "keras")
    assert moved.shape == (3, 2, 4, 6)
    assert moved[1, 0, 3, 5] == values[5, 3, 1, 0]
    assert resnet50_step.in_layout(values[:, :, 0, 0], "keras").shape == (4, 6)
    assert resnet50_step.in_layout(values, "torch") is values
