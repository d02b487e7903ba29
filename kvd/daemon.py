"""The daemon: puts the parts together, serves until told to stop, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvd import allocator, quota_requests
from kvd.arena import Arena
from kvd.cache import Cache
from kvd.config import Config
from kvd.descriptors import connections_allowed, raise_limit
from kvd.errors import ConfigError
from kvd.listening import ListeningSocket
from kvd.long_opening import lines, make_admission, make_paths, open_paths
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.notify import Notifier
from kvd.policy.live import Sampled
from kvd.preflight import start_warnings
from kvd.refusals import memory_refusal, metrics_refusal, os_remedy
from kvd.scrub import Scrubber
from kvd.served_connection import ServedConnection
from kvd.server import TICK_S, Server
from kvd.sessions import MAX_SESSIONS
from kvd.sight.watch import Watch
from kvd.size_classes import MAX_CLASSES
from kvd.version import __version__
from kvd.write_budget import WriteBudget
from tablespace import TablespaceError, format_size

# The loop gets the GIL back sooner from the disk threads: 5 ms, the default, is far above a
# request's time.
SWITCH_INTERVAL_S = 0.0005
# Nothing that comes and goes forms cycles; the default thresholds would scan all blocks every few
# thousand sets. So what does form one is as good as leaked.
GC_THRESHOLDS = (50_000, 50, 100)
THREAD_EXIT_S = 1.0
ACCEPT_COMPLAIN_S = 1.0

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; return the exit status."""
    if not allocator.hold_steady():
        logger.info("this C library takes no mallopt: resident memory may grow in steps")
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
        raise metrics_refusal(host, port, error) from error


async def _run_watched(
    config: Config, listening: ListeningSocket, stop: asyncio.Event, watch: Watch | None
) -> int:
    paths = make_paths(config)
    try:
        notes = await open_paths(paths) if paths is not None else []
        return await _serve(config, listening, paths, notes, stop, watch)
    finally:
        if paths is not None:
            paths.shut_down()


async def _serve(
    config: Config,
    listening: ListeningSocket,
    paths: LongPaths | None,
    path_notes: list[str],
    stop: asyncio.Event,
    watch: Watch | None,
) -> int:
    loop = asyncio.get_running_loop()
    # The region's own slots too: what lies in them is to be read into memory.
    on_disk = {size for tier in paths.tiers for size in tier.slot_sizes} if paths else set()
    more_sizes = [*config.slots.sizes, *sorted(on_disk, reverse=True)]
    try:
        arena = Arena(
            config.max_bytes,
            config.slot_bytes,
            more_sizes=more_sizes,
            hugepages=config.hugepages,
        )
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
        writes_back=paths is not None,
        rule=Sampled(config.evict_policy, arena.slot_count),
        sizes=more_sizes,
    )
    cache = Cache(
        memory,
        Namespaces(config.paths),
        paths,
        admission=make_admission(config),
        budget=WriteBudget(config.write_budget),
        flush_interval_s=config.flush_interval_ms / 1000,
    )
    notes = [*config.notes, *start_warnings(config), *path_notes]
    if cache.namespaces.damage is not None:
        notes.append(cache.namespaces.damage)
    await quota_requests.load(cache)
    if arena.pin_refusal is not None:
        notes.append(f"memory is not pinned: {arena.pin_refusal}")
    max_connections = connections_allowed(config)
    if max_connections < MAX_SESSIONS:
        notes.append(
            f"at most {max_connections} connections, by the limit of open files (ulimit -n)"
        )
    server = Server(arena, cache, notes, config.access, max_connections)
    if paths is not None:

        def back(tier: LongTier) -> None:
            # What lay beside its region may have gone with it.
            cache.namespaces.put_back(tier.directory)
            server.run(quota_requests.keep(cache, tier))
            for size in tier.slot_sizes:
                memory.classes.add(size)

        paths.on_back = back

    first_slots: asyncio.Future[None] = loop.create_future()

    def take_slabs() -> None:
        while (slabs := arena.take_ready()) is not None:
            memory.add_slabs(*slabs)
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
        lambda: _call_in_loop(loop, take_slabs),
        lambda error: _call_in_loop(loop, lambda: population_ended(error)),
    )
    # Whoever finds the socket finds room; the rest comes while we serve, or when it is needed.
    await first_slots
    memory.populate_now = arena.populate_now
    server.notes.extend(_about_huge_pages(arena, config.hugepages))
    if memory.classes.left_out:
        sizes = ", ".join(format_size(size) for size in memory.classes.left_out)
        server.notes.append(f"memory has no slots of {sizes}: {MAX_CLASSES} size classes at most")
    listener = await loop.create_unix_server(
        lambda: ServedConnection(server), sock=listening.socket
    )
    notifier = Notifier()
    background = [loop.create_task(_tick(server, notifier))]
    if paths is not None and config.scrub_rate:
        background.append(loop.create_task(Scrubber(paths, config.scrub_rate).run()))
    loop.add_signal_handler(signal.SIGHUP, lambda: server.run(_reload_quotas(cache)))
    listening.announce()
    if watch is not None:
        watch.serving(server)
    await _banner(config, server, paths, watch)
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
    # What clients used last counts for what the regions keep.
    server.lanes.fold()
    await _drain(cache, paths, config.drain_timeout_s)
    for task in background:
        task.cancel()
    if paths is None or all(tier.failure is None for tier in paths.tiers):
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


async def _drain(cache: Cache, paths: LongPaths | None, timeout_s: float) -> None:
    """Write what is dirty, then close the regions with their snapshots."""
    if paths is None or cache.write_back is None:
        return
    deadline = time.monotonic() + timeout_s
    left = await cache.write_back.drain(timeout_s)
    if left:
        logger.warning("not written in time and dropped: %d blocks", left)
    closing = asyncio.ensure_future(paths.close())
    try:
        # The snapshot only saves time at the next start, so it may not cost the stop its bound.
        await asyncio.wait_for(closing, max(1.0, deadline - time.monotonic()))
    except asyncio.TimeoutError:
        logger.warning("the region's snapshot was not ready in time; the journal has it all")
    except (TablespaceError, OSError) as error:
        logger.error("closing the region failed: %s", error)


def _about_huge_pages(arena: Arena, asked: bool) -> list[str]:
    """Say which huge pages there are, and why not the better ones."""
    if not asked:
        return []
    if arena.reserve_refusal is None:
        return [f"huge pages: {format_size(arena.data_bytes)} reserved ones (MFD_HUGETLB)"]
    notes = [f"no reserved huge pages (MFD_HUGETLB): {arena.reserve_refusal}"]
    if arena.huge_refusal is not None:
        return [*notes, f"no huge pages: {arena.huge_refusal}"]
    return [*notes, "huge pages: made of ordinary ones (MADV_COLLAPSE)"]


def _other_sizes(server: Server) -> str:
    sizes = [size for size in server.cache.memory.classes.sizes if size != server.arena.slot_bytes]
    return "".join(f", or of {format_size(size)}" for size in sizes)


async def _banner(
    config: Config, server: Server, paths: LongPaths | None, watch: Watch | None
) -> None:
    # As a client in any directory would have to name it.
    where = os.path.abspath(config.socket)
    text = [
        f"kvd {__version__} serves on {where}",
        f"  memory   {format_size(server.arena.data_bytes)} in {server.arena.slot_count} slots "
        f"of {format_size(server.arena.slot_bytes)}{_other_sizes(server)}",
    ]
    if paths is None:
        text.append("  disk     none; --long-path DIR adds a tier that survives restarts")
    else:
        text += await paths.tiers[0].on_index(lines, paths)
    if watch is not None:
        text.append(f"  watch    {watch.url}/ for a browser, {watch.url}/metrics for Prometheus")
    text += [f"  note     {note}" for note in server.notes]
    text += [
        f"  connect  export KVD_SOCKET={shlex.quote(where)}, or kvd.Client({where!r})",
        "  expect   'first hit: ...' here once a block is found; "
        f"counters: python -m kvd.statctl --socket {shlex.quote(where)}",
    ]
    sys.stdout.write("\n".join(text) + "\n")
    sys.stdout.flush()
