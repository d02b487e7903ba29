"""The wire protocol: messages, error codes. `kvd.codec` makes frames of them.

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
named once in a request. A value copied from the arena counts only if the slot's sequence equals
`version` before and after the copy; else the client asks again.

Whoever mapped the arena looks in its index first (`kvd.local_index`); `space` is a namespace's
id there.

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
closed after it), `hello_required`, `version_unsupported`, `not_allowed` (another user; the
connection is closed), `limit` (too many connections, subscribers or namespaces, or more values
asked for inline than fit a reply), `unavailable` (the long tier could not be asked),
`unknown_namespace` (PURGE, QUOTA), `no_long_tier` (QUOTA), `internal`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvd.results import Cleared, Flushed, Location, Purged, Stats, Status

VERSIONS = (1,)
MAX_BATCH_KEYS = 4096  # A 2M-token prompt in 512-token blocks; bounds one pass of the loop.
MAX_KEY_BYTES = 223  # 255 of the engine less 16 for the namespace, less 16 kept for later.
MAX_NAMESPACE_CHARS = 1024
MAX_KEPT_SLOTS = 65536  # 15 bytes each: half of what a frame without values may have.

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_BATCH_KEYS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
RetentionName = Literal["none", "ephemeral", "short", "long"]
Count = Annotated[int, msgspec.Meta(ge=0)]
MAX_TTL_S = 10 * 365 * 86400.0
MAX_FLUSH_S = 60.0  # A client that wants to wait longer asks again.
MAX_PREFETCH_S = 60.0
MAX_SUBSCRIBED_NAMESPACES = 1024
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_TTL_S)]
PrefetchSeconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_PREFETCH_S)]
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


class ReservedSlot(msgspec.Struct, array_like=True):
    """A reservation as the client names it."""

    slot: Count
    reservation: Count


class Hello(Message, tag="HELLO"):
    """Open a session, or go on with an earlier one of this process: `resume`.

    Of its lanes all but `keep_lanes` end (nil: none does).
    """

    versions: Annotated[list[int], msgspec.Meta(max_length=64)]
    client: str = ""
    engine: str | None = None
    block_bytes: Count | None = None
    l1_bytes: Count | None = None
    map: bool = True
    write: bool = True
    resume: Count | None = None
    keep_lanes: Annotated[list[Count], msgspec.Meta(max_length=64)] | None = None


class Bye(Message, tag="BYE"):
    """End the session: its reservations may be used again at once."""


class Release(Message, tag="RELEASE"):
    """Say what of a session this process uses no more.

    Of its own session (nil, or its id) the connection gives back every reserved slot but those
    of `keep` (nil: all are kept) and ends `lanes`, in which no lease is held any more. Another
    session of the same process ends as a whole.
    """

    session: Count | None = None
    keep: Annotated[list[ReservedSlot], msgspec.Meta(max_length=MAX_KEPT_SLOTS)] | None = None
    lanes: Annotated[list[Count], msgspec.Meta(max_length=64)] = []


class Ping(Message, tag="PING"):
    """Ask whether anybody is there."""


class Get(Message, tag="GET"):
    """Look one key up."""

    namespace: Name
    key: Key
    inline: bool = False
    verify: bool = False


class BatchGet(KeyedRequest, tag="BATCH_GET"):
    """Look many keys up. `verify`: what is damaged in memory is thrown away, and not found."""

    inline: bool = False
    verify: bool = False


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


class Cancel(Message, tag="CANCEL"):
    """Give reserved slots back unused."""

    slots: Annotated[list[ReservedSlot], msgspec.Meta(max_length=MAX_BATCH_KEYS)]


class PackedRequest(Message):
    """A request about many keys that are mostly looked up as they came: see `codec.pack_keys`.

    Raw refers to the frame that it was decoded from, which the next one may take the place of.
    """

    namespace: Name
    keys: msgspec.Raw


class Exists(PackedRequest, tag="EXISTS"):
    """Ask which keys are present in any tier."""


class Locate(KeyedRequest, tag="LOCATE"):
    """Ask where each key is."""


class MatchPrefix(PackedRequest, tag="MATCH_PREFIX"):
    """Ask how many leading keys are present in any tier."""


class Touch(KeyedRequest, tag="TOUCH"):
    """Refresh the recency of keys."""


class Prefetch(KeyedRequest, tag="PREFETCH"):
    """Have keys brought into memory; what has not begun by the deadline is left out."""

    deadline_s: PrefetchSeconds = 2.0


class Delete(KeyedRequest, tag="DELETE"):
    """Remove keys from every tier."""


class Clear(Message, tag="CLEAR"):
    """Remove a whole namespace from every tier."""

    namespace: Name


class Flush(Message, tag="FLUSH"):
    """Wait until the session's long blocks are durable or dropped."""

    timeout_s: FlushSeconds = 5.0


class Subscribe(Message, tag="SUBSCRIBE"):
    """Have EVENTS pushed under this request's id: of these namespaces, or (nil) of all."""

    namespaces: (
        Annotated[list[Name], msgspec.Meta(max_length=MAX_SUBSCRIBED_NAMESPACES)] | None
    ) = None


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
    | Release
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
    | Prefetch
    | Touch
    | Delete
    | Clear
    | Flush
    | Subscribe
    | StatsRequest
    | NamespacesRequest
    | Purge
    | Quota
    | StatusRequest
)


class LaneInfo(msgspec.Struct):
    """The geometry of a session's lane, and the number it is released by."""

    id: int
    bytes: int
    leases: int
    touches: int


class ArenaInfo(msgspec.Struct):
    """The geometry of the memfds, which the client checks against what it maps.

    `slot_count` is how many slot numbers there are: `slots_per_slab` for each slab.
    """

    uuid: str
    slot_count: int
    slab_bytes: int
    slots_per_slab: int
    index_bytes: int
    data_bytes: int
    lane: LaneInfo | None = None


class HelloAck(Message, tag="HELLO_ACK"):
    """The session is open. `arena` is None when the client did not ask to map it."""

    version: int
    session: int
    resumed: bool
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
    """The answer to MATCH_PREFIX, PREFETCH, TOUCH, DELETE, CANCEL and RELEASE."""

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


class Event(msgspec.Struct, array_like=True, frozen=True):
    """What happened to blocks: `kind` is `stored`, `removed` or `cleared` (then no keys)."""

    kind: str
    tier: str
    namespace: str
    keys: list[bytes]


class Events(Message, tag="EVENTS"):
    """Pushed to a subscriber. `lost` events before these did not fit its queue."""

    lost: int
    events: list[Event]


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
    """The answer to PING, SUBSCRIBE and BYE."""


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
    | Events
    | PurgedReply
    | QuotasReply
    | StatusReply
    | Ok
    | Error
)
