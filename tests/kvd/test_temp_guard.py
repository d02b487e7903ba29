"""Temporary files in the long path: whose they are decides, not how old they are."""

import os
import subprocess
import sys
import time

import msgspec
import pytest

from kvd import temp_guard
from kvd.temp_guard import Life

HOUR_S = 3600.0
LONG_AGO_S = 30 * 86400.0


def left_behind(directory, name="export.bin.tmp.1", age_s=HOUR_S):
    path = directory / name
    path.write_bytes(b"x" * 5000)
    date = time.time() - age_s
    os.utime(path, (date, date))
    return path


def register(path, age_s=HOUR_S, **changed):
    writer = msgspec.structs.replace(temp_guard.this_process(), **changed)
    marker = temp_guard.marker_of(path)
    marker.write_bytes(msgspec.json.encode(writer))
    date = time.time() - age_s
    os.utime(marker, (date, date))
    return marker


def dead_pid():
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return int(done.stdout)


def test_what_a_killed_writer_left_is_counted_and_goes_when_asked_for(tmp_path):
    path = left_behind(tmp_path)
    kept = tmp_path / "namespaces.json"
    kept.write_text("{}")
    found = temp_guard.find(tmp_path)
    assert [each.path for each in found] == [path]
    assert found[0].removable and found[0].size_bytes >= 5000
    assert temp_guard.sweep(tmp_path, dry_run=True).files == 1
    assert path.exists()
    swept = temp_guard.sweep(tmp_path)
    assert (swept.files, swept.kept) == (1, 0)
    assert not path.exists() and kept.exists()


def test_the_file_of_a_live_writer_stays_however_old_it_is(tmp_path):
    path = left_behind(tmp_path, age_s=LONG_AGO_S)
    marker = register(path, age_s=LONG_AGO_S)
    assert temp_guard.sweep(tmp_path) == temp_guard.Swept(0, 0, 1)
    assert path.exists() and marker.exists()


def test_a_process_id_used_again_is_not_the_writer(tmp_path):
    """A marker with only a process id kept a dead writer's file for as long as any process had
    that id."""
    path = left_behind(tmp_path)
    register(path, start_time=1)
    assert temp_guard.life_of(temp_guard.read_marker(temp_guard.marker_of(path))) is Life.DEAD
    assert temp_guard.sweep(tmp_path).files == 1
    assert not path.exists()


def test_the_file_of_a_dead_writer_goes_and_its_marker_after_an_hour(tmp_path):
    path = left_behind(tmp_path)
    marker = register(path, age_s=0.9 * HOUR_S, pid=dead_pid())
    assert temp_guard.sweep(tmp_path).files == 1
    assert marker.exists()
    temp_guard.sweep(tmp_path, now=time.time() + 0.2 * HOUR_S)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "another", "boot_id": "another"},
        {"boot_id": ""},
        {"start_time": 0},
        {"pid": 0},
        {"pid_namespace": "pid:[1]"},
    ],
)
def test_a_writer_of_whom_nothing_is_known_keeps_its_file(tmp_path, changed):
    """One on another host, in another container, or registered where /proc was missing."""
    path = left_behind(tmp_path, age_s=LONG_AGO_S)
    marker = register(path, age_s=LONG_AGO_S, **changed)
    assert temp_guard.sweep(tmp_path).kept == 1
    assert path.exists() and marker.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff" * 10])
def test_a_marker_that_cannot_be_read_keeps_the_file(tmp_path, content):
    path = left_behind(tmp_path, age_s=LONG_AGO_S)
    marker = temp_guard.marker_of(path)
    marker.write_bytes(content)
    os.utime(marker, (1, 1))
    assert temp_guard.sweep(tmp_path).kept == 1
    assert path.exists() and marker.exists()


def test_a_writer_from_before_this_machine_was_started_is_dead(tmp_path, monkeypatch):
    here = msgspec.structs.replace(temp_guard.this_process(), machine_id="m")
    monkeypatch.setattr(temp_guard, "this_process", lambda: here)
    assert temp_guard.life_of(msgspec.structs.replace(here, boot_id="before")) is Life.DEAD
    other = msgspec.structs.replace(here, boot_id="before", machine_id="other")
    assert temp_guard.life_of(other) is Life.UNKNOWN


def test_an_unregistered_file_has_a_quarter_of_an_hour(tmp_path):
    young = left_behind(tmp_path, "a.tmp", age_s=14 * 60)
    old = left_behind(tmp_path, "b.tmp", age_s=16 * 60)
    future = left_behind(tmp_path, "c.tmp", age_s=-86400)
    assert temp_guard.sweep(tmp_path) == temp_guard.Swept(1, 8192, 2)
    assert young.exists() and future.exists() and not old.exists()


def test_nothing_but_temporary_files_of_the_directory_is_touched(tmp_path):
    outside = tmp_path / "outside"
    inside = tmp_path / "long"
    outside.mkdir()
    inside.mkdir()
    victim = left_behind(outside)
    (inside / "link.tmp").symlink_to(victim)
    (inside / "linked").symlink_to(outside)
    (inside / "directory.tmp").mkdir()
    block = inside / "0000.bin"
    block.write_bytes(b"")
    assert temp_guard.sweep(inside) == temp_guard.Swept(0, 0, 0)
    assert victim.exists() and block.exists() and (inside / "directory.tmp").exists()


def test_a_writer_is_registered_while_it_writes_and_leaves_nothing(tmp_path):
    path = tmp_path / "names.json"
    with temp_guard.guarded(path) as temporary:
        assert not temporary.exists()
        writer = temp_guard.read_marker(temp_guard.marker_of(temporary))
        assert writer == temp_guard.this_process()
        temporary.write_bytes(b"new")
        later = time.time() + LONG_AGO_S
        assert temp_guard.sweep(tmp_path, now=later) == temp_guard.Swept(0, 0, 1)
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "names.json"
    temp_guard.replace_file(path, b"old")
    with pytest.raises(RuntimeError), temp_guard.guarded(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_killed_half_way_is_found_dead(tmp_path):
    """After a hard kill its file is left, and is nobody's from then on."""
    writing = (
        "import sys, pathlib, time; from kvd import temp_guard\n"
        "with temp_guard.guarded(pathlib.Path(sys.argv[1])) as path:\n"
        "    path.write_bytes(b'half'); print('writing', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", writing, str(tmp_path / "names.json")], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        later = time.time() + HOUR_S
        assert temp_guard.sweep(tmp_path, now=later).kept == 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert temp_guard.sweep(tmp_path).kept == 1  # Younger than a quarter of an hour.
    swept = temp_guard.sweep(tmp_path, now=time.time() + 2 * HOUR_S)
    assert (swept.files, swept.kept) == (1, 0)
    assert list(tmp_path.iterdir()) == []
