"""The linter, the formatter and the strict type checker are part of the suite."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", ".")


def test_ruff_would_reformat_nothing() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.parametrize("what", [("-p", "tablespace"), ("-p", "kvd")])
def test_strict_type_checker_finds_nothing(what: tuple[str, ...]) -> None:
    run("mypy", "--strict", *what)


def test_strict_type_checker_finds_nothing_in_the_connectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their folder has another name than what it is installed as.
    (tmp_path / "kvd_connectors").symlink_to(ROOT / "connectors")
    monkeypatch.setenv("MYPYPATH", str(tmp_path))
    run("mypy", "--strict", "-p", "kvd_connectors")
