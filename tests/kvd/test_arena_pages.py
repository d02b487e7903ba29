"""How the arena's memory is got: pinned, in huge pages, from which node; refusals are said."""

import threading

import pytest

from kvd.arena import Arena
from kvd.config import parse
from kvd.errors import ConfigError
from kvd.mapping import ArenaMapping
from kvd.pages import Pages
from kvd.slab_geometry import HUGE_PAGE_BYTES

SIZE = 8 << 20


def populated(arena):
    done = threading.Event()
    arena.populate_in_background(
        lambda: arena.populated_slabs == arena.geometry.slab_count and done.set(),
        lambda error: pytest.fail(str(error)),
    )
    assert done.wait(20)


def test_huge_pages_come_or_it_is_said_why_not():
    arena = Arena(SIZE, 65536, hugepages=True)
    populated(arena)
    assert (arena.huge_bytes == SIZE) == (arena.huge_refusal is None)
    assert arena.huge_refusal is None or "after 0M" in arena.huge_refusal
    mapping = ArenaMapping(arena.info(), arena.index_fd, arena.data_fd)
    arena.cut(0, 65536)
    arena.view(3, 5)[:] = b"hello"
    assert bytes(mapping.view(arena.offset(3), 5)) == b"hello"
    arena.close()


def test_a_refusal_of_huge_pages_is_said_once_and_costs_nothing_else(monkeypatch, caplog):
    calls = []

    def refuse(self, offset, size_bytes):
        calls.append(offset)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Pages, "collapse", refuse)
    monkeypatch.setattr("kvd.arena.POPULATE_BYTES", HUGE_PAGE_BYTES)
    arena = Arena(SIZE, 65536, hugepages=True)
    populated(arena)
    assert calls == [0]
    assert arena.huge_refusal == "Invalid argument, after 0M"
    assert caplog.text.count("no huge pages") == 1
    assert arena.populated_slots == arena.slot_count
    arena.close()


def test_memory_comes_from_the_nodes_named():
    arena = Arena(SIZE, 65536)
    arena.bind([0])
    arena.bind(None)
    with pytest.raises(OSError):
        arena.bind([1023])
    populated(arena)
    arena.close()


def test_the_flags_are_read():
    config = parse(["--no-pin", "--hugepages", "--numa", "1,0"])
    assert (config.no_pin, config.hugepages, config.numa) == (True, True, (0, 1))
    assert parse(["--numa", "interleave"]).numa == ()
    assert parse([]).numa is None
    for wrong in ("x", "-1", "1024", "0,,1"):
        with pytest.raises(ConfigError, match=f"--numa {wrong}: no nodes; write interleave"):
            parse(["--numa", wrong])


def test_a_daemon_says_what_it_chose(daemons):
    daemon = daemons("--no-pin", "--hugepages", "--numa", "interleave", disk=False).start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        stats = client.stats()
        assert not stats.memory.pinned
        assert "memory is not pinned: --no-pin" in stats.notes


def test_a_node_that_is_not_there_is_refused_with_the_remedy(daemons, wait_until):
    daemon = daemons("--numa", "1000", disk=False)
    with pytest.raises(pytest.fail.Exception, match=r"--numa 1000: .*numactl --hardware"):
        daemon.start()
    assert daemon.process.wait(10) != 0
