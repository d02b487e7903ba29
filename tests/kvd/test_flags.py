"""Flags and commands: each mistake is named together with its remedy."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd import machine_memory
from kvd.config import parse
from kvd.errors import ConfigError


def _run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvd", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_flag_is_required():
    config = parse([])
    assert config.long_path is None
    assert config.slot_bytes == 65536
    assert 0 < config.max_bytes <= 8 << 30
    assert any("--max-bytes" in note for note in config.notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-bytes", "lots"], ["--max-bytes lots", "8G"]),
        (["--max-bytes", "-1"], ["--max-bytes"]),
        (["--max-bytes", "0"], ["--max-bytes"]),
        (["--max-bytes", "4K"], ["--max-bytes 4K", "64K"]),
        (["--tablespace-slot-bytes", "5000"], ["--tablespace-slot-bytes", "multiple of 4K"]),
        (["--tablespace-slot-bytes", "1T"], ["--tablespace-slot-bytes", "32M"]),
        (["--long-bytes", "x", "--long-path", "/tmp/kvd-none/p"], ["--long-bytes x"]),
        (["--long-bytes", "4K", "--long-path", "/tmp/kvd-none/p"], ["--long-bytes 4K"]),
        (["--long-path", "/etc/passwd"], ["--long-path", "not a directory"]),
        (["--long-path", ""], ["--long-path", "empty"]),
        (["--drain-timeout", "soon"], ["--drain-timeout soon", "20s"]),
        (["--long-path", "/tmp/a", "--long-paths", "/tmp/b"], ["--long-paths", "one of them"]),
        (["--long-paths", "/tmp/kvd-a,/tmp/kvd-a"], ["--long-paths", "twice"]),
        (["--long-paths", "/tmp/kvd-a,,"], ["--long-paths", "empty"]),
        (["--long-paths", "/tmp/kvd-a,/tmp/kvd-b", "--long-bytes", "64K"], ["each of 2 paths"]),
        (["--follow", "/tmp/kvd-a"], ["--follow", "--long-path"]),
        (["--long-path", "/tmp/kvd-a", "--follow", "/tmp/kvd-a"], ["--follow", "own path"]),
        (["--tablespace-slot-bytes", "64K,5000"], ["--tablespace-slot-bytes 64K,5000"]),
        (["--tablespace-container-bytes", "5000"], ["--tablespace-container-bytes", "4K"]),
        (["--tablespace-flush-interval-ms", "x"], ["--tablespace-flush-interval-ms x", "60000"]),
        (["--long-workers-per-shard", "0"], ["--long-workers-per-shard 0", "from 1"]),
        (["--long-timeout-ms", "-1"], ["--long-timeout-ms -1"]),
        (["--scrub-rate", "fast"], ["--scrub-rate fast"]),
        (["--write-budget", "-3"], ["--write-budget -3"]),
        (["--free-floor", "some"], ["--free-floor some"]),
        (["--long-path", "/tmp/kvd-\udcff"], ["--long-path", "not UTF-8"]),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(flags, words):
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    for word in words:
        assert word in str(caught.value)


def test_more_memory_than_there_is_is_refused_with_both_numbers():
    free, _ = machine_memory.free_bytes()
    done = _run("--max-bytes", "900T")
    assert done.returncode == 2
    assert str(900 << 40) in done.stderr
    assert str(free)[:2] in done.stderr
    assert "free" in done.stderr


def test_bad_usage_exits_with_two():
    for arguments in (
        ["--no-such-flag"],
        ["--io-mode", "magic"],
        ["--max-bytes", "x"],
        ["fly"],
        ["--max", "1G"],
    ):
        done = _run(*arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert "replay" in _run("fly").stderr


def test_help_names_every_flag():
    done = _run("--help")
    assert done.returncode == 0
    for flag in (
        "--socket",
        "--max-bytes",
        "--long-path",
        "--long-bytes",
        "--tablespace-slot-bytes",
        "--io-mode",
        "--long-paths",
        "--follow",
        "--tablespace-container-bytes",
        "--tablespace-flush-interval-ms",
        "--long-workers-per-shard",
        "--long-timeout-ms",
        "--recover",
        "--scrub-rate",
        "--admission",
        "--write-budget",
        "--free-floor",
        "--log-level",
        "--drain-timeout",
    ):
        assert flag in done.stdout


def test_sizes_take_suffixes(tmp_path):
    config = parse(["--max-bytes", "16M", "--long-path", str(tmp_path), "--long-bytes", "1G"])
    assert (config.max_bytes, config.long_bytes) == (16 << 20, 1 << 30)
    assert parse(["--drain-timeout", "7.5s"]).drain_timeout_s == 7.5


def test_a_long_tier_smaller_than_memory_is_advised_against(tmp_path):
    config = parse(["--max-bytes", "16M", "--long-path", str(tmp_path), "--long-bytes", "8M"])
    assert any("churn" in note for note in config.notes)


def test_another_slot_size_for_a_region_is_refused_naming_the_region(daemons):
    daemon = daemons().start()
    assert daemon.stop() == 0
    done = _run(
        "--socket",
        daemon.socket,
        "--max-bytes",
        "8M",
        "--long-path",
        str(daemon.long_path),
        "--long-bytes",
        "16M",
        "--tablespace-slot-bytes",
        "32K",
    )
    assert done.returncode == 2
    assert str(daemon.long_path) in done.stderr
    assert not Path(daemon.socket).exists()


class TestMachineMemory:
    def _tree(self, root, cgroup):
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1000 kB\n")
        (root / "proc/self/cgroup").write_text(cgroup)

    def test_the_tightest_limit_on_the_way_up_counts(self, tmp_path):
        self._tree(tmp_path, "0::/a/b\n")
        leaf = tmp_path / "sys/fs/cgroup/a/b"
        leaf.mkdir(parents=True)
        (leaf / "memory.max").write_text("max\n")
        (leaf / "memory.current").write_text("5\n")
        (leaf.parent / "memory.max").write_text("600000\n")
        (leaf.parent / "memory.current").write_text("500000\n")
        (leaf.parent / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
        free, bound = machine_memory.free_bytes(tmp_path)
        assert free == 101_000
        assert str(leaf.parent) in bound

    def test_a_high_mark_bounds_as_a_limit_does(self, tmp_path):
        self._tree(tmp_path, "0::/\n")
        root = tmp_path / "sys/fs/cgroup"
        root.mkdir(parents=True)
        (root / "memory.max").write_text("max\n")
        (root / "memory.high").write_text("400000\n")
        (root / "memory.current").write_text("100000\n")
        assert machine_memory.free_bytes(tmp_path)[0] == 300_000

    def test_a_version_one_path_of_another_namespace_leaves_the_root_to_count(self, tmp_path):
        """In a container /proc names the host's path, and its own limit is at the mount's root."""
        self._tree(tmp_path, "4:cpu,memory:/docker/abc\n")
        root = tmp_path / "sys/fs/cgroup/memory"
        root.mkdir(parents=True)
        (root / "memory.limit_in_bytes").write_text("300000")
        (root / "memory.usage_in_bytes").write_text("100000")
        (root / "memory.stat").write_text("total_inactive_file 50000\n")
        assert machine_memory.free_bytes(tmp_path)[0] == 250_000

    def test_version_one_hierarchies_are_read_too(self, tmp_path):
        self._tree(tmp_path, "4:memory:/job\n0::/\n")
        leaf = tmp_path / "sys/fs/cgroup/memory/job"
        leaf.mkdir(parents=True)
        (leaf / "memory.limit_in_bytes").write_text("300000")
        (leaf / "memory.usage_in_bytes").write_text("100000")
        assert machine_memory.free_bytes(tmp_path)[0] == 200_000

    def test_without_a_limit_the_machine_counts(self, tmp_path):
        self._tree(tmp_path, "4:memory:/\n")
        assert machine_memory.free_bytes(tmp_path) == (1_024_000, "the machine")

    def test_reserved_huge_pages_count_by_themselves(self, tmp_path):
        """They are not among the free memory, which would then refuse the arena they hold."""
        assert machine_memory.reserved_huge_bytes(tmp_path) == 0
        pages = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
        pages.mkdir(parents=True)
        (pages / "free_hugepages").write_text("10\n")
        (pages / "resv_hugepages").write_text("4\n")
        assert machine_memory.reserved_huge_bytes(tmp_path) == 6 * (2 << 20)


def test_statctl_prints_counters_and_the_likely_reason(running):
    def statctl(*flags):
        return subprocess.run(
            [sys.executable, "-m", "kvd.statctl", "--socket", running.socket, *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    first = statctl()
    assert first.returncode == 0
    assert "sets_total" in first.stdout
    assert "no engine is connected" in first.stdout
    # It counted itself above the line that nobody is connected.
    assert re.search(r"^sessions +0$", first.stdout, re.MULTILINE)
    # What `tablespace info` takes is the region's directory, not the long path.
    assert f"{running.long_path}/region" in first.stdout
    with running.client(engine="vllm") as client:
        blocks = client.namespace("m")
        blocks.put(b"k", b"v")
        assert json.loads(statctl("--json").stdout)["engines"] == 1
        blocks.get(b"other")
        assert "hash seed" in statctl().stdout
        blocks.get(b"k")
        document = json.loads(statctl("--json").stdout)
    assert document["hits_total"] == 1
    assert document["misses_total"] == 1
    assert document["gets_total"] == 2
    assert document["memory"]["hits"] == 1
    assert document["no_hits_reason"] is None
    assert "first hit" in running.log


def test_statctl_without_a_daemon_exits_with_one(tmp_path):
    done = _run("statctl", "--socket", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "start one there (python -m kvd" in done.stderr


def test_the_banner_says_how_to_connect(running):
    assert f"KVD_SOCKET={running.socket}" in running.log
    assert "128 slots of 64K" in running.log
    assert f"{running.long_path}/region," in running.log
    assert "first hit" in running.log
