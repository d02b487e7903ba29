"""Time to the first token of a long prompt in vLLM: computed, from memory, from the disk.

    python asv_bench/vllm_first_token.py [--prompt 1500] [--layers 16] [--hidden 1024]

Needs the environment that `python tools/engine_venv.py vllm` makes. The model is random, its
size is printed. "disk" is a new daemon's and a new engine's first look at each prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from vllm_engine import UNKEPT, Engine, daemon, make_model, prompt, scratch, wait_until_durable

RESET = {"do": "reset"}
BLOCK = 32


def measure(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return seconds to the first token of each prompt, each way."""
    model, parameters = make_model(directory, options.layers, options.hidden)
    prompts = [prompt(options.prompt, start) for start in range(options.prompts)]
    warm = prompt(options.prompt, 200, params=UNKEPT)
    blocks = (options.prompt // BLOCK + 2) * (options.prompts + 2)
    with daemon(directory) as store:
        given = {
            "model": model,
            "socket": str(store.socket),
            "engine": {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 2048},
        }
        count = len(prompts)
        engine = Engine(directory, given, [warm, RESET, *prompts, RESET, *prompts])
        _, *results = engine.take(1 + 2 * count)
        engine.end()
        computed, memory = results[:count], results[count:]
        wait_until_durable(store.socket)
        store.kill()
        store.start()
        engine = Engine(directory, given, [warm, RESET, *prompts])
        _, *disk = engine.take(1 + count)
        engine.end()
    ways = {"computed": computed, "memory": memory, "disk": disk}
    return {
        "parameters": parameters,
        "prompt": options.prompt,
        "cached": {way: [each["cached"][0] for each in found] for way, found in ways.items()},
        "seconds": {way: [each["seconds"] for each in found] for way, found in ways.items()},
        "median": {
            way: statistics.median(each["seconds"] for each in found)
            for way, found in ways.items()
        },
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dir", type=Path, help="where the disk tier lies")
    options = parser.parse_args()
    with scratch(options.dir) as directory:
        print(json.dumps(measure(directory, options)))


if __name__ == "__main__":
    main()
