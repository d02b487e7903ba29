"""SGLang's backend: its settings, its keys, its namespaces, and which prefixes can be restored."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_connectors.sglang.facts import (
    RANKS,
    engine_facts,
    is_sharded,
    is_writer,
    name_of,
    pool_facts,
)
from kvd_connectors.sglang.keys import key_of
from kvd_connectors.sglang.options import Options, read_options
from kvd_connectors.sglang.restorable import ALL_PAGES, TRAILING_PAGES, restorable

SGLANGS_OWN = {
    "backend_name": "kvd",
    "module_path": "kvd_connectors.sglang",
    "class_name": "KvdHiCacheStorage",
    "interface_v1": 1,
    "of_a_later_version": True,
}


def test_what_is_sglangs_own_is_left_to_it() -> None:
    assert read_options(SGLANGS_OWN) == read_options(None) == Options()


def test_settings_are_those_of_the_table() -> None:
    found = read_options({**SGLANGS_OWN, "kvd": {"socket": "/run/s", "ttl_s": 60}})
    assert found == Options(socket="/run/s", ttl_s=60.0)
    assert (found.keep.retention, found.keep.ttl_s) == ("long", 60.0)


@pytest.mark.parametrize(
    "extra, named",
    [
        ({"kvd": {"sockt": "x"}}, "sockt"),
        ({"kvd": {"retention": "forever"}}, "forever"),
        ({"kvd": {"load_timeout_s": 0}}, "load_timeout_s"),
        ({"kvd": {"ttl_s": -1}}, "ttl_s"),
        ({"kvd": {"digests": 7}}, "digests"),
        ({"kvd": "/run/s"}, "table"),
        ({"socket": "/run/s"}, "beside its table"),
        ({"salt": "x"}, "beside its table"),
    ],
)
def test_what_cannot_be_meant_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_options(extra)


def test_a_page_hash_is_its_key_and_all_else_is_another() -> None:
    digest = hashlib.sha256(b"page").digest()
    assert key_of(digest.hex()) == digest
    others = [digest.hex().upper(), digest.hex()[:-1], digest.hex() + "0", "z" * 64, "", "page"]
    keys = [key_of(each) for each in others]
    assert len({*keys, digest}) == 7 and all(len(each) == 33 for each in keys)


# What an engine says of itself, and one value of each that another engine has.
CONFIG = {**RANKS, "model_name": "tiny", "is_mla_model": False, "is_storage_writer": True}
ARGUMENTS = {
    "model_path": "org/tiny",
    "revision": None,
    "quantization": None,
    "dtype": "float16",
    "kv_cache_dtype": "auto",
    "json_model_override_args": "{}",
    "load_format": "auto",
    "speculative_draft_model_path": None,
}
POOL = {
    "layout": "page_first",
    "dtype": "float16",
    "page_size": 16,
    "start_layer": 0,
    "end_layer": 3,
    "layer_num": 3,
    "head_num": 2,
    "head_dim": 32,
}
OTHERS: list[tuple[str, str, Any]] = [
    *(("config", name, 1 - default) for name, default in RANKS.items()),
    ("config", "model_name", "other"),
    ("arguments", "model_path", "org/other"),
    ("arguments", "revision", "v2"),
    ("arguments", "quantization", "fp8"),
    ("arguments", "dtype", "bfloat16"),
    ("arguments", "kv_cache_dtype", "fp8_e4m3"),
    ("arguments", "json_model_override_args", '{"rope_scaling": 2}'),
    ("arguments", "load_format", "dummy"),
    ("arguments", "speculative_draft_model_path", "org/draft"),
    ("pool", "layout", "page_head"),
    ("pool", "dtype", "bfloat16"),
    ("pool", "page_size", 32),
    ("pool", "start_layer", 1),
    ("pool", "end_layer", 4),
    ("pool", "head_num", 4),
    ("pool", "head_dim", 64),
]


def namespace(
    config: Any = CONFIG,
    arguments: Any = ARGUMENTS,
    pool: Any = POOL,
    salt: str = "",
    name: str = "kv",
    form: str = "pieces",
    sizes: tuple[int, ...] = (1024, 1024),
) -> str:
    config, pool = SimpleNamespace(**config), SimpleNamespace(**pool)
    facts = engine_facts(config, arguments and SimpleNamespace(**arguments), salt)
    return name_of(facts, pool_facts(config, pool, name, form, sizes))


@pytest.mark.parametrize("whose, fact, other", OTHERS)
def test_each_fact_is_part_of_the_namespace(whose: str, fact: str, other: Any) -> None:
    given = {"config": CONFIG, "arguments": ARGUMENTS, "pool": POOL}
    changed = {**given, whose: {**given[whose], fact: other}}
    assert namespace(**given) == namespace() != namespace(**changed)


def test_pools_forms_sizes_and_salts_share_nothing() -> None:
    names = {
        namespace(),
        namespace(salt="x"),
        namespace(name="draft"),
        namespace(form="flat"),
        namespace(sizes=(2048,)),
    }
    assert len(names) == 5 and all(each.startswith("sglang/tiny/") for each in names)


def test_ranks_with_the_same_bytes_share_them_and_one_stores_them() -> None:
    def latent(rank: int, size: int) -> dict[str, Any]:
        return {**CONFIG, "is_mla_model": True, "tp_rank": rank, "tp_size": size}

    assert namespace(latent(0, 1)) == namespace(latent(3, 4))
    assert namespace({**latent(0, 1), "dcp_rank": 1}) != namespace(latent(0, 1))
    config = SimpleNamespace(**{**latent(1, 4), "is_storage_writer": False})
    pool, cut = SimpleNamespace(), SimpleNamespace(head_num=4)
    assert not is_writer(config, pool, "kv") and not is_writer(config, pool, "indexer")
    # State of their own beside it: pools that are cut by heads, or by what SGLang says.
    for each, name in ((cut, "draft"), (pool, "mamba")):
        assert is_sharded(config, each, name) and is_writer(config, each, name)
        assert namespace(latent(0, 4), pool=vars(each), name=name) != namespace(
            latent(1, 4), pool=vars(each), name=name
        )


def test_a_version_that_says_less_is_said_exactly(caplog: pytest.LogCaptureFixture) -> None:
    """An adapter that warns of what is well, or not of what it could not know, misleads."""
    caplog.set_level(logging.WARNING)
    namespace()
    assert not caplog.messages
    less = {name: value for name, value in CONFIG.items() if not name.startswith("dcp")}
    assert namespace(less) == namespace()
    (said,) = caplog.messages
    assert "no dcp_rank, dcp_size:" in said
    caplog.clear()
    namespace(arguments=None)
    (said,) = caplog.messages
    assert "'tiny'" in said and "salt" in said


def test_an_adapter_that_was_trained_again_is_another(tmp_path: Path) -> None:
    """Its name and its path, which SGLang's hashes have, are what they were."""
    weights = tmp_path / "adapter_model.safetensors"
    ways = [
        [str(tmp_path)],
        [f"one={tmp_path}"],
        [{"lora_name": "one", "lora_path": str(tmp_path)}],
        {"one": str(tmp_path)},
        [SimpleNamespace(lora_name="one", lora_path=str(tmp_path))],
    ]
    weights.write_bytes(b"first")
    names = [namespace(arguments={**ARGUMENTS, "lora_paths": way}) for way in ways]
    assert len({*names, namespace()}) == 2
    weights.write_bytes(b"again")
    later = [namespace(arguments={**ARGUMENTS, "lora_paths": way}) for way in ways]
    assert len({*later}) == 1 and not {*later} & {*names}


def by_the_book(present: list[bool], policy: str, trailing: int) -> list[int]:
    """Return what SGLang's own backends return, page by page."""
    lengths = range(1, len(present) + 1)
    if policy == ALL_PAGES:
        return [length for length in lengths if all(present[:length])]
    return [length for length in lengths if all(present[max(0, length - trailing) : length])]


def test_prefixes_are_restorable_by_sglangs_rules() -> None:
    for length in range(9):
        for present in itertools.product((False, True), repeat=length):
            for policy, trailing in ((ALL_PAGES, 1), *((TRAILING_PAGES, n) for n in (1, 2, 5))):
                found = restorable(present, policy, trailing)
                assert found == by_the_book(list(present), policy, trailing)
    many = random.Random(0).choices((False, True), k=500)
    assert restorable(many, TRAILING_PAGES, 3) == by_the_book(many, TRAILING_PAGES, 3)
