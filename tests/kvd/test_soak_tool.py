"""`kvd soak`: it holds for a good daemon, and notices one that is not."""

from __future__ import annotations

import json
import os
import sys

import pytest

from kvd.replay.daemon import Daemon, scratch_daemon
from kvd.soak import run
from kvd.soak.report import Sample, growth, steady_problems
from kvd.soak.run import Settings, Soak

BLOCK_BYTES = 4 << 10
SIZES = {"max_bytes": 1 << 20, "long_bytes": 4 << 20, "slot_bytes": BLOCK_BYTES}
SEED = int(os.environ.get("KVD_SOAK_SEED", "1"))

WRONG_BYTE = """
import sys
from kvd.soak import worker

fill = worker.SoakBlocks.fill
made = 0


def spoilt(self, block, words):
    global made
    view = fill(self, block, words)
    made += 1
    if made % 3 == 0:
        view[777] ^= 1
    return view


worker.SoakBlocks.fill = spoilt
sys.exit(worker.main())
"""
LEAKED_SLOT = """
import sys
from kvd import memory_tier
from kvd.__main__ import main

let_go = memory_tier.MemoryTier._let_go
calls = 0


def forgetful(self, slot, held):
    global calls
    calls += 1
    if calls != 2:
        let_go(self, slot, held)


memory_tier.MemoryTier._let_go = forgetful
sys.exit(main())
"""
FORGOTTEN_CANCEL = """
import sys
from kvd import client
from kvd.soak import worker

client.Client._give_back = lambda self, session: None
for name in ("_get", "_put", "_lease", "_reconnect"):
    setattr(worker.Worker, name, worker.Worker._write_in_place)
sys.exit(worker.main())
"""
MISCOUNTED_NAMESPACE = """
import sys
from kvd import census
from kvd.__main__ import main

remove = census.Census._remove
calls = 0


def forgetful(self, key):
    global calls
    calls += 1
    if calls == 2:
        self._usage[key[:16]].bytes += 4096
    remove(self, key)


census.Census._remove = forgetful
sys.exit(main())
"""


class ScriptedDaemon(Daemon):
    """A daemon with something wrong in it."""

    script = ""

    def spawn(self) -> None:
        assert self._command[1:3] in (["-m", "kvd"], ["-c", self.script])
        self._command[1:3] = ["-c", self.script]
        super().spawn()


def soak(tmp_path, settings, *, script=None, worker=None):
    print(f"seed {settings.seed}: KVD_SOAK_SEED={settings.seed} repeats it")
    with scratch_daemon(tmp_path, **SIZES, arguments=("--watermark=1.0",)) as daemon:
        if script is not None:
            daemon.__class__ = type("Scripted", (ScriptedDaemon,), {"script": script})
        command = run.WORKER if worker is None else (sys.executable, "-c", worker)
        return Soak(daemon, tmp_path, settings, client_command=command).run()


def short(minutes=0.25, restarts=0, clients=3):
    return Settings(
        minutes, clients, restarts, SEED, BLOCK_BYTES, kill_every_s=1.0, fail_fast=True
    )


def test_a_short_soak_holds(tmp_path):
    report = soak(tmp_path, short(0.12, restarts=2))
    assert report.problems == []
    assert report.wrong_bytes == 0
    assert report.restarts == ["kill -9", "SIGTERM"]
    assert report.clients_killed > 0
    assert min(report.hits, report.leased, report.stored, report.blocks_written) > 0
    assert report.blocks_promoted > 0
    assert report.checks_at_rest >= 2
    assert report.usage_fractions[1] >= 0.9
    assert list(tmp_path.iterdir()) == [tmp_path / "board", tmp_path / "clients.log"]


def test_one_wrong_byte_is_noticed(tmp_path):
    report = soak(tmp_path, short(), worker=WRONG_BYTE)
    assert report.wrong_bytes > 0
    assert any("wrong bytes" in problem for problem in report.problems)


def test_one_leaked_slot_is_noticed(tmp_path):
    report = soak(tmp_path, short(), script=LEAKED_SLOT)
    assert report.wrong_bytes == 0
    assert any("free+entries+reserved" in problem for problem in report.problems)


def test_slots_that_a_client_never_gives_back_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "REST_S", 1.0)
    report = soak(tmp_path, short(), worker=FORGOTTEN_CANCEL)
    assert any("reserved in memory" in problem for problem in report.problems), report.problems


def test_a_namespace_that_is_miscounted_is_noticed(tmp_path):
    report = soak(tmp_path, short(), script=MISCOUNTED_NAMESPACE)
    assert any("bytes on disk differ" in problem for problem in report.problems)


@pytest.mark.long
def test_two_minutes_hold(tmp_path):
    report = soak(tmp_path, Settings(2.0, 8, 5, SEED, BLOCK_BYTES))
    assert report.problems == []
    assert report.wrong_bytes == 0
    assert report.restarts == ["kill -9", "SIGTERM", "kill -9", "SIGTERM", "kill -9"]
    assert report.evictions > 0


def samples(rss, descriptors=None, lives=None):
    return [
        Sample(
            minute=minute + 0.5,
            life=lives[minute] if lives else 1,
            at_rest=True,
            rss_bytes=each,
            anonymous_bytes=each // 2,
            threads=9,
            descriptors=descriptors[minute] if descriptors else 30,
            sessions=1,
            entries=1,
            used_bytes=1,
            usage_fraction=0.9,
        )
        for minute, each in enumerate(rss)
    ]


def test_memory_that_grows_after_the_first_third_is_a_problem():
    early = [1000 + 100 * minute for minute in range(10)]
    flat = early + [2000] * 18 + [2019] * 2
    assert steady_problems(samples(flat), 30) == []
    assert growth(samples(flat), 30).rss == 0.0095
    (problem,) = steady_problems(samples(early + [2000] * 18 + [2021] * 2), 30)
    assert "1.05 %" in problem
    # Another process's memory says nothing of this one's; a minute's says little.
    assert growth(samples(flat, lives=[1] * 20 + [2] * 10), 30) is None
    assert steady_problems(samples([1000, 2000, 3000]), 3) == []


def test_descriptors_that_grow_at_rest_are_a_problem():
    held = [40] * 10 + [30] * 18 + [32, 30]
    assert steady_problems(samples([1000] * 30, held), 30) == []
    (problem,) = steady_problems(samples([1000] * 30, [30] * 27 + [31, 32, 33]), 30)
    assert "descriptors" in problem


def test_the_command_prints_one_document_and_leaves_nothing(command, tmp_path):
    status, out, err = command(
        "soak", "--minutes", "0.02", "--clients", "1", "--restarts", "0", "--max-bytes", "1M",
        "--long-bytes", "4M", "--block-bytes", "4K", "--long-path", tmp_path, "--json",
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out)["problems"] == []
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_what_cannot_be_meant(command, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        command("soak", "--block-bytes", "5000")
