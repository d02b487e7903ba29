"""`kvd check-gpu-direct`: machines as trees of files, libraries that are compiled for the test."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.commands import check_gpu_direct
from kvd.gpu_machine import GpuMachine, in_container, look_at_machine
from kvd.gpu_roots import look_at_root

LIBRARY = Path(__file__).parents[1] / "connectors" / "gpu_direct" / "standin.c"
NOWHERE = {"KVD_HIPFILE_LIBRARY": "/nowhere/h.so", "KVD_CUFILE_LIBRARY": "/nowhere/c.so"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Return the environment in which a library is there."""
    folder = tmp_path_factory.mktemp("libraries")

    def build(kind: str) -> dict[str, str]:
        path = folder / f"{kind}.so"
        prefix = {"cufile": "cuFile", "hipfile": "hipFile"}[kind]
        if not path.exists():
            command = ["gcc", "-shared", "-fPIC", f"-DPREFIX={prefix}", "-o", str(path)]
            subprocess.run([*command, str(LIBRARY), "-lpthread"], check=True)
        return {**NOWHERE, f"KVD_{kind.upper()}_LIBRARY": str(path)}

    return build


def make(root: Path, **files: str) -> Path:
    """Make a machine's files; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


AMD = {
    "dev__kfd": "",
    "sys__module__amdgpu__version": "6.16.6\n",
    "opt__rocm__.info__version": "7.2.0\n",
    "proc__kallsyms": "0 T something\n0 t kfd_ais_rw_file [amdgpu]\n",
}
NVIDIA = {
    "dev__nvidiactl": "",
    "dev__nvidia-fs0": "",
    "proc__driver__nvidia__version": "NVRM version: NVIDIA UNIX x86_64  580.65.06  Sun\n",
    "proc__driver__nvidia-fs__version": "version: 2.26 RELEASE\n",
    "usr__local__cuda__version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}',
}


def look(root: Path, environment: dict[str, str], name: str) -> GpuMachine:
    (found,) = [each for each in look_at_machine(root, environment) if each.name == name]
    return found


def test_a_machine_with_all_of_amd(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    found = look(make(tmp_path, **AMD), library("hipfile"), "hipfile")
    assert found.missing == [] and found.notes == []
    assert found.versions == {"amdgpu": "6.16.6", "rocm": "7.2.0"}
    assert found.devices == {"/dev/kfd": "ok"} and found.library.endswith("hipfile.so")


def test_a_machine_with_all_of_nvidia(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    found = look(make(tmp_path, **NVIDIA), library("cufile"), "cufile")
    assert found.missing == [] and found.notes == []
    assert found.versions == {"nvidia": "580.65.06", "nvidia-fs": "2.26", "cuda": "13.0.1"}


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("dev__kfd", "/dev/kfd is absent.*--device /dev/kfd"),
        ("proc__kallsyms", "is not known: /proc/kallsyms is shut"),
    ],
)
def test_each_thing_of_amd_that_is_missing_is_named(
    tmp_path: Path, library: Callable[[str], dict[str, str]], without: str, words: str
) -> None:
    files = {name: text for name, text in AMD.items() if name != without}
    found = look(make(tmp_path, **files), library("hipfile"), "hipfile")
    (text,) = found.missing + found.notes
    assert_matches(words, text)


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


def test_a_kernel_that_cannot_read_files_is_named(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    files = {**AMD, "proc__kallsyms": "0 T something\n"}
    (text,) = look(make(tmp_path, **files), library("hipfile"), "hipfile").missing
    assert "amdgpu-dkms 30.20.1" in text and "CONFIG_PCI_P2PDMA" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_that_is_shut_is_named(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    make(tmp_path, **AMD)
    (tmp_path / "dev/kfd").chmod(0)
    (text,) = look(tmp_path, library("hipfile"), "hipfile").missing
    assert "/dev/kfd may not be opened" in text and "--group-add render" in text


def test_rights_are_asked_of_the_system(
    tmp_path: Path,
    library: Callable[[str], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path, **AMD)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK | os.W_OK)
    found = look(tmp_path, library("hipfile"), "hipfile")
    assert found.devices == {"/dev/kfd": "no permission"}
    assert "groups render and video" in found.missing[0]


def test_nvidia_fs_without_its_devices_is_a_containers(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    files = {name: text for name, text in NVIDIA.items() if "nvidia-fs0" not in name}
    (text,) = look(make(tmp_path, **files), library("cufile"), "cufile").missing
    assert "--device for each /dev/nvidia-fs*" in text and "/run/udev" in text


def test_without_nvidia_fs_it_is_said_that_it_may_be_slow(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    files = {name: text for name, text in NVIDIA.items() if "nvidia-fs" not in name}
    found = look(make(tmp_path, **files), library("cufile"), "cufile")
    assert found.missing == [] and "goes through host memory" in found.notes[0]


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = look(make(tmp_path, **AMD), dict(NOWHERE), "hipfile")
    assert found.library == "" and "/nowhere/h.so" in found.missing[0]


def test_a_driver_that_does_not_start_is_named(
    tmp_path: Path, library: Callable[[str], dict[str, str]]
) -> None:
    import ctypes

    environment = library("cufile")
    controls = ctypes.CDLL(environment["KVD_CUFILE_LIBRARY"])
    controls.standin_fail(b"DriverOpen", 1, 5001, 5001, 1)
    (text,) = look(make(tmp_path, **NVIDIA), environment, "cufile").missing
    assert text.startswith("cuFileDriverOpen: ") and "(5001)" in text
    assert look(tmp_path, environment, "cufile").missing == []
    assert controls.standin_users() == 0, "the driver was left open"


@pytest.mark.parametrize("file", [".dockerenv", "run__.containerenv"])
def test_a_container_is_seen(tmp_path: Path, file: str) -> None:
    assert not in_container(tmp_path)
    assert in_container(make(tmp_path, **{file: ""}))


# -- roots -------------------------------------------------------------------------------------


def classified(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    import kvd.gpu_roots as module
    from tablespace import classify

    def classify_as(path: str) -> Any:
        import dataclasses

        return dataclasses.replace(classify(path), **facts)

    monkeypatch.setattr(module, "classify", classify_as)


def test_a_root_on_nvme_has_nothing_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for system in ("ext4", "xfs"):
        classified(monkeypatch, device_class="nvme", file_system=system, chain=[])
        found = look_at_root(tmp_path)
        assert (found.missing, found.direct, found.file_system) == ([], "yes", system)
    assert list(tmp_path.iterdir()) == [], "the trial left a file"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"device_class": "nvme", "file_system": "btrfs"}, "is on btrfs"),
        ({"device_class": "sata", "file_system": "ext4"}, "is on sata, not NVMe"),
        ({"device_class": "nfs", "file_system": "nfs4"}, "is on nfs4"),
        ({"device_class": "overlay", "file_system": "overlay"}, "is on overlay"),
    ],
)
def test_storage_that_a_gpu_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], words: str
) -> None:
    classified(monkeypatch, chain=[], **facts)
    (text,) = look_at_root(tmp_path).missing
    assert words in text and "Remedy" in text


@pytest.mark.parametrize("option", ["data=journal", "data=writeback"])
def test_a_mount_option_that_hipfile_does_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    import kvd.gpu_roots as module

    classified(monkeypatch, device_class="nvme", file_system="ext4", chain=[])
    monkeypatch.setattr(module, "_mount_options", lambda mount_point: {"rw", option})
    (text,) = look_at_root(tmp_path).missing
    assert option in text


def test_options_are_those_of_the_mount() -> None:
    from kvd.gpu_roots import _mount_options

    assert _mount_options("/proc") & {"rw", "ro"} and not _mount_options("/no such place")


def test_a_root_without_direct_writes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    classified(monkeypatch, device_class="nvme", file_system="xfs", chain=[])
    monkeypatch.setattr(os, "pwrite", pwrite)
    (text,) = look_at_root(tmp_path).missing
    assert "O_DIRECT does not work" in text and "Invalid argument" in text


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "is no directory" in look_at_root(tmp_path / "none").missing[0]


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[GpuMachine]:
    found = [GpuMachine(name="hipfile", missing=["no GPU"]), GpuMachine(name="cufile")]
    monkeypatch.setattr(check_gpu_direct, "look_at_machine", lambda: found)
    for name in check_gpu_direct.ROOTS:
        monkeypatch.delenv(name, raising=False)
    return found


def test_one_library_that_has_all_is_enough(
    machine: list[GpuMachine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_gpu_direct.main([]) == 0
    shown = capsys.readouterr().out
    assert "none named" in shown and "as far as can be seen" in shown
    machine[1].missing.append("no cuFile")
    assert check_gpu_direct.main([]) == 1
    shown = capsys.readouterr().out
    assert "no cuFile" in shown and "no GPU" in shown


def test_a_root_that_is_unfit_is_enough_to_fail(
    machine: list[GpuMachine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    classified(monkeypatch, device_class="nvme", file_system="ext4", chain=[])
    assert check_gpu_direct.main([str(tmp_path)]) == 0
    monkeypatch.setenv("KVD_HIPFILE_ROOTS", f"long={tmp_path},short={tmp_path}/none")
    capsys.readouterr()
    assert check_gpu_direct.main(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ready"] is False
    assert [each["path"] for each in document["roots"]] == [str(tmp_path), f"{tmp_path}/none"]
    assert [bool(each["missing"]) for each in document["roots"]] == [False, True]
    assert {each["name"] for each in document["libraries"]} == {"hipfile", "cufile"}


def test_this_machine_is_looked_at_without_a_fuss(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu_direct.main(["--json"]) in (0, 1)
    assert set(json.loads(capsys.readouterr().out)) == {"container", "libraries", "ready", "roots"}
