"""Measure which lines of journal, snapshot, recovery and commit the tests run, Cython included.

    python tools/line_coverage.py [pytest's arguments]

The engine is built with -Dlinetrace=true into .venv-coverage, where the generated C lies beside
each .pyx: Cython's plugin for coverage.py reads from it which lines can run.  The exit status is
0 only where the tests passed and the share of lines is at least 95 %.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from instrumented_venv import ROOT, build, packages_of

ENVIRONMENT = ROOT / ".venv-coverage"
LEAST_PERCENT = 95
MEASURED = (
    "journal.py",
    "header_line.py",
    "snapshot.py",
    "recovery.py",
    "commit.py",
    "compaction.py",
    "_core/journal_replay.pyx",
    "_core/line_codec.pyx",
    "_core/snapshot_codec.pyx",
    "_core/commit_queue.pyx",
    "_core/victim_list.pyx",
    "io/commit_group.pyx",
    "io/put_request.pyx",
)
CRASHES = (
    "broken_read_queue",
    "damaged_values",
    "failed_append",
    "full_disk",
    "io_errors",
    "large_groups",
    "lost_files",
    "recovery_of_damage",
    "sequence_points",
)
TESTS = [
    *(f"tests/tablespace/{name}" for name in ("unit", "conformance", "format", "fuzz")),
    *(f"tests/tablespace/crash/test_{name}.py" for name in CRASHES),
]
# An exception from a signal strikes the tracer as well, and coverage.py then drops its plugin, or
# a function that cannot raise loses what the tracer raised;
# damage to every byte takes an hour under a tracer and runs no line that other damage does not.
LEFT_OUT = "not signal_anywhere and not interrupt and not every_byte"
# Declarations that Cython counts as lines are run at import or never.
SETTINGS = """
[run]
plugins = Cython.Coverage
core = ctrace
data_file = {data}
include =
{include}
[report]
show_missing = true
exclude_also =
    if TYPE_CHECKING:
    ^cdef extern
"""


def lay_generated_code_beside(packages: Path) -> None:
    """Put each module's generated C where the plugin looks for it."""
    for generated in (ENVIRONMENT / "build").rglob("*.pyx.c"):
        stem = generated.name.removesuffix(".pyx.c")
        (source,) = (packages / "tablespace").rglob(f"{stem}.pyx")
        shutil.copyfile(generated, source.with_suffix(".c"))


def main(arguments: list[str]) -> int:
    """Build, run pytest under coverage.py, print the report; return an exit status."""
    python = build(ENVIRONMENT, ["-Dlinetrace=true", "-Ddebug=false", "-Doptimization=1"])
    packages = packages_of(ENVIRONMENT)
    lay_generated_code_beside(packages)
    settings = ENVIRONMENT / "coverage.ini"
    include = "".join(f"    {packages}/tablespace/{name}\n" for name in MEASURED)
    data = ENVIRONMENT / "coverage.data"
    settings.write_text(SETTINGS.format(data=data, include=include))
    tests = arguments or [*(str(ROOT / name) for name in TESTS), "-m", "not long", "-k", LEFT_OUT]
    coverage = [str(python), "-m", "coverage"]
    # Code objects of Cython name their files relative to the directory of the package.
    tested = subprocess.run(
        [
            *coverage,
            "run",
            f"--rcfile={settings}",
            "-m",
            "pytest",
            "-q",
            f"--rootdir={ROOT}",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-o",
            "timeout=3600",
            *tests,
        ],
        cwd=packages,
        check=False,
    ).returncode
    reported = subprocess.run(
        [*coverage, "report", f"--rcfile={settings}", f"--fail-under={LEAST_PERCENT}"],
        cwd=packages,
        check=False,
    ).returncode
    return tested or reported


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
