"""What is deleted while a path is away stays deleted, whatever is restarted meanwhile."""

import pytest

from kvd import owed_deletions
from kvd.errors import ProtocolError
from kvd.hidden_keys import HiddenKeys
from kvd.namespaces import PREFIX_BYTES, disk_prefix
from kvd.owed_deletions import Owed
from tablespace import FailedError

FILE = owed_deletions.FILE_NAME


class TwoPaths:
    """A daemon with two paths, of which the second can be taken away and brought back."""

    def __init__(self, daemons):
        self.daemon = daemons(disk=False)
        self.root = self.daemon.long_path.parent
        self.mount, self.elsewhere = self.root / "mount", self.root / "elsewhere"
        self.mount.mkdir()
        self.paths = [self.root / "a", self.mount / "b"]
        self.daemon.flags += ["--long-paths", ",".join(map(str, self.paths))]
        self.daemon.flags += ["--long-bytes", "32M"]

    def take_away(self):
        self.mount.rename(self.elsewhere)
        self.mount.write_bytes(b"no directory: it cannot be made anew")

    def bring_back(self):
        self.mount.unlink()
        self.elsewhere.rename(self.mount)

    def files(self):
        return [path / FILE for path in self.paths if (path / FILE).exists()]


@pytest.fixture
def two(daemons, make_blocks):
    """Two paths with 40 blocks, the daemon stopped, the second path away; and the blocks."""
    made = TwoPaths(daemons)
    values = make_blocks(40)
    made.daemon.start()
    with made.daemon.client() as client:
        assert all(client.namespace("m").put_many(list(values.items())))
        assert client.flush(20).durable == 40
        assert min(path.entries for path in client.stats().long.paths) > 5
    assert made.daemon.stop() == 0
    made.take_away()
    made.values = values
    return made


def owed(client):
    return [path.deletions_owed for path in client.stats().long.paths]


@pytest.mark.parametrize("how", ["delete", "clear", "purge"])
@pytest.mark.parametrize("back", ["before the start", "while it runs"])
def test_what_was_deleted_while_a_path_was_away_stays_deleted_over_a_restart(
    two, document, command, wait_until, how, back
):
    """What was owed to a path that was away was known to that daemon alone: the next one, which
    had the path again, served what had been deleted, or purged."""
    daemon, values = two.daemon.start(), two.values
    gone, kept = list(values)[:20], list(values)[20:]
    with daemon.client() as client:
        blocks = client.namespace("m")
        if how == "delete":
            blocks.delete(gone)
        elif how == "clear":
            with pytest.raises(Exception, match="deleted when it is back"):
                blocks.clear()
        else:
            status, _, err = command("purge", "m", "--yes", "--socket", daemon.socket)
            assert (status, "deleted when it is back" in err) == (1, True)
        assert owed(client)[1] == (20 if how == "delete" else 1)
    daemon.kill()
    assert len(two.files()) == 1
    if back == "before the start":
        two.bring_back()
    daemon.start()
    with daemon.client() as client:
        blocks = client.namespace("m")
        if back == "while it runs":
            assert sum(owed(client)) > 0
            two.bring_back()
            wait_until(lambda: all(path.state == "up" for path in client.stats().long.paths))
        assert blocks.get_many(gone) == [None] * 20
        assert blocks.exists(gone) == [False] * 20
        rest = [values[key] for key in kept] if how == "delete" else [None] * 20
        assert blocks.get_many(kept) == rest
        wait_until(lambda: owed(client) == [0, 0] and not two.files())
        # What is stored from now on owes nothing to that.
        again = {key: values[key] for key in gone}
        assert all(blocks.put_many(list(again.items())))
        assert client.flush(20).pending == 0
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert client.namespace("m").get_many(gone) == list(again.values())


def test_a_file_that_cannot_be_read_is_said_and_stops_nothing(two):
    (two.paths[0] / FILE).write_bytes(b"{")
    daemon = two.daemon.start()
    assert FILE in daemon.log
    with daemon.client() as client:
        assert any(FILE in note and "purge" in note for note in client.stats().notes)
        client.namespace("m").delete(list(two.values))
    assert daemon.stop() == 0
    (found,) = owed_deletions.load(two.paths[0])
    assert len(found.keys) == 40


def test_what_is_owed_to_a_path_that_no_flag_names_waits_for_it(two):
    absent = Owed("/not/here", "0" * 32, [disk_prefix("m").hex()], [])
    owed_deletions.keep(two.paths[0], [absent])
    two.bring_back()
    daemon = two.daemon.start()
    with daemon.client() as client:
        assert client.namespace("m").get_many(list(two.values)) == list(two.values.values())
        uuid = client.stats().long.paths[1].uuid
    assert daemon.stop() == 0
    assert [owed_deletions.load(path) for path in two.paths] == [[absent]] * 2
    # The same region, at another place.
    owed_deletions.keep(two.paths[0], [Owed("/not/here", uuid, [disk_prefix("m").hex()], [])])
    owed_deletions.keep(two.paths[1], [])
    daemon.start()
    with daemon.client() as client:
        entries = [path.entries for path in client.stats().long.paths]
        assert entries[0] > 5
        assert entries[1] == 0
    assert two.files() == []


def test_the_answer_says_whether_the_debt_outlives_the_daemon(on_rig, monkeypatch):
    """With no other path that takes it, it does not, and nobody is told otherwise."""

    def failing(items, touched):
        raise FailedError("a sync failed: Input/output error")

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"v"})
        home = rig.home(b"k")
        home.write = failing
        while home.is_up:
            rig.put(b"y%d" % rig.paths.counters.blocks_written, b"v")
            await rig.cache.flush(rig.session, 20)
        with pytest.raises(ProtocolError, match=r"is back$"):
            await rig.cache.delete("m", [b"k"])
        for tier in rig.tiers:
            (found,) = owed_deletions.load(tier.directory)
            assert found == Owed(str(home.directory), home.uuid, [], [rig.disk_key(b"k").hex()])

        def refused(directory, content):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(owed_deletions, "keep", refused)
        with pytest.raises(ProtocolError, match=r"if this daemon still runs then$"):
            await rig.cache.delete("m", [b"k"])

    monkeypatch.setattr("kvd.back_off.FIRST_RETRY_S", 60.0)
    on_rig(scenario, paths=2)


def test_more_keys_than_are_kept_hide_their_namespace():
    hidden = HiddenKeys(3)
    one, other = b"1" * PREFIX_BYTES, b"2" * PREFIX_BYTES
    hidden.add([one + b"%d" % number for number in range(3)])
    hidden.add([other + b"k"])
    assert len(hidden) == 4
    present = [True] * 4
    hidden.hide([one + b"1", one + b"9", other + b"k", other + b"j"], present)
    assert present == [False, True, False, False]
