"""Scripts of ranks in the real, unpatched Horovod: each of their cases ends well on every rank.

Cases share one launch: starting horovodrun, and a framework, takes longer than most of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]
# Nothing fused, so that runs which compare bits sum in one order: fused tensors are summed in one
# that depends on when they came, and a last bit decides which values are kept. Two ranks have one.
UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
NODES = ["-H", "localhost:2,127.0.0.1:2"]  # two of two ranks, both of them this machine


def of(script, names):
    return [f"{script.removesuffix('.py')}:{name}" for name in names.split()]


# Trainings in many ways: of three ranks sums depend on their order, and pieces of a tensor are of
# several lengths; four are on two nodes. Each way is there by either exchange.
TRAIN_OF_TWO = of("train.py", """
    gather-fp16 gather-predivide gather-groups
    shared-fp32 shared-fp16 shared-sum shared-accumulate shared-clip shared-unused shared-groups
    shared-process-sets shared-scaler
""")  # fmt: skip
TRAIN_OF_THREE = [
    *of("train.py", """
        gather-fp32 gather-bf16 gather-sum gather-accumulate gather-clip gather-unused
        gather-groups-bf16 gather-process-sets gather-paper gather-without-names gather-scaler
        shared-fp32 shared-bf16 shared-predivide shared-groups-bf16
    """),
    "trust:damage_on_its_way_is_an_error_of_all",
    *of("buckets.py", """
        the_order_of_the_gradients_changes_no_bit a_rank_that_has_joined_is_asked_for_nothing
        a_gather_is_refused_once_a_rank_has_joined
    """),
]  # fmt: skip
TRAIN_OF_NODES = of("train.py", """
    gather-fp16 gather-predivide gather-accumulate gather-unused gather-groups-bf16
    gather-process-sets shared-bf16 shared-sum shared-clip shared-groups-bf16 shared-unused
""")  # fmt: skip
# Cases that hold whatever way gradients travel.
AS_EVER_BY_NODES = [
    *of("behave.py", """
        mean_is_the_mean not_a_number_reaches_all sparse_travels_as_plain
        resume a_gradient_is_exchanged_once what_is_thrown_away_leaves_no_trace
    """),
    *of("buckets.py", """
        the_order_of_the_gradients_changes_no_bit a_step_that_broke_off_is_as_if_it_had_never_been
    """),
    "trust:damage_on_its_way_is_an_error_of_all",
]  # fmt: skip
TENSORFLOW = of("tensorflow_train.py", """
    fp32 fp16 paper sum predivide groups groups-listed shared shared-sum shared-groups
    generic-names process-sets process-sets-traced
""")  # fmt: skip
TENSORFLOW_OF_THREE = [
    *of("tensorflow_train.py", "bf16 groups shared process-sets-traced"), "keras_train:shared",
    "tensorflow_gathered:many_ranks_have_the_bits_of_the_engine",
    "tensorflow_nodes:a_rank_joins_without_nodes",
]  # fmt: skip
# In TensorFlow `hvd.join()` can be called once in a process: at the end of each of these.
OF_SIX = of("tensorflow_nodes.py", "many_nodes_learn_as_without a_rank_joins_at_a_step_on_the_host")

# Scripts that share a start, on so many ranks; the first one is not slow, the one way to train in
# torch that is not.
STARTS = [
    (2, {}, ["behave.py"]),
    (2, {}, ["trust.py", "buckets.py", *TRAIN_OF_TWO, "tune.py", "apoptosis.py", "schedules.py"]),
    (3, UNFUSED, TRAIN_OF_THREE),
    (4, UNFUSED, ["nodes.py", *AS_EVER_BY_NODES, *TRAIN_OF_NODES]),
    (2, {}, [
        "keras_train.py", "tensorflow_behave.py", "tensorflow_outcomes.py", "tensorflow_trust.py",
    ]),
    (2, {}, [
        "tensorflow_sized.py", "tensorflow_gathered.py", "tensorflow_tune.py", *TENSORFLOW,
        "tensorflow_apoptosis_planned.py", "tensorflow_planned.py", "tensorflow_schedules.py",
    ]),
    (3, {}, TENSORFLOW_OF_THREE),
    (4, {}, ["tensorflow_nodes.py"]),
    (6, {}, OF_SIX),
]  # fmt: skip


def cases(words):
    """Of scripts by their names, without loading what they import."""
    found = []
    for word in words:
        if ":" in word:
            found.append(word)
            continue
        text = (RANKS / word).read_text().partition("\nCASES = [")[2].partition("]")[0]
        found += of(word, " ".join(re.findall(r"(\w+)(?:,|$)", text, re.MULTILINE)))
    return found


@pytest.fixture(scope="module")
def ended():
    """How each start ended that was begun so far."""
    return {}


EACH = [
    pytest.param(start, case, id=f"{n}-{case}", marks=[pytest.mark.slow] * (start > 0))
    for start, (n, _, words) in enumerate(STARTS)
    for case in [*cases(words), "end"]
]


@pytest.mark.parametrize(("start", "case"), EACH)
def test_case(horovodrun, ended, start, case):
    n, env, words = STARTS[start]
    if start not in ended:
        options = NODES if n == 4 else ()
        ended[start] = None  # where it does not end, no other case starts it anew
        ended[start] = horovodrun(
            n, RANKS / "several.py", *words, options=options, timeout=880, **env
        )
    run = ended[start]
    assert run, "the start failed: see its first case"
    if case == "end":
        run.check()
    else:
        said = re.findall(rf">:ok {re.escape(case)}\n", run.stdout)
        assert len(said) == n, run.stdout[-8000:]
