"""The variables: what may stand there, and what is said of anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd_connectors.gpu_direct.chunking import blocks_per_chunk, whole_chunks
from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.settings import Settings, read_settings


def test_nothing_said_is_off() -> None:
    settings = read_settings({})
    assert settings == Settings({}) and not settings.is_on


def test_everything_said() -> None:
    settings = read_settings(
        {
            "KVD_AIS": "1",
            "KVD_HIPFILE_ROOTS": "long=/nvme/a, short=/nvme/b",
            "KVD_L3_BUDGET_BYTES": "1.5T",
            "KVD_L3_FREE_FLOOR": "64GiB",
            "KVD_CHUNK_TOKENS": "2048",
        }
    )
    roots = {"long": Path("/nvme/a"), "short": Path("/nvme/b")}
    assert settings == Settings(roots, "1", 3 << 39, 64 << 30, 2048) and settings.is_on


def test_names_of_an_older_system_count_behind_the_new() -> None:
    old = {"INFERA_KVD_HIPFILE_ROOTS": "/nvme/a", "INFERA_KVD_L3_BUDGET_BYTES": "1000000"}
    settings = read_settings(old)
    assert settings.roots == {"long": Path("/nvme/a")} and settings.budget_bytes == 1_000_000
    assert read_settings({**old, "KVD_L3_BUDGET_BYTES": "1G"}).budget_bytes == 1 << 30


def test_auto_is_what_is_not_said() -> None:
    named = {"KVD_AIS": "auto", "KVD_CHUNK_TOKENS": "auto", "KVD_L3_BUDGET_BYTES": ""}
    assert read_settings(named) == read_settings({})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"KVD_AIS": "yes"}, "KVD_AIS is 'yes': give auto, 1 or 0"),
        ({"KVD_AIS": "1"}, "KVD_HIPFILE_ROOTS names no root"),
        ({"KVD_HIPFILE_ROOTS": "ephemeral=/a"}, "names 'ephemeral'"),
        ({"KVD_HIPFILE_ROOTS": "long=/a,long=/b"}, "names long twice"),
        ({"KVD_HIPFILE_ROOTS": "/a,/b"}, "names long twice"),
        ({"KVD_HIPFILE_ROOTS": "long=nvme"}, "'nvme' is no absolute path"),
        ({"KVD_HIPFILE_ROOTS": "long="}, "'' is no absolute path"),
        ({"KVD_L3_BUDGET_BYTES": "much"}, "KVD_L3_BUDGET_BYTES is 'much'"),
        ({"KVD_L3_BUDGET_BYTES": "-1"}, "KVD_L3_BUDGET_BYTES is '-1'"),
        ({"KVD_L3_BUDGET_BYTES": "0"}, "nothing would ever be kept"),
        ({"KVD_L3_FREE_FLOOR": "10%"}, "KVD_L3_FREE_FLOOR is '10%'"),
        ({"KVD_CHUNK_TOKENS": "0"}, "KVD_CHUNK_TOKENS is '0'"),
        ({"KVD_CHUNK_TOKENS": "many"}, "KVD_CHUNK_TOKENS is 'many'"),
    ],
)
def test_what_cannot_be_meant_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(GpuDirectError) as caught:
        read_settings(variables)
    assert words in str(caught.value)


def test_a_chunk_is_at_least_128_mib_where_its_tokens_are_not_said() -> None:
    assert blocks_per_chunk(None, 16, 2 << 20) == 64
    assert blocks_per_chunk(None, 16, (2 << 20) + 1) == 64
    assert blocks_per_chunk(None, 16, (2 << 20) - 1) == 65
    assert blocks_per_chunk(None, 16, 1 << 30) == 1
    assert blocks_per_chunk(512, 16, 1) == 32


def test_tokens_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(GpuDirectError, match="give 96 or 128"):
        blocks_per_chunk(100, 32, 4096)
    with pytest.raises(GpuDirectError, match="give 32 or 32"):
        blocks_per_chunk(10, 32, 4096)


def test_a_rest_is_in_no_chunk() -> None:
    keys = [b"%d" % each for each in range(10)]
    assert whole_chunks(keys, 4) == [keys[:4], keys[4:8]]
    assert whole_chunks(keys[:8], 4) == [keys[:4], keys[4:8]]
    assert whole_chunks(keys[:3], 4) == [] == whole_chunks([], 4)
