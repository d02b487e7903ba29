"""Names: learnt from what is stored, not from what is asked."""

import json
import subprocess
import sys

import pytest

import kvd
from kvd.errors import ConfigError, ProtocolError
from kvd.namespaces import FILE_NAME, Namespaces


def test_asking_about_names_makes_none(running):
    """Every lookup created its namespace and had it persisted: 65,536 mistyped names locked
    every new one out, also after a restart."""
    with running.client() as client:
        for number in range(50):
            blocks = client.namespace(f"only asked about {number}")
            assert blocks.get(b"k") is None
            assert blocks.exists([b"k"]) == [False]
            assert blocks.match_prefix([b"k"]) == 0
            assert not blocks.locate([b"k"])[0].long
            assert blocks.touch([b"k"]) == 0
            assert blocks.delete([b"k"]) == 0
            assert blocks.clear().entries == 0
        assert client.namespaces() == []
        assert client.namespace("memory").put(b"k", b"v", retention="ephemeral")
        assert client.namespace("disk").put(b"k", b"v")
        assert client.flush(5).durable == 1
        assert client.namespaces() == ["disk", "memory"]
    saved = json.loads((running.long_path / FILE_NAME).read_text())
    assert list(saved["namespaces"]) == ["disk"]
    assert running.stop() == 0
    running.start()
    with running.client() as client:
        assert client.namespaces() == ["disk"]
        assert client.namespace("disk").get(b"k") == b"v"


def test_blocks_are_found_under_a_name_that_was_lost(running):
    """Reads must not depend on the file of names: a region may come without it."""
    with running.client() as client:
        assert client.namespace("m").put(b"k", b"v")
        assert client.flush(5).durable == 1
    assert running.stop() == 0
    (running.long_path / FILE_NAME).unlink()
    running.start()
    with running.client() as client:
        assert client.namespaces() == []
        blocks = client.namespace("m")
        assert blocks.exists([b"k"]) == [True]
        assert blocks.get(b"k") == b"v"
        assert client.namespaces() == ["m"]
        assert blocks.clear().entries == 1
        assert client.namespaces() == []


def test_a_name_without_blocks_makes_room_for_others(monkeypatch):
    monkeypatch.setattr("kvd.namespaces.MAX_NAMESPACES", 3)
    names = Namespaces(None)
    kept = [names.get(name) for name in "abc"]
    for namespace in kept:
        namespace.in_memory = True
    with pytest.raises(ProtocolError, match="limit"):
        names.get("d")
    assert names.look("d").name == "d"
    namespace.in_memory = False  # Still referred to, by the handover of a block say.
    assert names.names() == ["a", "b"]
    assert names.get("d").id not in {namespace.id for namespace in kept}


def test_two_questions_at_once_mean_the_same_namespace():
    names = Namespaces(None)
    one, other = names.look("m"), names.look("m")
    assert one is other is names.get("m")
    assert names.names() == []


@pytest.mark.parametrize("content", [b'{"version": 2, "namespaces": {}}', None])
def test_a_file_of_names_that_cannot_be_used_stops_the_start(tmp_path, content):
    """Another version was read as if it were this one, and a directory in its place ended in
    a traceback."""
    path = tmp_path / FILE_NAME
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=FILE_NAME):
        Namespaces(tmp_path)


def test_a_damaged_file_of_names_costs_only_names(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"{")
    assert Namespaces(tmp_path).names() == []


def test_a_daemon_says_which_file_it_cannot_use(daemons):
    daemon = daemons()
    (daemon.long_path / FILE_NAME).mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "kvd", *daemon.flags], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert FILE_NAME.encode() in done.stderr
    assert b"Traceback" not in done.stderr


def test_an_id_is_never_given_twice():
    """Also not after its namespace is gone: a slot may still carry it."""
    names = Namespaces(None)
    seen = set()
    for number in range(1000):
        space = names.get(f"n{number % 7}")
        assert space.id not in seen
        seen.add(space.id)
        del space


def test_names_are_written_beside_a_marker_and_leave_nothing_else(running):
    with running.client() as client:
        for number in range(3):
            assert client.namespace(f"n{number}").put(b"k", b"v")
            assert client.flush(5).pending == 0
    saved = json.loads((running.long_path / FILE_NAME).read_text())
    assert sorted(saved["namespaces"]) == ["n0", "n1", "n2"]
    assert sorted(path.name for path in running.long_path.iterdir()) == [
        "ages.json",
        FILE_NAME,
        "region",
    ]


def test_names_lost_to_damage_are_said_and_learnt_anew(running, document):
    with running.client() as client:
        assert client.namespace("m").put(b"k", b"v")
        assert client.flush(5).durable == 1
    assert running.stop() == 0
    (running.long_path / FILE_NAME).write_bytes(b"\x00\xff{")
    running.start()
    status = document("status", "--socket", running.socket)
    assert any(FILE_NAME in note and "damaged" in note for note in status["notes"])
    with running.client() as client:
        assert client.namespace("m").get(b"k") == b"v"
        assert client.namespace("n").put(b"k", b"v")
        assert client.flush(5).pending == 0
    saved = json.loads((running.long_path / FILE_NAME).read_text())
    assert sorted(saved["namespaces"]) == ["m", "n"]


def test_names_that_cannot_be_written_cost_no_blocks(running, document, wait_until):
    """On a full disk the region has room of its own, but every block of a namespace that was not
    listed yet was dropped with the list."""
    in_the_way = running.long_path / FILE_NAME
    in_the_way.mkdir()
    with running.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert client.flush(10) == kvd.Flushed(1, 0, 0)
        assert "names of namespaces are not written" in running.log
        (health,) = document("status", "--socket", running.socket)["health"]
        assert health["state"] == "ok"
        assert "names of namespaces are not written" in health["detail"]
        in_the_way.rmdir()
        assert blocks.put(b"l", b"v")
        assert client.flush(10) == kvd.Flushed(2, 0, 0)
    assert list(json.loads(in_the_way.read_text())["namespaces"]) == ["m"]
    (health,) = document("status", "--socket", running.socket)["health"]
    assert health["detail"] == ""
    assert list(running.long_path.glob("*tmp*")) == list(running.long_path.glob(".writing*")) == []


def test_a_purge_is_done_also_where_the_names_cannot_be_written(running, document):
    with running.client() as client:
        assert client.namespace("m").put(b"k", b"v")
        assert client.flush(10).durable == 1
        (running.long_path / FILE_NAME).unlink()
        (running.long_path / FILE_NAME).mkdir()
        purged = document("purge", "m", "--yes", "--socket", running.socket)
        assert purged["long"]["entries"] == 1
        assert client.namespace("m").get(b"k") is None
    assert "still lists what was purged" in running.log
