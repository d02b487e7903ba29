"""Stores of chunk files, and a library in place of hipFile's or cuFile's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_connectors.gpu_direct.choosing import Choice, choose_driver
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.posix_driver import PosixDriver
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import PAYLOAD, PREFIXES, VARIABLES, Standin

HERE = Path(__file__).parent


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-O1", *flags]
    subprocess.run([*command, "-o", str(target), str(source), "-ldl", "-lpthread"], check=True)
    return target


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile one of the C files here, once for each set of flags."""
    made: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("compiled")

    def compile_once(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in made:
            made[key] = compile_c(HERE / name, folder / f"lib{len(made)}.so", *flags)
        return made[key]

    return compile_once


@pytest.fixture(params=["cufile", "hipfile"])
def standin(
    request: pytest.FixtureRequest,
    compiled: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Standin]:
    """A library that is found by its variable, and the other one that is not there."""
    kind = request.param
    found = Standin(kind, compiled("standin.c", f"-DPREFIX={PREFIXES[kind]}"))
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "/nowhere/lib.so")
    monkeypatch.setenv(found.variable, str(found.path))
    monkeypatch.delenv("HIPFILE_ALLOW_COMPAT_MODE", raising=False)
    found.reset()
    yield found
    found.reset()
    # Whatever a test did, its driver ends with it.
    assert found.calls.standin_files() == 0
    assert found.calls.standin_buffers() == 0
    assert found.calls.standin_users() == 0


@pytest.fixture
def directory(tmp_path: Path) -> RootDirectory:
    return RootDirectory(tmp_path / "root")


@pytest.fixture
def make_store(directory: RootDirectory) -> Callable[..., ChunkStore]:
    """A store by O_DIRECT; arguments as ChunkStore's, `namespace` and `directory` too."""

    def make(**options: Any) -> ChunkStore:
        where = options.pop("directory", directory)
        choice = options.pop("choice", None) or Choice(PosixDriver(direct=True), ())
        namespace = options.pop("namespace", "ns")
        options.setdefault("budget_bytes", 64 << 20)
        return ChunkStore(where, choice, namespace, **options)

    return make


@pytest.fixture
def native_store(
    standin: Standin, directory: RootDirectory
) -> Iterator[tuple[ChunkStore, HostMemory]]:
    """A store through the library, and memory registered with it."""
    store = ChunkStore(directory, choose_driver("1", directory), "ns", budget_bytes=64 << 20)
    memory = HostMemory(PAYLOAD)
    store.register(memory)
    yield store, memory
    standin.reset()
    store.unregister(memory)
    store.close()


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(PAYLOAD)
