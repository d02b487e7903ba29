"""What documents say about the code is compared with the code, where that can be done."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tablespace
from kvd import codec, config, protocol
from kvd.policy import cli as size
from kvd.replay import cli as replay
from kvd.soak import cli as soak
from tablespace import checksum64

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("tablespace/*.md"), *(ROOT / "docs").rglob("*.md")]
)
# Names of files that a region or a daemon has, not this repository.
OF_A_REGION = {
    *("ages.json", "index.snapshot.json", "namespaces.json", "owed-deletions.json"),
    *("quotas.json", "region.json"),
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in re.findall(r"`([\w./-]+\.(?:py|pyx|pxd|h|toml|txt|json))`", document.read_text()):
        if name in OF_A_REGION or "NAME" in name:
            continue
        assert any(path == name or path.endswith(f"/{name}") for path in tracked), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert document.read_text().isascii()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_index_names_every_decision() -> None:
    index = text_of("docs/decisions/README.md")
    pages = [path.name for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert [name for name in pages if name != "README.md" and f"({name})" not in index] == []


def test_lines_shown_in_format_are_lines_of_the_format() -> None:
    lines = re.findall(r'^(\{.*,"line":"[0-9a-f]{16}"\})$', text_of("docs/format.md"), re.M)
    assert len(lines) >= 8
    for line in lines:
        body, _, rest = line.partition(',"line":"')
        assert rest == f'{checksum64(body.encode()):016x}"}}', line
        assert line == msgspec.json.encode(msgspec.json.decode(line)).decode()


def test_format_names_every_op_and_member_of_the_engine() -> None:
    codec = text_of("tablespace/src/tablespace/_core/line_codec.pyx")
    ops = set(re.findall(r"""skip\(&cursor, b'(\w+)"'""", codec)) & {
        "put",
        "evict",
        "delete",
        "drop",
        "claim",
        "release",
        "quarantine",
        "restore",
    }
    page = text_of("docs/format.md")
    assert len(ops) == codec.count("out.kind = RECORD_") - codec.count("out.kind = RECORD_NONE")
    for name in ("region", "journal", "snapshot"):
        source = text_of(f"tablespace/src/tablespace/{name}.py")
        for body in re.findall(r"^class _\w+Line\(.*\n((?:    \w+: .*\n)+)", source, re.M):
            ops |= set(re.findall(r"^    (\w+):", body, re.M))
    ops |= set(re.findall(r"""b['"].*?,"(\w+)":""", codec)) - {"line"}
    assert len(ops) >= 20
    assert ops <= members(page)


def test_every_call_of_the_engine_is_in_its_readme() -> None:
    calls = {name for name in dir(tablespace.Store) if not name.startswith("_")}
    calls -= {"announce", "after_fork_in_child", "start_prewriting"}  # For the package itself.
    assert len(calls) >= 18
    assert calls <= members(text_of("tablespace/README.md"))
    options = set(inspect.signature(tablespace.open).parameters) - {"path"}
    shown = set(re.findall(r"`(\w+)(?:=[^`]*)?`", text_of("tablespace/CHANGELOG.md")))
    assert options <= shown


@pytest.mark.parametrize("page", ["pools-and-claims", "resize"])
def test_an_example_of_a_decision_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    text = text_of(f"docs/decisions/{page}.md")
    found = re.search(r"^\$ python - <<'EOF'\n(.*?)^EOF\n(.*?)^```$", text, re.M | re.S)
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-c", found[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == found[2]


def test_the_kits_examples_run(tmp_path: Path) -> None:
    """Those with a test class are given to pytest, the others to Python."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of("docs/testing.md"), re.M | re.S)
    ran = []
    for number, block in enumerate(blocks):
        kind = "pytest" if "\nclass Test" in block else "python"
        path = tmp_path / f"test_example_{number}.py"
        path.write_text(block)
        command = ["-m", "pytest", "-q", str(path)] if kind == "pytest" else [str(path)]
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("noticed:" if kind == "python" else " passed") in done.stdout
        ran.append(kind)
    assert ran == ["python", "pytest"]


def requests() -> list[Any]:
    return list(protocol.Request.__args__)


def members(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row))


@pytest.mark.parametrize("kind", requests(), ids=lambda kind: kind.__struct_config__.tag)
def test_protocol_names_every_member_of_every_request(kind: Any) -> None:
    tag = kind.__struct_config__.tag
    page = text_of("docs/protocol.md")
    row = next(
        (line for line in page.splitlines() if re.match(rf"\| {tag} \|", line)),
        None,
    )
    assert row is not None, f"no row for {tag}"
    if tag == "HELLO":
        row = page.partition("| HELLO |")[2].partition("\n\n")[0]
    assert set(kind.__struct_fields__) - {"id"} <= members(row)


@pytest.mark.parametrize("kind", list(protocol.Reply.__args__), ids=lambda kind: kind.__name__)
def test_protocol_names_every_reply(kind: Any) -> None:
    assert re.search(rf"\b{kind.__struct_config__.tag}\b", text_of("docs/protocol.md"))


def test_protocol_names_every_status_and_limit() -> None:
    page = text_of("docs/protocol.md")
    statuses = {
        protocol.STORED,
        protocol.REFRESHED,
        protocol.RESERVED,
        protocol.NO_ROOM,
        protocol.TOO_LARGE,
        protocol.RETENTION_NONE,
        protocol.EXPIRED,
        protocol.UNKNOWN_RESERVATION,
    }
    table = page.partition("**Status words**")[2].partition("\n\nRESERVE")[0]
    assert statuses <= members(table)
    assert f"at most {protocol.MAX_BATCH_KEYS}" in page
    assert f"1 to {protocol.MAX_KEY_BYTES} bytes" in page
    assert f"1 to {protocol.MAX_NAMESPACE_CHARS} characters" in page


def test_protocol_names_every_error_code_the_daemon_sends() -> None:
    table = text_of("docs/protocol.md").partition("## Errors")[2].partition("\n\nThe daemon")[0]
    daemon = (
        "cache.py",
        "codec.py",
        "dispatch.py",
        "events.py",
        "frames.py",
        "lanes.py",
        "namespaces.py",
        "served_connection.py",
        "server.py",
    )
    sent = set()
    for name in daemon:
        sent |= set(
            re.findall(
                r'(?:ProtocolError|Refused|_refuse)\(\s*(?:[\w.]+, )?"(\w+)"',
                text_of(f"kvd/{name}"),
            )
        )
    assert len(sent) >= 8
    assert sent <= members(table)


def test_frame_shown_in_protocol_is_a_frame() -> None:
    shown = re.search(r"^((?:[0-9a-f]{2} +)+[0-9a-f]{2})$", text_of("docs/protocol.md"), re.M)
    assert shown is not None
    assert bytes.fromhex(shown[1]) == codec.encode(protocol.Ping(id=7))


def test_frames_shown_as_bytes_are_frames() -> None:
    page = text_of("docs/protocol.md").partition("## Frames as bytes")[2]
    frames = re.findall(r"^(->|<-) ((?:[0-9a-f]{2}[ \n]+)+)", page, re.M)
    assert len(frames) >= 9
    for arrow, shown in frames:
        frame = bytes.fromhex(shown)
        decode = codec.decode_request if arrow == "->" else codec.decode_reply
        assert codec.encode(decode(frame[4:])) == frame


def test_flags_named_in_documents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse(["--help"])
    tools = "".join(each.parser().format_help() for each in (size, replay, soak))
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out + tools))
    for name in ("README.md", "CHANGELOG.md", "docs/architecture.md"):
        block = "\n".join(
            line
            for line in text_of(name).splitlines()
            if not any(word in line for word in ("replay", "pip", "statctl"))
        )
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", block):
            assert flag in known, f"{name}: {flag}"
