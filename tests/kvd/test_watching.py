"""Metrics, health and the status page, as those who watch a live daemon meet them."""

import http.client
import json
import re
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

URL = re.compile(r"http://(127\.0\.0\.1):(\d+)/ for a browser")


def ask(daemon, path, method="GET"):
    """Return (status, headers, body) of one request to a daemon's port."""
    host, port = URL.search(daemon.log).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def samples(daemon):
    """Return every sample of /metrics: (name, labels) to value."""
    status, headers, body = ask(daemon, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


@pytest.fixture
def watched(daemons, wait_until):
    daemon = daemons("--metrics", "0").start()
    wait_until(lambda: URL.search(daemon.log))
    return daemon


def numbers(document, prefix=""):
    """Return the names of every number in a document of STATS."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (bool, int, float)):
            yield f"{prefix}{name}"


def test_every_number_of_stats_is_a_metric(watched):
    with watched.client() as client:
        stats = client.stats().to_dict()
    found = samples(watched)
    names = {(name.removesuffix("_total"), dict(labels).get("tier")) for name, labels in found}
    for number in numbers(stats):
        tier, dot, field = number.rpartition(".")
        wanted = f"kvd_{'tier_' if dot else ''}{field.removesuffix('_total')}"
        if tier.count("."):
            tier, _, inner = tier.partition(".")
            wanted = f"kvd_tier_{inner}_{field}"
        assert (wanted, tier or None) in names, number


def test_a_fresh_daemon_shows_every_counter_and_all_are_zero(watched):
    """Metrics were missing from a peer's endpoint, or not 0 with no traffic."""
    status, _, body = ask(watched, "/metrics")
    assert status == 200
    counted = 0
    for family in text_string_to_metric_families(body.decode()):
        if family.type == "counter" and family.name.startswith("kvd_"):
            for sample in family.samples:
                counted += 1
                # What the region had to say for itself at its opening is no traffic.
                assert sample.value == 0, sample
    assert counted > 30


def test_traffic_is_counted_per_tier_and_op(watched, make_blocks, wait_until):
    """Per-tier bytes, a histogram of latencies and the writes dropped were asked for."""
    values = make_blocks(8)
    with watched.client(map_arena=False) as client:
        blocks = client.namespace("m")
        assert all(blocks.put_many(list(values.items())))
        assert client.flush(20).durable == 8
        key = next(iter(values))
        assert blocks.get(key) == values[key]
        assert blocks.get(b"absent") is None
        assert blocks.exists([key, b"absent"]) == [True, False]
    found = samples(watched)
    assert found["kvd_sets_stored_total", ()] == 8
    assert found["kvd_tier_hits_total", (("tier", "memory"),)] == 1
    assert found["kvd_tier_misses_total", (("tier", "long"),)] == 1
    assert found["kvd_tier_bytes_written_total", (("tier", "long"),)] == 8 * 65536
    assert found["kvd_tier_dropped_total", (("tier", "long"),)] == 0
    assert found["kvd_move_seconds_count", (("op", "write_back"),)] >= 1
    assert found["kvd_status_per_namespace_bytes", (("name", "m"),)] == 8 * 65536
    assert found["kvd_status_usage_fraction", ()] == 8 * 65536 / (16 << 20)
    requests = {
        (dict(labels)["tier"], dict(labels)["op"]): value
        for (name, labels), value in found.items()
        if name == "kvd_request_seconds_count" and value
    }
    assert {("memory", "batch_get"), ("long", "batch_get")} <= set(requests)
    for (name, labels), value in found.items():
        if name == "kvd_request_seconds_bucket" and dict(labels)["le"] == "+Inf":
            rest = tuple(pair for pair in labels if pair[0] != "le")
            assert value == found["kvd_request_seconds_count", rest]


def test_a_watched_daemon_listens_on_the_loopback_only(watched):
    """A scheduler of a peer was bound on all interfaces."""
    port = int(URL.search(watched.log)[2])
    local = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{watched.pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and words[1].endswith(f":{port:04X}"):
                    local.append(words[1])
    assert local == [f"0100007F:{port:04X}"]


def test_health_and_readiness(watched):
    assert ask(watched, "/healthz")[::2] == (200, b"ok\n")
    assert ask(watched, "/readyz")[::2] == (200, b"ok\n")
    status, headers, body = ask(watched, "/readyz", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "3")


def test_a_stopped_loop_is_not_alive(watched, wait_until):
    """The thread that answers is not the loop: it sees that the loop hangs."""
    from kvd.sight.watch import STALE_S, Watch

    class Hangs:
        last_tick = time.monotonic() - STALE_S - 1

        class cache:
            long = None

    watch = Watch.__new__(Watch)
    watch._server, watch._state = Hangs, "serving"
    assert "no heartbeat" in watch.not_alive()
    assert "no heartbeat" in watch.not_ready()


def test_a_failed_long_tier_is_alive_but_not_ready(on_rig):
    """57 of 57 stores failed and a peer's health still said 200."""
    from kvd.sight.watch import Watch

    async def scenario(rig):
        watch = Watch.__new__(Watch)
        watch._server, watch._state = None, "starting"
        assert watch.not_ready() == "starting"

        class Serves:
            last_tick = time.monotonic()
            cache = rig.cache

        watch._server, watch._state = Serves, "serving"
        assert watch.not_ready() == ""
        rig.long.failure = "EIO"
        assert "EIO" in watch.not_ready()
        assert watch.not_alive() == ""
        rig.long.failure = None

    on_rig(scenario)


class TestHostileRequests:
    def raw(self, daemon, data, half_close=True):
        host, port = URL.search(daemon.log).groups()
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.sendall(data)
            if half_close:
                peer.shutdown(socket.SHUT_WR)
            got = b""
            try:
                while part := peer.recv(65536):
                    got += part
            except ConnectionResetError:
                pass
            return got

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"GET /../../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
            (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n\r\n", b"404"),
            (b"GET //etc/passwd HTTP/1.1\r\n\r\n", b"404"),
            (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
            (b"\x00\xff\x16\x03\r\n\r\n", b"400"),
            (b"GET /\r\n\r\n", b"400"),
            (b"GET", b"400"),
            (b"GET / HTTP/1.1\r\nX: " + b"a" * 10000, b"431"),
            (b"GET /metrics?x=../.. HTTP/1.0\r\n\r\n", b"200"),
        ],
    )
    def test_a_bad_request_gets_its_status(self, watched, data, status):
        got = self.raw(watched, data)
        assert got.startswith(b"HTTP/1.1 " + status)
        assert b"root:" not in got

    def test_slow_and_many_connections_end_and_block_neither_health_nor_clients(self, watched):
        host, port = URL.search(watched.log).groups()
        slow = []
        for _ in range(40):
            peer = socket.create_connection((host, int(port)), timeout=20)
            peer.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            slow.append(peer)
        assert ask(watched, "/healthz")[0] == 200
        with watched.client() as client:
            assert client.namespace("m").put(b"k", b"v")
        started = time.monotonic()
        for peer in slow:
            assert peer.recv(100).startswith(b"HTTP/1.1 408")
            peer.close()
        assert time.monotonic() - started < 15

    def test_more_connections_than_the_limit_are_closed_at_once(self, watched):
        from kvd.sight.http import MAX_CONNECTIONS

        host, port = URL.search(watched.log).groups()
        many = [
            socket.create_connection((host, int(port)), timeout=20)
            for _ in range(MAX_CONNECTIONS + 8)
        ]
        closed = 0
        for peer in many[MAX_CONNECTIONS:]:
            peer.settimeout(3)
            closed += peer.recv(1) == b""
        assert closed == 8
        for peer in many:
            peer.close()

    def test_a_client_that_reads_nothing_is_left(self, watched):
        host, port = URL.search(watched.log).groups()
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            time.sleep(0.2)
            assert ask(watched, "/healthz")[0] == 200


def test_the_status_page_needs_nothing_from_elsewhere(watched):
    status, headers, body = ask(watched, "/")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    page = body.decode()
    outside = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+", page)) - {"http://www.w3.org"}
    assert outside == set()
    assert "innerHTML" not in page
    # Each element that the script fills in is there.
    for name in re.findall(r'\bat\("([a-z-]+)"\)', page):
        assert f'id="{name}"' in page


def test_the_status_document_has_what_the_page_shows(watched, wait_until):
    with watched.client(engine="vllm") as client:
        blocks = client.namespace("<img src=x onerror=alert(1)>")
        blocks.put(b"k", b"v")
        assert blocks.get(b"k") == b"v"
        status, headers, body = ask(watched, "/status.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        document = json.loads(body)
        assert document["state"] == "serving"
        assert document["ready"] is True
        assert document["namespaces"][0][0] == "<img src=x onerror=alert(1)>"
        assert document["stats"]["engines"] == 1
        page = ask(watched, "/")[2].decode()
        for tier, fields in {
            tier: set(re.findall(rf"\b{tier}\.([a-z_]+)", page)) for tier in ("memory", "long")
        }.items():
            assert fields <= set(document["stats"][tier]) | {"append"}, tier
        for field in re.findall(r"\bstats\.([a-z_]+)", page):
            assert field in document["stats"]
    wait_until(lambda: json.loads(ask(watched, "/status.json")[2])["history"])


def test_a_taken_port_is_refused_naming_the_flag(daemons, watched):
    import subprocess
    import sys

    port = URL.search(watched.log)[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvd", "--socket", f"{watched.socket}2"),
            *("--max-bytes", "8M", "--metrics", port),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"--metrics 127.0.0.1:{port}" in done.stderr
    assert "another" in done.stderr


class TestServiceManager:
    @pytest.fixture
    def manager(self, tmp_path, monkeypatch):
        """A socket such as systemd's, and what came in over it."""
        path = str(tmp_path / "notify")
        heard = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            receiver.bind(path)
            receiver.settimeout(0.1)
            ended = threading.Event()

            def listen():
                while not ended.is_set():
                    try:
                        heard.append(receiver.recv(4096).decode())
                    except TimeoutError:
                        continue

            thread = threading.Thread(target=listen)
            thread.start()
            monkeypatch.setenv("NOTIFY_SOCKET", path)
            yield heard
            ended.set()
            thread.join(5)

    def test_it_hears_of_readiness_life_and_the_stop(
        self, manager, monkeypatch, daemons, wait_until
    ):
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        daemon = daemons()
        daemon.start()
        wait_until(lambda: any(message.startswith("READY=1\n") for message in manager))
        wait_until(lambda: manager.count("WATCHDOG=1") >= 2)
        assert daemon.stop() == 0
        wait_until(lambda: any(message.startswith("STOPPING=1\n") for message in manager))

    def test_without_a_watchdog_it_hears_no_signs_of_life(self, manager, monkeypatch):
        from kvd.notify import Notifier

        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        Notifier().alive()
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        monkeypatch.setenv("WATCHDOG_PID", "1")
        Notifier().alive()
        Notifier().ready("x")
        time.sleep(0.3)
        assert manager == ["READY=1\nSTATUS=x"]

    def test_a_manager_that_is_gone_is_said_once(self, tmp_path, caplog):
        from kvd.notify import Notifier

        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")})
        notifier.ready("x")
        notifier.stopping()
        assert caplog.text.count("NOTIFY_SOCKET") == 1


def test_what_is_added_to_stats_is_exported_without_more_code():
    """Lists of paths, mappings and nested structs, as numbers come to lie in STATS."""
    import msgspec

    from kvd.results import LongStats, Stats
    from kvd.sight.exported import _zero
    from kvd.sight.families import MAX_NAMES, stats_families

    class Path(msgspec.Struct):
        path: str
        entries: int
        state: str
        lag: int | None = None

    class More(LongStats, frozen=True):
        paths: list[Path] = msgspec.field(default_factory=list)
        dropped_by: dict[str, int] = msgspec.field(default_factory=dict)

    paths = [Path("/a", 1, "up"), Path("/b", 2, "up", 3)]
    dropped = {f"reason {number}": number for number in range(MAX_NAMES + 5)}
    fields = {name: getattr(_zero(LongStats), name) for name in LongStats.__struct_fields__}
    long = More(**{**fields, "paths": paths, "dropped_by": dropped})
    families = {
        family.name: family
        for family in stats_families(msgspec.structs.replace(_zero(Stats), long=long))
    }
    entries = families["kvd_tier_paths_entries"]
    assert [(sample.labels, sample.value) for sample in entries.samples] == [
        ({"path": "/a", "tier": "long"}, 1),
        ({"path": "/b", "tier": "long"}, 2),
    ]
    assert [sample.value for sample in families["kvd_tier_paths_lag"].samples] == [3]
    by_reason = families["kvd_tier_dropped_by"]
    assert by_reason.type == "counter"
    assert len(by_reason.samples) == MAX_NAMES
    assert min(sample.value for sample in by_reason.samples) == 5
