"""What a process may have by its limits, read from files that are made up."""

import resource
import warnings
from pathlib import Path

import pytest

from sn_memory import PlanError
from sn_memory.base import host
from sn_memory.base.errors import PlanWarning
from sn_memory.base.host import Limit, limits
from sn_memory.run import reserved

NONE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def free(root: Path) -> dict[str, int]:
    return {it.name.replace(str(root), ""): it.free_bytes for it in limits(root)}


@pytest.fixture(autouse=True)
def no_rlimits(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: NONE)


def test_nothing_is_known_where_nothing_can_be_read(tmp_path):
    assert limits(tmp_path) == []


def test_free_memory(tmp_path):
    tree(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\nHugePages_Total: 0\n"})
    assert free(tmp_path) == {"free memory (MemAvailable)": 7 << 10}


def test_limits_of_the_process_less_what_it_takes_of_each(tmp_path, monkeypatch):
    tree(tmp_path, {"proc/self/status": "Name:\tx\nVmSize:\t 50 kB\nVmData:\t 20 kB\n"})
    most = {resource.RLIMIT_DATA: (30 << 10, -1), resource.RLIMIT_AS: (40 << 10, -1)}
    monkeypatch.setattr(resource, "getrlimit", most.get)
    assert free(tmp_path) == {"RLIMIT_DATA": 10 << 10, "RLIMIT_AS": 0}


def test_cgroups_of_version_2_and_those_above(tmp_path):
    top = "sys/fs/cgroup"
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{top}/a/memory.max": "1000\n",
            f"{top}/a/memory.current": "300\n",
            f"{top}/a/memory.stat": "anon 5\ninactive_file 100\nactive_file 7\n",
            f"{top}/a/b/memory.max": "max\n",
            f"{top}/a/b/memory.high": "900\n",
            f"{top}/a/b/memory.current": "200\n",
        },
    )
    assert free(tmp_path) == {
        f"memory.max of /{top}/a": 800,
        f"memory.high of /{top}/a/b": 700,
    }


def test_cgroups_of_version_1_in_a_container_whose_path_is_the_hosts(tmp_path):
    top = "sys/fs/cgroup/memory"
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/\n",
            f"{top}/memory.limit_in_bytes": "1000",
            f"{top}/memory.usage_in_bytes": "400",
            f"{top}/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
        },
    )
    assert free(tmp_path) == {f"memory.limit_in_bytes of /{top}": 650}
    tree(tmp_path, {f"{top}/memory.limit_in_bytes": "9223372036854771712"})
    assert free(tmp_path) == {}


def test_a_budget_is_what_the_smallest_limit_leaves_and_what_is_there(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("RLIMIT_DATA", 3200 * MIB))
    assert reserved.host_budget(7) == 3100 * MIB - reserved.process_bytes(None) + 7


def test_where_no_limit_is_known_the_error_names_those_that_were_read(monkeypatch):
    monkeypatch.setattr(host, "limits", list)
    monkeypatch.setattr(reserved, "smallest_limit", host.smallest_limit)
    with pytest.raises(PlanError, match=r"RLIMIT_DATA.*memory.max.*MemAvailable.*Pass budget="):
        reserved.host_budget(0)


def test_a_limit_that_leaves_nothing_is_named(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("memory.max of /a", 5))
    with pytest.raises(PlanError, match=r"the smallest limit, memory.max of /a, leaves 5 B"):
        reserved.host_budget(0)


@pytest.fixture
def libc(monkeypatch):
    """A glibc that says what it is told."""
    calls = []

    class Library:
        gnu_get_libc_version = None

        def mallopt(self, *given):
            calls.append(given)
            return 1

        def malloc_trim(self, _):
            calls.append("trim")

    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: Library())
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    return calls


def test_malloc_returns_what_is_freed_where_the_limit_is_near(libc, monkeypatch):
    monkeypatch.delenv(host.SETTING, raising=False)
    monkeypatch.setattr(host, "smallest_limit", lambda: Limit("RLIMIT_DATA", 300))
    monkeypatch.setattr(host, "_WARNED", [])
    assert not host.return_freed(100)
    assert not libc
    with pytest.warns(PlanWarning, match="RLIMIT_DATA leaves 300 B, less than 3 times"):
        assert host.return_freed(101)
    assert libc == [(-3, 128 << 10), (-1, 128 << 10), "trim"]
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
