"""One SGLang engine on the CPU: does what its JSON argument says, prints a line of JSON for each.

Argument: {"model": DIR, "socket": PATH, "kvd": {...}, "extra": {...}, "engine": {...},
"steps": [...]}, a step being {"do": "generate", "prompt": [length, start], "tokens": N,
"salt": TEXT} or "settle", "flush", "sleep", "wait".
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

QUIET_S = 1.5
TRIES = 50
GIVEN = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}


def say(**facts: Any) -> None:
    """Print a result."""
    sys.stdout.write("RESULT " + json.dumps(facts) + "\n")
    sys.stdout.flush()


def prompt(length: int, start: int) -> list[int]:
    """Return token ids that depend on their place."""
    return [3 + (start + at * 7) % 250 for at in range(length)]


def open_engine() -> Any:
    """Return the engine."""
    import sglang

    options: dict[str, Any] = {
        "model_path": GIVEN["model"],
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "dtype": "float32",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "skip_server_warmup": True,
        "log_level": "info",
        "disable_overlap_schedule": True,
        "random_seed": 0,
        "page_size": 16,
    }
    if GIVEN.get("socket"):
        extra = {
            "backend_name": "kvd",
            "module_path": "kvd_connectors.sglang",
            "class_name": "KvdHiCacheStorage",
            "interface_v1": 1,
            "prefetch_threshold": 16,
            **GIVEN.get("extra", {}),
            "kvd": {"socket": GIVEN["socket"], "digests": True, **GIVEN.get("kvd", {})},
        }
        options.update(
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )
    return sglang.Engine(**{**options, **GIVEN.get("engine", {})})


def generate(engine: Any, step: dict[str, Any]) -> None:
    """Run a prompt and say what came out."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": step.get("tokens", 16),
        "ignore_eos": True,
    }
    started = time.perf_counter()
    more = {"cache_salt": step["salt"]} if "salt" in step else {}
    output = engine.generate(input_ids=prompt(*step["prompt"]), sampling_params=sampling, **more)
    about = output["meta_info"]
    details = about.get("cached_tokens_details") or {}
    say(
        seconds=round(time.perf_counter() - started, 4),
        tokens=output.get("output_ids"),
        cached=about.get("cached_tokens"),
        storage=details.get("storage", 0),
        backend=details.get("storage_backend"),
        finish=(about.get("finish_reason") or {}).get("type"),
    )


def settle() -> None:
    """Wait until nothing more gets into kvd, for a while."""
    import kvd

    with kvd.Client(GIVEN["socket"], map_arena=False) as client:
        last, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_S:
            sets = client.stats().sets_total
            if sets != last:
                last, since = sets, time.monotonic()
            time.sleep(0.05)


def flush(engine: Any) -> bool:
    """Empty the engine's own caches; it refuses while a request is not wholly over."""
    for _ in range(TRIES):
        if engine.flush_cache().success:
            return True
        time.sleep(0.3)
    raise SystemExit("the engine's cache could not be emptied")


def main() -> None:
    """Go through the steps."""
    started = time.perf_counter()
    engine = open_engine()
    say(ready=round(time.perf_counter() - started, 2))
    for step in GIVEN["steps"]:
        if step["do"] == "generate":
            generate(engine, step)
        elif step["do"] == "settle":
            settle()
        elif step["do"] == "flush":
            say(flushed=flush(engine))
        elif step["do"] == "sleep":
            time.sleep(step["seconds"])
        elif step["do"] == "wait":
            # Whoever started this does something meanwhile, then says so.
            say(waiting=True)
            sys.stdin.readline()
        else:
            raise SystemExit(f"no step {step['do']!r}")
    engine.shutdown()


if __name__ == "__main__":
    main()
