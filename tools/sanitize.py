"""Run tests with the engine built under a sanitizer of gcc; fail when it has anything to report.

    python tools/sanitize.py {address,thread} [pytest's arguments]

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, `thread` is ThreadSanitizer.  The
exit status is 0 only where the tests passed and no process of theirs left a report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from instrumented_venv import ROOT, build, native_modules

SUPPRESSIONS = ROOT / "tests" / "sanitizers" / "thread.supp"


@dataclass(frozen=True)
class Sanitizer:
    """How one kind of build is made, recognised and run."""

    environment: str
    flags: str
    libraries: tuple[str, ...]
    # A symbol that every instrumented module refers to.
    trace: bytes
    variables: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


SANITIZERS = {
    "address": Sanitizer(
        ".venv-asan",
        "address,undefined",
        ("libasan.so", "libubsan.so"),
        b"__asan_",
        # The interpreter frees little at its end, so leaks are looked for by other means.
        options={
            "ASAN_OPTIONS": "detect_leaks=0",
            # Beside AddressSanitizer its reports go to stderr whatever log_path says, so the
            # first one ends the process.
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    ),
    "thread": Sanitizer(
        ".venv-tsan",
        "thread",
        ("libtsan.so",),
        b"__tsan_",
        # Tests fork with threads running; a child of theirs only ends or execs.
        options={"TSAN_OPTIONS": f"die_after_fork=0:suppressions={SUPPRESSIONS}"},
    ),
}


def library(name: str) -> str:
    """Return the path of a runtime library of gcc."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        raise SystemExit(f"gcc has no {name}. Remedy: install gcc's sanitizer libraries")
    return found


def environ_of(sanitizer: Sanitizer, reports: Path) -> dict[str, str]:
    """Return the variables under which an instrumented module can be loaded."""
    environ = {**os.environ, **sanitizer.variables}
    environ["LD_PRELOAD"] = " ".join(map(library, sanitizer.libraries))
    # Python's own allocator would hide what happens within its arenas.
    environ["PYTHONMALLOC"] = "malloc"
    for name, value in sanitizer.options.items():
        environ[name] = f"{value}:log_path={reports / name.lower()}"
    return environ


def run(kind: str, arguments: list[str]) -> int:
    """Build, run pytest, print what was reported; return an exit status."""
    sanitizer = SANITIZERS[kind]
    environment = ROOT / sanitizer.environment
    # Frames and lines in reports need symbols; more than -O1 blurs them and takes long to compile.
    python = build(
        environment,
        [
            f"-Db_sanitize={sanitizer.flags}",
            "-Db_lundef=false",
            "-Ddebug=true",
            "-Doptimization=1",
        ],
    )
    modules = native_modules(environment)
    plain = [path.name for path in modules if sanitizer.trace not in path.read_bytes()]
    if plain or not modules:
        raise SystemExit(f"not instrumented: {plain or 'no module at all'}")
    with tempfile.TemporaryDirectory(prefix="sanitizer-") as folder:
        reports = Path(folder)
        done = subprocess.run(
            # Python's streams alone are captured: what native code says is to be seen.
            [str(python), "-m", "pytest", "-o", "timeout=900", "--capture=sys", *arguments],
            cwd=ROOT,
            env=environ_of(sanitizer, reports),
            check=False,
        )
        found = sorted(reports.iterdir())
        for path in found:
            print(f"--- {path.name}\n{path.read_text(errors='replace')}", flush=True)
    print(f"{kind}: pytest ended with {done.returncode}, {len(found)} reports", flush=True)
    return int(done.returncode != 0 or bool(found))


def main(arguments: list[str]) -> int:
    """Read the kind, run, return the exit status."""
    if not arguments or arguments[0] not in SANITIZERS:
        raise SystemExit(__doc__)
    return run(arguments[0], arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
