"""What gives an SGLang engine's pages their meaning: the facts of their namespaces."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvd_connectors.identity import fingerprint, namespace_of

logger = logging.getLogger(__name__)

ENGINE = "sglang"
# Fields of SGLang's storage configuration, and what an SGLang without them means.
RANKS = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "dcp_rank": 0,
    "dcp_size": 1,
}
# Arguments of the engine that change what it computes for the same tokens.
ARGUMENTS = (
    "quantization",
    "quantization_param_path",
    "dtype",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
)
# Attributes of host pools that tell how a page's bytes are to be read.
POOL = (
    "layout",
    "page_size",
    "logical_page_size",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
    "storage_format_tag",
)
# State that every tensor-parallel rank has its own part of, whatever the main pool is.
SHARDED_POOLS = ("mamba",)
MAIN = "kv"


def engine_arguments() -> Any:
    """Return the arguments of the engine that runs in this process; None without one."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception as error:
        logger.debug("no engine's arguments: %s", error)
        return None


def engine_facts(config: Any, arguments: Any, salt: str) -> dict[str, Any]:
    """Return what all pools of an engine have in common.

    Parameters
    ----------
    config : HiCacheStorageConfig
    arguments : ServerArgs or None
        Without them only a model's name is known, which the log says.
    salt : str
    """
    missing = [name for name in RANKS if not hasattr(config, name)]
    if missing:
        logger.warning(
            "this SGLang's storage configuration has no %s: taken as if there were one rank",
            ", ".join(missing),
        )
    name = str(getattr(config, "model_name", None) or "")
    facts: dict[str, Any] = {"name": name, "salt": salt}
    path = getattr(arguments, "model_path", None)
    if path is None:
        logger.warning(
            "the engine's arguments cannot be read: models are told apart by their name alone, "
            "which is %r. Remedy: another salt for each version of a model",
            name,
        )
        return facts
    revision = getattr(arguments, "revision", None)
    facts["model"] = fingerprint(str(path), revision, _commit(str(path), revision))
    facts["arguments"] = {each: str(getattr(arguments, each, None)) for each in ARGUMENTS}
    # Not the weights that are in the files.
    facts["dummy"] = str(getattr(arguments, "load_format", "")) == "dummy"
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft:
        facts["draft"] = fingerprint(str(draft))
    adapters = _adapters(getattr(arguments, "lora_paths", None))
    if adapters:
        facts["adapters"] = adapters
    return facts


def pool_facts(
    config: Any, pool: Any, pool_name: str, form: str, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Return what tells a pool's pages apart.

    Parameters
    ----------
    pool : HostKVCache
    pool_name : str
        "kv" for the main one.
    form : str
        Of a page's bytes.
    sizes : tuple of int
        Of a page's runs of bytes.
    """
    about = {name: _plain(getattr(pool, name, None)) for name in POOL}
    ranks = {name: getattr(config, name, default) for name, default in RANKS.items()}
    if not is_sharded(config, pool, pool_name):
        # Every rank has the same bytes, whatever their number.
        del ranks["tp_rank"], ranks["tp_size"]
    return {
        "pool": pool_name,
        "kind": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", None)),
        "form": form,
        "sizes": list(sizes),
        "about": about,
        "ranks": ranks,
    }


def is_sharded(config: Any, pool: Any, pool_name: str) -> bool:
    """Say whether each tensor-parallel rank holds its own part of a pool.

    Beside a main pool that all ranks have alike there are pools cut by heads, such as a draft
    model's: SGLang has one rank store them, and the others must not take that one's for theirs.
    """
    if not getattr(config, "is_mla_model", False) or pool_name in SHARDED_POOLS:
        return True
    return pool_name != MAIN and getattr(pool, "head_num", None) is not None


def is_writer(config: Any, pool: Any, pool_name: str) -> bool:
    """Say whether this rank stores a pool's pages: of ranks that have the same, one does."""
    if is_sharded(config, pool, pool_name):
        return True
    writer = getattr(config, "is_storage_writer", None)
    return bool(config.tp_rank == 0 if writer is None else writer)


def name_of(engine: Mapping[str, Any], pool: Mapping[str, Any]) -> str:
    """Return the namespace of a pool's pages."""
    return namespace_of(ENGINE, str(engine["name"]), {"engine": engine, "pool": pool})


def _adapters(given: Any) -> list[str]:
    """Return what tells the weights of adapters apart.

    SGLang's hashes have an adapter's name and path, which stay when it is trained again.

    Parameters
    ----------
    given : sequence or mapping or None
        As ``--lora-paths`` has it: paths, ``name=path``, mappings, or SGLang's own objects.
    """
    paths = []
    for each in given.values() if isinstance(given, Mapping) else given or ():
        if isinstance(each, Mapping):
            each = each.get("lora_path", each)
        path = str(getattr(each, "lora_path", each))
        paths.append(path.partition("=")[2] or path)
    return sorted(fingerprint(path) for path in paths)


def _plain(value: Any) -> Any:
    """Return a value as JSON can say it."""
    return value if value is None or isinstance(value, int | str) else str(value)


def _commit(model: str, revision: str | None) -> str | None:
    """Return the commit of a hub's model that lies in the local cache: branches move."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:
        return None
    if not isinstance(found, str):
        return None
    _, _, rest = found.replace("\\", "/").partition("/snapshots/")
    return rest.split("/", 1)[0] or None
