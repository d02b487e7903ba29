"""What each command says of a command line that cannot be meant: one line, status 2, no traces."""

import json
import os
import subprocess
import sys

import pytest

from kvd.__main__ import COMMANDS, main


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "kvd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "--requests", "banana"], "--requests: must be a whole number, not 'banana'"),
        (["replay", "--speed", "x"], "--speed: must be a number, not 'x'"),
        (["replay", "--seed", "x"], "--seed: must be a whole number"),
        (["replay", "--generate", "zipf=x"], "zipf must be a number, not 'x'"),
        (["replay", "--long-path", "/none"], "/none is no directory"),
        (["replay", "--wat"], "unrecognized arguments: --wat"),
        (["soak", "--minutes", "banana"], "--minutes: must be a number, not 'banana'"),
        (["soak", "--restarts", "-1"], "must not be negative"),
        (["soak", "--long-path", "/none"], "/none is no directory"),
        (["demo", "--dir", "/none"], "/none is no directory"),
        (["size", "--requests", "banana", "t"], "--requests: must be a whole number"),
        (["size"], "name a TRACE, or give --live"),
        (["statctl", "--block-tokens", "x"], "--block-tokens: must be a whole number"),
        (["statctl", "--wat"], "'--wat' is no option"),
        (["top", "--count", "0"], "--count: must be at least 1"),
        (["top", "--interval", "banana"], "--interval: 'banana' is no time"),
        (["top", "--interval", "0"], "--interval takes 0.1 s or more"),
        (["purge", "m", "--older-than", "x"], "--older-than: 'x' is no time"),
        (["check-gpu-direct", "--wat"], "'--wat' is no option and no root"),
        (["classify", ".", "--socket", "S"], "name one path, not '.', '--socket', 'S'"),
    ],
)
def test_usage_is_one_line(capsys, arguments, words):
    """argparse put its usage before some, and its own functions' names into others."""
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith(f"kvd {arguments[0]}: ") and words in line
    assert "_count" not in line and "$" not in line


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    for command in (["demo", "--dir"], ["replay", "--long-path"], ["soak", "--long-path"]):
        assert run(*command, tmp_path / "none").returncode == 2
        assert list(tmp_path.iterdir()) == []


def test_help_names_every_command_and_what_it_takes():
    """`soak` was missing, and `classify --help` showed no PATH."""
    said = run("--help").stdout
    commands = said[said.index("Commands:") :]
    assert all(name in commands for name in COMMANDS)
    assert "kvd classify PATH" in run("classify", "--help").stdout
    assert "matplotlib" in run("size", "--help").stdout


def test_size_does_not_offer_a_generator_that_it_has_not(tmp_path):
    done = run("size", tmp_path / "absent")
    assert done.returncode == 2
    assert "generator" not in done.stderr


def test_statctl_prints_a_document_also_when_it_fails(command, tmp_path):
    for flags, status in ((["--socket", tmp_path / "no.sock"], 1), (["--block-bytes", "x"], 2)):
        found, out, err = command("statctl", *flags, "--json")
        assert found == status
        assert json.loads(out)["error"]["message"] in err


def test_a_path_without_a_region_is_not_answered_with_the_flag_that_was_given(command, tmp_path):
    status, _, err = command("status", "--long-path", tmp_path)
    assert status == 2
    assert "there is no region of kvd in it; name the directory that a daemon has" in err
