"""The stubs say what the built modules have: names, parameters, defaults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALLOWED = Path(__file__).parent / "stubtest-allowlist.txt"


def stubtest(path: Path, allowlist: Path, *options: str) -> str:
    """Run stubtest in an empty directory, so that no sources hide the installed package."""
    command = [sys.executable, "-m", "mypy.stubtest", "tablespace", "--concise", "--allowlist"]
    done = subprocess.run(
        [*command, str(allowlist), *options],
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    # stubtest counts its findings in the exit status; what it says of itself is no finding.
    found = [line for line in done.stdout.splitlines() if not line.startswith("Success")]
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "\n".join(found)


def test_the_stubs_fit_the_modules_but_for_what_the_list_allows(tmp_path: Path) -> None:
    assert stubtest(tmp_path, ALLOWED) == ""


def test_the_list_hides_no_class_that_is_missing_or_different(tmp_path: Path) -> None:
    """A class that the list names for its layout alone is checked in everything else."""
    stricter = tmp_path / "stricter.txt"
    stricter.write_text(ALLOWED.read_text().replace("__)?\n", "__)\n"))
    assert stricter.read_text().count(")?\n") == 1
    options = ("--ignore-disjoint-bases", "--ignore-unused-allowlist")
    assert stubtest(tmp_path, stricter, *options) == ""
