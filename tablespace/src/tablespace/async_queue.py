"""Calls from event loops, served by two threads: one lane for reads, one for writes.

A call goes: loop -> gate (how much one loop may have under way) -> lane (a thread that serves many
calls at once) -> port (the loop's eventfd) -> the waiting task.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from tablespace.errors import ClosedError
from tablespace.io.wakeup import Wakeup

# Keys that one loop may have queued or in flight in a lane; calls beyond it wait their turn.
MAX_KEYS_UNDER_WAY = 4096


class Call:
    """One call of a task.

    Attributes
    ----------
    kind : str
        Calls of one kind and mode are served together.
    mode : str or None
        The durability that a put asks for.
    arguments : Any
        What the lane needs; dropped when the call is over.
    keys : int
        How many keys it is about.
    borrows : bool
        Whether memory of the caller's is read or written until it is over.
    taken : bool
        Whether the lane serves it: it cannot be taken back any more.
    """

    __slots__ = (
        "arguments",
        "borrows",
        "counted",
        "dropped",
        "error",
        "future",
        "gate",
        "keys",
        "kind",
        "mode",
        "over",
        "release",
        "result",
        "taken",
    )

    def __init__(
        self,
        kind: str,
        arguments: Any,
        keys: int,
        *,
        mode: str | None = None,
        borrows: bool = False,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.arguments = arguments
        self.keys = keys
        self.borrows = borrows
        self.release = release
        self.result: Any = None
        self.error: BaseException | None = None
        self.counted = self.taken = self.dropped = self.over = False
        self.future: asyncio.Future[None]
        self.gate: Gate

    def let_go(self) -> None:
        """Give the caller's memory back."""
        self.arguments = None
        if self.release is not None:
            self.release()
            self.release = None


class Lane:
    """A thread that serves calls, many of one kind at once, in the order in which they came.

    Parameters
    ----------
    serve : callable
        Given a list of calls of one kind; sets `result` or `error` of each.
    limit : int
        Keys served at once; a call with more is served alone.
    """

    def __init__(self, name: str, serve: Callable[[list[Call]], None], limit: int) -> None:
        self._name = name
        self._serve = serve
        self._limit = limit
        self._queue: deque[Call] = deque()
        self._closed: str | None = None
        self._idle = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition(threading.Lock())

    def put(self, calls: list[Call]) -> None:
        """Queue calls; the first ones start the thread."""
        with self._changed:
            if self._closed is not None:
                raise ClosedError(self._closed)
            if self._thread is None:
                # Before anything is queued: where no thread can be had, nothing stays behind.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.extend(calls)
            if self._idle:
                self._changed.notify()

    def take_back(self, call: Call) -> bool:
        """Withdraw a call that is not being served yet; False when it is too late."""
        with self._changed:
            call.dropped = not call.taken
        return call.dropped

    def close(self, reason: str) -> None:
        """Refuse the calls that wait, and later ones; wait for those being served."""
        with self._changed:
            self._closed = reason
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify()
            for call in waiting:
                call.taken = not call.dropped
        refused = [call for call in waiting if call.taken]
        for call in refused:
            call.error = ClosedError(reason)
        self._hand_over(refused)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._serve_once():
            pass

    def _serve_once(self) -> bool:
        """Serve what waits; False when the lane is closed.  Keeps nothing of it afterwards."""
        with self._changed:
            self._idle = True
            while not self._queue and self._closed is None:
                self._changed.wait()
            self._idle = False
            if self._closed is not None:
                return False
            calls = self._take()
        if calls:
            try:
                self._serve(calls)
            except BaseException as error:
                for call in calls:
                    call.error = error
            self._hand_over(calls)
        return True

    def _take(self) -> list[Call]:
        """Take the next calls that may be served together; the condition is held."""
        calls: list[Call] = []
        total = 0
        while self._queue:
            call = self._queue[0]
            if not call.dropped:
                if calls and not (
                    call.kind == calls[0].kind
                    and call.mode == calls[0].mode
                    and total + call.keys <= self._limit
                ):
                    break
                call.taken = True
                total += call.keys
                calls.append(call)
            self._queue.popleft()
        return calls

    def _hand_over(self, calls: list[Call]) -> None:
        ports = set()
        for call in calls:
            call.let_go()
            call.gate.port.finished.append(call)
            ports.add(call.gate.port)
        for port in ports:
            port.wakeup.set()


class Gate:
    """What one loop has under way in one lane. Everything here runs in that loop's thread."""

    def __init__(self, port: Port, lane: Lane) -> None:
        self.port = port
        self._lane = lane
        self._keys = 0
        self._fresh: list[Call] = []
        self._waiting: deque[Call] = deque()

    async def run(self, call: Call) -> Any:
        """Have a call served; return its result or raise its error.

        Cancelled before a lane has taken it, the call has not happened.  Cancelled later, it goes
        on; where it uses memory of the caller's, the cancellation is held back until it is over.
        """
        loop = asyncio.get_running_loop()
        call.gate = self
        call.future = loop.create_future()
        self.port.calls += 1
        if self._waiting or self._keys >= MAX_KEYS_UNDER_WAY:
            self._waiting.append(call)
        else:
            self._admit(call, loop)
        cancelled: asyncio.CancelledError | None = None
        while not call.over:
            try:
                await call.future
            except asyncio.CancelledError as error:
                if call.over:
                    raise
                if self._lane.take_back(call):
                    self._forget(call)
                    raise
                if not call.borrows:
                    raise
                cancelled = error
                call.future = loop.create_future()
            except BaseException:
                # The task is thrown away with its loop: there is nobody to wait here.
                if self._lane.take_back(call):
                    call.let_go()
                raise
        if cancelled is not None:
            raise cancelled
        if call.error is not None:
            raise call.error
        return call.result

    def _admit(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        """Count a call in; all of one turn of the loop go to the lane together."""
        call.counted = True
        self._keys += call.keys
        self._fresh.append(call)
        if len(self._fresh) == 1:
            loop.call_soon(self._send)

    def _send(self) -> None:
        calls, self._fresh = [call for call in self._fresh if not call.dropped], []
        if not calls:
            return
        try:
            self._lane.put(calls)
        except Exception as error:
            # The lane is closed, or there is no thread to be had.
            for call in calls:
                call.error = error
                call.let_go()
                self.settle(call)

    def settle(self, call: Call) -> None:
        """Wake the task of a call that is over."""
        call.over = True
        if not call.future.done():
            call.future.set_result(None)
        self._forget(call)

    def _forget(self, call: Call) -> None:
        """Count a call out and let waiting ones in."""
        if call.dropped:
            call.let_go()
        self.port.calls -= 1
        if call.counted:
            self._keys -= call.keys
        while self._waiting and self._keys < MAX_KEYS_UNDER_WAY:
            waiting = self._waiting.popleft()
            if not waiting.dropped:
                self._admit(waiting, waiting.future.get_loop())


class Port:
    """Where one event loop hears of calls that are over.

    Attributes
    ----------
    loop : weak reference
    finished : deque of Call
        Filled by lanes, emptied by the loop; `wakeup` is set behind it.
    calls : int
        Calls of this loop that are not over; changed in its thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lanes: dict[str, Lane]) -> None:
        self.loop = weakref.ref(loop)
        self.finished: deque[Call] = deque()
        self.calls = 0
        self.wakeup = Wakeup()
        self.gates = {name: Gate(self, lane) for name, lane in lanes.items()}
        self._closing = False
        loop.add_reader(self.wakeup.fileno(), self._deliver)

    def _deliver(self) -> None:
        self.wakeup.clear()
        while self.finished:
            call = self.finished.popleft()
            call.gate.settle(call)
        if self._closing:
            self.retire()

    def retire(self) -> None:
        """Stop listening once no call is left; runs in the loop's thread."""
        self._closing = True
        loop = self.loop()
        if self.calls == 0 and self.wakeup.fileno() >= 0:
            if loop is not None and not loop.is_closed():
                loop.remove_reader(self.wakeup.fileno())
            self.wakeup.close()


class AsyncQueues:
    """The lanes of one store and the ports of the loops that use it.

    Parameters
    ----------
    lanes : dict of str to Lane
    """

    def __init__(self, lanes: dict[str, Lane]) -> None:
        self._lanes = lanes
        self._closed: str | None = None
        self._lock = threading.Lock()
        # By the identity of the loop, which may be another's once the first is gone.
        self._ports: dict[int, Port] = {}

    def gate(self, lane: str) -> Gate:
        """Return the running loop's gate to a lane."""
        loop = asyncio.get_running_loop()
        port = self._ports.get(id(loop))
        if port is None or port.loop() is not loop:
            with self._lock:
                if self._closed is not None:
                    raise ClosedError(self._closed)
                self._sweep()
                port = self._ports[id(loop)] = Port(loop, self._lanes)
        return port.gates[lane]

    def _sweep(self) -> None:
        """Close what loops that are closed or gone have left: nobody listens there."""
        for number, port in list(self._ports.items()):
            loop = port.loop()
            if loop is None or loop.is_closed():
                port.wakeup.close()
                del self._ports[number]

    def close(self, reason: str) -> None:
        """Refuse calls that wait, wait for those being served, and let the loops go."""
        with self._lock:
            self._closed = reason
        for lane in self._lanes.values():
            lane.close(reason)
        with self._lock:
            self._sweep()
            for port in self._ports.values():
                loop = port.loop()
                try:
                    if loop is not None:
                        loop.call_soon_threadsafe(port.retire)
                except RuntimeError:  # Closed since.
                    port.wakeup.close()
