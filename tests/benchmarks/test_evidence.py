"""The frozen evidence: a tiny section is frozen and gone on with, and each rule of comparing."""

import copy
import json

import evidence
import evidence_rules as rules
import evidence_sections
import pytest

PLAN = {
    "key": "net at 60% by auto", "choices": "a", "peak_bytes": 1000, "seconds": 1.0, "ended": True,
}  # fmt: skip
CUT = PLAN | {"key": "net at 40% by auto", "ended": False}
WORKS = {"key": "ViT by graph", "works": True, "equal": True, "kept": True}


WIDTH = {"ratio": 31.1, "steps": 50.0}
plan, report = rules.same_plan, rules.same_numbers("report")
below, higher = rules.not_above("peak"), {"height": 1000, "ended": False}
hidden, blocks = rules.not_below("hidden", 0.05), rules.not_below_part("blocks", 0.1)


@pytest.mark.parametrize(("rule", "before", "changes", "worse"), [
    (plan, PLAN, {}, False),
    (plan, PLAN, {"peak_bytes": 1001}, True),
    (plan, PLAN, {"seconds": 1.001}, True),
    # Other choices must bring something.
    (plan, PLAN, {"choices": "b"}, True),
    (plan, PLAN, {"choices": "b", "seconds": 0.9}, False),
    (plan, PLAN, {"choices": "b", "seconds": 0.9, "peak_bytes": 1001}, True),
    (plan, CUT, {"choices": "b", "seconds": 1.014}, False),
    (plan, CUT, {"choices": "b", "seconds": 1.016}, True),
    (plan, CUT, {"choices": "b", "peak_bytes": 1014}, False),
    (plan, CUT, {"choices": "b", "peak_bytes": 1016}, True),
    # That the search ends earlier now does not loosen what is asked.
    (plan, PLAN, {"seconds": 1.01, "ended": False}, True),
    (plan, CUT, {"refused": True}, True),
    (plan, CUT | {"refused": True}, {"refused": False}, False),
    (plan, CUT | {"refused": True}, {"peak_bytes": 1016, "seconds": None}, True),
    (plan, PLAN, {"absent": "there is no such planner"}, True),
    (plan, {"key": "x", "absent": "as well"}, {}, False),
    # What held holds, and numbers keep their bounds.
    (rules.holds("works"), WORKS, {"works": False}, True),
    (rules.holds("works"), WORKS | {"works": False}, {"works": True}, False),
    (below, {"peak": 10}, {"peak": 11}, True),
    (below, {"peak": 10}, {"peak": None}, True),
    (rules.not_above("peak", 0.1), {"peak": 10}, {"peak": 11}, False),
    (hidden, {"hidden": 0.9}, {"hidden": 0.84}, True),
    (hidden, {"hidden": 0.9}, {"hidden": 0.86}, False),
    (blocks, {"blocks": 100}, {"blocks": 88}, True),
    (rules.same_height, higher, {"height": 1014}, False),
    (rules.same_height, higher | {"ended": True}, {"height": 1001}, True),
    (rules.modules, {"count": 1, "modules": ["a"]}, {"count": 2, "modules": ["a", "b"]}, True),
    # What has to be the same is the same; a key that came or went is not worse.
    (rules.same("bits"), {"bits": "ab"}, {"bits": "ac"}, True),
    (rules.same("bits"), {"bits": "ab"}, {"bits": None}, True),
    (report, {"key": "fft", "report": WIDTH}, {"report": WIDTH | {"ratio": 31.1 + 1e-10}}, False),
    (report, {"key": "fft", "report": WIDTH}, {"report": WIDTH | {"ratio": 31.2}}, True),
    (report, {"key": "fft", "report": WIDTH}, {"report": {"ratio": 31.1, "tuned": 0.0}}, False),
])  # fmt: skip
def test_a_rule_finds_what_is_worse(rule, before, changes, worse):
    assert any(finding.worse for finding in rule(before, before | changes)) is worse


def test_a_median_is_of_the_whole_section():
    pairs = [({"s": 1.0}, {"s": it}) for it in (0.9, 1.01, 1.3)]
    for bound, worse in ((0.02, False), (0.005, True)):
        assert any(it.worse for it in rules.median_not_above("s", bound)(pairs)) is worse


def test_rows_that_went_or_crashed_are_lost_cases():
    def lost(before, after):
        return [key for key, it in rules.compared(before, after, ()) if it.worse]

    other = WORKS | {"key": "DiT by graph"}
    broken = {"key": "DiT", "crashed": "ended with -9"}
    assert not lost([WORKS], [WORKS, other])
    assert lost([WORKS, other], [WORKS]) == ["DiT by graph"]
    assert lost([WORKS, other], [WORKS, broken]) == ["DiT", "DiT by graph"]
    assert not lost([WORKS, broken], [WORKS, broken])


def written(folder, rows, section="plans", **more):
    folder.mkdir(exist_ok=True)
    file = {"section": section, "machine": "m", "versions": {}, "rows": rows, **more}
    (folder / f"{section}.json").write_text(json.dumps(file))
    return str(folder)


def test_compare_returns_1_where_anything_is_worse_and_not_explained(tmp_path, capsys):
    before = written(tmp_path / "before", [PLAN, CUT])
    after = written(tmp_path / "after", [PLAN | {"peak_bytes": 1100}, CUT | {"seconds": 1.01}])
    assert evidence.main(["compare", before, before]) == 0
    assert evidence.main(["compare", before, after]) == 1
    text = capsys.readouterr().out
    assert "WORSE plans: net at 60% by auto: peak_bytes: 1000 -> 1100 (+10.00%)" in text
    assert "plans: 2 rows, 1 worse, 1 other differences" in text
    assert evidence.main(["compare", before, after, "--explained", "60% by auto: peak"]) == 0
    assert evidence.main(["compare", before, after, "--sections", "pool"]) == 0
    # A section that was frozen before has to be there.
    assert evidence.main(["compare", before, str(tmp_path)]) == 1


def test_a_tiny_section_is_frozen_gone_on_with_and_equal_to_itself(tmp_path, capsys):
    out, again = tmp_path / "once", tmp_path / "again"
    command = ["freeze", "--sections", "plans", "--units", "layered12", "--out"]
    assert evidence.main([*command, str(out)]) == 0
    file = json.loads((out / "plans.json").read_text())
    planners = {row["key"].rpartition(" ")[2] for row in file["rows"]}
    assert planners == set(evidence_sections.PLANNERS)
    assert all(row.get("refused") or row["peak_bytes"] for row in file["rows"])
    assert list(file["units"]) == ["layered12"]
    # What is done is not done again.
    before = copy.deepcopy(file)
    assert evidence.main([*command, str(out), "--resume"]) == 0
    assert "done before" in capsys.readouterr().out
    assert json.loads((out / "plans.json").read_text()) == before
    # The same tree plans the same, whatever the load.
    assert evidence.main([*command, str(again)]) == 0
    assert evidence.main(["compare", str(out), str(again)]) == 0
    assert "0 worse, 0 other differences" in capsys.readouterr().out


def test_golden_payloads_are_frozen_and_equal_to_themselves(tmp_path, capsys):
    command = ["freeze", "--sections", "compress_golden", "--out"]
    assert evidence.main([*command, str(tmp_path / "once")]) == 0
    assert evidence.main([*command, str(tmp_path / "again")]) == 0
    assert evidence.main(["compare", str(tmp_path / "once"), str(tmp_path / "again")]) == 0
    assert "compress_golden: 72 rows, 0 worse, 0 other" in capsys.readouterr().out


def test_a_freeze_of_other_sources_is_not_gone_on_with(tmp_path):
    written(tmp_path / "out", [], commit="abc", sources="other", units={})
    with pytest.raises(SystemExit, match="other sources"):
        evidence.main(["freeze", "--resume", "--sections", "plans", "--units", "layered12",
                       "--out", str(tmp_path / "out")])  # fmt: skip


def test_a_unit_that_crashes_is_a_row_that_says_so_and_is_tried_again(tmp_path):
    command = ["freeze", "--sections", "plans", "--units", "no such net", "--out", str(tmp_path)]
    assert evidence.main(command) == 1
    file = json.loads((tmp_path / "plans.json").read_text())
    assert file["units"] == {}
    assert "KeyError" in file["rows"][0]["crashed"]
    assert evidence.main([*command, "--resume"]) == 1
    assert len(json.loads((tmp_path / "plans.json").read_text())["rows"]) == 1
