"""The cache: built once, whole or not at all, whichever process requests it."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.errors import ConfigError


def building(calls, content="abc" * 1000):
    def build(folder):
        calls.append(folder)
        (folder / "data.bin").write_text(content)

    return build


def test_a_cached_entry_is_not_built_again(tmp_path):
    calls = []
    first, second = (find_or_build(tmp_path / "key", building(calls)) for _ in range(2))
    assert first == second and len(calls) == 1
    assert (first / "data.bin").read_text() == "abc" * 1000


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "sums"])
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    calls = []
    entry = find_or_build(tmp_path / "key", building(calls))
    data = entry / "data.bin"
    if damage == "flip":
        data.write_text("abd" + data.read_text()[3:])
    elif damage == "cut":
        data.write_text("abc")
    elif damage == "remove":
        data.unlink()
    else:
        (entry / "sums.json").write_text("[")
    for _ in range(2):
        assert (find_or_build(tmp_path / "key", building(calls)) / "data.bin").read_text() == "abc" * 1000
    assert len(calls) == 2


def test_an_entry_is_read_in_full_only_if_its_time_changed(tmp_path, monkeypatch):
    """The content of a copy has another time, and its checksum decides."""
    entry = find_or_build(tmp_path / "key", building([]))
    monkeypatch.setattr("tfm_blocks.data.cache.file_digest", lambda path: pytest.fail("the file was read"))
    assert find_or_build(tmp_path / "key", building([])) == entry
    monkeypatch.undo()
    os.utime(entry / "data.bin", (1, 1))
    assert find_or_build(tmp_path / "key", building([])) == entry


def test_others_can_read_an_entry_as_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        entry = find_or_build(tmp_path / "key", building([]))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (entry, entry / "data.bin")] == [0o755, 0o644]


def test_an_entry_that_cannot_be_read_is_an_error_and_not_a_damaged_entry(tmp_path, monkeypatch):
    find_or_build(tmp_path / "key", building([]))

    def refuse(path, *arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # the tests may run as root, who can read everything
    with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
        find_or_build(tmp_path / "key", building([]))
    assert not (tmp_path / "key-1").exists()


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def failing(folder):
        (folder / "half").write_text("half")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        find_or_build(tmp_path / "key", failing)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_race_all_get_a_whole_entry(tmp_path):
    code = f"""
from pathlib import Path
from tfm_blocks.data.cache import find_or_build
entry = find_or_build(Path({str(tmp_path)!r}) / "key", lambda into: (into / "data").write_text("whole" * 2_000_000))
assert (entry / "data").read_text() == "whole" * 2_000_000
"""
    racers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [racer.wait() for racer in racers] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["key-0"]


def test_a_cache_folder_that_cannot_be_written_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"data\.cache(.|\n)*TFM_BLOCKS_CACHE"):
        find_or_build(tmp_path / "file" / "key", building([]))


def test_the_setting_comes_before_the_variable_before_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path))
    assert cache_folder(str(tmp_path / "set")) == tmp_path / "set"
    assert cache_folder(None) == tmp_path
    monkeypatch.delenv("TFM_BLOCKS_CACHE")
    assert cache_folder(None).name == "tfm-blocks"


def test_keys_differ_where_their_parts_differ():
    assert cache_key("a", 1) == cache_key("a", 1) != cache_key("a1")


def test_the_home_folder_of_nobody_is_refused_by_the_name_of_the_setting(monkeypatch):
    with pytest.raises(ConfigError, match=r"data\.cache: .*~nouser"):
        cache_folder("~nouser/cache")
    monkeypatch.setenv("TFM_BLOCKS_CACHE", "~nouser/cache")
    with pytest.raises(ConfigError, match=r"TFM_BLOCKS_CACHE: .*~nouser"):
        cache_folder(None)
