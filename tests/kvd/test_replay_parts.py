"""The parts of a replay that need no daemon: contents, percentiles, the driver's counting."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvd.replay.buffers import BlockBuffers
from kvd.replay.content import CELL_BYTES, BlockContents, id_of, key_of, mix
from kvd.replay.driver import Driver
from kvd.replay.journal import JournalFollower
from kvd.replay.latency import Calls, weighted_percentiles
from kvd.replay.ledger import Ledger, long_key
from kvd.replay.progress import Meter
from kvd.replay.report import DaemonCounts, as_json, build
from kvd.replay.trace import Request

BLOCK_BYTES = 64 << 10


def block(hash_id: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    words = np.empty(block_bytes // 8, dtype=np.uint64)
    BlockContents(block_bytes).fill(hash_id, words)
    return words


def wrong(hash_id: int, words: np.ndarray, length: int = BLOCK_BYTES) -> int:
    return BlockContents(BLOCK_BYTES).wrong_bytes(hash_id, words, length)


class TestContents:
    def test_a_block_equals_itself_only(self) -> None:
        assert wrong(5, block(5)) == 0
        assert wrong(6, block(5)) > BLOCK_BYTES * 0.9

    def test_every_word_differs_between_blocks(self) -> None:
        assert not (block(5) == block(6)).any()

    def test_words_of_one_block_are_all_different(self) -> None:
        assert len(np.unique(block(9))) == BLOCK_BYTES // 8

    def test_contents_never_change(self) -> None:
        # Regions outlive versions: other bytes need another CONTENT_VERSION.
        assert block(1)[:2].tolist() == [0xD914ED4E9BABAF1A, 0x4D23D9D535BF86EB]

    @pytest.mark.parametrize("cell", [0, 1, 63, 127])
    def test_one_cell_of_another_block_is_noticed(self, cell: int) -> None:
        words = block(5)
        part = slice(cell * CELL_BYTES // 8, (cell + 1) * CELL_BYTES // 8)
        words[part] = block(6)[part]
        assert CELL_BYTES * 0.9 < wrong(5, words) <= CELL_BYTES

    def test_two_swapped_cells_are_noticed(self) -> None:
        words = block(5)
        cells = words.reshape(-1, CELL_BYTES // 8)
        cells[[3, 90]] = cells[[90, 3]]
        assert 2 * CELL_BYTES * 0.9 < wrong(5, words) <= 2 * CELL_BYTES

    @pytest.mark.parametrize("bytes_", [1, 8, 512, 4096])
    def test_a_shifted_block_is_noticed(self, bytes_: int) -> None:
        shifted = np.roll(block(5).view(np.uint8), bytes_).view(np.uint64)
        assert wrong(5, shifted) > BLOCK_BYTES * 0.9

    @pytest.mark.parametrize("bit", [0, 12345, BLOCK_BYTES * 8 - 1])
    def test_one_flipped_bit_is_one_wrong_byte(self, bit: int) -> None:
        words = block(5)
        words.view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        assert wrong(5, words) == 1

    def test_missing_and_surplus_bytes_are_wrong(self) -> None:
        assert wrong(5, block(5), BLOCK_BYTES - 100) == 100
        assert wrong(5, block(5), BLOCK_BYTES + 7) == 7
        assert wrong(5, block(5), 0) == BLOCK_BYTES

    def test_zeros_are_wrong(self) -> None:
        assert wrong(5, np.zeros(BLOCK_BYTES // 8, np.uint64)) > BLOCK_BYTES * 0.9

    def test_poison_shows_every_cell_that_was_not_written(self) -> None:
        words = block(5)
        BlockContents.poison(words)
        cells = words.reshape(-1, CELL_BYTES // 8)
        assert (cells[:, 0] != block(5).reshape(cells.shape)[:, 0]).all()
        cells[1:] = block(5).reshape(cells.shape)[1:]
        assert 1 <= wrong(5, words) <= 8

    @pytest.mark.parametrize("size", [0, 511, 513, -512])
    def test_odd_sizes_are_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match="multiple of 512"):
            BlockContents(size)

    def test_keys_and_ids_map_one_to_one(self) -> None:
        for hash_id in (0, 1, 255, 1 << 40, (1 << 64) - 1):
            assert id_of(key_of(hash_id)) == hash_id
        assert len({mix(number) for number in range(10_000)}) == 10_000

    def test_generating_and_comparing_are_cheap(self) -> None:
        # They must not dominate a replay: 15 us for 64 KiB, with slack for a loaded machine.
        contents = BlockContents(BLOCK_BYTES)
        words = np.empty(BLOCK_BYTES // 8, dtype=np.uint64)
        best = min(_timed(contents, words) for _ in range(50))
        assert best < 2 * 15e-6


def _timed(contents: BlockContents, words: np.ndarray) -> float:
    began = time.perf_counter()
    contents.fill(77, words)
    assert contents.wrong_bytes(77, words, BLOCK_BYTES) == 0
    return time.perf_counter() - began


class TestBuffers:
    def test_rows_are_aligned_and_apart(self) -> None:
        buffers = BlockBuffers(BLOCK_BYTES, 3)
        for words, view in zip(buffers.words, buffers.views, strict=True):
            assert words.ctypes.data % 4096 == 0
            assert view.nbytes == BLOCK_BYTES
        buffers.words[1][:] = 7
        assert bytes(buffers.views[1][:8]) == (7).to_bytes(8, "little")
        assert not any(buffers.views[0])
        assert not any(buffers.views[2])


class TestPercentiles:
    def test_nearest_rank(self) -> None:
        values = [float(number) for number in range(1, 101)]
        assert weighted_percentiles(values, [1] * 100, [0, 1, 50, 90, 99, 100]) == [
            1, 1, 50, 90, 99, 100,
        ]  # fmt: skip

    def test_order_of_samples_does_not_matter(self) -> None:
        assert weighted_percentiles([3.0, 1.0, 2.0], [1, 1, 1], [50]) == [2.0]

    def test_weights_count_as_repeats(self) -> None:
        values, weights = [5.0, 1.0, 9.0], [3, 6, 1]
        repeated = [5.0] * 3 + [1.0] * 6 + [9.0]
        percents = [10, 50, 60, 61, 90, 91, 99]
        assert weighted_percentiles(values, weights, percents) == weighted_percentiles(
            repeated, [1] * 10, percents
        )

    def test_one_sample_is_every_percentile(self) -> None:
        assert weighted_percentiles([4.0], [1], [1, 50, 99]) == [4.0] * 3

    def test_nothing_is_not_a_number(self) -> None:
        assert np.isnan(weighted_percentiles([], [], [50, 99])).all()

    def test_calls_answer_per_call_and_per_block(self) -> None:
        calls = Calls()
        calls.add(10e-6, 1)
        calls.add(90e-6, 9)
        calls.add(1000e-6, 10)
        assert calls.per_call_us([50]) == pytest.approx([90.0])
        assert calls.per_block_us([50, 51]) == pytest.approx([10.0, 100.0])


class DictBlocks:
    """Serves blocks from a dict; the first ``memory_keys`` distinct keys are "in memory"."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.memory: set[bytes] = set()
        self.refuse: set[bytes] = set()
        self.calls: list[int] = []

    def get_many_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tiers: list[str | None] | None = None,
    ) -> list[int | None]:
        assert tiers is not None
        self.calls.append(len(keys))
        lengths: list[int | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(key)
            if value is not None:
                buffer[: len(value)] = value
            lengths.append(None if value is None else len(value))
            served = "memory" if key in self.memory else "long"
            tiers.append(None if value is None else served)
        return lengths

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        kept = [key not in self.refuse for key, _ in items]
        self.values |= {key: bytes(value) for key, value in items if key not in self.refuse}
        return kept


def request(*hash_ids: int, timestamp: float = 0.0) -> Request:
    return Request(timestamp, 512 * len(hash_ids), 1, list(hash_ids))


class TestDriver:
    def test_counts_hits_misses_and_leading_hits(self) -> None:
        blocks = DictBlocks()
        blocks.memory = {key_of(1), key_of(9)}
        stored: list[int] = []
        driver = Driver(blocks, 4096, on_stored=stored.extend)
        driver.play(request(1, 2, 3))
        del blocks.values[key_of(2)]
        driver.play(request(1, 2, 3, 9))
        out = driver.outcome
        assert stored == [1, 2, 3, 2, 9]
        assert (out.requests, out.references, out.hits, out.misses) == (2, 7, 2, 5)
        assert out.leading_hits == 1
        assert out.tiers["memory"].hits == 1
        assert out.tiers["memory"].bytes == 4096
        assert out.tiers["long"].hits == 1
        assert out.wrong_bytes == 0
        assert out.puts_stored == 5
        assert out.put_bytes == 5 * 4096

    def test_what_is_stored_is_what_the_id_stands_for(self) -> None:
        blocks = DictBlocks()
        Driver(blocks, 4096).play(request(5, 6))
        assert blocks.values == {
            key_of(5): block(5, 4096).tobytes(),
            key_of(6): block(6, 4096).tobytes(),
        }

    def test_batches_are_bounded_and_prefixes_span_them(self) -> None:
        blocks = DictBlocks()
        driver = Driver(blocks, 1 << 20)
        ids = list(range(11))
        driver.play(request(*ids))
        driver.play(request(*ids))
        assert blocks.calls == [4, 4, 3, 4, 4, 3]
        assert driver.outcome.leading_hits == 11
        assert driver.outcome.hits == 11

    def test_wrong_bytes_of_a_hit_are_counted(self) -> None:
        blocks = DictBlocks()
        driver = Driver(blocks, 4096)
        driver.play(request(1, 2, 3))
        blocks.values[key_of(1)], blocks.values[key_of(3)] = (
            blocks.values[key_of(3)],
            blocks.values[key_of(1)],
        )
        flipped = bytearray(blocks.values[key_of(2)])
        flipped[77] ^= 4
        blocks.values[key_of(2)] = bytes(flipped)
        driver.play(request(1, 2, 3))
        assert driver.outcome.wrong_blocks == 3
        assert driver.outcome.wrong_ids == [1, 2, 3]
        assert 2 * 4096 * 0.9 < driver.outcome.wrong_bytes <= 2 * 4096 + 1

    def test_a_hit_that_writes_nothing_is_wrong(self) -> None:
        class Lazy(DictBlocks):
            def get_many_into(
                self,
                keys: Sequence[bytes],
                buffers: Sequence[memoryview],
                tiers: list[str | None] | None = None,
            ) -> list[int | None]:
                elsewhere = [memoryview(bytearray(4096)) for _ in buffers]
                return super().get_many_into(keys, elsewhere, tiers)

        driver = Driver(Lazy(), 4096)
        # The right bytes are still in the buffer from the put: only the poison tells.
        driver.play(request(1))
        driver.play(request(1))
        assert driver.outcome.wrong_bytes > 0

    def test_refused_puts_are_counted_and_not_stored(self) -> None:
        blocks = DictBlocks()
        blocks.refuse = {key_of(2)}
        stored: list[int] = []
        driver = Driver(blocks, 4096, on_stored=stored.extend)
        driver.play(request(1, 2, 3))
        assert stored == [1, 3]
        assert (driver.outcome.puts_stored, driver.outcome.puts_refused) == (2, 1)

    def test_check_returns_the_absent_and_stores_nothing(self) -> None:
        blocks = DictBlocks()
        driver = Driver(blocks, 4096)
        driver.play(request(1, 2))
        assert driver.check([3, 1, 4, 2]) == [3, 4]
        assert set(blocks.values) == {key_of(1), key_of(2)}
        assert driver.outcome.references == 2

    def test_speed_keeps_the_traces_times(self) -> None:
        blocks = DictBlocks()
        requests = [request(number, timestamp=1000.0 + 100 * number) for number in range(4)]
        began = time.monotonic()
        Driver(blocks, 4096).replay(requests, speed=2.0)
        assert time.monotonic() - began >= 0.15

    def test_stop_ends_a_wait_at_once(self) -> None:
        stop = threading.Event()
        requests = [request(1), request(2, timestamp=3_600_000.0)]
        driver = Driver(DictBlocks(), 4096)
        driver.replay(requests, speed=1.0, stop=stop, on_request=lambda one: stop.set())
        assert driver.outcome.requests == 1


def line(seq: int, op: str, key: bytes = b"k") -> bytes:
    record = {"seq": seq, "grp": 1, "op": op, "key": key.hex(), "line": "0"}
    return json.dumps(record).encode() + b"\n"


class TestJournalFollower:
    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        return tmp_path / "index.log"

    def test_appended_lines_are_taken_once(self, log: Path) -> None:
        log.write_bytes(b'{"format":1}\n' + line(1, "put"))
        follower = JournalFollower(log)
        assert follower.poll() == 1
        with log.open("ab") as file:
            file.write(line(2, "evict", b"a") + line(3, "put"))
        assert follower.poll() == 3
        assert follower.poll() == 3
        assert follower.evicted == {b"a": 2}

    def test_half_a_line_is_taken_when_it_is_whole(self, log: Path) -> None:
        whole = line(2, "evict", b"a")
        log.write_bytes(line(1, "put") + whole[:20])
        follower = JournalFollower(log)
        assert follower.poll() == 1
        log.write_bytes(line(1, "put") + whole)
        assert follower.poll() == 2

    def test_filler_is_no_end(self, log: Path) -> None:
        filler = b"\n" * (3 << 20)
        head, more, last = line(1, "put"), line(2, "evict", b"a"), line(3, "evict", b"b")
        log.write_bytes(head + filler)
        follower = JournalFollower(log)
        assert follower.poll() == 1
        for written in (head + more, head + more + b"\n" * 100 + last):
            log.write_bytes(written + filler)
            follower.poll()
        assert follower.evicted == {b"a": 2, b"b": 3}

    def test_half_a_line_before_filler_waits(self, log: Path) -> None:
        whole = line(2, "evict", b"a")
        log.write_bytes(line(1, "put") + whole[:20] + b"\n" * 500)
        follower = JournalFollower(log)
        assert follower.poll() == 1
        log.write_bytes(line(1, "put") + whole + b"\n" * 500)
        assert follower.poll() == 2

    def test_lines_longer_than_a_chunk_boundary(
        self, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvd.replay.journal.CHUNK_BYTES", 37)
        log.write_bytes(b"".join(line(seq, "evict", b"%d" % seq) for seq in range(1, 50)))
        follower = JournalFollower(log)
        assert follower.poll() == 49
        assert len(follower.evicted) == 49

    def test_rotation_loses_nothing(self, log: Path) -> None:
        backup = log.with_name("index.log.bak")
        log.write_bytes(line(1, "put"))
        follower = JournalFollower(log)
        follower.poll()
        with log.open("ab") as file:
            file.write(line(2, "evict", b"a"))
        log.rename(backup)
        log.write_bytes(line(3, "evict", b"b"))
        assert follower.poll() == 3
        # Two rotations between polls: the middle journal is the backup now.
        log.rename(backup)
        log.write_bytes(line(4, "evict", b"c"))
        log.rename(backup)
        log.write_bytes(line(5, "evict", b"d"))
        assert follower.poll() == 5
        assert follower.evicted == {b"a": 2, b"b": 3, b"c": 4, b"d": 5}

    def test_a_journal_written_anew_takes_nothing_back(self, log: Path) -> None:
        log.with_name("index.log.bak").write_bytes(line(1, "evict", b"a"))
        log.write_bytes(line(2, "put", b"a") + line(3, "evict", b"a"))
        follower = JournalFollower(log)
        follower.poll()
        anew = log.with_name("index.log.new")
        anew.write_bytes(line(2, "put", b"a") + line(3, "evict", b"a"))
        anew.rename(log)
        assert follower.poll() == 3
        assert follower.evicted == {b"a": 3}

    def test_absent_journal_is_none_yet(self, log: Path) -> None:
        assert JournalFollower(log).poll() == 0


class TestLedger:
    NAME = "some namespace"

    def append(self, tmp_path: Path, *lines: bytes) -> None:
        with (tmp_path / "index.log").open("ab") as file:
            file.write(b"".join(lines))

    def test_absent_blocks_are_lost_unless_evicted_since(self, tmp_path: Path) -> None:
        ledger = Ledger(self.NAME, tmp_path)
        self.append(tmp_path, line(1, "put"), line(2, "evict", long_key(self.NAME, 7)))
        ledger.store([5, 6, 7, 8])
        assert ledger.waiting() == [5, 6, 7, 8]
        ledger.confirm([5, 6, 7], ledger.position())
        self.append(tmp_path, line(3, "evict", long_key(self.NAME, 6)))
        verdict = ledger.judge([6, 7])
        # 7 was evicted before it was confirmed, so it had been stored again: it is lost.
        assert (verdict.confirmed, verdict.found, verdict.evicted) == (3, 1, 1)
        assert verdict.lost == [7]
        assert ledger.confirmed() == [5]
        assert ledger.waiting() == [8]

    def test_confirming_again_moves_the_promise(self, tmp_path: Path) -> None:
        ledger = Ledger(self.NAME, tmp_path)
        self.append(tmp_path, line(1, "put"))
        ledger.store([6])
        ledger.confirm([6], ledger.position())
        self.append(tmp_path, line(2, "evict", long_key(self.NAME, 6)))
        ledger.store([6])
        ledger.confirm([6], ledger.position())
        assert ledger.judge([6]).lost == [6]

    def test_another_namespaces_eviction_excuses_nothing(self, tmp_path: Path) -> None:
        ledger = Ledger(self.NAME, tmp_path)
        ledger.confirm([6], ledger.position())
        self.append(tmp_path, line(2, "evict", long_key("another", 6)))
        assert ledger.judge([6]).lost == [6]


def test_report_is_one_json_document_with_nulls_where_nothing_was_timed() -> None:
    driver = Driver(DictBlocks(), 4096)
    driver.play(request(1, 2))
    counts = DaemonCounts(memory_evictions=3, long_evictions=4, dropped=5)
    report = build(driver.outcome, counts, {"no_room": 6}, source="t", block_bytes=4096)
    found = json.loads(as_json(report))
    assert found["tiers"]["memory"]["evictions"] == 3
    assert found["tiers"]["long"]["evictions"] == 4
    assert found["tiers"]["long"]["block_us"] == {"p50": None, "p95": None, "p99": None}
    assert found["puts"]["stored"] == 2
    assert found["puts"]["refusals"] == {"no_room": 6}
    assert found["puts"]["block_us"]["p50"] > 0
    assert found["wrong_bytes"] == 0


def test_daemon_counts_are_differences() -> None:
    assert DaemonCounts(11, 13, 15).since(DaemonCounts(1, 2, 3)) == DaemonCounts(10, 11, 12)


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.replay.progress.LINE_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with Meter("replay", 4, stream) as meter:
        meter.advance()
        meter.advance(3)
    assert stream.getvalue() == "replay: 25 %\nreplay: 100 %\n"


def test_progress_off_a_terminal_ends_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped at whatever its last line said, so a finished step looked given up."""
    monkeypatch.setattr("kvd.replay.progress.LINE_INTERVAL_S", 0.0)
    stream = io.StringIO()
    with Meter("replay", 4, stream) as meter:
        meter.advance()
        monkeypatch.setattr("kvd.replay.progress.LINE_INTERVAL_S", 60.0)
        meter.advance()
        meter.advance(2)
    assert stream.getvalue().endswith("replay: 100 %\n")
    with pytest.raises(KeyError), Meter("replay", 4, stream) as meter:
        raise KeyError
    assert stream.getvalue().count("100 %") == 1
