"""What a process may have by its limits, read from files that are made up."""

import resource
import warnings
from unittest.mock import Mock, call

import pytest

from sn_memory import PlanError
from sn_memory.base import host
from sn_memory.base.errors import PlanWarning
from sn_memory.base.host import Limit, limits
from sn_memory.run import reserved

NONE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
MIB, KIB = 1 << 20, 1 << 10
TOP = "sys/fs/cgroup"
VERSION_1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/\n",
    f"{TOP}/memory/memory.limit_in_bytes": "1000",
    f"{TOP}/memory/memory.usage_in_bytes": "400",
    f"{TOP}/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
}
# Files, limits of the process, what is free by which limit.
CASES = {
    "nothing can be read": ({}, {}, {}),
    "free memory": (
        {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\nHugePages_Total: 0\n"},
        {},
        {"free memory (MemAvailable)": 7 * KIB},
    ),
    "limits of the process, less what it takes of them": (
        {"proc/self/status": "Name:\tx\nVmSize:\t 50 kB\nVmData:\t 20 kB\n"},
        {resource.RLIMIT_DATA: (30 * KIB, -1), resource.RLIMIT_AS: (40 * KIB, -1)},
        {"RLIMIT_DATA": 10 * KIB, "RLIMIT_AS": 0},
    ),
    "cgroups of version 2 and those above": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{TOP}/a/memory.max": "1000\n",
            f"{TOP}/a/memory.current": "300\n",
            f"{TOP}/a/memory.stat": "anon 5\ninactive_file 100\nactive_file 7\n",
            f"{TOP}/a/b/memory.max": "max\n",
            f"{TOP}/a/b/memory.high": "900\n",
            f"{TOP}/a/b/memory.current": "200\n",
        },
        {},
        {f"memory.max of /{TOP}/a": 800, f"memory.high of /{TOP}/a/b": 700},
    ),
    "cgroups of version 1 in a container whose path is the host's": (
        VERSION_1,
        {},
        {f"memory.limit_in_bytes of /{TOP}/memory": 650},
    ),
    "version 1 without a limit": (
        VERSION_1 | {f"{TOP}/memory/memory.limit_in_bytes": "9223372036854771712"},
        {},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_limits_are_read(tmp_path, monkeypatch, case):
    files, most, free = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: most.get(kind, NONE))
    found = {it.name.replace(str(tmp_path), ""): it.free_bytes for it in limits(tmp_path)}
    assert found == free


def test_a_budget_is_what_the_smallest_limit_leaves_and_what_is_there(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("RLIMIT_DATA", 3200 * MIB))
    assert reserved.host_budget(7) == 3100 * MIB - reserved.process_bytes(None) + 7
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("memory.max of /a", 5))
    with pytest.raises(PlanError, match=r"the smallest limit, memory.max of /a, leaves 5 B"):
        reserved.host_budget(0)


def test_where_no_limit_is_known_the_error_names_those_that_were_read(monkeypatch):
    monkeypatch.setattr(host, "limits", list)
    monkeypatch.setattr(reserved, "smallest_limit", host.smallest_limit)
    with pytest.raises(PlanError, match=r"RLIMIT_DATA.*memory.max.*MemAvailable.*Pass budget="):
        reserved.host_budget(0)


@pytest.fixture
def libc(monkeypatch):
    """A glibc that only takes notes."""
    library = Mock(**{"mallopt.return_value": 1})
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: library)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    return library


def test_malloc_returns_what_is_freed_where_the_limit_is_near(libc, monkeypatch):
    monkeypatch.delenv(host.SETTING, raising=False)
    monkeypatch.setattr(host, "smallest_limit", lambda: Limit("RLIMIT_DATA", 300))
    monkeypatch.setattr(host, "_WARNED", [])
    assert not host.return_freed(100)
    assert not libc.mock_calls
    with pytest.warns(PlanWarning, match="RLIMIT_DATA leaves 300 B, less than 3 times"):
        assert host.return_freed(101)
    assert libc.mock_calls == [
        call.mallopt(-3, 128 << 10), call.mallopt(-1, 128 << 10), call.malloc_trim(0)
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host.return_freed(101)  # once in a process is enough


def test_one_setting_turns_it_off_or_on(libc, monkeypatch):
    monkeypatch.setattr(host, "smallest_limit", lambda: Limit("RLIMIT_DATA", 0))
    monkeypatch.setenv(host.SETTING, "off")
    assert not host.return_freed(100)
    monkeypatch.setenv(host.SETTING, "on")
    assert host.return_freed()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    assert not host.return_freed()
    monkeypatch.setenv(host.SETTING, "yes")
    with pytest.raises(ValueError, match=r"SN_MEMORY_MALLOC='yes'"):
        host.return_freed()
