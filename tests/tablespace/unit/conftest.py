"""Fixtures for the tests of single modules."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace.__main__ import main

import tablespace


class FakeSystem:
    """A sysfs and a procfs in a directory, and a path that is mounted by them."""

    pci = "pci0000:00/0000:00:1f.2"

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.path = root / "data"
        for folder in (self.sys / "dev/block", self.sys / "class/block", self.proc / "self"):
            folder.mkdir(parents=True)
        self.path.mkdir()
        self.lines: list[str] = []
        self.minor = 0

    def disk(self, where: str, **attributes: str) -> Path:
        """Add a block device; names with two underscores are in subdirectories."""
        node = self.sys / "devices" / where
        node.mkdir(parents=True, exist_ok=True)
        self.minor += 1
        self.put(node, "dev", f"259:{self.minor}\n")
        for name, text in attributes.items():
            self.put(node, name.replace("__", "/"), f"{text}\n")
        for link in (
            self.sys / "dev/block" / f"259:{self.minor}",
            self.sys / "class/block" / node.name,
        ):
            link.symlink_to(os.path.relpath(node, link.parent))
        return node

    def put(self, node: Path, name: str, text: str) -> None:
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).write_text(text)

    def stack(self, name: str, *below: Path, **attributes: str) -> Path:
        """Add a virtual device on others."""
        node = self.disk(f"virtual/block/{name}", **attributes)
        (node / "slaves").mkdir(exist_ok=True)
        for each in below:
            (node / "slaves" / each.name).symlink_to(os.path.relpath(each, node / "slaves"))
        return node

    def mount(
        self,
        file_system: str,
        source: str,
        number: str | Path = "0:99",
        options: str = "rw",
        at: Path | None = None,
    ) -> FakeSystem:
        if isinstance(number, Path):
            number = (number / "dev").read_text().strip()
        point, source = (text.replace(" ", "\\040") for text in (str(at or self.path), source))
        self.lines.append(
            f"36 35 {number} / {point} rw,noatime shared:1 - {file_system} {source} {options}\n"
        )
        (self.proc / "self/mountinfo").write_text("".join(self.lines))
        return self

    def classify(self, path: Path | None = None) -> tablespace.Classification:
        return tablespace.classify(
            path or self.path, sys_root=str(self.sys), proc_root=str(self.proc)
        )

    # Kinds of disks, where the kernel puts them.

    def nvme(self, number: int = 0) -> Path:
        name = f"{self.pci}/nvme/nvme{number}/nvme{number}n1"
        return self.disk(name, queue__rotational="0", device__transport="pcie")

    def scsi(
        self, carrier: str, name: str, rotational: str = "0", vendor: str = "SEAGATE"
    ) -> Path:
        return self.disk(
            f"{carrier}/target2:0:0/2:0:0:0/block/{name}",
            queue__rotational=rotational,
            device__vendor=vendor,
        )

    def sata(self, name: str = "sda", rotational: str = "0") -> Path:
        return self.scsi(f"{self.pci}/ata1/host2", name, rotational, "ATA     ")

    def sas(self, name: str = "sdb", rotational: str = "0", vendor: str = "SEAGATE") -> Path:
        carrier = f"{self.pci}/host2/port-2:0/end_device-2:0"
        return self.scsi(carrier, name, rotational, vendor)


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


# Of the commands.

SMALL = {"max_bytes": "256K", "slot_bytes": "4K"}
VALUES = {
    b"alpha": b"one\n",
    b"beta": b"",
    b"beta/2": bytes(range(256)) * 16,
    b"\x00\xff": b"binary key",
    "caf\u00e9".encode(): b"text",
}


@pytest.fixture
def region(tmp_path: Path) -> Path:
    path = tmp_path / "region"
    with tablespace.open(path, **SMALL) as store:
        assert all(store.put_many((key, value, key[:1]) for key, value in VALUES.items()))
    return path


def run_command(*arguments: str | Path, given: bytes = b"", **options: Any) -> Any:
    """Run in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tablespace", *map(str, arguments)],
        input=given,
        capture_output=True,
        check=False,
        timeout=120,
        **options,
    )


class Calls:
    """Runs commands in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def text(self, *arguments: str | Path, code: int = 0) -> str:
        assert main([str(each) for each in arguments]) == code
        out, self.errors = self._capfd.readouterr()
        return out

    def json(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        found = json.loads(self.text(*arguments, "--json", code=code))
        assert isinstance(found, dict)
        return found


@pytest.fixture
def calls(capfd: pytest.CaptureFixture[str]) -> Calls:
    return Calls(capfd)


@pytest.fixture
def values() -> dict[bytes, bytes]:
    """What the fixture `region` holds."""
    return dict(VALUES)


@pytest.fixture
def run() -> Callable[..., Any]:
    """`python -m tablespace` in a process of its own."""
    return run_command


def run_on_terminal(*arguments: str | Path, which: str = "stdout") -> tuple[int, bytes, bytes]:
    """Run with one stream on a terminal; return status, what it showed, and the other stream."""
    outer, inner = pty.openpty()
    other = "stderr" if which == "stdout" else "stdout"
    with subprocess.Popen(
        [sys.executable, "-m", "tablespace", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        **{which: inner, other: subprocess.PIPE},
    ) as child:
        os.close(inner)
        shown = b""
        while True:
            try:
                piece = os.read(outer, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        rest = getattr(child, other).read()
        code = child.wait(timeout=60)
    os.close(outer)
    return code, shown, rest


@pytest.fixture
def on_terminal() -> Callable[..., tuple[int, bytes, bytes]]:
    """The same with one of its streams on a terminal."""
    return run_on_terminal
