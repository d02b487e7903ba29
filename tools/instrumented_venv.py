"""An environment of its own for the engine built another way: sanitizers, coverage.

It holds that build alone and borrows every other package from the environment that runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "tablespace"


def packages_of(environment: Path) -> Path:
    """Return the directory of an environment's packages."""
    return Path(
        sysconfig.get_path("purelib", "posix_prefix", {"base": str(environment), "platbase": ""})
    )


def build(environment: Path, options: list[str], source: Path = ENGINE) -> Path:
    """Build and install the engine into an environment; what is up to date is not built again.

    Parameters
    ----------
    environment : Path
        Made where it is missing.
    options : list of str
        For ``meson setup``, such as ``-Db_sanitize=thread``.
    source : Path
        The engine's project.

    Returns
    -------
    Path
        The environment's interpreter.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=False, symlinks=True)
    packages = packages_of(environment)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(borrowed)))
    scripts = sysconfig.get_path("scripts")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command += ["--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    command += ["--force-reinstall", f"-Cbuild-dir={environment / 'build'}"]
    command += [f"-Csetup-args={option}" for option in options]
    environ = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*command, str(source)], env=environ, check=True)
    return python


def native_modules(environment: Path) -> list[Path]:
    """Return the engine's native modules of an environment."""
    return sorted((packages_of(environment) / "tablespace").rglob("*.so"))
