"""Where flags come from: the command line, the file of --config, an older system's variables."""

import json
import logging
import subprocess
import sys

import pytest

from kvd import config
from kvd.config import all_flags, parse
from kvd.config.flag import choice, count, flag, flags_of, fraction, switch
from kvd.config.values import Given, Values
from kvd.errors import ConfigError
from kvd.logs import JsonFormatter
from kvd.socket_path import client_socket


@pytest.fixture
def write_file(tmp_path):
    def write(text):
        path = tmp_path / "kvd.toml"
        path.write_text(text)
        return str(path)

    return write


class TestFile:
    def test_same_names_and_flags_win(self, write_file, tmp_path):
        path = write_file(
            f'max-bytes = "16M"\nlong-bytes = 33554432\nlong-path = "{tmp_path}/long"\n'
            "drain-timeout = 2.5\n"
        )
        config = parse(["--config", path, "--max-bytes", "8M"], {})
        assert config.max_bytes == 8 << 20
        assert config.long_bytes == 32 << 20
        assert config.long_path == tmp_path / "long"
        assert config.drain_timeout_s == 2.5

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('max-byte = "1G"', ["max-byte'", "did you mean max-bytes?", "kvd.toml"]),
            ('max_bytes = "1G"', ["did you mean max-bytes?"]),
            ('max-bytes = "lots"', ["--max-bytes lots", "kvd.toml", "8G"]),
            ("max-bytes = true", ["--max-bytes true", "not a size"]),
            ('[memory]\nmax-bytes = "1G"', ["[memory]", "no tables"]),
            ("max-bytes = 1979-05-27", ["max-bytes", "must be a string, a number"]),
            ("max-bytes = ", ["not TOML"]),
        ],
    )
    def test_a_mistake_is_named_with_its_remedy(self, write_file, text, words):
        with pytest.raises(ConfigError) as caught:
            parse(["--config", write_file(text)], {})
        for word in words:
            assert word in str(caught.value)

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.toml"):
            parse(["--config", str(tmp_path / "none.toml")], {})
        binary = tmp_path / "binary.toml"
        binary.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not TOML"):
            parse(["--config", str(binary)], {})


class TestOldVariables:
    def test_they_stand_for_flags_and_are_said_in_one_line(self):
        config = parse(
            [],
            {
                "INFERA_KVD_SOCKET": "/run/old.sock",
                "INFERA_KVD_MAX_BYTES": "16M",
                "INFERA_KVD_L3_BUDGET_BYTES": "1G",
                "INFERA_KVD_TABLESPACE_SLOT_BYTES": "32K",
            },
        )
        assert config.socket == "/run/old.sock"
        assert config.max_bytes == 16 << 20
        assert config.long_bytes == 1 << 30
        assert config.slot_bytes == 32 << 10
        said = [note for note in config.notes if "INFERA_KVD" in note]
        assert len(said) == 1
        assert "INFERA_KVD_L3_BUDGET_BYTES is now --long-bytes" in said[0]
        assert "INFERA_KVD_MAX_BYTES is now --max-bytes" in said[0]

    def test_flags_win_over_them_and_they_over_the_file(self, write_file):
        path = write_file('io-mode = "direct"\nlog-level = "debug"\n')
        old = {"INFERA_KVD_IO_MODE": "buffered", "INFERA_KVD_DRAIN_TIMEOUT": "1s"}
        config = parse(["--config", path, "--drain-timeout", "3s"], old)
        assert (config.io_mode, config.log_level, config.drain_timeout_s) == (
            "buffered",
            "debug",
            3.0,
        )

    def test_one_without_a_counterpart_is_said_and_left_aside(self):
        config = parse([], {"INFERA_KVD_HIPFILE_ROOTS": "/mnt/a,/mnt/b"})
        assert any("INFERA_KVD_HIPFILE_ROOTS" in note for note in config.notes)

    def test_a_wrong_value_names_the_variable(self):
        with pytest.raises(ConfigError, match=r"--max-bytes lots \(INFERA_KVD_MAX_BYTES\)"):
            parse([], {"INFERA_KVD_MAX_BYTES": "lots"})

    def test_an_empty_one_is_none(self):
        assert parse([], {"INFERA_KVD_MAX_BYTES": ""}).notes == parse([], {}).notes


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--max-byte", "1G"], ["--max-byte;", "did you mean --max-bytes?"]),
            (["--long-byts=1G"], ["--long-byts;", "did you mean --long-bytes?"]),
            (["--zzzzzz"], ["--zzzzzz", "kvd --help"]),
            (["--max-bytes", "1G", "left"], ["'left'"]),
        ],
    )
    def test_an_unknown_argument_names_the_nearest_flag(self, arguments, words):
        with pytest.raises(ConfigError) as caught:
            parse(arguments, {})
        for word in words:
            assert word in str(caught.value)

    def test_the_last_of_a_repeated_flag_counts(self):
        assert parse(["--drain-timeout", "1s", "--drain-timeout", "2s"], {}).drain_timeout_s == 2

    def test_every_flag_is_in_a_group_of_the_help(self):
        text = config.parser().format_help()
        for title, group in config.GROUPS:
            flags = flags_of(group)
            assert not flags or f"\n{title}:\n" in text
        assert len(all_flags()) >= 9


def _values(members, given):
    group = type("Group", (), {"__annotations__": dict.fromkeys(members, str), **members})
    import dataclasses

    flags = flags_of(dataclasses.dataclass(group))
    return Values(flags, {name: Given(text) for name, text in given.items()})


def test_lists_switches_and_bounds_are_read():
    members = {
        "uids": flag("--allow", count(0, 100), many=True, help=""),
        "off": switch("--off", help=""),
        "high": flag("--high", fraction(0.1, 1), default="0.9", help=""),
        "kind": flag("--kind", choice("a", "b"), default="a", help=""),
    }
    values = _values(members, {"uids": "1, 2", "off": "true"})
    assert values.values == {"uids": (1, 2), "off": True, "high": 0.9, "kind": "a"}
    assert _values(members, {}).values["off"] is False
    for name, text in {"uids": "1,x", "off": "maybe", "high": "nan", "kind": "c"}.items():
        with pytest.raises(ConfigError, match=r"must be"):
            _values(members, {name: text})


def test_json_log_lines_are_objects():
    def ends():
        raise OSError("gone")

    try:
        ends()
    except OSError:
        record = logging.LogRecord("kvd.x", 40, "f", 1, "hit %d\nmore", (7,), sys.exc_info())
    document = json.loads(JsonFormatter().format(record))
    assert document["level"] == "error"
    assert document["message"] == "hit 7\nmore"
    assert "OSError: gone" in document["exception"]
    assert document["time"].endswith("Z")


def test_a_daemon_logs_json_where_asked(daemons):
    daemon = daemons("--log-format", "json").start()
    assert daemon.stop() == 0
    lines = [line for line in daemon.log.splitlines() if line.startswith("{")]
    assert "stopped" in [json.loads(line)["message"] for line in lines]


def test_a_daemon_takes_its_flags_from_a_file(write_file, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "--config", write_file('socket = ""\n')],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--socket" in done.stderr
    assert "kvd.toml" in done.stderr


def test_an_unknown_backend_is_refused_naming_those_there_are():
    """A renamed type made an engine's start abort with no word about the names there are."""
    with pytest.raises(ConfigError, match="--long-backend fs_python: must be one of tablespace"):
        parse(["--long-backend", "fs_python"], {})


def test_without_sizes_both_tiers_are_bounded_and_the_help_says_by_what(tmp_path):
    """A store without a cap filled the disk until the node evicted its pods."""
    bounded = parse(["--long-path", str(tmp_path)], {})
    assert 0 < bounded.max_bytes <= 8 << 30
    assert bounded.long_bytes == 32 << 30
    text = " ".join(config.parser().format_help().split())
    assert "hard cap of all paths together, each an equal share (default: 32G)" in text
    assert "Sizes take K, M, G, T" in text


def test_the_port_is_the_loopbacks_unless_an_address_is_given():
    for given, meant in {
        "9464": ("127.0.0.1", 9464),
        ":9464": ("127.0.0.1", 9464),
        "localhost:1": ("127.0.0.1", 1),
        "0.0.0.0:9464": ("0.0.0.0", 9464),
        "[::1]:9464": ("::1", 9464),
    }.items():
        assert parse(["--metrics", given], {}).metrics == meant
    for wrong in ("", "x", "9464x", "host.example:1", "127.0.0.1:70000", "127.0.0.1:"):
        with pytest.raises(ConfigError, match="--metrics"):
            parse(["--metrics", wrong], {})
    assert parse([], {}).metrics is None


def test_a_client_finds_the_socket_by_the_old_variable_too(monkeypatch):
    monkeypatch.setenv("INFERA_KVD_SOCKET", "/run/old.sock")
    assert client_socket(None) == "/run/old.sock"
    monkeypatch.setenv("KVD_SOCKET", "/run/new.sock")
    assert client_socket(None) == "/run/new.sock"
