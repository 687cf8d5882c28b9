"""A link between real ranks is cut: for five seconds, or for good. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "ranks" / "cut.py"
GLOO_TIMEOUT_S = 20
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


@pytest.fixture
def links(monkeypatch):
    """Two network namespaces with a cable between them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shaped_links

    if reason := shaped_links.why_not():
        pytest.skip(reason)
    with shaped_links.ShapedLinks(2, None) as made:
        yield made


def start(links, exchange, folder):
    """Two ranks of `cut.py`, each in its namespace, as horovodrun would start them."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(verbose=0)
    port = server.start()
    hosts = parse_hosts(",".join(f"{links.address(rank)}:1" for rank in range(2)))
    slots = get_host_assignments(hosts, 2)
    server.init(slots)
    common = create_run_env_vars(links.address(None), ["eth0"], port)
    processes = []
    for slot in slots:
        env = {k: str(v) for k, v in {**common, **create_slot_env_vars(slot)}.items()}
        env |= {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH", "")]))
        command = links.command(slot.rank, sys.executable, str(SCRIPT), exchange, str(folder))
        processes.append(subprocess.Popen(command, env=os.environ | env, stderr=subprocess.DEVNULL))
    return server, processes


def said(folder, rank):
    path = folder / f"rank{rank}"
    return path.read_text() if path.exists() else ""


def wait_for(what, limit_s):
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.1)


@pytest.mark.parametrize(("exchange", "for_good"), [("gather", True), ("shared", False)])
def test_a_cut_link_ends_or_heals_and_is_never_silent(links, tmp_path, exchange, for_good):
    """Five seconds TCP survives: the same weights as without. For good, each rank gets an error."""
    inside = links.command(1, "ip", "link", "set", "eth0")
    server, processes = start(links, exchange, tmp_path)
    try:
        wait_for(lambda: said(tmp_path, 0) > "step 10", 90)
        subprocess.run([*inside, "down"], check=True)
        if for_good:
            wait_for(lambda: all(p.poll() is not None for p in processes), 3 * GLOO_TIMEOUT_S + 30)
            assert all(process.returncode for process in processes)
            assert not any(said(tmp_path, rank).startswith("weights") for rank in range(2))
            return
        time.sleep(5)
        assert said(tmp_path, 0).startswith("step"), "a step went on without the other rank"
        subprocess.run([*inside, "up"], check=True)
        wait_for(lambda: all(p.poll() is not None for p in processes), 90)
        ends = {said(tmp_path, rank) for rank in range(2)}
        if any(process.returncode for process in processes):
            assert not any(end.startswith("weights") for end in ends), ends
        else:
            assert len(ends) == 1, ends
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.stop()
        server._httpd.server_close()  # stop() leaves the socket open
