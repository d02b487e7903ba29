"""Several processes on one small arena, everything at once: never another block's bytes."""

import json
import random
import subprocess
import sys

WORKER = """
import json, random, sys, time
import kvd

path, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
source = random.Random(seed)
client = kvd.Client(path)
handles = [client.namespace(f"space {number}") for number in range(3)]
counts = dict(puts=0, hits=0, misses=0, wrong=0, deleted=0)


def value(space, number):
    return (b"%d:%d;" % (space, number)) * (5000 + number * 10)


end = time.monotonic() + seconds
while time.monotonic() < end:
    space = source.randrange(3)
    blocks = handles[space]
    numbers = [source.randrange(400) for _ in range(source.randrange(1, 20))]
    keys = [b"%d" % number for number in numbers]
    action = source.random()
    if action < 0.45:
        retention = source.choice(["long", "long", "short", "ephemeral"])
        items = [(key, value(space, number)) for key, number in zip(keys, numbers)]
        counts["puts"] += sum(blocks.put_many(items, retention=retention))
    elif action < 0.9:
        buffers = [bytearray(65536) for _ in keys]
        for number, buffer, length in zip(
            numbers, buffers, blocks.get_many_into(keys, buffers)
        ):
            if length is None:
                counts["misses"] += 1
            elif bytes(buffer[:length]) == value(space, number):
                counts["hits"] += 1
            else:
                counts["wrong"] += 1
    elif action < 0.99:
        counts["deleted"] += blocks.delete(keys)
    else:
        blocks.clear()
json.dump(counts, sys.stdout)
"""


def test_no_process_ever_reads_anothers_bytes(running):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, running.socket, str(seed + number), "4"],
            stdout=subprocess.PIPE,
        )
        for number in range(3)
    ]
    totals: dict[str, int] = {}
    for worker in workers:
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0
        for name, count in json.loads(output).items():
            totals[name] = totals.get(name, 0) + count
    assert totals["wrong"] == 0, f"seed {seed}: {totals}"
    assert totals["hits"] > 50, totals
    assert totals["deleted"] > 0, totals
    with running.client() as client:
        stats = client.stats()
        memory = stats.memory
        assert memory.corrupt == 0
        assert stats.long.corrupt == 0
        assert stats.errors_total == 0
        assert stats.long.blocks_promoted > 0
        client.namespace("space 0").clear()
        assert client.flush(20).pending == 0
        stats = client.stats()
        memory = stats.memory
        assert memory.slots_reserved == memory.slots_quarantined == 0
        held = memory.slots_free + memory.entries + stats.long.in_flight_blocks
        assert memory.slots - stats.long.queue_blocks <= held <= memory.slots
    assert "Traceback" not in running.log
