"""Ranks behind shaped links on one machine: namespaces, veth pairs, a bridge, a token bucket.

Each rank gets a network namespace whose only way out is a cable to a bridge, shaped at both ends.
Needs root and iproute2. Everything made here is removed again: at the end of the `with`, at exit,
and on SIGTERM; what a killed run left behind is found at the next start and named.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType

PREFIX = "snbench"  # of everything made here
_ETC = Path("/etc/netns")


class NoLinksError(RuntimeError):
    """The machine or the user cannot shape links; the text says why."""


def why_not() -> str:
    """Why links cannot be shaped here; empty if they can."""
    if os.geteuid() != 0:
        return "shaped links need root (ip netns, tc); run it as root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"shaped links need iproute2: there is no {tool} (apt-get install iproute2)"
    probe = f"{PREFIX}probe{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"no network namespaces here: {added.stderr.strip()}" if added.returncode else ""


def leftovers() -> list[str]:
    """Namespaces and bridges of ours whose process has ended."""
    spaces = _run("ip", "netns", "list").split("\n")
    links = _run("ip", "-o", "link", "show", "type", "bridge").split("\n")
    names = [line.split()[0] for line in spaces if line.strip()]
    names += [line.split(": ")[1].partition("@")[0] for line in links if ": " in line]
    orphans = []
    for name in names:
        owner = name.removeprefix(PREFIX).partition("r")[0].partition("b")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            orphans.append(name)
    return sorted(orphans)


def clean(names: list[str]) -> None:
    """Remove what `leftovers` found."""
    for name in names:
        if name.endswith("b"):
            _run("ip", "link", "del", name)
        else:
            _end_processes(name)
            _run("ip", "netns", "del", name)
            shutil.rmtree(_ETC / name, ignore_errors=True)


class ShapedLinks:
    """As many namespaces as ranks, `gbit` each way between each and all others.

    Parameters
    ----------
    gbit : rate of each link in Gbit/s; None leaves it unshaped
    """

    def __init__(self, ranks: int, gbit: float | None) -> None:
        if reason := why_not():
            raise NoLinksError(reason)
        if left := leftovers():
            raise NoLinksError(
                f"an earlier run was killed and left {', '.join(left)}; remove it with "
                "`python -m benchmarks training --clean`"
            )
        self.ranks, self.gbit = ranks, gbit
        self.bridge = f"{PREFIX}{os.getpid()}b"
        # One /24 per process, so that two runs at once do not meet.
        self._net = f"10.{64 + os.getpid() // 254 % 128}.{1 + os.getpid() % 254}"
        self._closed = False

    def space(self, rank: int) -> str:
        """The name of a rank's namespace."""
        return f"{PREFIX}{os.getpid()}r{rank}"

    def address(self, rank: int | None) -> str:
        """A rank's address; None is this process, on the bridge."""
        return f"{self._net}.{254 if rank is None else rank + 1}"

    def command(self, rank: int, *words: str) -> list[str]:
        """What runs a command as a rank."""
        return ["ip", "netns", "exec", self.space(rank), *words]

    def __enter__(self) -> ShapedLinks:
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            # SystemExit runs the `with` blocks on the way out; the default action would not.
            signal.signal(signal.SIGTERM, lambda number, frame: exit(128 + number))
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.address(None)}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for rank in range(self.ranks):
            space, cable = self.space(rank), f"snv{os.getpid()}x{rank}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", cable, "master", self.bridge, "up")
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            if self.gbit is not None:
                shape = _bucket(self.gbit)
                _run("tc", "qdisc", "add", "dev", cable, "root", *shape)
                _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
            # Horovod 0.28.1 takes the address that the host name resolves to, whatever
            # HOROVOD_GLOO_IFACE says; ip netns exec puts this file in the place of /etc/hosts.
            folder = _ETC / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{self.address(rank)} {socket.gethostname()}\n"
            )

    def close(self) -> None:
        """Remove everything; a second time nothing happens."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for rank in range(self.ranks):
            space = self.space(rank)
            _end_processes(space)
            _run("ip", "netns", "del", space, must=False)  # takes its end of the cable along
            _run("ip", "link", "del", f"snv{os.getpid()}x{rank}", must=False)
            shutil.rmtree(_ETC / space, ignore_errors=True)
        _run("ip", "link", "del", self.bridge, must=False)


def _bucket(gbit: float) -> list[str]:
    """Token bucket of a rate: bursts of 2 ms, at least the 64 KiB that the stack sends at once."""
    burst = max(int(gbit * 1e9 / 8 * 2e-3), 4 * 65536)
    return ["tbf", "rate", f"{gbit * 1e3:g}mbit", "burst", str(burst), "latency", "100ms"]


def _end_processes(space: str) -> None:
    """Kill what still runs in a namespace of ours: it would keep the namespace alive."""
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _run(*words: str, must: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if must and done.returncode:
        raise NoLinksError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
