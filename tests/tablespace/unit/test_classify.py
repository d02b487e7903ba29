"""`classify` over made-up sysfs and procfs trees: every class, stacks, and what may be wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tablespace.io.classify import DEVICE_CLASSES, LOW_WSIZE_BYTES, TREATMENTS
from tablespace.io.mounts import file_system_of, mount_of
from tablespace.io.open import choose_io
from tablespace.io.system_files import SystemFiles
from tablespace.region import HOLDER_BYTES
from tablespace.testing import SimulatedDirectory

import tablespace


def fc(system: Any) -> Path:
    return system.scsi(f"{system.pci}/host7/rport-7:0-1", "sdc", "1")


def iscsi(system: Any, name: str = "sdd", session: int = 1) -> Path:
    return system.scsi(f"platform/host{session}/session{session}", name, "1")


SINGLE = {
    "nvme": lambda system: system.nvme(),
    "nvme over fabrics": lambda system: system.disk("virtual/nvme-subsystem/nvme-subsys0/nvme0n1"),
    "sas": lambda system: system.sas(),
    "sas hdd": lambda system: system.sas(rotational="1"),
    "sata behind a sas host": lambda system: system.sas(vendor="ATA"),
    "sata": lambda system: system.sata(),
    "sata hdd": lambda system: system.sata(rotational="1"),
    "raid controller": lambda system: system.scsi(f"{system.pci}/host0", "sda"),
    "virtio": lambda system: system.disk(
        "pci0000:00/0000:00:02.0/virtio1/block/vda", queue__rotational="1"
    ),
    "virtio-scsi": lambda system: system.scsi("pci0000:00/0000:00:03.0/virtio2/host0", "sda", "1"),
    "usb": lambda system: system.scsi("pci0000:00/usb1/1-1/1-1:1.0/host6", "sde", "1"),
    "iscsi": iscsi,
    "fc": fc,
    "unknown ssd": lambda system: system.disk("vmbus/block/xvda", queue__rotational="0"),
    "unknown hdd": lambda system: system.disk("vmbus/block/xvda", queue__rotational="1"),
    "silent": lambda system: system.disk("virtual/block/zram0"),
}
EXPECTED = {
    "nvme over fabrics": "nvme",
    "sas hdd": "hdd",
    "sata behind a sas host": "sata",
    "sata hdd": "hdd",
    "raid controller": "unknown",
    "virtio-scsi": "virtio",
    "unknown ssd": "unknown",
    "unknown hdd": "hdd",
    "silent": "unknown",
}


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize("partition", [False, True])
def test_a_disk_is_known_by_what_carries_it(system: Any, kind: str, partition: bool) -> None:
    disk = SINGLE[kind](system)
    if partition:
        inside = str(disk.relative_to(system.sys / "devices"))
        disk = system.disk(f"{inside}/{disk.name}p1", partition="1")
    found = system.mount("ext4", f"/dev/{disk.name}", disk).classify()
    assert found.device_class == EXPECTED.get(kind, kind)
    assert found.file_system == "ext4" and found.mount_point == str(system.path)
    assert len(found.chain) == 1 + partition
    assert found.chain[-1].device_class == found.device_class
    treatment = TREATMENTS[found.device_class]
    assert (found.io_mode, found.concurrency) == (treatment.io_mode, treatment.concurrency)


def test_direct_io_is_for_what_queues_deep_and_the_page_cache_for_the_rest() -> None:
    direct = {name for name, each in TREATMENTS.items() if each.io_mode == "direct"}
    assert direct == {"nvme", "sas", "virtio", "weka", "parallel", "fc", "iscsi", "unknown"}
    assert all(1 <= each.concurrency <= 64 for each in TREATMENTS.values())


def test_the_documented_table_is_the_table_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/io.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (direct|buffered) \| (\d+) \| (\d+) \|", page, re.M)
    assert [tuple(row) for row in rows] == [
        (name, each.io_mode, str(each.concurrency), str(each.flush_interval_ms))
        for name, each in TREATMENTS.items()
    ]


def test_of_a_volume_on_two_nvme_and_one_hdd_the_worst_wins(system: Any) -> None:
    disks = [system.nvme(0), system.nvme(1), system.sata(rotational="1")]
    volume = system.stack("dm-0", *disks, dm__uuid="LVM-x", dm__name="vg-data")
    found = system.mount("xfs", "/dev/mapper/vg-data", volume).classify()
    assert found.device_class == "hdd" and found.io_mode == "buffered"
    assert [layer.name for layer in found.chain] == ["dm-0", "nvme0n1", "nvme1n1", "sda"]
    assert "LVM" in found.chain[0].why and "sda" in found.reasons[0]


def test_an_array_of_ssds_is_an_ssd(system: Any) -> None:
    array = system.stack("md0", system.nvme(0), system.nvme(1), md__level="raid1")
    found = system.mount("ext4", "/dev/md0", array).classify()
    assert found.device_class == "nvme"
    assert found.chain[0].why == "an md array (raid1) on nvme0n1, nvme1n1"


def test_an_array_of_sata_ssds_is_sata(system: Any) -> None:
    array = system.stack("md127", system.sata("sda"), system.sas("sdb", vendor="ATA"))
    assert system.mount("ext4", "/dev/md127", array).classify().device_class == "sata"


def test_an_encrypted_volume_on_a_partition_is_what_is_below(system: Any) -> None:
    disk = system.sata()
    part = system.disk(f"{disk.relative_to(system.sys / 'devices')}/sda1", partition="1")
    volume = system.stack("dm-3", part, dm__uuid="CRYPT-LUKS2-0123-data")
    found = system.mount("ext4", "/dev/mapper/data", volume).classify()
    assert found.device_class == "sata"
    assert [layer.name for layer in found.chain] == ["dm-3", "sda1", "sda"]
    assert "dm-crypt" in found.chain[0].why and "partition of sda" in found.chain[1].why


def test_a_multipath_map_over_iscsi_is_iscsi(system: Any) -> None:
    paths = [iscsi(system, "sdd", 1), iscsi(system, "sde", 2)]
    whole = system.stack("dm-0", *paths, dm__uuid="mpath-3600")
    part = system.stack("dm-1", whole, dm__uuid="part1-mpath-3600")
    found = system.mount("ext4", "/dev/mapper/mpatha1", part).classify()
    assert found.device_class == "iscsi" and found.io_mode == "direct"
    assert "multipath" in found.chain[0].why and "multipath" in found.chain[1].why


def test_a_loop_device_is_as_good_as_its_file(system: Any, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    system.mount("ext4", "/dev/sda", system.sata(rotational="1"), at=images)
    loop = system.disk("virtual/block/loop0", loop__backing_file=str(images / "disk.img"))
    found = system.mount("ext4", "/dev/loop0", loop).classify()
    assert found.device_class == "hdd"
    assert [layer.name for layer in found.chain] == ["loop0", "sda"]


def test_a_loop_device_on_its_own_file_ends(system: Any) -> None:
    loop = system.disk("virtual/block/loop0", loop__backing_file=str(system.path / "disk.img"))
    found = system.mount("ext4", "/dev/loop0", loop).classify()
    assert found.device_class == "unknown" and 2 <= len(found.chain) < 20


@pytest.mark.parametrize("several", [False, True])
def test_btrfs_is_found_by_its_source_since_its_numbers_name_no_device(
    system: Any, several: bool
) -> None:
    first, second = system.nvme(0), system.sata(rotational="1")
    if several:
        members = system.sys / "fs/btrfs/0123-uuid/devices"
        members.mkdir(parents=True)
        for each in (first, second):
            (members / each.name).symlink_to(os.path.relpath(each, members))
    found = system.mount("btrfs", f"/dev/{first.name}", "0:38", "rw,subvol=/data").classify()
    assert found.device_class == ("hdd" if several else "nvme")


@pytest.mark.parametrize("source", ["/dev/mapper/my--vg-my--lv", "/dev/my-vg/my-lv"])
def test_a_volume_is_found_by_either_of_its_names(system: Any, source: str) -> None:
    system.stack("dm-0", system.nvme(), dm__uuid="LVM-x", dm__name="my--vg-my--lv")
    found = system.mount("btrfs", source, "0:38").classify()
    assert [layer.name for layer in found.chain] == ["dm-0", "nvme0n1"]
    assert found.device_class == "nvme"


@pytest.mark.parametrize(
    ("file_system", "device_class"),
    [
        ("tmpfs", "tmpfs"),
        ("ramfs", "tmpfs"),
        ("overlay", "overlay"),
        ("nfs", "nfs"),
        ("nfs4", "nfs"),
        ("wekafs", "weka"),
        ("lustre", "parallel"),
        ("cifs", "network"),
        ("virtiofs", "network"),
        ("fuse.sshfs", "network"),
        ("zfs", "unknown"),
    ],
)
def test_a_file_system_without_a_device_is_known_by_its_type(
    system: Any, file_system: str, device_class: str
) -> None:
    found = system.mount(file_system, "somewhere:/export").classify()
    assert (found.device_class, found.file_system) == (device_class, file_system)
    assert found.warnings == []


@pytest.mark.parametrize("seen", [False, True])
def test_an_overlay_is_at_best_an_overlay(system: Any, tmp_path: Path, seen: bool) -> None:
    upper = tmp_path / "upper"
    if seen:
        upper.mkdir()
        system.mount("ext4", "/dev/sda", system.sata(rotational="1"), at=upper)
    found = system.mount("overlay", "overlay", options=f"rw,upperdir={upper}").classify()
    assert found.device_class == ("hdd" if seen else "overlay")
    assert found.io_mode == "buffered" and found.chain[0].device_class == "overlay"


def test_an_overlay_on_nvme_stays_an_overlay(system: Any, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    system.mount("ext4", "/dev/nvme0n1", system.nvme(), at=tmp_path / "upper")
    found = system.mount(
        "overlay", "overlay", options=f"rw,upperdir={tmp_path / 'upper'}"
    ).classify()
    assert [layer.device_class for layer in found.chain] == ["overlay", "nvme"]
    assert found.device_class == "overlay" and found.io_mode == "buffered"


NFS_OPTIONS = (
    "rw,vers={vers},rsize={size},wsize={size},namlen=255,hard,proto=tcp,sec=sys,addr=10.0.0.1"
)


@pytest.mark.parametrize("vers", ["3", "4.2"])
def test_a_low_wsize_is_warned_of_with_the_command_that_mends_it(system: Any, vers: str) -> None:
    kind = "nfs" if vers == "3" else "nfs4"
    options = NFS_OPTIONS.format(vers=vers, size=32768)
    found = system.mount(kind, "filer:/export/a b", options=options).classify()
    (warning,) = found.warnings
    assert "wsize=32768: every 1 MiB written takes 32 calls" in warning
    assert (
        warning.endswith(
            f"umount {system.path} && mount -t {kind} -o rw,noatime,vers={vers},hard,proto=tcp,"
            f"sec=sys,rsize=1048576,wsize=1048576 'filer:/export/a b' {system.path}"
        )
        or "filer:/export/a" in warning
    )


@pytest.mark.parametrize("wsize", ["1048576", str(LOW_WSIZE_BYTES), "", "many", "9" * 40])
def test_a_fair_or_unreadable_wsize_is_not_warned_of(system: Any, wsize: str) -> None:
    found = system.mount("nfs4", "filer:/export", options=f"rw,wsize={wsize}").classify()
    assert found.device_class == "nfs" and found.warnings == []


def test_a_path_that_is_not_there_yet_is_on_its_ancestors_mount(system: Any) -> None:
    system.mount("ext4", "/dev/nvme0n1", system.nvme())
    found = system.classify(system.path / "not" / "yet")
    assert found.device_class == "nvme" and found.path.endswith("/not/yet")


def test_the_deepest_and_latest_mount_counts(system: Any) -> None:
    inner = system.path / "in ner"
    inner.mkdir()
    system.mount("ext4", "/dev/sda", system.sata(), at=inner)
    system.mount("ext4", "/dev/nvme0n1", system.nvme(), at=inner)
    system.mount("tmpfs", "tmpfs")
    assert system.classify(inner / "x").device_class == "nvme"
    assert system.classify().device_class == "tmpfs"


def test_without_mountinfo_the_type_comes_from_statfs(system: Any) -> None:
    files = SystemFiles(str(system.sys), str(system.proc))
    assert mount_of(str(system.path), files).mount_point == ""
    real = file_system_of(str(system.path))
    magic = mount_of(str(system.path), files).file_system
    assert magic in (real, "ext4" if real.startswith("ext") else "", "fuse", "")
    assert system.classify().device_class in ("unknown", "tmpfs", "nfs", "overlay", "network")


# Whatever may be wrong with a system.


def test_a_device_that_sysfs_does_not_have_is_unknown(system: Any) -> None:
    found = system.mount("ext4", "/dev/sdz", "259:77").classify()
    assert found.device_class == "unknown" and "no entry" in found.chain[0].why


def test_broken_links_are_unknown(system: Any) -> None:
    (system.sys / "dev/block/259:5").symlink_to("../../devices/gone/sda")
    assert system.mount("ext4", "/dev/sda", "259:5").classify().device_class == "unknown"
    volume = system.stack("dm-0", system.nvme(), dm__uuid="LVM-x")
    (volume / "slaves/sdq").symlink_to("../../../gone/sdq")
    found = system.mount("ext4", "/dev/dm-0", volume).classify()
    assert found.device_class == "unknown" and len(found.chain) == 3


def test_devices_that_stand_on_each_other_end(system: Any) -> None:
    first, second = system.stack("dm-0"), system.stack("dm-1")
    for one, other in ((first, second), (second, first), (first, first)):
        (one / "slaves" / other.name).symlink_to(os.path.relpath(other, one / "slaves"))
    found = system.mount("ext4", "/dev/dm-0", first).classify()
    assert found.device_class == "unknown" and len(found.chain) == 2
    (system.sys / "dev/block/259:9").symlink_to("259:9")
    assert system.mount("ext4", "/dev/loopy", "259:9").classify().device_class == "unknown"


def test_a_deep_stack_ends(system: Any) -> None:
    below = system.nvme()
    for number in range(60):
        below = system.stack(f"dm-{number}", below)
    found = system.mount("ext4", "/dev/dm-59", below).classify()
    assert found.device_class == "unknown" and "too many" in found.chain[-1].why


def test_files_that_are_directories_or_pipes_say_nothing(system: Any) -> None:
    disk = system.disk("vmbus/block/xvda")
    (disk / "queue/rotational").mkdir(parents=True)
    (disk / "loop").mkdir()
    os.mkfifo(disk / "loop/backing_file")
    found = system.mount("ext4", "/dev/xvda", disk).classify()
    assert found.device_class == "unknown"
    (system.proc / "self/mountinfo").unlink()
    os.mkfifo(system.proc / "self/mountinfo")
    assert system.classify().device_class in DEVICE_CLASSES


def test_what_may_not_be_read_is_unknown(system: Any) -> None:
    """As root every file may be read, so the tree is read by a user who may not."""
    volume = system.stack("dm-0", system.nvme(), dm__uuid="LVM-x")
    system.mount("ext4", "/dev/dm-0", volume)
    (volume / "slaves").chmod(0)
    (system.sys / "devices/virtual").chmod(0)
    script = (
        "import os, sys, tablespace\n"
        "path, sys_root, proc_root, lower = sys.argv[1:]\n"
        "if lower == '1': os.setgid(65534); os.setuid(65534)\n"
        "found = tablespace.classify(path, sys_root=sys_root, proc_root=proc_root)\n"
        "print(found.device_class)\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            str(system.path),
            str(system.sys),
            str(system.proc),
            str(int(os.geteuid() == 0)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    (system.sys / "devices/virtual").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in DEVICE_CLASSES


@pytest.mark.parametrize("path", ["", "\0", "x" * 5000, "/nowhere/\udcff", b"\xff", "/"])
def test_no_path_is_too_strange(path: str | bytes) -> None:
    found = tablespace.classify(path)
    assert found.device_class in DEVICE_CLASSES
    json.dumps(found.path).encode("ascii")


NAMES = """
dm-0 dm-1 sda slaves dev block 259:1 259:2 class queue loop rotational partition backing_file
device transport vendor dm uuid name fs btrfs devices nvme0 ata1 virtio1 usb1 self mountinfo
"""
TOKENS = """
36 0:5 259:1 259:x / - rw ext4 btrfs nfs overlay PATH /dev/sda /dev/mapper/x wsize=1 wsize=-1
upperdir=PATH \\777 : =,,=
"""
paths = st.lists(st.sampled_from(NAMES.split()), min_size=1, max_size=5).map("/".join)
tokens = st.sampled_from(TOKENS.split())
lines = st.one_of(
    st.lists(tokens, max_size=12).map(" ".join),
    st.builds(
        "36 35 {} / PATH rw - {} {} {}".format,
        *([tokens] * 4),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    nodes=st.lists(st.tuples(paths, st.sampled_from("dfl"), st.binary(max_size=20), paths)),
    mountinfo=st.lists(lines, max_size=5),
    noise=st.binary(max_size=50),
)
def test_no_tree_is_too_strange(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: list[tuple[str, str, bytes, str]],
    mountinfo: list[str],
    noise: bytes,
) -> None:
    root = tmp_path_factory.mktemp("strange")
    (root / "self").mkdir()
    for name, kind, content, target in nodes:
        at = root / name
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            if kind == "d":
                at.mkdir()
            elif kind == "f":
                at.write_bytes(content)
            else:
                at.symlink_to(os.path.relpath(root / target, at.parent))
        except OSError:
            continue
    text = "\n".join(mountinfo).replace("PATH", str(root)).encode() + b"\n" + noise
    try:
        (root / "self/mountinfo").write_bytes(text)
    except OSError:
        pass
    found = tablespace.classify(root / "data", sys_root=str(root), proc_root=str(root))
    assert found.device_class in DEVICE_CLASSES and found.io_mode in ("direct", "buffered")
    json.dumps([found.reasons, found.warnings]).encode("ascii")


# What `open` makes of it.


def test_open_follows_the_classification(
    system: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A region on NFS with a small wsize was slow, and nothing at start said why."""
    options = NFS_OPTIONS.format(vers="4.1", size=32768)
    found = system.mount("nfs4", "filer:/export", options=options).classify()
    monkeypatch.setattr("tablespace.io.open.classify", lambda path: found)
    with (
        caplog.at_level(logging.WARNING, "tablespace"),
        tablespace.open(system.path / "region", max_bytes="1M") as store,
    ):
        stats = store.stats()
        store.put(b"key", b"value")
        assert store.get(b"key") == b"value"
    assert stats.io_mode == "buffered"
    assert [each for each in stats.choices if "umount" in each] == found.warnings
    assert len([each for each in caplog.messages if "umount" in each]) == 1
    assert any(each.startswith("storage nfs") for each in stats.choices)


def test_open_on_a_disk_that_seeks_uses_the_page_cache(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = system.mount("ext4", "/dev/sda", system.sata(rotational="1")).classify()
    monkeypatch.setattr("tablespace.io.open.classify", lambda path: found)
    with tablespace.open(system.path / "region", max_bytes="1M") as store:
        assert store.stats().io_mode == "buffered"
        assert "mode buffered, 32 transfers in flight" in "; ".join(store.stats().choices)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_region_works_at_any_concurrency(
    system: Any, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    found = dataclasses.replace(tablespace.classify(system.path), concurrency=concurrency)
    monkeypatch.setattr("tablespace.io.open.classify", lambda path: found)
    values = {b"%d" % at: bytes([at]) * (4096 - at % 3) for at in range(100)}
    with tablespace.open(system.path / "region", max_bytes="1M", slot_bytes="4K") as store:
        assert all(store.put_many(values.items()))
        assert store.get_many(values) == list(values.values())


def test_a_simulated_disk_is_no_disk_of_this_machine() -> None:
    choice = choose_io(SimulatedDirectory(), "buffered", "posix")
    assert choice.concurrency == TREATMENTS["unknown"].concurrency
    assert not any("storage" in reason for reason in choice.reasons)


def test_choices_too_long_for_region_json_leave_the_holder_readable(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the holder was cut at its size, and a record that is cut names nobody."""
    from tablespace.describe import describe_region

    real = tablespace.classify(system.path)
    found = dataclasses.replace(real, warnings=["w" * HOLDER_BYTES, "v" * 100])
    monkeypatch.setattr("tablespace.io.open.classify", lambda path: found)
    with tablespace.open(system.path / "region", max_bytes="1M") as store:
        writer = describe_region(system.path / "region")["writer"]
        assert writer["pid"] == os.getpid() and writer["io_mode"] == store.stats().io_mode
        assert "v" * 100 in store.stats().choices
