"""Fixtures for the storage engine's tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tablespace.io.directory import PosixDirectory
from tablespace.io.open import choose_io
from tablespace.testing.broken import broken

import tablespace

# Builds a shim of the support folder by its name; returns the LD_PRELOAD to run under.
Preload = Callable[[str], str]
SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="session", autouse=True)
def break_a_rule() -> Iterator[None]:
    """Break the rule of durability that TABLESPACE_BROKEN_RULE names, for the whole run."""
    name = os.environ.get("TABLESPACE_BROKEN_RULE")
    with broken(name) if name else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def switch_threads_at() -> Iterator[None]:
    """Let threads take turns at the interval in SWITCH_INTERVAL_S, where it is set."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(float(os.environ.get("SWITCH_INTERVAL_S", before)))
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def open_small(tmp_path: Path) -> Iterator[Callable[..., tablespace.Store]]:
    """Open a region of 4 containers x 16 slots of 4 KiB; every store is closed at the end."""
    opened: list[tablespace.Store] = []

    def opener(path: Path | None = None, **options: Any) -> tablespace.Store:
        options = {"max_bytes": "256K", "slot_bytes": "4K", **options}
        store = tablespace.open(path or tmp_path / "region", **options)
        opened.append(store)
        return store

    yield opener
    for store in opened:
        store.close()


@pytest.fixture
def support() -> Path:
    """The directory of scripts and shims that tests run in other processes."""
    return SUPPORT


@pytest.fixture
def preload(tmp_path: Path, support: Path) -> Preload:
    """Return a function that builds a shim of the support folder and names it for LD_PRELOAD."""

    def build(name: str) -> str:
        shim, source = tmp_path / f"{name}.so", support / f"{name}.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
        # Behind what is preloaded already: a sanitizer's runtime must come first.
        return f"{os.environ.get('LD_PRELOAD', '')} {shim}".strip()

    return build


def refusal(path: Path, mode: str = "auto", engine: str = "auto") -> str | None:
    """Return why this machine refuses an IO mode or engine under a path, or None."""
    try:
        choose_io(PosixDirectory(path), mode, engine)
    except OSError as error:
        return str(error)
    return None


@pytest.fixture
def need_direct(tmp_path: Path) -> None:
    """Skip, with the reason, where the file system of the tests refuses O_DIRECT."""
    (tmp_path / "containers").mkdir()
    reason = refusal(tmp_path, mode="direct")
    (tmp_path / "containers").rmdir()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def need_direct_by_default(tmp_path: Path) -> None:
    """Skip, with the reason, where O_DIRECT is not what is chosen under the tests' directory."""
    (tmp_path / "containers").mkdir()
    choice = choose_io(PosixDirectory(tmp_path), "auto", "posix")
    (tmp_path / "containers").rmdir()
    if not choice.direct:
        pytest.skip("; ".join(choice.reasons))


@pytest.fixture
def need_uring(tmp_path: Path) -> None:
    """Skip, with the reason, where io_uring is refused."""
    reason = refusal(tmp_path, mode="buffered", engine="uring")
    if reason is not None:
        pytest.skip(reason)
