"""Settings of the vLLM connector and of single requests."""

from __future__ import annotations

import logging

import pytest

from kvd_connectors.vllm.options import Keep, Options, read_keep, read_options


def test_nothing_given_means_the_defaults() -> None:
    assert read_options({}) == Options()


def test_settings_are_taken_as_json_gives_them() -> None:
    found = read_options({"socket": "/run/s", "async_load": False, "load_timeout_s": 2})
    assert found == Options(socket="/run/s", async_load=False, load_timeout_s=2.0)


@pytest.mark.parametrize(
    "extra, named",
    [
        ({"sockt": "x"}, "sockt"),
        ({"retention": "forever"}, "forever"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"load_timeout_s": "soon"}, "load_timeout_s"),
        ({"digests": 7}, "digests"),
    ],
)
def test_what_cannot_be_meant_is_named(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_options(extra)


@pytest.mark.parametrize(
    "params, keep",
    [
        (None, Keep("long")),
        ({}, Keep("long")),
        ({"kvd_retention": "none"}, Keep("none")),
        ({"infera_retention": "short"}, Keep("short")),
        ({"infera_retention": "short", "kvd_retention": "ephemeral"}, Keep("ephemeral")),
        ({"kvd_ttl_seconds": 5}, Keep("long", 5.0)),
        ({"other": 1}, Keep("long")),
    ],
)
def test_a_request_says_how_long_its_blocks_are_kept(
    params: dict[str, object], keep: Keep
) -> None:
    assert read_keep(params, "long") == keep


@pytest.mark.parametrize(
    "params",
    [
        {"kvd_retention": "forever"},
        {"kvd_retention": 3},
        {"kvd_ttl_seconds": -1},
        {"kvd_ttl_seconds": "soon"},
        {"kvd_ttl_seconds": True},
        {"kvd_ttl_seconds": float("nan")},
    ],
)
def test_what_a_request_cannot_mean_fails_nothing_and_is_said(
    params: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_keep(params, "short") == Keep("short")
    (said,) = caplog.messages
    assert next(iter(params)) in said and "left out" in said
