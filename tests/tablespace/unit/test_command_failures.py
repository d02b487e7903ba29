"""How ``python -m tablespace`` fails, leaves, and shows that it is still at work."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tablespace.__main__ import main
from tablespace.commands.keys import parse_bytes, printable
from tablespace.commands.progress import WIDTH, Progress

import tablespace

SMALL = {"max_bytes": "256K", "slot_bytes": "4K"}


# How commands fail.


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "{absent}"],
        ["ls", "{absent}"],
        ["get", "{absent}", "key"],
        ["put", "{absent}", "key"],
        ["rm", "{absent}", "key"],
        ["compact", "{absent}"],
        ["bench", "{absent}"],
        ["ls", "{file}"],
        ["get", "{region}", "alpha", "-o", "{absent}/x"],
        ["get", "{region}", ""],
        ["get", "{region}", "hex:0"],
        ["get", "{region}", "hex:"],
        ["get", "{region}", "k" * 256],
        ["put", "{region}", "key", "{absent}"],
        ["put", "{region}", "key", "{region}"],
        ["put", "{region}", "key", "--metadata", "m" * 256],
        ["put", "{absent}", "key", "--create", "many"],
        ["ls", "{region}", "--limit", "-1"],
        ["ls", "{region}", "--nothing"],
        ["ls"],
        ["nothing", "{region}"],
        ["bench", "{region}", "--seconds", "nan"],
        ["bench", "{region}", "--threads", "0"],
    ],
    ids=" ".join,
)
def test_what_cannot_run_is_one_line_with_a_remedy_and_status_2(
    arguments: list[str], region: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    named = {"region": region, "absent": tmp_path / "absent", "file": tmp_path / "file"}
    given = [each.format(**named) for each in arguments]
    for extra in ([], ["--json"]):
        with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", nothing)
            assert main([*given, *extra]) == 2
        out, errors = capfd.readouterr()
        assert errors.startswith("tablespace: ") and errors.count("\n") == 1
        assert "Remedy:" in errors
        if extra:
            assert json.loads(out)["error"]["message"] in errors
        else:
            assert out == ""
    assert not (tmp_path / "absent").exists()


def test_a_live_writer_is_named(region: Path, calls: Any) -> None:
    with tablespace.open(region, **SMALL):
        for arguments in (("put", region, "k", os.devnull), ("rm", region, "k")):
            calls.text(*arguments, code=2)
            assert f"pid {os.getpid()}" in calls.errors and "Remedy:" in calls.errors
        error = calls.json("compact", region, code=2)["error"]
        assert error["kind"] == "BusyError" and error["holder"]["pid"] == os.getpid()


@pytest.mark.parametrize("name", ["region.json", "index.log"])
@pytest.mark.parametrize("command", [("ls",), ("get", "alpha"), ("compact",)])
def test_damage_is_status_1_and_names_file_and_offset(
    region: Path, calls: Any, name: str, command: tuple[str, ...]
) -> None:
    data = bytearray((region / name).read_bytes())
    data[30] ^= 1
    (region / name).write_bytes(data)
    calls.text(command[0], region, *command[1:], code=1)
    assert name in calls.errors and re.search(r"at byte \d+", calls.errors)
    error = calls.json(command[0], region, *command[1:], code=1)["error"]
    assert error["kind"] == "CorruptionError" and error["path"].endswith(name)
    assert isinstance(error["offset_bytes"], int)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_region_of_another_user_is_refused_with_a_remedy(region: Path) -> None:
    # Once before, for the imports: the other user may not be allowed to read this environment.
    script = (
        "import os, sys\n"
        "from tablespace.__main__ import main\n"
        "sys.stderr = open(os.devnull, 'w')\n"
        "main(['ls', os.devnull])\n"
        "sys.stderr = sys.__stderr__\n"
        "os.setuid(65534)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for reachable in (False, True):
        if reachable:
            for folder in (region, *region.parents[:3]):
                folder.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", script, "ls", str(region)],
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert os.strerror(errno.EACCES) in done.stderr and "owner of the region" in done.stderr


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    """`ls | head` ended with a traceback, and again when the interpreter flushed."""
    with tablespace.open(tmp_path / "region", max_bytes="32M", slot_bytes="4K") as store:
        store.put_many((b"a long enough key %040d" % at, b"") for at in range(3000))
    command = f"{sys.executable} -m tablespace ls {tmp_path / 'region'} --json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stdout.endswith("0\n") and done.stderr == ""


def test_a_full_standard_output_is_said_once(region: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tablespace", "ls", str(region)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert os.strerror(errno.ENOSPC) in done.stderr


def test_an_ascii_terminal_shows_any_key(region: Path, run: Any) -> None:
    done = run("ls", region, env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"caf\\xe9" in done.stdout


# The parts.


def test_keys_come_back_as_they_are_shown(values: dict[bytes, bytes]) -> None:
    for key in (*values, b"hex:00", b"a b", b"\x1b[0m", b"\xff", b"a\nb"):
        assert parse_bytes(f"hex:{key.hex()}") == key
        text = printable(key)
        assert text is None or parse_bytes(text) == key
    assert printable(b"hex:00") is None and printable(b"\x1b[0m") is None


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_shows_how_far_it_is() -> None:
    times = iter([0.0, 4.0, 8.0, 9.0])
    progress = Progress("working", 10, stream=Terminal(), clock=lambda: next(times))
    progress.done = 5
    assert progress.line() == f"working [{'#' * 15}{'.' * 15}]  50% 4 s"
    progress.done = 20
    assert progress.line() == f"working [{'#' * WIDTH}] 100% 8 s"
    assert Progress("opening", stream=Terminal(), clock=lambda: 0.0).line() == "opening 0 s"


def test_short_work_shows_no_progress() -> None:
    terminal = Terminal()
    with Progress("working", 1, stream=terminal):
        pass
    assert terminal.text == ""


def test_long_work_shows_progress_on_a_terminal_alone(
    tmp_path: Path, run: Any, on_terminal: Any
) -> None:
    few = ("bench", tmp_path, "--seconds", "1", "--max-bytes", "4M")
    code, shown, out = on_terminal(*few, which="stderr")
    assert code == 0 and b"measuring [#" in shown and shown.endswith(b"\r\x1b[K")
    assert out.count(b"measuring") == 0 and b"put_many" in out
    done = run(*few, "--json")
    assert done.stderr == b"" and len(json.loads(done.stdout)["phases"]) == 3
