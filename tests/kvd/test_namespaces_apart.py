"""Two namespaces with the same keys never see each other, whatever is done by whatever way."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

# Where one name's key continues another's name, both would be one text if simply joined.
NAMES = ("a", "ab", "ab\0", "A", "-a", "a/b", "\u00e4")
KEYS = (b"c", b"bc", b"b\0c", b"\0", b"a", b"k" * 223, b"/b")
RETENTIONS = ("ephemeral", "short", "long")

names = st.sampled_from(NAMES)
keys = st.sampled_from(KEYS)
some_keys = st.lists(keys, min_size=1, max_size=5, unique=True)
ways = st.sampled_from(("mapped", "inline"))
retentions = st.sampled_from(RETENTIONS)


class Apart(RuleBasedStateMachine):
    """A model of presence by (namespace, key); each such pair has bytes of its own."""

    daemon = None
    turns = 0

    @initialize()
    def begin(self):
        Apart.turns += 1
        self.clients = {
            "mapped": self.daemon.client(),
            "inline": self.daemon.client(map_arena=False),
        }
        self.subscription = self.clients["mapped"].subscribe()
        self.present = set()
        self.ever = set()  # What was stored at any time, and what events told of.
        self.stored = set()

    def teardown(self):
        if hasattr(self, "clients"):
            for name in NAMES:
                self.blocks("mapped", name).clear()
            self.subscription.close()
            for client in self.clients.values():
                client.close()

    def blocks(self, way, name):
        return self.clients[way].namespace(name)

    def value(self, name, key):
        return b"%r %r " % (name, key) * 20

    @rule(way=ways, name=names, chosen=some_keys, retention=retentions)
    def put(self, way, name, chosen, retention):
        self.ever |= {(name, key) for key in chosen}
        items = [(key, self.value(name, key)) for key in chosen]
        assert all(self.blocks(way, name).put_many(items, retention=retention))
        self.present |= {(name, key) for key in chosen}

    @rule(way=ways, name=names, chosen=some_keys, retention=retentions)
    def reserve(self, way, name, chosen, retention):
        self.ever |= {(name, key) for key in chosen}
        values = [self.value(name, key) for key in chosen]
        with self.blocks(way, name).reserve([len(value) for value in values]) as slots:
            for slot, value in zip(slots, values, strict=True):
                slot.view[:] = value
            assert all(slots.commit(chosen, retention=retention))
        self.present |= {(name, key) for key in chosen}

    @rule(way=ways, name=names, chosen=some_keys, verify=st.booleans())
    def read(self, way, name, chosen, verify):
        wanted = [self.value(name, key) if (name, key) in self.present else None for key in chosen]
        blocks = self.blocks(way, name)
        assert blocks.get_many(chosen, verify=verify) == wanted
        assert blocks.get(chosen[0], verify=verify) == wanted[0]
        buffers = [bytearray(10000) for _ in chosen]
        lengths = blocks.get_many_into(chosen, buffers, verify=verify)
        found = [
            None if length is None else bytes(buffer[:length])
            for length, buffer in zip(lengths, buffers, strict=True)
        ]
        assert found == wanted

    @rule(way=ways, name=names, chosen=some_keys)
    def ask(self, way, name, chosen):
        blocks = self.blocks(way, name)
        there = [(name, key) in self.present for key in chosen]
        assert blocks.exists(chosen) == there
        assert blocks.match_prefix(chosen) == [*there, False].index(False)
        assert [place.memory or place.long for place in blocks.locate(chosen)] == there

    @rule(way=ways, name=names, chosen=some_keys)
    def hint(self, way, name, chosen):
        blocks = self.blocks(way, name)
        assert blocks.touch(chosen) <= len(chosen)
        assert blocks.prefetch(chosen) <= len(chosen)

    @rule(way=ways, name=names, chosen=some_keys)
    def delete(self, way, name, chosen):
        gone = {(name, key) for key in chosen} & self.present
        assert self.blocks(way, name).delete(chosen) == len(gone)
        self.present -= gone

    @rule(way=ways, name=names)
    def clear(self, way, name):
        gone = {pair for pair in self.present if pair[0] == name}
        cleared = self.blocks(way, name).clear()
        assert cleared.entries == len(gone)
        assert cleared.bytes == sum(len(self.value(*pair)) for pair in gone)
        self.present -= gone

    @rule(way=ways)
    def flush(self, way):
        assert self.clients[way].flush(20).pending == 0

    @invariant()
    def events_name_what_was_stored(self):
        while hasattr(self, "subscription"):
            event = self.subscription.next(0.0005)
            if event is None:
                return
            self.stored |= {(event.namespace, key) for key in event.keys}
            assert self.stored <= self.ever


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_namespaces_with_the_same_keys_never_meet(daemons, disk):
    """A peer keyed its arena without the namespace: model A read model B's block under the
    same key, and clearing one removed the other's."""
    Apart.daemon = daemons("--max-bytes", "16M", disk=disk).start()
    run_state_machine_as_test(
        Apart,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
    with Apart.daemon.client() as client:
        assert client.stats().memory.slots_reserved == 0
        assert Apart.turns
