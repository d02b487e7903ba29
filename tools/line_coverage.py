"""Measure which lines of journal, snapshot, recovery and commit the tests run, Cython included.

    python tools/line_coverage.py [pytest's arguments]

The engine is built with -Dlinetrace=true into .venv-coverage, where the generated C lies beside
each .pyx: Cython's plugin for coverage.py reads from it which lines can run.  Every file of tests
runs in a process of its own, and how it ended is printed, but whether tests pass is not the point
here: some cannot under a tracer.  The exit status is 0 where the share of lines is at least 95 %.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import DataError
from instrumented_venv import ROOT, build, packages_of

ENVIRONMENT = ROOT / ".venv-coverage"
DATA = ENVIRONMENT / "coverage.data"
PLUGIN = "Cython.Coverage"
TRACER = f"{PLUGIN}.Plugin"
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
    "creations",
    "damaged_values",
    "durability_modes",
    "failed_append",
    "full_disk",
    "interrupts",
    "io_errors",
    "large_groups",
    "lost_files",
    "policy_crashes",
    "recovery_of_damage",
    "reserved_space",
    "rotations_on_a_full_disk",
    "salvage",
    "sequence_points",
    "short_transfers",
)
TESTS = [
    *(f"tests/tablespace/{name}" for name in ("unit", "conformance", "format", "fuzz")),
    *(f"tests/tablespace/crash/test_{name}.py" for name in CRASHES),
    "tests/tablespace/model/test_random_histories.py",
]
# An exception from a signal strikes the tracer as well: coverage.py then drops its plugin, or a
# function that cannot raise loses what the tracer raised. So each of these runs alone.
INTERRUPTS = "signal_anywhere or interrupt"
# Damage to every byte takes an hour under a tracer and runs no line that other damage does not.
LEFT_OUT = "every_byte"
# Every traced line takes the GIL: threads that race each other may take longer than anybody waits.
LIMIT_SECONDS = 240
# Declarations that Cython counts as lines are run at import or never.
SETTINGS = """
[run]
plugins = {plugin}
core = ctrace
parallel = true
sigterm = true
data_file = {data}
include =
{include}
[report]
precision = 1
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


class Tracer:
    """Runs pytest under coverage.py in the instrumented environment.

    Parameters
    ----------
    python : Path
        The environment's interpreter.
    packages : Path
        Where its packages lie. Code objects of Cython name their files relative to it.
    """

    def __init__(self, python: Path, packages: Path) -> None:
        self.python = python
        self.packages = packages
        self.settings = ENVIRONMENT / "coverage.ini"
        include = "".join(f"    {packages}/tablespace/{name}\n" for name in MEASURED)
        self.settings.write_text(SETTINGS.format(data=DATA, plugin=PLUGIN, include=include))
        for old in ENVIRONMENT.glob(f"{DATA.name}*"):
            old.unlink()

    def _coverage(self, command: str, *arguments: str) -> list[str]:
        """Return a command line of coverage.py."""
        run = [str(self.python), "-m", "coverage", command, f"--rcfile={self.settings}"]
        return [*run, *arguments]

    def _pytest(self, *arguments: str) -> list[str]:
        """Return the arguments that run pytest on the project's tests from elsewhere."""
        configuration = ["-c", str(ROOT / "pyproject.toml"), "-o", "timeout=3600"]
        return ["-m", "pytest", "-q", f"--rootdir={ROOT}", *configuration, *arguments]

    def collect(self, *arguments: str) -> list[str]:
        """Return the names of tests, as pytest takes them."""
        found = subprocess.run(
            [str(self.python), *self._pytest("--collect-only", *arguments)],
            cwd=self.packages,
            capture_output=True,
            text=True,
            check=True,
        )
        return [str(ROOT / line) for line in found.stdout.splitlines() if "::" in line]

    def test(self, *arguments: str) -> str:
        """Run tests traced, in a process that is ended in time; return how they ended."""
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen(
                self._coverage("run", *self._pytest(*arguments)),
                cwd=self.packages,
                stdout=log,
                stderr=log,
            )
            try:
                child.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                # What it has run is saved on the way out.
                child.terminate()
                try:
                    child.wait(60)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                return f"ended after {LIMIT_SECONDS} s"
            log.seek(0)
            return log.read().strip().rpartition("\n")[2]

    def _combine(self) -> None:
        """Make one of all processes' data.

        Where the plugin was dropped, modules that ran only after that were measured by no plugin:
        coverage.py combines such data with no other, and it is left out.
        """
        whole = CoverageData(str(DATA))
        if DATA.exists():
            whole.read()
        for path in ENVIRONMENT.glob(f"{DATA.name}.*"):
            part = CoverageData(str(path))
            try:
                part.read()
            except DataError as error:
                # Of a process that had to be killed.
                print(f"left out: {error}", flush=True)
                continue
            wanted = {file for file in part.measured_files() if file.endswith(".py")}
            traced = {
                file: TRACER for file in part.measured_files() if part.file_tracer(file) == TRACER
            }
            whole.add_lines({file: part.lines(file) or () for file in (*wanted, *traced)})
            whole.add_file_tracers(traced)
        whole.write()
        for path in ENVIRONMENT.glob(f"{DATA.name}.*"):
            path.unlink()  # A report would combine it once more.

    def report(self) -> int:
        """Print the lines not run; return 0 where enough were."""
        self._combine()
        report = self._coverage("report", f"--fail-under={LEAST_PERCENT}")
        return subprocess.run(report, cwd=self.packages, check=False).returncode


def main(arguments: list[str]) -> int:
    """Build, run pytest under coverage.py, print the report; return an exit status."""
    python = build(ENVIRONMENT, ["-Dlinetrace=true", "-Ddebug=false", "-Doptimization=1"])
    packages = packages_of(ENVIRONMENT)
    lay_generated_code_beside(packages)
    tracer = Tracer(python, packages)
    chosen = [*(arguments or (str(ROOT / name) for name in TESTS)), "-m", "not long"]
    calm = f"not ({INTERRUPTS} or {LEFT_OUT})"
    files = dict.fromkeys(name.partition("::")[0] for name in tracer.collect(*chosen, "-k", calm))
    jobs = [(file, "-m", "not long", "-k", calm) for file in files]
    jobs += [(name,) for name in tracer.collect(*chosen, "-k", INTERRUPTS)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for (name, *_), ending in zip(
            jobs, pool.map(lambda job: tracer.test(*job), jobs), strict=True
        ):
            print(f"{Path(name).name}: {ending}", flush=True)
    return tracer.report()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
