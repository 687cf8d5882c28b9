"""Scripts of ranks in the real, unpatched Horovod: each of their cases ends well on every rank.

Cases share one launch: starting horovodrun, and a framework, takes longer than most of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
slow = pytest.mark.slow
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
# Nothing fused, so that runs which compare bits sum in one order: fused tensors are summed in one
# that depends on when they came, and a last bit decides which values are kept.
UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
NODES = ["-H", "localhost:2,127.0.0.1:2"]  # two of two ranks, both of them this machine
# Scripts that share a start, on so many ranks; the first one is not slow, the one way to train in
# torch that is not.
STARTS = [
    (["behave.py"], 2, {}),
    (["buckets.py"], 2, UNFUSED),
    (["trust.py"], 2, {}),
    (["nodes.py", "nodes_as_ever.py"], 4, UNFUSED),
    (["keras_train.py"], 2, {}),
    (["tensorflow_behave.py", "tensorflow_outcomes.py", "tensorflow_trust.py"], 2, {}),
    (["tensorflow_sized.py", "tensorflow_gathered.py", "tensorflow_tune.py"], 2, {}),
    (["tensorflow_nodes.py"], 4, {}),
]


def names(scripts):
    """Of their cases, without loading what they import."""
    texts = [(RANKS / script).read_text() for script in scripts]
    listed = [text.partition("\nCASES = [")[2].partition("]")[0] for text in texts]
    return re.findall(r"(\w+)(?:,|$)", "\n".join(listed), re.MULTILINE)


@pytest.fixture(scope="module")
def ended():
    """How each start ended that was made so far."""
    return {}


EACH = [
    pytest.param(start, case, id=f"{scripts[0]}-{case}", marks=[slow] * (start > 0))
    for start, (scripts, *_) in enumerate(STARTS)
    for case in [*dict.fromkeys(names(scripts)), "end"]
]


@pytest.mark.parametrize(("start", "case"), EACH)
def test_case(horovodrun, ended, start, case):
    scripts, ranks, env = STARTS[start]
    if start not in ended:
        options = NODES if ranks == 4 else ()
        script, *others = scripts
        ended[start] = None  # where it does not end, no other case starts it anew
        ended[start] = horovodrun(
            ranks, RANKS / script, *others, options=options, timeout=580, **env
        )
    run = ended[start]
    assert run, "the start failed: see its first case"
    if case == "end":
        run.check()
    else:
        said = re.findall(rf">:ok {case}\n", run.stdout)
        assert len(said) == ranks * names(scripts).count(case), run.stdout[-8000:]


TORCH = [
    "fp32", "fp16", "bf16", "sum", "predivide", "accumulate", "clip", "unused", "groups",
    "groups-bf16", "order", "process-sets",
]  # fmt: skip
TENSORFLOW = [
    "fp32", "fp16", "bf16", "paper", "sum", "predivide", "groups", "groups-listed", "groups-bf16",
    "shared", "shared-sum", "shared-groups", "generic-names", "process-sets",
    "process-sets-traced",
]  # fmt: skip
BY_NODES = ["fp16", "bf16", "sum", "predivide", "accumulate", "clip", "unused", "groups-bf16"]
BY_NODES.append("process-sets")  # which have no nodes


@slow
@pytest.mark.parametrize(("script", "ranks", "cases", "env"), [
    # Three: sums then depend on their order, and pieces of a tensor are of several lengths.
    ("train.py", 3, [
        "way=gather", *TORCH, "paper", "without-names", "two-optimizers", "scaler",
        "way=shared", *TORCH, "join", "scaler",
    ], UNFUSED),
    ("train.py", 2, ["way=shared", *TORCH, "join", "scaler"], {}),
    ("train.py", 4, ["way=gather", *BY_NODES, "way=shared", *BY_NODES], {}),
    ("tensorflow_train.py", 2, TENSORFLOW, {}),
    ("tensorflow_train.py", 3, [
        "bf16", "groups", "shared", "process-sets-traced", "keras_train.py:shared",
        "tensorflow_gathered.py:many_ranks_have_the_bits_of_the_engine",
    ], {}),
    # In TensorFlow `hvd.join()` can be called once in a process: of the other one here, at its end.
    ("tensorflow_nodes.py", 6,
     ["many_nodes_learn_as_without", "a_rank_joins_at_a_step_on_the_host"], {}),
])  # fmt: skip
def test_these_cases(horovodrun, script, ranks, cases, env):
    """Of trainings of 20 steps, ranks stay bit-identical; a skipped one is as if never been."""
    options = NODES if ranks == 4 else ()
    run = horovodrun(ranks, RANKS / script, *cases, options=options, timeout=580, **env).check()
    for case in {case for case in cases if not case.startswith("way=")}:
        said = re.findall(rf">:ok {case}[ \n]", run.stdout)
        assert len(said) == ranks * cases.count(case), f"{case}\n{run.stdout}"


@slow
@pytest.mark.parametrize("scripts", [
    ["schedules.py", "apoptosis.py", "apoptosis_planned.py", "tune.py"],
    ["tensorflow_schedules.py", "tensorflow_apoptosis_planned.py", "tensorflow_planned.py"],
], ids=["torch", "tensorflow"])  # fmt: skip
def test_scripts_in_turn(horovodrun, scripts):
    """Every kind of schedule, the tuner, nets that shrink, and a plan: alike on all ranks."""
    run = horovodrun(2, RANKS / "several.py", *scripts, timeout=400).check()
    for script in scripts:
        assert run.stdout.count(f">:ok {script}\n") == 2, run.stdout
