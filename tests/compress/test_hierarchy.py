"""Ranks by nodes, without a framework: who is where, who owns what, and states of other nodes."""

import numpy as np
import pytest

from sn_compress import CompressError
from sn_compress.engine.hierarchy import (
    NodeLayout,
    Owners,
    Place,
    layout_of,
    loadable,
    state_of,
    states_to_load,
    whole_states,
)


@pytest.mark.parametrize(("ids", "expected"), [
    ([5, 5, 5], "all ranks are on one node"),
    ([1, 2, 3], "each rank is alone on its node"),
    ([1], "all ranks are on one node"),
    ([1, 1, 2, 3, 3], "nodes have 2 and 1 ranks"),
])  # fmt: skip
def test_why_there_is_no_hierarchy(ids, expected):
    assert layout_of(ids) == expected


def test_ranks_of_a_node_need_not_follow_each_other():
    layout = layout_of([8, 3, 8, 3, 9, 9])
    assert layout == NodeLayout(((0, 2), (1, 3), (4, 5)))
    assert [layout.place(rank) for rank in range(6)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert layout.across() == ((0, 1, 4), (2, 3, 5))
    with pytest.raises(ValueError, match="rank 6"):
        layout.place(6)


def test_owners_share_the_elements_and_stay():
    rng = np.random.default_rng(0)
    sizes = {f"w{i}": int(n) for i, n in enumerate(rng.integers(1, 10_000, 200))}
    owners = Owners(8)
    chosen = {name: owners.of(name, n) for name, n in sizes.items()}
    loads = [sum(sizes[name] for name, o in chosen.items() if o == one) for one in range(8)]
    assert max(loads) - min(loads) <= max(sizes.values())
    again = Owners(8)
    for name in reversed(list(sizes)):  # of what is known nothing is decided anew
        again.of_name[name] = chosen[name]
    assert {name: again.of(name, n) for name, n in sizes.items()} == chosen


def state(rank, ranks, names, nodes=None):
    return {
        "rank": rank, "ranks": ranks, "hierarchy": nodes and {"nodes": nodes, "owners": {}},
        "feedback": {"format": 1, "memory": {name: (rank, name) for name in names}},
        "shared": {"format": 1, "tensors": dict.fromkeys(names, rank), "left_out": {}},
    }  # fmt: skip


def test_states_of_a_node_together_have_all_tensors():
    nodes = [[0, 2], [1, 3]]
    states = [state(rank, 4, "ab" if rank < 2 else "c", nodes) for rank in range(4)]
    whole = whole_states(states)
    assert [(each["rank"], each["ranks"]) for each in whole] == [(0, 2), (1, 2)]
    assert whole[1]["feedback"]["memory"] == {"a": (1, "a"), "b": (1, "b"), "c": (3, "c")}
    assert whole[0]["shared"]["tensors"] == {"a": 0, "b": 0, "c": 2}
    assert state_of(whole[0], {"c"})["feedback"]["memory"] == {"c": (2, "c")}
    assert whole[0]["feedback"]["memory"].keys() == set("abc"), "changed what it was given"
    flat = [state(rank, 2, "abc") for rank in range(2)]
    assert whole_states(flat) == flat


@pytest.mark.parametrize("given", [[], [1], [1, 0], [0]])
def test_states_of_some_ranks_are_refused(given):
    with pytest.raises(CompressError, match="Load the list"):
        whole_states([state(rank, 2, "a", [[0, 1]]) for rank in given])


def test_states_by_nodes_are_loaded_on_other_numbers_of_ranks_as_those_of_nodes():
    """Each has some of the tensors only: a mean of all ranks' there is none of."""
    states = [state(rank, 4, "ab" if rank < 2 else "c", [[0, 2], [1, 3]]) for rank in range(4)]
    assert loadable(states, 4) is states
    assert loadable(states, 3) == whole_states(states)
    assert loadable(states[0], 3) is states[0]
    flat = [state(rank, 2, "abc") for rank in range(2)]
    assert loadable(flat, 3) is flat
    for junk in (None, 3, [], ["x", "y"]):
        assert loadable(junk, 3) is junk


def test_what_a_rank_goes_on_from():
    nodes = [[0, 1], [2, 3]]
    saved = [state(rank, 4, "ac" if rank % 2 == 0 else "b", nodes) for rank in range(4)]
    for each in saved:
        each["hierarchy"]["owners"] = {"a": 0, "b": 1, "c": 0}
    sizes = [("a", 5), ("b", 3), ("c", 1)]
    same = Place(layout_of([7, 7, 8, 8]), 2)
    assert states_to_load(saved, same, sizes) is None  # its own state is right
    assert same.state() == saved[0]["hierarchy"]
    assert states_to_load([saved[0]], same, sizes) is None  # of the same number on another node
    with pytest.raises(CompressError, match="Load the list"):
        states_to_load([saved[1]], same, sizes)
    others = Place(layout_of([7, 8, 7, 8]), 2)
    found = states_to_load(saved, others, [("c", 9), ("a", 5), ("b", 5)])
    assert others.number == 1
    assert [list(each["shared"]["tensors"]) for each in found] == [["a", "b"]] * 2
    assert states_to_load(saved, None, sizes) == whole_states(saved)
    assert states_to_load([state(0, 4, "abc")], None, sizes) is None
