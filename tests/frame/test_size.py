"""How large the house may be: lines of each room, files of the package, lines of a file.

`pytest -s tests/frame/test_size.py` prints the table. A cap is lowered whenever a change makes a
room smaller, until it is the line budget of the room (`docs/decisions/0076`); it is raised for a
new capability alone, whose decision says so (91, 102, 105, 106, 110: activations, 92:
regions), and was twice beside: where comprehensions took the names of what they run over, and in
the guards, where five copies in other rooms became one there.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 600  # of a file: in a longer one lives more than one concept
# Room: its folders or files, its cap today, its line budget. What has a row of its own does not
# count for the folder around it.
ROOMS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "base": (("base",), 928, 650),
    "graph": (("graph",), 1241, 1150),
    "cost": (("cost",), 1224, 800),
    "check": (("check.py",), 377, 430),
    "run, report": (("run", "report"), 2065, 1350),
    "pool": (("pool",), 949, 800),
    "plan": (("plan",), 1904, 1500),
    "plan/search": (("plan/search",), 1198, 1700),
    "plan/policies": (("plan/policies.py",), 465, 300),
    "activations": (("activations",), 894, 800),
    "apoptosis": (("apoptosis",), 3141, 2600),
    "torch: plan, estimate, verify, planned": (("torch",), 3471, 1700),
    "torch: target device": (("torch/target",), 1276, 700),
    "torch: guards": (("torch/model",), 3362, 1700),
    "torch: trace": (("torch/trace",), 3276, 2300),
    "torch: eager": (("torch/eager",), 1937, 1500),
    "torch: host": (("torch/state", "torch/host"), 1739, 1300),
    "torch: compile": (("torch/compile",), 955, 700),
    "torch: policy": (("torch/policy",), 1192, 750),
    "torch: regions": (("torch/regions",), 2115, 900),
    "torch: modules": (("torch/modules",), 1035, 550),
    "torch: activations": (("torch/activations",), 2478, 1200),
    "tensorflow": (("tensorflow",), 6709, 4200),
}
TOTAL = (44_053, 28_000)
MOST_FILES = (170, 170)
# Of sn_compress, whose rooms have no budgets of their own. Raised for ranks by nodes and for the
# shards of FSDP2 (decisions 98, 99, 100), in TensorFlow, too, for casts (103), for predicting
# nodes and for cores that ranks share (108), and groups in vectors (110).
COMPRESS_LINES = (27_971, 19_500)
COMPRESS_FILES = (119, 120)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(path: Path, package: Path) -> str:
    """Return the room of the innermost folder or file that holds `path`; "": the package itself."""
    inside = [
        (len(name), room)
        for room, (names, _, _) in ROOMS.items()
        for name in names
        if path.is_relative_to(package / name)
    ]
    return max(inside, default=(0, ""))[1]


def test_rooms_keep_their_budgets():
    package = ROOT / "sn_memory"
    files = sorted(package.rglob("*.py"))
    held = dict.fromkeys(["", *ROOMS], 0)
    for path in files:
        held[room_of(path, package)] += lines(path)
    print(f"\n{'room':40} {'lines':>7} {'cap':>7} {'budget':>7}")
    for room, (_, cap, budget) in ROOMS.items():
        print(f"{room:40} {held[room]:7} {cap:7} {budget:7}")
    total = sum(held.values())
    print(f"{'in all':40} {total:7} {TOTAL[0]:7} {TOTAL[1]:7}")
    print(f"{'files':40} {len(files):7} {MOST_FILES[0]:7} {MOST_FILES[1]:7}")
    assert not {room: held[room] for room, (_, cap, _) in ROOMS.items() if held[room] > cap}
    assert total <= TOTAL[0]
    assert len(files) <= MOST_FILES[0]


def test_sn_compress_keeps_its_budget():
    held = [lines(path) for path in (ROOT / "sn_compress").rglob("*.py")]
    print(f"\n{'sn_compress':40} {sum(held):7} {COMPRESS_LINES[0]:7} {COMPRESS_LINES[1]:7}")
    print(f"{'files':40} {len(held):7} {COMPRESS_FILES[0]:7} {COMPRESS_FILES[1]:7}")
    assert sum(held) <= COMPRESS_LINES[0]
    assert len(held) <= COMPRESS_FILES[0]


def test_no_file_is_long():
    for package in ("sn_memory", "sn_cli", "sn_compress"):
        for path in (ROOT / package).rglob("*.py"):
            assert lines(path) <= MOST_LINES, path
