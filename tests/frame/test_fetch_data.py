"""The data set is fetched into a private folder and kept only if it is what it should be."""

import gzip
import os
import stat
from pathlib import Path

import fetch_fashion_mnist as fetch
import pytest


class Apt:
    """Stands in for apt and dpkg; notes who could have written where they worked."""

    def __init__(self, contents):
        self.contents = contents
        self.modes = []
        self.commands = []

    def __call__(self, command, folder):
        self.modes.append(stat.S_IMODE(folder.stat().st_mode))
        self.commands.append(command)
        if "download" in command:
            (folder / f"{fetch.PACKAGE}_0.deb").touch()
        if command[0] == "dpkg":
            place = folder / "unpacked" / fetch.DEBIAN.relative_to("/")
            place.mkdir(parents=True)
            for name, content in self.contents.items():
                (place / name).write_bytes(content)
        return ""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "CACHE", tmp_path / "cache")
    monkeypatch.setattr("shutil.which", lambda name: name)
    return tmp_path / "cache"


@pytest.fixture
def good(monkeypatch):
    """Give four files whose hashes are the ones expected."""
    contents = {name: gzip.compress(name.encode() * 1000) for name in fetch.FILES}
    for name in fetch.FILES:
        plain = fetch.hashlib.sha256(name.encode() * 1000).hexdigest()
        monkeypatch.setitem(fetch.HASHES, name, plain)
    return contents


@pytest.mark.parametrize("lists", [True, False], ids=["lists", "no lists"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
def test_nobody_else_can_write_where_it_unpacks(cache, good, monkeypatch, root, lists):
    """Without package lists it takes lists of its own: a user may not renew the system's."""
    apt, own = Apt(good), "Dir::State::Lists="

    def run(command, folder):
        error = apt(command, folder)
        system = command[0] == "apt-get" and not any(word.startswith(own) for word in command)
        return "no lists" if system and not lists else error

    monkeypatch.setattr(fetch, "_run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    before = os.umask(0)
    try:
        assert fetch.fetch() == cache
    finally:
        os.umask(before)
    assert apt.modes
    assert all(mode & 0o077 == 0 for mode in apt.modes)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755
    for name in fetch.FILES:
        assert stat.S_IMODE((cache / name).stat().st_mode) == 0o644
        assert (cache / name).read_bytes() == good[name]
    # A private folder is closed to apt's own user too, so root's apt stays root.
    assert ("APT::Sandbox::User=root" in apt.commands[0]) == root
    updates = [command for command in apt.commands if "update" in command]
    assert len(updates) == (not lists)
    assert all(any(word.startswith(own) for word in command) for command in updates)


def test_packed_again_is_the_same_data(cache, good, monkeypatch):
    name = fetch.FILES[0]
    good[name] = gzip.compress(gzip.decompress(good[name]), compresslevel=1)
    monkeypatch.setattr(fetch, "_run", Apt(good))
    assert fetch.fetch() == cache


@pytest.mark.parametrize(
    ("damage", "which"), [("other data", 0), ("cut", 3), ("not gzip", 0), ("a bit", 3)]
)
def test_wrong_data_is_refused_and_nothing_kept(cache, good, monkeypatch, damage, which):
    name = fetch.FILES[which]
    whole = good[name]
    turned = bytearray(whole)
    turned[len(whole) // 2] ^= 1
    good[name] = {
        "other data": gzip.compress(b"other"),
        "cut": whole[:-9],
        "not gzip": b"not gzip",
        "a bit": bytes(turned),
    }[damage]
    monkeypatch.setattr(fetch, "_run", Apt(good))
    with pytest.raises(RuntimeError, match=name):
        fetch.fetch()
    assert not cache.exists()


def test_hashes_are_those_of_the_data():
    folder = fetch.find()
    if folder is None:
        pytest.skip("Fashion-MNIST is not here")
    for name, expected in fetch.HASHES.items():
        assert fetch.content_hash(Path(folder, name)) == expected
