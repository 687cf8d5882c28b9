"""How large the house may be: lines of each room, files of the package, lines of a file.

`pytest -s tests/frame/test_size.py` prints the table. A cap is lowered whenever a change makes a
room smaller, until it is the line budget of the room (`docs/decisions/0076`); no cap is raised.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 600  # of a file: in a longer one lives more than one concept
# Room: its folders, its cap today, its line budget. A folder within a folder that has a row of its
# own does not count for the outer one.
ROOMS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "base": (("base",), 950, 650),
    "graph": (("graph",), 1391, 1150),
    "cost": (("cost",), 1510, 800),
    "check": (("check",), 389, 430),
    "run, report": (("run", "report"), 2220, 1350),
    "pool": (("pool",), 982, 800),
    "plan": (("plan",), 2715, 1500),
    "plan/search": (("plan/search",), 1977, 1700),
    "plan/policies": (("plan/policies",), 266, 300),
    "activations": (("activations",), 780, 800),
    "apoptosis": (("apoptosis",), 3206, 2600),
    "torch: plan, estimate, verify, planned": (("torch",), 5542, 1700),
    "torch: target device": (("torch/device", "torch/elsewhere"), 0, 700),
    "torch: guards": (("torch/model", "torch/ones"), 2977, 1700),
    "torch: trace": (("torch/trace",), 3351, 2300),
    "torch: eager": (("torch/eager",), 2107, 1500),
    "torch: host": (("torch/state",), 1169, 1300),
    "torch: compile": (("torch/compile",), 1258, 700),
    "torch: policy": (("torch/policy",), 1345, 750),
    "torch: modules": (("torch/modules",), 1130, 550),
    "torch: activations": (("torch/activations",), 1051, 1200),
    "tensorflow": (("tensorflow",), 5941, 4200),
}
TOTAL = (42_337, 28_000)
MOST_FILES = (214, 170)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(path: Path, package: Path) -> str:
    """Return the room of the innermost folder that holds `path`, "" for the package itself."""
    folder = path.parent.relative_to(package).as_posix()
    inside = [
        (len(name), room)
        for room, (folders, _, _) in ROOMS.items()
        for name in folders
        if folder == name or folder.startswith(f"{name}/")
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


def test_no_file_is_long():
    for package in ("sn_memory", "sn_cli"):
        for path in (ROOT / package).rglob("*.py"):
            assert lines(path) <= MOST_LINES, path
