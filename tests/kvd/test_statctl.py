"""statctl: the counters, and why there are no hits."""

import json


def test_the_counters_are_printed_and_the_reason_for_no_hits(running, command, document):
    at = ["--socket", running.socket]
    assert "no engine is connected" in document("statctl", *at)["no_hits_reason"]
    with running.client(engine="vllm") as client:
        assert client.namespaces() == []  # So that it is connected.
        assert "asked for nothing" in document("statctl", *at)["no_hits_reason"]
        blocks = client.namespace("a")
        assert blocks.put(b"k", b"v")
        assert "none looked up" in document("statctl", *at)["no_hits_reason"]
        assert client.namespace("b").get(b"k") is None
        found = document("statctl", *at)
        assert "another namespace" in found["no_hits_reason"]
        assert "hash seed" in found["no_hits_reason"]
        assert blocks.get(b"k") == b"v"
    found = document("statctl", *at)
    assert found["no_hits_reason"] is None
    counted = {name: found[name] for name in found if name.endswith("_total")}
    assert counted == {
        "sets_total": 1,
        "gets_total": 2,
        "hits_total": 1,
        "misses_total": 1,
        "deletes_total": 0,
        "errors_total": 0,
        "inline_total": 0,
    }
    status, out, _ = command("statctl", *at)
    lines = dict(line.split(None, 1) for line in out.splitlines() if " " in line)
    assert status == 0
    assert lines["sets_total"] == "1" and lines["hits_total"] == "1"
    assert command("statctl", "--socket", running.socket + "x")[0] == 1


def test_it_says_how_many_tokens_fit_and_what_a_slot_wastes(running, command, document):
    """Documents overstated capacity sevenfold: bytes a token were counted wrongly."""
    at = ["--socket", running.socket]
    fit = document("statctl", *at, "--block-bytes", "48K", "--block-tokens", 16)["fit"]
    assert fit == {
        "slack_bytes": 16384,
        "memory_blocks": 128,
        "memory_tokens": 2048,
        "long_blocks": 256,
        "long_tokens": 4096,
    }
    out = command("statctl", *at, "--block-bytes", "48K", "--block-tokens", 16)[1]
    assert "fit.long_tokens        4096" in out
    larger = document("statctl", *at, "--block-bytes", "65K")["fit"]
    assert "larger than a slot of the long tier, 65536" in larger["problem"]
    assert "gets slots of its own" in larger["note"]
    assert larger["long_blocks"] == 0 < larger["memory_blocks"] < 128
    assert (
        "larger than a slab" in document("statctl", *at, "--block-bytes", "1G")["fit"]["problem"]
    )
    assert document("statctl", *at)["fit"] == {}
    assert command("statctl", *at, "--block-bytes", "x")[0] == 2


def test_a_quota_that_refuses_everything_is_the_reason(running, document):
    at = ["--socket", running.socket]
    document("quota", "set", "m", 0, *at)
    with running.client() as client:
        assert not client.namespace("m").put(b"k", b"v")
        assert client.namespace("m").get(b"k") is None
    reason = document("statctl", *at)["no_hits_reason"]
    assert "every block offered was refused" in reason and "quota" in reason
    assert json.dumps(reason)
