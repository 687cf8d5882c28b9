"""What "will it fit" stands on: graphs at other batches, parts on several cards, the search."""

import pytest

from sn_memory import Device, Graph, GraphError, Op, Storage, Workspace
from sn_memory.run.estimate import Batches, Fit, Units, Way, largest, on_cards

UNKNOWN = Device()


def step(batch, ops=2, device=UNKNOWN, measured=False):
    storages = [Storage("w", 1000, "parameter"), Storage("x", 8 * batch, "input")]
    storages += [Storage(f"h{it}", 16 * batch + 4) for it in range(ops)]
    rows = [
        Op(
            f"f{it}", (f"h{it - 1}" if it else "x", "w"), (f"h{it}",),
            flops=10.0 * batch, dtype="bf16",
            workspaces=(Workspace(3 * batch, 0.5 * batch if measured else None),),
            seconds=1.0 * batch if measured else None,
            traffic_bytes=32 * batch + 8 if measured else None,
        )
        for it in range(ops)
    ]  # fmt: skip
    return Graph(storages, rows, name="step", device=device)


@pytest.mark.parametrize("measured", [False, True])
def test_a_graph_at_another_batch_is_the_one_traced_there(measured):
    batches = Batches((2, step(2, measured=measured)), (4, step(4, measured=measured)))
    for batch in (1, 2, 3, 4, 100):
        assert batches.at(batch) == step(batch, measured=measured)


def test_through_one_measurement_goes_no_line():
    once = Batches((2, step(2)), (4, step(4, measured=True))).at(8)
    assert [op.seconds for op in once.ops] == [4.0, 4.0]
    assert [op.traffic_bytes for op in once.ops] == [32 * 4 + 8] * 2


def test_steps_that_differ_are_refused():
    with pytest.raises(GraphError, match="not the one at 4: it differs in f2"):
        Batches((2, step(2)), (4, step(4, ops=3)))
    with pytest.raises(GraphError, match="a larger second"):
        Batches((4, step(4)), (4, step(4)))


def test_roofline_follows_the_batch():
    device = Device("d", 1.0, 1e9, flops_per_s_by_dtype=(("bf16", 10.0),))
    batches = Batches((2, step(2, device=device)), (4, step(4, device=device)))
    assert batches.at(10).arrays.seconds == [(10.0,), (10.0,)]


def test_what_a_card_holds():
    state = {"parameters_bytes": 100, "gradients_bytes": 100, "optimizer_bytes": 200}
    fixed = {**state, "rest_bytes": 50, "units": Units(block_bytes=20, root_bytes=30)}
    alone = on_cards(1, **fixed)
    assert (alone.state_bytes, alone.gathered_bytes, alone.peak_bytes) == (400, 0, 450)
    four = on_cards(4, **fixed)
    # Two blocks and the root, whole, and the gradient of the larger of them.
    assert (four.state_bytes, four.gathered_bytes) == (100, 2 * 20 + 30 + 30)
    assert four.peak_bytes == 100 + 100 + 50
    with pytest.raises(ValueError, match="got 0 cards"):
        on_cards(0, **fixed)


@pytest.mark.parametrize("room", [0, 1, 2, 29, 30, 31, 100, 511, 512, 600])
def test_the_search_finds_what_fits(room):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= room

    found = largest(fits, 1, 512)
    # To a thirtieth.
    assert min(room, 512) * 29 / 30 - 1 <= found <= min(room, 512)
    assert len(asked) <= 18


def test_a_table_reads():
    plain = Way("plain", 8, seconds=0.5, samples_per_s=16.0, allocated_bytes=1 << 30,
                reserved_bytes=2 << 30)  # fmt: skip
    ways = (plain, Way("plan, +5 % time", 0, note="no plan fits in that time"))
    lines = str(Fit("h100", 79 << 30, None, 8, ways, ("seconds are predicted",))).splitlines()
    assert lines[0] == "h100, room 79 GiB"
    head = "way batch step, s samples/s allocated reserved pinned"
    assert " ".join(lines[1].split()) == head
    assert "8+" in lines[2]  # as many as were asked for, so perhaps more
    assert "none" in lines[3]
    assert lines[-2:] == [
        "note: plan, +5 % time: no plan fits in that time", "note: seconds are predicted"
    ]  # fmt: skip
