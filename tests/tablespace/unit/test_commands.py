"""``python -m tablespace``: text, JSON and exit status of each command, and how it fails."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tablespace.__main__ import main
from tablespace.commands.parser import build_parser
from tablespace.io.scratch import SCRATCH_PREFIX

import tablespace

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"max_bytes": "256K", "slot_bytes": "4K"}
GOLDEN = ROOT / "tests/tablespace/format/golden/v1"
COMMANDS = ("info", "ls", "get", "put", "rm", "check", "compact", "bench", "classify")
# Looking.


def test_info_describes_a_region_and_its_writer(region: Path, calls: Any) -> None:
    assert "4 containers of 64K" in calls.text("info", region)
    found = calls.json("info", region)
    assert found["slot_bytes"] == [4096] and found["capacity"] == 64
    assert found["missing_containers"] == [] and found["writer"]["pid"] == os.getpid()
    (region / "containers" / "0002.bin").unlink()
    assert "0002.bin" in calls.text("info", region, code=1)


def test_info_works_beside_a_writer_and_writes_nothing(region: Path, calls: Any) -> None:
    with tablespace.open(region, **SMALL) as store:
        store.put(b"more", b"x")
        before = {path: path.stat().st_mtime_ns for path in region.rglob("*")}
        assert calls.json("info", region)["writer_alive"] is True
        assert {path: path.stat().st_mtime_ns for path in region.rglob("*")} == before


def test_reading_works_beside_a_writer_and_writes_nothing(region: Path, calls: Any) -> None:
    with tablespace.open(region, **SMALL):
        before = {path: path.stat().st_mtime_ns for path in region.rglob("*")}
        for command in (("ls", region), ("get", region, "alpha")):
            calls.text(*command, code=0)
        assert {path: path.stat().st_mtime_ns for path in region.rglob("*")} == before


def test_ls_lists_every_key_in_order(region: Path, calls: Any, values: dict[bytes, bytes]) -> None:
    text = calls.text("ls", region).splitlines()
    assert [line.split()[0] for line in text[1:-1]] == [
        f"hex:{key.hex()}" for key in sorted(values)
    ]
    assert text[1].endswith("-") and text[2].endswith("alpha") and text[-1] == "5 keys"
    assert calls.text("ls", region, "--prefix", "alpha").splitlines()[-1] == "1 key"
    found = calls.json("ls", region)
    assert (found["total"], found["shown"]) == (5, 5)
    assert [bytes.fromhex(row["key"]) for row in found["entries"]] == sorted(values)
    with tablespace.open(region, **SMALL) as store:
        for row in found["entries"]:
            key = bytes.fromhex(row["key"])
            entry = store.stat(key)
            assert entry is not None and row["length"] == len(values[key])
            assert (row["container"], row["slot"]) == (entry.container, entry.slot)
            assert row["checksum"] == f"{tablespace.checksum64(values[key]):016x}"
            assert bytes.fromhex(row["metadata"]) == key[:1]


def test_ls_takes_a_prefix_and_a_limit(region: Path, calls: Any) -> None:
    for prefix in ("beta", "hex:62657461"):
        found = calls.json("ls", region, "--prefix", prefix)
        assert [row["text"] for row in found["entries"]] == ["beta", "beta/2"]
    found = calls.json("ls", region, "--limit", "2")
    assert (found["total"], found["shown"], len(found["entries"])) == (5, 2, 2)
    assert "3 more not shown" in calls.text("ls", region, "--limit", "2")
    assert calls.json("ls", region, "--prefix", "zzz")["entries"] == []
    assert calls.json("ls", region, "--limit", "0")["entries"] == []


def test_ls_of_the_golden_region_is_what_it_holds(tmp_path: Path, calls: Any) -> None:
    shutil.copytree(GOLDEN / "region", tmp_path / "region")
    expected = json.loads((GOLDEN / "expected.json").read_text())
    found = calls.json("ls", tmp_path / "region")
    assert {row["key"]: row["metadata"] for row in found["entries"]} == {
        key: metadata for key, (_, metadata) in expected.items()
    }
    assert [row["key"] for row in found["entries"]] == sorted(expected)
    for row in found["entries"]:
        value = calls.json("get", tmp_path / "region", f"hex:{row['key']}")["value_base64"]
        data = base64.b64decode(value)
        assert f"{tablespace.checksum64(data):016x}" == row["checksum"]


def test_get_writes_the_value_and_nothing_else(
    region: Path, run: Any, values: dict[bytes, bytes]
) -> None:
    done = run("get", region, "beta/2")
    assert (done.returncode, done.stdout, done.stderr) == (0, values[b"beta/2"], b"")
    assert run("get", region, "hex:00ff").stdout == b"binary key"
    assert run("get", region, "caf\u00e9").stdout == b"text"


def test_get_into_a_file_and_as_json(
    region: Path, tmp_path: Path, calls: Any, values: dict[bytes, bytes]
) -> None:
    assert calls.text("get", region, "beta/2", "-o", tmp_path / "out") == ""
    assert (tmp_path / "out").read_bytes() == values[b"beta/2"]
    found = calls.json("get", region, "beta/2")
    assert base64.b64decode(found["value_base64"]) == values[b"beta/2"]
    assert (found["found"], found["length"], found["metadata"]) == (True, 4096, "62")
    found = calls.json("get", region, "beta", "-o", tmp_path / "out")
    assert found["file"] == str(tmp_path / "out") and "value_base64" not in found
    assert (tmp_path / "out").read_bytes() == b""


def test_get_of_an_absent_key_is_status_1(region: Path, calls: Any) -> None:
    assert calls.text("get", region, "nowhere", code=1) == ""
    assert calls.errors == f"tablespace: key hex:{b'nowhere'.hex()} is absent\n"
    assert calls.json("get", region, "nowhere", code=1)["found"] is False


def test_get_of_a_damaged_value_is_status_1(region: Path, calls: Any) -> None:
    rows = {row["text"]: row for row in calls.json("ls", region)["entries"]}
    row = rows["beta/2"]
    with open(region / "containers" / f"{row['container']:04d}.bin", "r+b") as file:
        file.seek(row["slot"] * 4096 + 7)
        file.write(b"\xee")
    assert calls.text("get", region, "beta/2", code=1) == ""
    assert "damaged" in calls.errors and "Remedy:" in calls.errors


def test_get_keeps_binary_off_a_terminal_unless_forced(region: Path, on_terminal: Any) -> None:
    code, shown, errors = on_terminal("get", region, "beta/2")
    assert (code, shown) == (2, b"")
    assert b"--force" in errors and errors.count(b"\n") == 1
    assert on_terminal("get", region, "alpha") == (0, b"one\r\n", b"")
    code, shown, _ = on_terminal("get", region, "beta/2", "--force")
    assert code == 0 and b"\xfe\xff" in shown


# Changing.


def test_put_stores_what_get_returns(region: Path, tmp_path: Path, run: Any) -> None:
    data = random.Random(1).randbytes(4000)
    (tmp_path / "in").write_bytes(data)
    for arguments, given in (
        (["from-stdin"], data),
        (["from-dash", "-"], data),
        (["from-file", tmp_path / "in"], b""),
        (["hex:0001", "-", "--metadata", "hex:ff00"], data),
    ):
        done = run("put", region, *arguments, given=given)
        assert done.returncode == 0, done.stderr
        assert b"stored hex:" in done.stdout and b"4000 bytes" in done.stdout
        assert run("get", region, arguments[0]).stdout == data
    found = json.loads(run("put", region, "hex:0001", "--json", given=b"new").stdout)
    assert found["replaced"] is True and found["length"] == 3
    with tablespace.open(region, **SMALL) as store:
        entry = store.stat(b"\x00\x01")
        assert entry is not None and entry.metadata is None and entry.seq == found["seq"]


def test_put_makes_a_region_only_when_told_to(tmp_path: Path, calls: Any) -> None:
    (tmp_path / "value").write_bytes(b"v")
    put = ("put", tmp_path / "new", "key", tmp_path / "value")
    calls.text(*put, code=2)
    assert "no region here" in calls.errors and not (tmp_path / "new").exists()
    calls.text(*put, "--create", "64K", "--slot-bytes", "4K")
    assert calls.json("info", tmp_path / "new")["capacity"] == 16
    calls.text(*put, "--slot-bytes", "4K", code=2)
    assert "--create" in calls.errors and "Remedy:" in calls.errors
    # There is one now: its size stays.
    calls.text(*put, "--create", "128K")
    assert calls.json("info", tmp_path / "new")["capacity"] == 16


def test_put_of_too_large_a_value_stores_nothing(region: Path, run: Any) -> None:
    done = run("put", region, "big", given=bytes(4097))
    assert done.returncode == 2 and b"4096" in done.stderr and b"Remedy:" in done.stderr
    assert run("get", region, "big").returncode == 1


def test_put_into_a_full_region_is_refused_or_evicts(region: Path, calls: Any, run: Any) -> None:
    with tablespace.open(region, **SMALL) as store:
        store.put_many((b"%d" % at, b"") for at in range(100))
    assert run("put", region, "one more").returncode == 2
    assert run("put", region, "one more", "--evict").returncode == 0
    assert calls.json("get", region, "one more")["length"] == 0


def test_rm_removes_keys_and_names_the_absent(region: Path, calls: Any) -> None:
    found = calls.json("rm", region, "alpha", "hex:00ff", "alpha")
    assert found == {"path": str(region), "removed": 2, "absent": [], "left": 3}
    found = calls.json("rm", region, "alpha", "beta", code=1)
    assert (found["removed"], found["absent"]) == (1, [b"alpha".hex()])
    assert calls.text("rm", region, "gone", code=1).startswith(f"absent hex:{b'gone'.hex()}")
    assert sorted(row["text"] for row in calls.json("ls", region)["entries"]) == [
        "beta/2",
        "caf\u00e9",
    ]


def test_rm_by_prefix_needs_yes_for_everything(region: Path, calls: Any) -> None:
    assert calls.json("rm", region, "--prefix", "beta")["removed"] == 2
    calls.text("rm", region, "--prefix", "", code=2)
    assert "--yes" in calls.errors
    assert len(calls.json("ls", region)["entries"]) == 3
    assert calls.text("rm", region, "--prefix", "", "--yes") == "removed 3, 0 left\n"
    calls.text("rm", region, code=2)
    calls.text("rm", region, "key", "--prefix", "beta", code=2)


def test_keys_that_look_like_options_come_after_two_dashes(region: Path, calls: Any) -> None:
    """Names that begin with a dash were taken for flags, and what was meant was not removed."""
    with tablespace.open(region, **SMALL) as store:
        store.put(b"--yes", b"v")
    assert calls.text("get", region, "--", "--yes") == "v"
    assert calls.text("rm", region, "--", "--yes").startswith("removed 1")
    assert calls.json("ls", region, "--prefix=--")["entries"] == []
    assert calls.text("get", region, "--", "--", code=1) == ""


def test_compact_leaves_a_short_journal(
    region: Path, calls: Any, values: dict[bytes, bytes]
) -> None:
    found = calls.json("compact", region)
    assert found["entries"] == len(values)
    assert found["files"]["index.log"] < 1000 and "index.log" in found["files_before"]
    assert f"{len(values)} entries" in calls.text("compact", region)


def test_check_prints_damaged_values_as_ls_prints_entries(region: Path, calls: Any) -> None:
    # Keys were Python's: "b'alpha'". And nothing in the document said what the status says.
    (row,) = calls.json("ls", region, "--prefix", "alpha")["entries"]
    with (region / "containers" / f"{row['container']:04d}.bin").open("r+b") as file:
        file.seek(row["slot"] * 4096)
        file.write(b"another")
    found = calls.json("check", region, code=1)
    assert found["ok"] is False
    (damaged,) = found["damaged_values"]
    assert damaged["key"] == row["key"] and damaged["seq"] == row["seq"]
    assert row["key"] in calls.text("check", region, "--repair", code=1)
    assert calls.json("check", region)["ok"] is True


@pytest.mark.parametrize("command", ["info", "ls", "compact"])
def test_a_missing_region_file_is_told_from_no_region(
    region: Path, calls: Any, command: str
) -> None:
    (region / "region.json").unlink()
    calls.text(command, region, code=2)
    assert "region.json is missing" in calls.errors and "check --repair" in calls.errors
    found = calls.json("check", region, code=1)
    assert found["damaged_files"][0]["found"] == "no such file, or an empty one"
    calls.text("check", region, "--repair", code=1)
    calls.text(command, region)
    calls.text("check", region.parent, code=2)
    assert "Remedy: name the directory of a region" in calls.errors


def test_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capfd.readouterr().out == f"tablespace {tablespace.__version__}\n"


# Measuring.


def test_classify_says_what_open_makes_of_a_path(tmp_path: Path, calls: Any) -> None:
    found = calls.json("classify", tmp_path / "not" / "there")
    assert found == json.loads(
        json.dumps(dataclasses.asdict(tablespace.classify(tmp_path / "not" / "there")))
    )
    text = calls.text("classify", tmp_path)
    assert f"class        {found['device_class']}\n" in text and found["io_mode"] in text
    with tablespace.open(tmp_path / "region", **SMALL) as store:
        assert any(each.startswith("storage ") for each in store.stats().choices)


@pytest.mark.parametrize("io_mode", ["auto", "buffered"])
def test_bench_measures_three_phases_and_leaves_nothing(
    tmp_path: Path, calls: Any, io_mode: str
) -> None:
    few = ("--seconds", "0.05", "--value-size", "5000", "--batch", "8", "--threads", "2")
    found = calls.json("bench", tmp_path, *few, "--max-bytes", "4M", "--io-mode", io_mode)
    assert [phase["name"] for phase in found["phases"]] == ["put_many", "put", "get_many_into"]
    for phase in found["phases"]:
        latency = phase["latency_us"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
        assert phase["calls"] > 0 and phase["value_bytes"] == 5000
        assert phase["values_per_s"] * 5000 == pytest.approx(phase["bytes_per_s"], rel=0.01)
    assert found["io_mode"] in ("direct", "buffered") and found["choices"]
    assert list(tmp_path.iterdir()) == []


def test_bench_leaves_nothing_when_it_is_stopped_or_fails(tmp_path: Path, calls: Any) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tablespace", "bench", str(tmp_path), "--max-bytes=4M"],
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{SCRATCH_PREFIX}*/region/region.json")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    child.terminate()
    assert child.wait(timeout=60) == 128 + 15
    child.communicate()
    assert list(tmp_path.iterdir()) == []
    calls.text("bench", tmp_path, "--value-size", "1M", "--max-bytes", "1M", code=2)
    assert list(tmp_path.iterdir()) == []
    calls.text("bench", tmp_path / "absent", code=2)
    assert "Remedy:" in calls.errors


# What is promised.


def test_the_same_commands_are_there_as_are_promised(capsys: pytest.CaptureFixture[str]) -> None:
    actions = [each for each in build_parser()._actions if each.dest == "command"]
    assert tuple(sorted(actions[0].choices)) == tuple(sorted(COMMANDS))
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        assert "exit status" in text and "PATH" in text and "--json" in text


def test_every_option_and_member_is_documented(region: Path, calls: Any) -> None:
    page = (ROOT / "docs/commands.md").read_text()
    told = set(re.findall(r"`([\w./-]+)", page))
    actions = [each for each in build_parser()._actions if each.dest == "command"]
    for name, command in actions[0].choices.items():
        assert f"## {name}\n" in page
        options = {flag for each in command._actions for flag in each.option_strings}
        assert options - {"-h", "--help"} <= told, name
    documents = [
        calls.json("info", region),
        calls.json("ls", region)["entries"][0],
        calls.json("ls", region),
        calls.json("get", region, "alpha"),
        calls.json("get", region, "alpha", "-o", os.devnull),
        calls.json("put", region, "x", os.devnull),
        calls.json("rm", region, "x"),
        calls.json("compact", region),
        calls.json("classify", region),
        calls.json("classify", region)["chain"][0],
        calls.json("get", region / "absent", "x", code=2),
        calls.json("get", region / "absent", "x", code=2)["error"],
    ]
    few = ("--seconds", "0.01", "--max-bytes", "4M", "--batch", "4")
    documents.append(calls.json("bench", region.parent, *few))
    documents += [documents[-1]["phases"][0], documents[-1]["phases"][0]["latency_us"]]
    for document in documents:
        assert set(document) <= told, set(document) - told
