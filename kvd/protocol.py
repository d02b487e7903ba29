"""The wire protocol: frames, messages, error codes.

Long because one decoder knows every message, and they are read side by side.

Frames
------
A frame is a 4-byte big-endian length and that many bytes of MessagePack: one map whose `op`
names the message. `id` is chosen by the client and comes back in the reply; replies may come
in any order. A request that is no SET or BATCH_SET is at most `kvd.frames.MAX_PLAIN_BYTES`
long, those two what HELLO_ACK says (`max_frame_bytes`); `op` is then the map's first member.

Opening
-------
The client sends HELLO with the protocol versions it speaks, newest first. HELLO_ACK names the
one chosen, the session and the limits. If the client asked to map the arena, one ARENA frame
follows at once; its first byte carries the descriptors (SCM_RIGHTS) in the order of its `fds`.
Anything but HELLO and PING before that is answered with `hello_required`.

Lookups
-------
BATCH_GET answers, per key, nil (a miss) or a `Hit`: the tier that served it, length, checksum
and either `(slot, offset, version)` into the arena or the bytes (`data`): when `inline` was
asked, and when memory had no slot for a block of the long tier. Asked inline, a key may be
named once in a request. A
value copied from the arena counts only if the slot's sequence equals `version` before and
after the copy; else the client asks again.

Whoever mapped the arena looks in its index first (`kvd.local_index`) and asks for the rest.
For that, a reply about a namespace names its id there (`space`).

Storing
-------
BATCH_SET carries the bytes. RESERVE gives slots to write into and COMMIT publishes them with
their keys and checksums; CANCEL gives them back. Every item is answered by one word:
`stored`, `refreshed` (was present), or why not: `no_room`, `too_large`, `retention_none`,
`expired` (a reservation kept too long), `unknown_reservation`, `quota` (its namespace's quota is
used up).

Errors
------
ERROR carries a stable `code`: `malformed` (not MessagePack, or no map with `op`),
`unknown_op`, `bad_request` (wrong types or values), `frame_too_large` (the connection is
closed after it), `hello_required`, `version_unsupported`, `limit` (too many connections or
namespaces, or more values asked for inline than fit a reply), `unavailable` (the long tier
could not be asked), `unknown_namespace` (PURGE, QUOTA), `no_long_tier` (QUOTA), `internal`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvd.errors import ProtocolError
from kvd.frames import HEADER
from kvd.results import Cleared, Flushed, Location, Purged, Stats, Status

VERSIONS = (1,)
MAX_BATCH_KEYS = 4096  # A 2M-token prompt in 512-token blocks; bounds one pass of the loop.
MAX_KEY_BYTES = 223  # 255 of the engine less 16 for the namespace, less 16 kept for later.
MAX_NAMESPACE_CHARS = 1024
MAX_SHORT_BYTES = 128

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_BATCH_KEYS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
RetentionName = Literal["none", "ephemeral", "short", "long"]
Count = Annotated[int, msgspec.Meta(ge=0)]
MAX_TTL_S = 10 * 365 * 86400.0
MAX_FLUSH_S = 60.0  # A client that wants to wait longer asks again.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_TTL_S)]
FlushSeconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_FLUSH_S)]

STORED = "stored"
REFRESHED = "refreshed"
NO_ROOM = "no_room"
TOO_LARGE = "too_large"
RETENTION_NONE = "retention_none"
EXPIRED = "expired"
UNKNOWN_RESERVATION = "unknown_reservation"
QUOTA = "quota"
RESERVED = "reserved"


class Message(msgspec.Struct, tag_field="op", kw_only=True):
    """What every message carries: `op` (its tag) and the request's id."""

    id: Count = 0


class KeyedRequest(Message):
    """A request about many keys of one namespace."""

    namespace: Name
    keys: Keys


class Hello(Message, tag="HELLO"):
    """Open a session. `released` names earlier sessions whose slots the client let go."""

    versions: Annotated[list[int], msgspec.Meta(max_length=64)]
    client: str = ""
    engine: str | None = None
    block_bytes: Count | None = None
    l1_bytes: Count | None = None
    map: bool = True
    write: bool = True
    released: Annotated[list[int], msgspec.Meta(max_length=64)] = []


class Bye(Message, tag="BYE"):
    """End the session: its reservations may be used again at once."""


class Ping(Message, tag="PING"):
    """Ask whether anybody is there."""


class Get(Message, tag="GET"):
    """Look one key up."""

    namespace: Name
    key: Key
    inline: bool = False


class BatchGet(KeyedRequest, tag="BATCH_GET"):
    """Look many keys up."""

    inline: bool = False


class SetItem(msgspec.Struct, array_like=True):
    """A key and its value, sent inline."""

    key: Key
    value: bytes
    checksum: Count


class Set(Message, tag="SET"):
    """Store one value sent inline."""

    namespace: Name
    key: Key
    value: bytes
    checksum: Count
    retention: RetentionName = "long"
    ttl_s: Seconds | None = None


class BatchSet(Message, tag="BATCH_SET"):
    """Store many values sent inline."""

    namespace: Name
    items: Annotated[list[SetItem], msgspec.Meta(max_length=MAX_BATCH_KEYS)]
    retention: RetentionName = "long"
    ttl_s: Seconds | None = None


class Reserve(Message, tag="RESERVE"):
    """Ask for slots to write into. With `keys`, those present are refreshed instead."""

    namespace: Name
    sizes: Annotated[list[Count], msgspec.Meta(max_length=MAX_BATCH_KEYS)]
    keys: Keys | None = None
    retention: RetentionName = "long"
    ttl_s: Seconds | None = None


class CommitItem(msgspec.Struct, array_like=True):
    """A written slot: which, under which reservation, and what it now holds."""

    slot: Count
    reservation: Count
    key: Key
    length: Count
    checksum: Count


class Commit(Message, tag="COMMIT"):
    """Publish written slots."""

    namespace: Name
    items: Annotated[list[CommitItem], msgspec.Meta(max_length=MAX_BATCH_KEYS)]
    retention: RetentionName = "long"
    ttl_s: Seconds | None = None


class ReservedSlot(msgspec.Struct, array_like=True):
    """A reservation as the client names it."""

    slot: Count
    reservation: Count


class Cancel(Message, tag="CANCEL"):
    """Give reserved slots back unused."""

    slots: Annotated[list[ReservedSlot], msgspec.Meta(max_length=MAX_BATCH_KEYS)]


class Exists(KeyedRequest, tag="EXISTS"):
    """Ask which keys are present in any tier."""


class Locate(KeyedRequest, tag="LOCATE"):
    """Ask where each key is."""


class MatchPrefix(KeyedRequest, tag="MATCH_PREFIX"):
    """Ask how many leading keys are present in any tier."""


class Touch(KeyedRequest, tag="TOUCH"):
    """Refresh the recency of keys."""


class Delete(KeyedRequest, tag="DELETE"):
    """Remove keys from every tier."""


class Clear(Message, tag="CLEAR"):
    """Remove a whole namespace from every tier."""

    namespace: Name


class Flush(Message, tag="FLUSH"):
    """Wait until the session's long blocks are durable or dropped."""

    timeout_s: FlushSeconds = 5.0


class StatsRequest(Message, tag="STATS"):
    """Ask for the counters."""


class NamespacesRequest(Message, tag="NAMESPACES"):
    """Ask for the names known to the daemon."""


class Purge(Message, tag="PURGE"):
    """Remove a namespace, or everything, or temporary files left behind; exactly one of them."""

    namespace: Name | None = None
    all: bool = False
    tmp: bool = False
    older_than_s: Seconds | None = None
    dry_run: bool = False
    zero: bool = False


class Quota(Message, tag="QUOTA"):
    """Ask for the quotas, set one, or (`limit_bytes` nil) remove one."""

    action: Literal["list", "set", "remove", "reload"] = "list"
    namespace: Name | None = None
    limit_bytes: Count | None = None


class StatusRequest(Message, tag="STATUS"):
    """Ask how full the long tier is and how it fares."""


Request = (
    Hello
    | Bye
    | Ping
    | Get
    | BatchGet
    | Set
    | BatchSet
    | Reserve
    | Commit
    | Cancel
    | Exists
    | Locate
    | MatchPrefix
    | Touch
    | Delete
    | Clear
    | Flush
    | StatsRequest
    | NamespacesRequest
    | Purge
    | Quota
    | StatusRequest
)


class LaneInfo(msgspec.Struct):
    """The geometry of the session's lane."""

    bytes: int
    leases: int
    touches: int


class ArenaInfo(msgspec.Struct):
    """The geometry of the memfds, which the client checks against what it maps."""

    uuid: str
    slot_count: int
    slot_bytes: int
    index_bytes: int
    data_bytes: int
    lane: LaneInfo | None = None


class HelloAck(Message, tag="HELLO_ACK"):
    """The session is open. `arena` is None when the client did not ask to map it."""

    version: int
    session: int
    server: str
    pid: int
    max_frame_bytes: int
    max_batch_keys: int
    max_batch_blocks: int
    max_value_bytes: int
    reservation_s: float
    arena: ArenaInfo | None


ARENA_FDS = ["index", "data", "lane"]


class Arena(Message, tag="ARENA"):
    """Comes with the descriptors, in the order of `fds`."""

    fds: list[str]


class Hit(msgspec.Struct, array_like=True):
    """A found block. `data` is set instead of a usable slot when sent inline."""

    tier: str
    length: int
    checksum: int
    slot: int
    offset: int
    version: int
    data: bytes | None = None


class AboutNamespace(Message, kw_only=True):
    """A reply about one namespace, with its id (`space`) in the shared index; 0 is none."""

    space: Count = 0


class Found(AboutNamespace, tag="FOUND"):
    """The answer to GET and BATCH_GET: one entry per key."""

    hits: list[Hit | None]


class Grant(msgspec.Struct, array_like=True):
    """The answer per reserved size: `status` is `reserved`, `refreshed` or a reason."""

    status: str
    slot: int = -1
    offset: int = -1
    reservation: int = 0


class Granted(AboutNamespace, tag="GRANTED"):
    """The answer to RESERVE."""

    grants: list[Grant]


class StoredReply(AboutNamespace, tag="STORED"):
    """The answer to SET, BATCH_SET and COMMIT: one word per item."""

    results: list[str]


class Presence(AboutNamespace, tag="PRESENCE"):
    """The answer to EXISTS."""

    present: list[bool]


class Located(Message, tag="LOCATED"):
    """The answer to LOCATE."""

    locations: list[Location]


class Counted(AboutNamespace, tag="COUNTED"):
    """The answer to MATCH_PREFIX, TOUCH, DELETE and CANCEL."""

    count: int


class ClearedReply(Message, tag="CLEARED"):
    """The answer to CLEAR."""

    cleared: Cleared


class FlushedReply(Message, tag="FLUSHED"):
    """The answer to FLUSH."""

    flushed: Flushed


class StatsReply(Message, tag="STATS_REPLY"):
    """The answer to STATS."""

    stats: Stats


class NamespacesReply(Message, tag="NAMESPACES_REPLY"):
    """The answer to NAMESPACES."""

    names: list[str]


class PurgedReply(Message, tag="PURGED"):
    """The answer to PURGE."""

    purged: Purged


class QuotasReply(Message, tag="QUOTAS"):
    """The answer to QUOTA: every quota, in bytes by name."""

    quotas: dict[str, int]


class StatusReply(Message, tag="STATUS_REPLY"):
    """The answer to STATUS."""

    status: Status


class Ok(Message, tag="OK"):
    """The answer to PING and BYE."""


class Error(Message, tag="ERROR"):
    """A refused request."""

    code: str
    message: str


Reply = (
    HelloAck
    | Arena
    | Found
    | Granted
    | StoredReply
    | Presence
    | Located
    | Counted
    | ClearedReply
    | FlushedReply
    | StatsReply
    | NamespacesReply
    | PurgedReply
    | QuotasReply
    | StatusReply
    | Ok
    | Error
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)


class _Envelope(msgspec.Struct):
    """A frame of which only two members matter, and those only if they are short."""

    op: msgspec.Raw = msgspec.Raw(b"\xc0")
    id: msgspec.Raw = msgspec.Raw(b"\x00")


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_loose_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_REQUEST_OPS = frozenset(kind.__struct_config__.tag for kind in Request.__args__)


class Refused(ProtocolError):
    """A frame that is no request, with the id it asked to be answered under."""

    def __init__(self, code: str, message: str, request_id: int) -> None:
        super().__init__(code, message)
        self.request_id = request_id


def encode(message: Message) -> bytes:
    """Return the whole frame of a message, length included."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return bytes(frame)


def decode_request(body: bytes | bytearray | memoryview) -> Message:
    """Return the request in a frame's body.

    Raises
    ------
    Refused
        With the stable code of what is wrong.
    """
    try:
        request: Message = _request_decoder.decode(body)
        return request
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise _refusal(body, error) from None


def decode_reply(body: bytes | bytearray | memoryview) -> Message:
    """Return the reply in a frame's body; ProtocolError when it is none."""
    try:
        reply: Message = _reply_decoder.decode(body)
        return reply
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError("malformed", str(error)) from None


def _refusal(body: bytes | bytearray | memoryview, error: Exception) -> Refused:
    """Find out what kind of nonsense a body is, building nothing of it but `op` and `id`."""
    try:
        envelope = _envelope_decoder.decode(body)
        op = _short(envelope.op)
    except Exception as loose:
        return Refused("malformed", f"no MessagePack map with string keys: {loose}", 0)
    if not isinstance(op, str):
        return Refused("malformed", "a frame is a map with a string `op`", 0)
    request_id = _short(envelope.id)
    if not isinstance(request_id, int) or not 0 <= request_id < 1 << 64:
        request_id = 0
    if op not in _REQUEST_OPS:
        return Refused("unknown_op", f"there is no op {op[:64]!r}", request_id)
    return Refused("bad_request", f"{op}: {error}", request_id)


def _short(raw: msgspec.Raw) -> Any:
    """Return what raw MessagePack says; None where it is too long to be an op or an id."""
    if len(memoryview(raw)) > MAX_SHORT_BYTES:
        return None
    try:
        return _loose_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
