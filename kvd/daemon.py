"""The daemon: puts the parts together, serves until told to stop, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kvd import quota_requests, quotas
from kvd.arena import Arena
from kvd.cache import Cache
from kvd.config import Config
from kvd.descriptors import connections_allowed, raise_limit
from kvd.errors import ConfigError
from kvd.listening import ListeningSocket
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.notify import Notifier
from kvd.policy.live import Sampled
from kvd.preflight import start_warnings
from kvd.refusals import memory_refusal, os_remedy
from kvd.region_eviction import EvictionFlags
from kvd.server import TICK_S, Connection, Server
from kvd.sessions import MAX_SESSIONS
from kvd.sight.watch import Watch
from kvd.version import __version__
from tablespace import TablespaceError, format_size

# The loop gets the GIL back sooner from the disk threads: 5 ms, the default, is far above a
# request's time.
SWITCH_INTERVAL_S = 0.0005
# Blocks form no cycles; the default thresholds would scan all of them every few thousand sets.
GC_THRESHOLDS = (50_000, 50, 100)
THREAD_EXIT_S = 1.0
ACCEPT_COMPLAIN_S = 1.0

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; return the exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    raise_limit()
    stop = StopSignals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Until there are quotas to load anew.
    with contextlib.closing(ListeningSocket(config.socket, config.access)) as listening:
        status = asyncio.run(_run(config, listening, stop))
    _leave_stuck_threads(status)
    stop.ignore()
    return status


class StopSignals:
    """SIGTERM and SIGINT, from the first to the last moment: repeated, they change nothing.

    asyncio's own handlers go with its loop, and a signal after that would end the process with
    another status than it stopped with.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._came = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        for number in self.NUMBERS:
            signal.signal(number, self._note)

    def event(self) -> asyncio.Event:
        """Return what is set in the running loop once a signal came."""
        event = asyncio.Event()
        self._event, self._loop = event, asyncio.get_running_loop()
        if self._came:
            event.set()
        return event

    def ignore(self) -> None:
        """Let the interpreter's own end be undisturbed."""
        for number in (*self.NUMBERS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._loop is not None and self._event is not None:
            _call_in_loop(self._loop, self._event.set)


def _leave_stuck_threads(status: int) -> None:
    """End the process if a thread hangs in a disk call: the interpreter would wait for it."""
    deadline = time.monotonic() + THREAD_EXIT_S
    for thread in threading.enumerate():
        if thread.name.startswith("kvd-"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.error("thread %s hangs in a disk call and is left behind", thread.name)
                logging.shutdown()
                os._exit(status)


async def _run(config: Config, listening: ListeningSocket, signals: StopSignals) -> int:
    stop = signals.event()
    asyncio.get_running_loop().set_exception_handler(LoopComplaints())
    with contextlib.ExitStack() as closing:
        watch = None
        if config.metrics is not None:
            watch = _watch(*config.metrics)
            closing.callback(watch.close)
        return await _run_watched(config, listening, stop, watch)


def _watch(host: str, port: int) -> Watch:
    try:
        return Watch(host, port, asyncio.get_running_loop())
    except OSError as error:
        raise ConfigError(
            f"--metrics {host}:{port}: {error}; choose another address or port"
        ) from error


async def _run_watched(
    config: Config, listening: ListeningSocket, stop: asyncio.Event, watch: Watch | None
) -> int:
    long_tier = None
    if config.long_path is not None:
        long_tier = LongTier(
            config.long_path,
            config.long_bytes,
            config.slot_bytes,
            config.io_mode,
            evict=EvictionFlags(config.evict_policy, config.watermark, config.evict_ratio),
        )
        try:
            await opened(long_tier.on_writer(long_tier.open_region), long_tier.region)
        except BaseException:
            long_tier.shut_down()
            raise
    try:
        return await _serve(config, listening, long_tier, stop, watch)
    finally:
        if long_tier is not None:
            long_tier.shut_down()


async def opened(opening: asyncio.Future[None], region: Path, every_s: float = 5.0) -> None:
    """Wait for a region to be open, and say now and then that it takes its time."""
    started = time.monotonic()
    while not (await asyncio.wait([opening], timeout=every_s))[0]:
        logger.info(
            "still opening %s: %.0f s; clients are served after that",
            region,
            time.monotonic() - started,
        )
    opening.result()


async def _serve(
    config: Config,
    listening: ListeningSocket,
    long_tier: LongTier | None,
    stop: asyncio.Event,
    watch: Watch | None,
) -> int:
    loop = asyncio.get_running_loop()
    try:
        arena = Arena(config.max_bytes, config.slot_bytes, hugepages=config.hugepages)
    except OSError as error:
        raise memory_refusal(config.max_bytes, error) from error
    if config.numa is not None:
        try:
            arena.bind(config.numa or None)
        except OSError as error:
            raise ConfigError(
                f"--numa {','.join(map(str, config.numa)) or 'interleave'}: {error.strerror}; "
                "name nodes that `numactl --hardware` lists with memory, or leave it out"
            ) from error
    if config.no_pin:
        arena.pin_refusal = "--no-pin"
    else:
        arena.pin()
    memory = MemoryTier(
        arena,
        writes_back=long_tier is not None,
        rule=Sampled(config.evict_policy, arena.slot_count),
    )
    names_directory = config.long_path if long_tier is not None else None
    cache = Cache(memory, Namespaces(names_directory), long_tier)
    notes = [*config.notes, *start_warnings(config)]
    if cache.namespaces.damage is not None:
        notes.append(cache.namespaces.damage)
    if cache.quotas is not None:
        first = cache.tiers[0]
        cache.quotas.take(await first.on_writer(quotas.load, first.directory))
    if arena.pin_refusal is not None:
        notes.append(f"memory is not pinned: {arena.pin_refusal}")
    max_connections = connections_allowed(config)
    if max_connections < MAX_SESSIONS:
        notes.append(
            f"at most {max_connections} connections, by the limit of open files (ulimit -n)"
        )
    server = Server(arena, cache, notes, config.access, max_connections)

    first_slots: asyncio.Future[None] = loop.create_future()

    def take_slots(first: int, count: int) -> None:
        memory.add_slots(first, count)
        if not first_slots.done():
            first_slots.set_result(None)

    def population_ended(error: OSError) -> None:
        if not first_slots.done():
            first_slots.set_exception(memory_refusal(config.max_bytes, error))
        logger.error(
            "the kernel gave no more memory after %d of %d slots (%s); the rest stays unused",
            arena.populated_slots,
            arena.slot_count,
            error,
        )

    arena.populate_in_background(
        lambda first, count: _call_in_loop(loop, lambda: take_slots(first, count)),
        lambda error: _call_in_loop(loop, lambda: population_ended(error)),
    )
    # Whoever finds the socket finds room; the rest comes while we serve.
    await first_slots
    if arena.huge_refusal is not None:
        server.notes.append(f"no huge pages: {arena.huge_refusal}")
    listener = await loop.create_unix_server(lambda: Connection(server), sock=listening.socket)
    notifier = Notifier()
    ticker = loop.create_task(_tick(server, notifier))
    loop.add_signal_handler(signal.SIGHUP, lambda: server.run(_reload_quotas(cache)))
    listening.announce()
    if watch is not None:
        watch.serving(server)
    await _banner(config, server, long_tier, watch)
    notifier.ready(f"serves on {config.socket}")
    await stop.wait()

    logger.info("stopping: draining for at most %.0f s", config.drain_timeout_s)
    notifier.stopping()
    if watch is not None:
        watch.stopping()
    listening.withdraw()
    listener.close()
    arena.fall_silent()
    server.close_connections()
    await _drain(cache, long_tier, config.drain_timeout_s)
    ticker.cancel()
    if long_tier is None or long_tier.failure is None:
        server.lanes.close()
        arena.close()
    logger.info("stopped")
    return 0


class LoopComplaints:
    """What the loop itself complains of. It retries an accept for ever and says so each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a complaint; those about connections not accepted once in a while."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + ACCEPT_COMPLAIN_S
            error = context.get("exception")
            remedy = os_remedy(error, "is retried") if isinstance(error, OSError) else "is retried"
            logger.error("a connection was not accepted: %s; %s", error, remedy)


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass  # The loop is closed: the daemon is ending and needs no more slots.


async def _tick(server: Server, notifier: Notifier) -> None:
    while True:
        try:
            server.tick()
            notifier.alive()
        except Exception:
            # Without its heartbeat the daemon would be dead to its clients.
            logger.exception("the periodic work failed")
        await asyncio.sleep(TICK_S)


async def _reload_quotas(cache: Cache) -> None:
    try:
        limits = await quota_requests.reload(cache)
        logger.info("SIGHUP: %d quotas hold from now on", len(limits))
    except Exception as error:
        logger.error("SIGHUP: %s", error)


async def _drain(cache: Cache, long_tier: LongTier | None, timeout_s: float) -> None:
    """Write what is dirty, then close the region with its snapshot."""
    if long_tier is None or cache.write_back is None:
        return
    deadline = time.monotonic() + timeout_s
    left = await cache.write_back.drain(timeout_s)
    if left:
        logger.warning("not written in time and dropped: %d blocks", left)
    closing = asyncio.ensure_future(long_tier.on_writer(long_tier.close_region))
    try:
        # The snapshot only saves time at the next start, so it may not cost the stop its bound.
        await asyncio.wait_for(closing, max(1.0, deadline - time.monotonic()))
    except asyncio.TimeoutError:
        logger.warning("the region's snapshot was not ready in time; the journal has it all")
    except (TablespaceError, OSError) as error:
        logger.error("closing the region failed: %s", error)


async def _banner(
    config: Config, server: Server, long_tier: LongTier | None, watch: Watch | None
) -> None:
    lines = [
        f"kvd {__version__} serves on {config.socket}",
        f"  memory   {format_size(server.arena.data_bytes)} in {server.arena.slot_count} slots "
        f"of {format_size(server.arena.slot_bytes)}",
    ]
    if long_tier is None:
        lines.append("  disk     none; --long-path DIR adds a tier that survives restarts")
    else:
        stats = await long_tier.on_index(long_tier.stats)
        lines.append(
            f"  disk     {format_size(config.long_bytes)} in {long_tier.region}, "
            f"{stats.capacity} slots, io {stats.io_mode} by {stats.io_engine}"
        )
        if long_tier.resized_from is not None:
            lines.append(
                f"  resized  from {format_size(long_tier.resized_from)}; a larger one keeps every "
                "block, a smaller one those that lie in what is left"
            )
        lines.append(
            f"  reopened {stats.recovery.entries} blocks in {stats.recovery.seconds:.3f} s "
            f"from {stats.recovery.source}"
        )
    if watch is not None:
        lines.append(f"  watch    {watch.url}/ for a browser, {watch.url}/metrics for Prometheus")
    lines += [f"  note     {note}" for note in server.notes]
    lines += [
        f"  connect  export KVD_SOCKET={config.socket}, or kvd.Client({config.socket!r})",
        "  expect   'first hit: ...' here once a block is found; "
        f"counters: python -m kvd.statctl --socket {config.socket}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
