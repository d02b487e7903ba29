"""Name what this machine lacks to build the project, with the remedy; runs on any Python 3."""

import os
import shutil
import sys
import sysconfig


def missing():
    """Return one sentence for each thing that is not there."""
    found = []
    if sys.version_info < (3, 10):
        found.append(
            "Python >= 3.10 is needed, %s is %d.%d. Remedy: make PYTHON=python3.12 (or another)"
            % (sys.executable, sys.version_info[0], sys.version_info[1])
        )
        return found
    if not sys.platform.startswith("linux"):
        found.append("Linux is needed: io_uring, O_DIRECT, memfd and flock are its interfaces")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        found.append("No C compiler. Remedy on Debian or Ubuntu: apt-get install gcc libc6-dev")
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        found.append(
            "Python.h is missing (%s). Remedy on Debian or Ubuntu: apt-get install python3-dev"
            % header
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        found.append("The venv module is missing. Remedy: apt-get install python3-venv")
    return found


if __name__ == "__main__":
    problems = missing()
    for problem in problems:
        sys.stderr.write("preflight: " + problem + "\n")
    sys.exit(1 if problems else 0)
