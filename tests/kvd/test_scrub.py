"""--scrub-rate: damage is found before anybody asks for the block."""

import asyncio
import time

from kvd.scrub import Scrubber


def _damage(daemon, wanted):
    for path in sorted((daemon.long_path / "region" / "containers").iterdir()):
        data = path.read_bytes()
        if (at := data.find(wanted)) >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 77)
                file.write(bytes([wanted[77] ^ 1]))
            return
    raise AssertionError("the block is in no container")


def test_a_damaged_block_is_dropped_and_counted(daemons, make_blocks, wait_until):
    daemon = daemons().start()
    values = make_blocks(20)
    with daemon.client() as client:
        assert all(client.namespace("m").put_many(list(values.items())))
        assert client.flush(20).pending == 0
        assert client.stats().long.scrubbed_values == 0
    assert daemon.stop() == 0
    _damage(daemon, values[b"1/7"])
    daemon.flags += ["--scrub-rate", "64M/s"]
    daemon.start()
    with daemon.client() as client:
        wait_until(lambda: client.stats().long.scrub_damaged == 1)
        long = client.stats().long
        assert long.scrubbed_values >= 1
        assert long.corrupt == 1
        blocks = client.namespace("m")
        present = dict(zip(values, blocks.exists(list(values)), strict=True))
        assert not present.pop(b"1/7")
        assert all(present.values())
        assert client.stats().long.blocks_promoted == 0
    assert "were damaged and are gone" in daemon.log


def test_the_rate_is_kept(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"%d" % number: bytes(4096) for number in range(60)})
        order = list(rig.long.store)
        rate = 400_000
        task = asyncio.ensure_future(Scrubber(rig.paths, rate).run())
        began = time.monotonic()
        await asyncio.sleep(1.0)
        task.cancel()
        read = rig.paths.counters.scrubbed_bytes
        # A first step of a quarter of a MiB goes ahead of the clock.
        assert 0 < read <= rate * (time.monotonic() - began) + (1 << 18)
        assert list(rig.long.store) == order

    on_rig(scenario)


def test_lookups_go_first(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": bytes(4096)})
        rig.paths.reads_waiting += 1
        task = asyncio.ensure_future(Scrubber(rig.paths, 1 << 30).run())
        await asyncio.sleep(0.1)
        assert rig.paths.counters.scrubbed_values == 0
        rig.paths.reads_waiting -= 1
        await rig.ticking(lambda: rig.paths.counters.scrubbed_values >= 1)
        task.cancel()

    on_rig(scenario)
