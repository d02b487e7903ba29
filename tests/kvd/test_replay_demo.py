"""The demo, at a hundredth of its size, and what it says when it can't run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvd import demo
from kvd.replay.generate import Shape


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(demo, "ARENA_BYTES", 8 << 20)
    monkeypatch.setattr(demo, "REGION_BYTES", 16 << 20)
    shape = Shape(
        conversations=190, concurrent=125, turns=4, message_tokens=4000, system_tokens=2048
    )
    monkeypatch.setattr(demo, "SHAPE", shape)
    monkeypatch.setattr(demo, "REQUESTS", 525)


def test_demo_recovers_what_was_confirmed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = demo.main([f"--dir={tmp_path}"])
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "wrong bytes: 0", shown
    assert status == 0, shown
    assert "recovered, read and equal" in shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "found", "remedy"),
    [
        ("free_bytes", (100 << 20, "the machine"), "stop something"),
        ("free_disk_bytes", 100 << 20, "--dir"),
    ],
)
def test_missing_room_is_named_with_its_remedy(
    function: str,
    found: object,
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, function, lambda *arguments: found)
    assert demo.main([f"--dir={tmp_path}"]) == 1
    shown = capsys.readouterr()
    assert remedy in shown.err
    assert shown.out == "wrong bytes: 0\n"


def test_failing_daemon_is_reported_and_the_last_line_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BLOCK_BYTES", 512)  # No slot size: the daemon refuses it.
    assert demo.main([f"--dir={tmp_path}"]) == 1
    shown = capsys.readouterr()
    assert "kvd demo: " in shown.err
    assert shown.out == "wrong bytes: 0\n"
    assert list(tmp_path.iterdir()) == []


def test_what_the_killed_daemon_does_not_take_looks_like_no_fault(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a block was not stored: unavailable` in the midst of the demo looked like a defect."""
    assert demo.main([f"--dir={tmp_path}"]) == 0
    assert "not stored" not in capsys.readouterr().err
    record = logging.LogRecord(
        "kvd.client", logging.WARNING, "", 0, "not stored: %s%s", ("unavailable", ""), None
    )
    assert demo._as_planned(record)
    assert "as planned" in record.getMessage()
