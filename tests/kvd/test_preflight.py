"""`kvd --check`: every precondition with its remedy, and what start says of the same."""

import ctypes
import json
import resource
import subprocess
import sys

import pytest

from kvd import preflight
from kvd.config import parse

PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14  # prctl(2), capabilities(7).


def check(*flags, limits=()):
    """Run a check in a process of its own; return it and the document it printed."""

    def limit():
        # Root may pin beyond its limit; a program started without the capability may not.
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))

    done = subprocess.run(
        [sys.executable, "-m", "kvd", "--check", "--json", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )
    document = json.loads(done.stdout)
    return done.returncode, document, {each["name"]: each for each in document["findings"]}


@pytest.fixture
def flags(tmp_path):
    return [
        *("--socket", str(tmp_path / "kvd.sock"), "--max-bytes", "16M"),
        *("--long-path", str(tmp_path / "long"), "--long-bytes", "32M"),
    ]


def test_every_precondition_is_printed_with_its_verdict(flags, tmp_path):
    """A peer needed a doctor: start failed on file systems without O_DIRECT, seccomp and so on."""
    status, document, found = check(*flags)
    assert status == 0
    assert document["would_start"] is True
    assert {
        *("flags", "memory", "descriptors", "shared memory", "memlock", "page tables"),
        *("socket", "disk space", "storage", "io_uring", "O_DIRECT"),
    } <= set(found)
    for finding in document["findings"]:
        assert finding["level"] in ("ok", "warn", "fail")
        assert bool(finding["remedy"]) == (finding["level"] != "ok"), finding
    # A check leaves nothing behind.
    assert list(tmp_path.iterdir()) == []


def test_it_is_readable_as_text(flags):
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "--check", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "it would start"
    assert "memlock" in done.stdout


def test_a_memory_tier_larger_than_the_memory_would_not_start():
    """A RAM tier larger than the RAM took a machine down."""
    status, document, found = check("--max-bytes", "900T")
    assert (status, document["would_start"]) == (1, False)
    assert str(900 << 40) in found["flags"]["found"]
    assert "ask for at most" in found["flags"]["remedy"]


def test_few_descriptors_would_not_start(flags):
    status, _, found = check(*flags, limits=[(resource.RLIMIT_NOFILE, 40)])
    assert status == 1
    assert found["descriptors"]["level"] == "fail"
    assert "ulimit -n" in found["descriptors"]["remedy"]


def test_a_live_socket_would_not_start_and_its_daemon_is_unharmed(running):
    status, _, found = check("--socket", running.socket, "--max-bytes", "8M")
    assert status == 1
    assert found["socket"]["level"] == "fail"
    assert str(running.pid) in found["socket"]["found"] + found["socket"]["remedy"]
    with running.client() as client:
        assert client.namespace("m").put(b"k", b"v")


def test_other_slots_than_the_regions_would_not_start(running):
    flags = [*("--socket", running.socket + "2"), *("--long-path", str(running.long_path))]
    status, _, found = check(*flags, "--max-bytes", "8M", "--tablespace-slot-bytes", "32K")
    assert status == 1
    assert "64K" in found["region"]["found"]
    status, _, found = check(*flags, "--max-bytes", "8M", "--long-bytes", "16M")
    assert found["region"]["level"] == "ok"


def test_a_path_that_is_a_file_would_not_start(tmp_path):
    (tmp_path / "file").write_text("")
    status, _, found = check("--long-path", str(tmp_path / "file"))
    assert status == 1
    assert "not a directory" in found["flags"]["found"] + found["flags"]["remedy"]


def test_a_budget_larger_than_the_volume_is_said_with_one_that_fits(tmp_path):
    """A peer looked at the host's disk, filled a smaller volume, and its pod was evicted."""
    config = parse(["--long-path", str(tmp_path / "p"), "--long-bytes", "900T"], {})
    (finding,) = preflight._room(config, config.long_path)
    # The start is refused; under a floor, or as one of several, the path is tried again.
    assert finding.level == "fail"
    assert "900T" in finding.found
    assert "would fit" in finding.remedy
    floor = parse(["--long-path", str(tmp_path / "p"), "--long-bytes=900T", "--free-floor=1"], {})
    assert [each.level for each in preflight._room(floor, floor.long_path)] == ["warn"]
    assert any("can't fit" in warning for warning in preflight.start_warnings(config))
    small = parse(["--long-path", str(tmp_path / "p"), "--long-bytes", "16M"], {})
    assert not any("disk space" in warning for warning in preflight.start_warnings(small))


def test_what_a_region_has_already_counts_as_room(tmp_path, monkeypatch):
    containers = tmp_path / "region" / "containers"
    containers.mkdir(parents=True)
    (containers / "0000.bin").write_bytes(bytes(8 << 20))
    config = parse(["--long-path", str(tmp_path), "--long-bytes", "8M"], {})

    class Full:
        f_bavail, f_frsize = 1024, 4096

    monkeypatch.setattr(preflight.os, "statvfs", lambda path: Full)
    (finding,) = preflight._room(config, config.long_path)
    assert finding.level == "ok"


def test_each_of_several_paths_is_examined(tmp_path):
    """Only the first directory was looked at, and the others failed hours later."""
    paths = [tmp_path / "a", tmp_path / "c"]
    config = parse(
        ["--long-paths", ",".join(map(str, paths)), "--long-bytes", "900T"],
        {},
    )
    warnings = [each for each in preflight.start_warnings(config) if "can't fit" in each]
    assert [str(path) in each for path, each in zip(paths, warnings, strict=True)] == [True] * 2
    assert all("450T asked for" in each for each in warnings)
    found = [each for each in preflight.examine(config) if each.name == "O_DIRECT"]
    assert [str(path) in each.found for path, each in zip(paths, found, strict=True)] == [True] * 2


def test_memory_that_cannot_be_pinned_names_the_limits_to_change(flags):
    """A fallback line that names neither cause nor remedy helps nobody."""
    status, document, found = check(*flags, limits=[(resource.RLIMIT_MEMLOCK, 65536)])
    assert (status, document["would_start"]) == (0, True)
    assert found["memlock"]["level"] == "warn"
    assert "can't be pinned" in found["memlock"]["found"]
    assert "limit 64K" in found["memlock"]["found"]
    assert "LimitMEMLOCK=infinity" in found["memlock"]["remedy"]


def test_large_page_tables_are_said():
    config = parse(["--max-bytes", "16M"], {})
    (small,) = preflight._page_tables(config)
    object.__setattr__(config, "max_bytes", 1 << 40)
    (large,) = preflight._page_tables(config)
    assert (small.level, large.level) == ("ok", "warn")
    assert "2G" in large.found


def test_storage_with_a_warning_says_its_remedy(tmp_path, monkeypatch):
    """Low wsize is said at start with the exact command that mounts it again."""
    kind = preflight.tablespace.classify(tmp_path)
    said = "NFS at /mnt has wsize=4096: every 1 MiB written takes 256 calls; umount /mnt && mount"
    kind = preflight.tablespace.Classification(**{**vars(kind), "warnings": [said]})
    monkeypatch.setattr(preflight.tablespace, "classify", lambda path: kind)
    config = parse(["--long-path", str(tmp_path)], {})
    (finding,) = preflight._storage(config, config.long_path)
    assert (finding.level, "umount /mnt && mount" in finding.remedy) == ("warn", True)
    assert any("umount /mnt && mount" in each for each in preflight.start_warnings(config))


def test_a_refused_io_uring_names_cause_and_remedy(tmp_path, monkeypatch):
    config = parse(["--long-path", str(tmp_path), "--io-mode", "buffered"], {})
    opened = preflight.tablespace.open

    def without_uring(*args, **options):
        return opened(*args, **options, io_engine="posix")

    monkeypatch.setattr(preflight.tablespace, "open", without_uring)
    findings = {each.name: each for each in preflight._transfers(config, config.long_path)}
    assert findings["io_uring"].level == "warn"
    assert "io_uring_disabled" in findings["io_uring"].remedy
    assert findings["O_DIRECT"].remedy or findings["O_DIRECT"].level == "ok"


def test_json_without_check_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--json: goes with --check" in done.stderr
