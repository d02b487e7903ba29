"""Which driver is taken, and what is said of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_connectors.gpu_direct.choosing import choose_driver
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError

from .chunks import BY_ERRNO, ELSEWHERE, LIE, NOTHING, Standin

NOWHERE = {"KVD_HIPFILE_LIBRARY": "/nowhere/h.so", "KVD_CUFILE_LIBRARY": "/nowhere/c.so"}


def test_auto_takes_a_library_that_works(
    standin: Standin, directory: RootDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choice = choose_driver("auto", directory)
    assert choice.driver.name == standin.kind
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1 and str(standin.path) in said[0]
    assert list(directory.chunks.iterdir()) == [], "the trial left a file"
    choice.driver.close()


FAULTS = [
    ("DriverOpen", 5001, 5001, "not loaded"),
    ("DriverOpen", 5025, 5025, "permission denied"),
    ("BufRegister", 5013, 5013, "memory of this type"),
    ("HandleRegister", 5008, 5008, "this file is not supported"),
    ("HandleRegister", 5020, 5020, "O_DIRECT"),
    ("Write", BY_ERRNO, 22, "Invalid argument"),
    ("Write", 5010, 5010, "kernel's driver failed"),
    ("Read", 5012, 5012, "not one of the GPU's"),
    ("Read", NOTHING, 0, "0 of 65536 bytes"),
    ("Read", LIE, 0, "other bytes"),
    ("Read", ELSEWHERE, 0, "bytes"),
    ("Write", LIE, 0, "bytes"),
    ("BufDeregister", 5030, 5030, "internal error"),
]


@pytest.mark.parametrize(("call", "way", "value", "words"), FAULTS)
def test_auto_goes_on_by_posix_and_says_why_once(
    standin: Standin,
    directory: RootDirectory,
    caplog: pytest.LogCaptureFixture,
    call: str,
    way: int,
    value: int,
    words: str,
) -> None:
    standin.fail(call, way, value)
    choice = choose_driver("auto", directory)
    assert choice.driver.name == "posix-direct"
    (said,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert words in said.getMessage() and standin.kind in said.getMessage()
    assert words in " ".join(choice.reasons)
    assert list(directory.chunks.iterdir()) == []


@pytest.mark.parametrize(("call", "way", "value", "words"), FAULTS)
def test_one_refuses_to_start(
    standin: Standin, directory: RootDirectory, call: str, way: int, value: int, words: str
) -> None:
    standin.fail(call, way, value)
    with pytest.raises(GpuDirectError) as caught:
        choose_driver("1", directory)
    said = str(caught.value)
    assert words in said and "KVD_AIS is 1" in said and "kvd check-gpu-direct" in said


def test_one_names_both_libraries_where_there_are_none(directory: RootDirectory) -> None:
    with pytest.raises(GpuDirectError) as caught:
        choose_driver("1", directory, environment=dict(NOWHERE))
    assert "hipfile: KVD_HIPFILE_LIBRARY" in str(caught.value)
    assert "cufile: KVD_CUFILE_LIBRARY" in str(caught.value)


def test_one_lets_hipfile_take_no_way_round(
    standin: Standin, directory: RootDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it goes through host memory without a word where it cannot go directly."""
    choose_driver("auto", directory).driver.close()
    assert "HIPFILE_ALLOW_COMPAT_MODE" not in os.environ
    choose_driver("1", directory).driver.close()
    assert os.environ["HIPFILE_ALLOW_COMPAT_MODE"] == "false"
    monkeypatch.setenv("HIPFILE_ALLOW_COMPAT_MODE", "true")
    choose_driver("1", directory).driver.close()
    assert os.environ["HIPFILE_ALLOW_COMPAT_MODE"] == "true"


def test_zero_asks_no_library(
    standin: Standin, directory: RootDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choice = choose_driver("0", directory)
    assert choice.driver.name == "posix-direct" and choice.reasons == ()
    assert [each.levelno for each in caplog.records] == [logging.INFO]


def test_a_file_system_without_direct_writes_is_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XFS and others take the flag at open and refuse the first write."""
    directory = RootDirectory(tmp_path / "root")
    real = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    choice = choose_driver("0", directory)
    assert choice.driver.name == "posix-buffered" and choice.driver.open_flags == 0
    (said,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "posix-buffered" in said.getMessage() and "Invalid argument" in said.getMessage()


def test_a_disk_that_takes_nothing_is_an_error(
    directory: RootDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwritev(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(GpuDirectError, match=r"posix-direct: .*posix-buffered: .*Input/output"):
        choose_driver("0", directory)


def test_the_second_library_is_tried_where_the_first_fails(
    compiled: Callable[..., Path], directory: RootDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hip = Standin("hipfile", compiled("standin.c", "-DPREFIX=hipFile"))
    cu = Standin("cufile", compiled("standin.c", "-DPREFIX=cuFile"))
    hip.fail("DriverOpen", 5001)
    choice = choose_driver(
        "auto", directory, environment={each.variable: str(each.path) for each in (hip, cu)}
    )
    assert choice.driver.name == "cufile"
    assert [each.split(":")[0] for each in choice.reasons] == ["hipfile"]
    choice.driver.close()
    hip.reset()
