"""Generates seeded multi-turn conversations in the same record type as a trace file."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from kvd.replay.trace import TOKENS_PER_BLOCK, Request


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the conversations to generate; token counts are means unless said otherwise.

    Parameters
    ----------
    conversations : int
        Conversations in all; generation ends when the last of them has ended.
    concurrent : int
        Conversations open at the same time. The distance between two uses of a prefix grows
        with it, so it decides which tier can still hold the prefix.
    turns : int
        Turns of a conversation that is not abandoned.
    abandon : float
        Probability, after every turn, that the user never comes back.
    systems : int
        System prompts shared by the conversations, the first the most used.
    zipf : float
        Exponent of the Zipf law by which a conversation chooses its system prompt; 0 for the
        smaller of two equal draws.
    system_tokens, message_tokens, reply_tokens : int
        Length of each system prompt (exact), of a user's message and of an answer.
    interval_ms : float
        Time between two requests.
    """

    conversations: int = 400
    concurrent: int = 100
    turns: int = 6
    abandon: float = 0.1
    systems: int = 4
    zipf: float = 0.0
    system_tokens: int = 4096
    message_tokens: int = 1500
    reply_tokens: int = 500
    interval_ms: float = 100.0

    def __post_init__(self) -> None:
        for field in ("conversations", "concurrent", "turns", "systems"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        for field in ("system_tokens", "message_tokens", "reply_tokens", "interval_ms", "zipf"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, not {getattr(self, field)}")
        if not 0.0 <= self.abandon <= 1.0:
            raise ValueError(f"abandon is a probability from 0 to 1, not {self.abandon}")


def parse_shape(text: str) -> Shape:
    """Return the shape that ``name=value,name=value`` describes, defaults for the rest.

    Raises
    ------
    ValueError
        For an unknown name or a value of the wrong type or range; the text says which.
    """
    found: dict[str, Any] = {}
    known = msgspec.structs.asdict(Shape())
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not NAME=VALUE")
        name = name.strip()
        if name not in known:
            raise ValueError(f"no setting named {name!r}; known: {', '.join(known)}")
        found[name] = _number(name, value.strip(), type(known[name]))
    return Shape(**found)


def _number(name: str, text: str, kind: type) -> float:
    """Return a number of the kind that a setting has; ValueError names the setting."""
    try:
        number: float = kind(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {what}, not {text!r}")
    return number


class _Draw:
    """Draws numbers from ``random.Random.random`` alone, the one stream Python keeps stable."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def under(self, cumulated: list[float]) -> int:
        """Return an index, each as likely as its share of the last of growing sums."""
        return bisect.bisect_right(cumulated, self._random() * cumulated[-1])

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def tokens(self, mean: int) -> int:
        """Return an exponentially distributed length of at least one token, at most 8 means."""
        if mean == 0:
            return 0
        drawn = -mean * math.log(1.0 - self._random())
        return max(1, min(int(drawn), 8 * mean))


class _Ids:
    """Hands out hash ids that no other block of this workload has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        first = self._next
        self._next += count
        return list(range(first, self._next))


class _Conversation:
    """A growing prefix: whole blocks keep their ids, the tail has one of its own each turn."""

    def __init__(self, system: list[int], system_tokens: int, turns: int) -> None:
        self.turns_left = turns
        self._blocks = list(system)
        self._tokens = system_tokens

    def extend(self, tokens: int, ids: _Ids) -> None:
        self._tokens += tokens
        self._blocks += ids.take(self._tokens // TOKENS_PER_BLOCK - len(self._blocks))

    def request(self, timestamp: float, output: int, ids: _Ids) -> Request:
        # The tail block's hash covers only the tokens it has so far: next turn it is another.
        tail = ids.take(1) if self._tokens % TOKENS_PER_BLOCK else []
        return Request(timestamp, self._tokens, output, self._blocks + tail)


def generate(
    shape: Shape | None = None, *, seed: int = 0, limit: int | None = None
) -> Iterator[Request]:
    """Yield the requests of interleaved conversations, the same ones for the same arguments.

    Parameters
    ----------
    shape : Shape, optional
        What the conversations look like.
    seed : int
        Chooses the workload; equal on every Python version.
    limit : int, optional
        Stop after this many requests.
    """
    shape = shape or Shape()
    draw = _Draw(seed)
    ids = _Ids()
    whole = shape.system_tokens // TOKENS_PER_BLOCK
    systems = [ids.take(whole) for _ in range(shape.systems)]
    shares = list(itertools.accumulate((1.0 + n) ** -shape.zipf for n in range(shape.systems)))
    waiting = shape.conversations
    active: list[_Conversation] = []
    produced = 0
    while limit is None or produced < limit:
        while waiting and len(active) < shape.concurrent:
            if shape.zipf:
                which = draw.under(shares)
            else:
                # The smaller of two draws: a few system prompts carry most of the traffic.
                which = min(draw.below(shape.systems), draw.below(shape.systems))
            turns = 1 + draw.below(2 * shape.turns - 1)
            active.append(_Conversation(systems[which], shape.system_tokens, turns))
            waiting -= 1
        if not active:
            return
        chosen = draw.below(len(active))
        talk = active[chosen]
        talk.extend(draw.tokens(shape.message_tokens), ids)
        output = draw.tokens(shape.reply_tokens)
        yield talk.request(produced * shape.interval_ms, output, ids)
        produced += 1
        talk.extend(output, ids)
        talk.turns_left -= 1
        if talk.turns_left == 0 or draw.chance(shape.abandon):
            active[chosen] = active[-1]
            active.pop()
