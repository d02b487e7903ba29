"""One vLLM engine on the CPU: does what its JSON argument says, prints a line of JSON for each.

Argument: {"model": DIR, "socket": PATH, "extra": {...}, "engine": {...}, "transfer": {...},
"env": {...}, "steps": [...]}, a step being {"do": "generate", "prompts": [[length, start]],
"params": {...}, "tokens": N} or "reset", "sleep", "wait", "digests"; with `watched` as the
connector's module also "stop-at", "slow-saves" and "seen".
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

TRIES = 10
GIVEN = json.loads(sys.argv[1])
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCHDYNAMO_DISABLE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_CPU_KVCACHE_SPACE="1",
)
for name, value in GIVEN.get("env", {}).items():
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402


def say(**facts: Any) -> None:
    """Print a result."""
    sys.stdout.write("RESULT " + json.dumps(facts) + "\n")
    sys.stdout.flush()


def prompt(length: int, start: int) -> list[int]:
    """Return token ids that depend on their place."""
    return [3 + (start + at * 7) % 250 for at in range(length)]


def open_engine() -> LLM:
    """Return the engine."""
    options: dict[str, Any] = {
        "model": GIVEN["model"],
        "enforce_eager": True,
        "max_model_len": 2048,
        "dtype": "float32",
        "seed": 0,
        "block_size": 32,
        "num_gpu_blocks_override": 200,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **GIVEN.get("engine", {}),
    }
    if GIVEN.get("socket"):
        transfer = {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd_connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": GIVEN["socket"],
                "digests": True,
                **GIVEN.get("extra", {}),
            },
            **GIVEN.get("transfer", {}),
        }
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(**options)


def generate(engine: LLM, step: dict[str, Any]) -> None:
    """Run prompts together and say what came out."""
    sampling = SamplingParams(
        temperature=0,
        max_tokens=step.get("tokens", 16),
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        extra_args={"kv_transfer_params": step["params"]} if "params" in step else None,
    )
    prompts = [{"prompt_token_ids": prompt(*each)} for each in step["prompts"]]
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    metrics = {each.name: getattr(each, "value", None) for each in engine.get_metrics()}
    say(
        seconds=round(seconds, 4),
        tokens=[list(each.outputs[0].token_ids) for each in outputs],
        logprobs=[
            [round(next(iter(one.values())).logprob, 4) for one in each.outputs[0].logprobs or []]
            for each in outputs
        ],
        finish=[each.outputs[0].finish_reason for each in outputs],
        cached=[each.num_cached_tokens for each in outputs],
        hits=metrics.get("vllm:external_prefix_cache_hits"),
        queries=metrics.get("vllm:external_prefix_cache_queries"),
        preemptions=metrics.get("vllm:num_preemptions"),
        counts={name: value for name, value in metrics.items() if name.startswith("vllm:kvd_")},
    )


def reset(engine: LLM) -> bool:
    """Empty the engine's own cache; say whether that worked.

    Blocks whose save ended after the last step are free with the next one.
    """
    nothing = SamplingParams(
        max_tokens=1,
        detokenize=False,
        extra_args={"kv_transfer_params": {"kvd_retention": "none"}},
    )
    for _ in range(TRIES):
        if engine.reset_prefix_cache():
            return True
        time.sleep(0.2)
        engine.generate([{"prompt_token_ids": [3, 4, 5]}], nothing, use_tqdm=False)
    return False


def digests(engine: LLM) -> dict[str, str]:
    """Return a digest of each block of the engine's own cache, by group and block hash.

    Of an engine in one process. Taken past every connector: what attention will read.
    """
    core = engine.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    context = runner.compilation_config.static_forward_context
    groups = manager.kv_cache_config.kv_cache_groups
    found = {}
    for block in manager.block_pool.blocks:
        if block.block_hash is None:
            continue
        key, group = block.block_hash[:-4], int.from_bytes(block.block_hash[-4:], "big")
        digest = hashlib.blake2b(digest_size=8)
        for name in groups[group].layer_names:
            cache = context[name].kv_cache
            cache = cache[0] if isinstance(cache, list) else cache
            digest.update(cache[block.block_id].contiguous().view(torch.uint8).numpy().tobytes())
        found[f"{group}:{key.hex()}"] = digest.hexdigest()
    return found


def main() -> None:
    """Go through the steps."""
    started = time.perf_counter()
    engine = open_engine()
    say(ready=round(time.perf_counter() - started, 2))
    for step in GIVEN["steps"]:
        if step["do"] == "generate":
            generate(engine, step)
        elif step["do"] == "reset":
            say(reset=reset(engine))
            if step.get("stored"):
                say(cleared=engine.reset_prefix_cache(reset_connector=True))
        elif step["do"] == "sleep":
            time.sleep(step["seconds"])
        elif step["do"] == "wait":
            # Whoever started this does something meanwhile, then says so.
            say(waiting=True)
            sys.stdin.readline()
        elif step["do"] == "digests":
            say(digests=digests(engine))
        elif step["do"] == "stop-at":
            import watched

            watched.stop_at.add(step["where"])
        elif step["do"] == "slow-saves":
            import watched

            watched.slow["saves"] = step["seconds"]
        elif step["do"] == "seen":
            import watched

            say(seen=watched.take())
        else:
            raise SystemExit(f"no step {step['do']!r}")


if __name__ == "__main__":
    main()
