"""SUBSCRIBE: which blocks come and go, told to those who asked, whom nobody waits for."""

import asyncio
import time

import pytest

import kvd
from kvd import events, protocol, subscribing
from kvd.errors import ProtocolError
from kvd.events import EventHub, Feed
from kvd.memory_tier import HANDOVER_S
from kvd.protocol import Event
from kvd.subscribing import EventQueue

from .raw import Raw


def collect(subscription, count, timeout_s=10.0):
    """Return the next `count` events, one key each."""
    found = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        event = subscription.next(deadline - time.monotonic())
        if event is not None:
            found += [
                (event.kind, event.tier, event.namespace, key) for key in event.keys or [b""]
            ]
    return found


def test_events_tell_of_every_tier(running):
    with running.client() as client, client.subscribe() as subscription:
        blocks = client.namespace("m")
        assert blocks.put(b"k", b"v")
        assert client.flush(20).pending == 0
        assert collect(subscription, 2) == [
            ("stored", "memory", "m", b"k"),
            ("stored", "long", "m", b"k"),
        ]
        assert blocks.delete([b"k", b"absent"]) == 1
        assert collect(subscription, 2) == [
            ("removed", "memory", "m", b"k"),
            ("removed", "long", "m", b"k"),
        ]
        assert blocks.put(b"l", b"v", retention="ephemeral")
        blocks.clear()
        assert collect(subscription, 3) == [
            ("stored", "memory", "m", b"l"),
            ("removed", "memory", "m", b"l"),
            ("cleared", "long", "m", b""),
        ]
        assert subscription.lost == 0
        assert subscription.next(0.05) is None


@pytest.mark.parametrize("older_than_s", [None, 0.0])
def test_a_purge_is_told_of_every_tier(running, older_than_s):
    """A router went on sending requests where a namespace had been purged."""
    with running.client() as client, client.subscribe(["m"]) as subscription:
        for name in ("m", "other"):
            assert client.namespace(name).put(b"k", b"v")
        assert client.flush(20).pending == 0
        assert len(collect(subscription, 2)) == 2
        request = protocol.Purge(namespace="m", older_than_s=older_than_s)
        assert client.ask(request, protocol.PurgedReply).purged.long.entries == 1
        last = (
            ("removed", "long", "m", b"k") if older_than_s == 0 else ("cleared", "long", "m", b"")
        )
        assert collect(subscription, 2) == [("removed", "memory", "m", b"k"), last]
        assert subscription.next(0.05) is None
        everything = protocol.Purge(all=True, older_than_s=older_than_s)
        assert client.namespace("m").put(b"l", b"v")
        assert client.flush(20).pending == 0
        client.ask(everything, protocol.PurgedReply)
        last = (
            ("removed", "long", "m", b"l") if older_than_s == 0 else ("cleared", "long", "m", b"")
        )
        assert collect(subscription, 4)[2:] == [("removed", "memory", "m", b"l"), last]


def test_promotion_and_eviction_are_told(daemons, make_blocks, put_all):
    daemon = daemons("--evict-policy", "lru").start()
    values = make_blocks(3)
    with daemon.client() as client:
        put_all(client, client.namespace("m"), values)
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client, client.subscribe(["m"]) as subscription:
        blocks = client.namespace("m")
        key = next(iter(values))
        assert blocks.get(key) == values[key]
        assert collect(subscription, 1) == [("stored", "memory", "m", key)]
        time.sleep(2 * HANDOVER_S)  # Until then it stays for its asker.
        put_all(client, client.namespace("other"), make_blocks(200, 100, seed=2))
        assert collect(subscription, 1) == [("removed", "memory", "m", key)]


def test_only_the_namespaces_asked_for_are_told(running):
    with running.client() as client, client.subscribe(["a"]) as subscription:
        for name in ("b", "a", "c"):
            assert client.namespace(name).put(b"k", b"v", retention="ephemeral")
        assert collect(subscription, 1) == [("stored", "memory", "a", b"k")]
        assert subscription.next(0.05) is None


def test_iterating_ends_when_the_daemon_leaves(running):
    with running.client() as client, client.subscribe() as subscription:
        assert client.namespace("m").put(b"k", b"v", retention="ephemeral")
        each = iter(subscription)
        assert next(each) == Event("stored", "memory", "m", [b"k"])
        running.kill()
        assert next(each, None) is None
        with pytest.raises(kvd.UnavailableError):
            subscription.next(1.0)


def test_an_absent_daemon_cannot_be_subscribed_to(tmp_path):
    with pytest.raises(kvd.UnavailableError, match="absent"):
        kvd.Client(tmp_path / "absent.sock").subscribe()


def test_a_subscriber_that_does_not_read_costs_neither_memory_nor_time(running):
    """Its events are lost and counted; the daemon waits for nobody."""
    deaf = Raw(running.socket).hello()
    assert deaf.ask(op="SUBSCRIBE", id=7) == {"op": "OK", "id": 7}
    with running.client() as client:
        blocks = client.namespace("m" * 200)
        rounds = 40
        started = time.monotonic()
        for number in range(rounds):
            keys = [b"%d-%d" % (number, n) + bytes(190) for n in range(96)]
            items = [(key, b"v") for key in keys]
            assert all(blocks.put_many(items, retention="ephemeral"))
            blocks.delete(keys)
        assert time.monotonic() - started < 30
        total = rounds * 96 * 2
        told = lost = 0
        while told + lost < total:
            message = deaf.reply()
            if message["op"] == "EVENTS":
                assert message["id"] == 7
                told += sum(len(event[3]) for event in message["events"] if event[3])
                told += sum(1 for event in message["events"] if not event[3])
                lost += message["lost"]
        assert client.stats().pid == running.pid
    deaf.close()


def test_a_full_queue_loses_the_oldest_and_counts_them(monkeypatch):
    monkeypatch.setattr(events, "MAX_WAITING", 10)
    sent = []
    behind = [True]

    def push(message):
        if not behind[0]:
            sent.append(message)
        return not behind[0]

    async def main():
        feed = Feed(3, None, push)
        for number in range(25):
            feed.add(("stored", "memory", "m", b"%d" % number))
        feed.send()
        assert sent == []
        behind[0] = False
        feed.send()
        feed.add(("removed", "memory", "m", b"0"))
        feed.send()
        feed.close()

    asyncio.run(main())
    assert [(message.id, message.lost) for message in sent] == [(3, 15), (3, 0)]
    assert sent[0].events == [
        Event("stored", "memory", "m", [b"%d" % number for number in range(15, 25)])
    ]


def test_subscribers_are_bounded_and_memory_is_not_asked_without_any(on_rig, monkeypatch):
    monkeypatch.setattr(events, "MAX_FEEDS", 2)

    async def scenario(rig):
        hub = EventHub(rig.memory)
        feeds = [Feed(number, None, lambda message: True) for number in range(3)]
        hub.add(feeds[0])
        hub.add(feeds[1])
        with pytest.raises(ProtocolError, match="2 subscribers"):
            hub.add(feeds[2])
        assert rig.memory.on_stored is not None
        hub.remove(feeds[0])
        hub.remove(feeds[1])
        assert rig.memory.on_stored is None and rig.memory.on_removed is None

    on_rig(scenario)


def test_a_client_keeps_no_more_events_than_it_may(monkeypatch):
    monkeypatch.setattr(subscribing, "MAX_QUEUED", 3)
    queue = EventQueue()
    many = [Event("stored", "memory", "m", [b"%d" % number, b"x"]) for number in range(5)]
    queue.take(protocol.Events(lost=2, events=many))
    queue.take(protocol.Ok())
    assert (queue.lost, list(queue.events)) == (6, many[2:])


def test_a_second_subscribe_replaces_the_first(running):
    raw = Raw(running.socket).hello()
    raw.ask(op="SUBSCRIBE", id=7)
    raw.ask(op="SUBSCRIBE", id=8, namespaces=["m"])
    with running.client() as client:
        assert client.namespace("m").put(b"k", b"v", retention="ephemeral")
    message = raw.reply()
    assert message["op"] == "EVENTS" and message["id"] == 8
    assert message["events"] == [["stored", "memory", "m", [b"k"]]]
    refused = raw.ask(op="SUBSCRIBE", id=9, namespaces=["m"] * 1025)
    assert refused["code"] == "bad_request"
    raw.close()


def test_events_in_asyncio(running):
    async def main():
        async with kvd.AsyncClient(running.socket) as client:
            blocks = client.namespace("m")
            async with client.subscribe() as subscription:
                assert await subscription.next(0.05) is None
                assert await blocks.put(b"k", b"v", retention="ephemeral")
                assert await subscription.next(5) == Event("stored", "memory", "m", [b"k"])
                # A cancelled wait loses nothing.
                waiting = asyncio.ensure_future(subscription.next(20))
                await asyncio.sleep(0.02)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert await blocks.delete([b"k"]) == 1
                seen = []
                await asyncio.sleep(0.2)
                running.kill()
                async for event in subscription:
                    seen.append(event)
                assert seen == [Event("removed", "memory", "m", [b"k"])]
                assert subscription.lost == 0
            with pytest.raises(kvd.UnavailableError):
                async with client.subscribe():
                    pass

    asyncio.run(main())
