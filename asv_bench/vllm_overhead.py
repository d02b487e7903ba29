"""What the vLLM connector costs prompts that find nothing, beside an engine without it.

    python asv_bench/vllm_overhead.py [--pairs 20] [--layers 8] [--hidden 512]

Two engines take turns with the same new prompts, the first of a pair by turns. Printed: how much
longer the one with the connector takes, with a 95 % interval over the pairs; its time inside the
engine's calls and the time of its thread that saves, as shares of the steps' time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from vllm_engine import Engine, daemon, make_model, prompt, scratch

WAIT = {"do": "wait"}
BLOCK = 32
# Of the normal distribution; pairs are 20 at least.
DEVIATIONS = 1.96
WARM = 2


def interval(values: list[float]) -> list[float]:
    """Return the mean and its 95 % interval."""
    mean = statistics.fmean(values)
    half = DEVIATIONS * statistics.stdev(values) / math.sqrt(len(values))
    return [round(each, 4) for each in (mean - half, mean, mean + half)]


def turn(engine: Engine) -> dict[str, Any]:
    """Let an engine go through its next prompt."""
    engine.go_on()
    (result,) = engine.take(1)
    return result


def measure(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return the costs."""
    model, parameters = make_model(directory, options.layers, options.hidden)
    rounds = options.pairs + WARM
    steps: list[Any] = []
    for start in range(rounds):
        steps += [WAIT, prompt(options.prompt, start, tokens=options.tokens)]
    # Every prompt begins like no other: nothing is found here or there.
    length = options.prompt + options.tokens + BLOCK
    engine = {"max_model_len": length, "num_gpu_blocks_override": 3 * length // BLOCK}
    given = {"model": model, "engine": engine}
    ratios, hooks, saves = [], [], []
    with daemon(directory) as store:
        plain = Engine(directory, given, steps)
        kept = Engine(directory, {**given, "socket": str(store.socket)}, steps)
        before: dict[str, float] = {}
        for number in range(rounds):
            order = (plain, kept) if number % 2 else (kept, plain)
            results = {id(each): turn(each) for each in order}
            one, other = results[id(plain)], results[id(kept)]
            assert one["cached"] == other["cached"] == [0]
            counts = {
                name: other["counts"].get(f"vllm:kvd_{name}", 0) for name in ("hook_us", "save_us")
            }
            if number >= WARM:
                ratios.append(other["seconds"] / one["seconds"] - 1)
                hooks.append((counts["hook_us"] - before["hook_us"]) / 1e6 / other["seconds"])
                saves.append((counts["save_us"] - before["save_us"]) / 1e6 / other["seconds"])
            before = counts
        plain.end()
        kept.end()
    return {
        "parameters": parameters,
        "pairs": options.pairs,
        "prompt": options.prompt,
        "slower": interval(ratios),
        "slower_median": round(statistics.median(ratios), 4),
        "in_hooks": interval(hooks),
        "in_saving_thread": interval(saves),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=16, help="to generate")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dir", type=Path, help="where the disk tier lies")
    options = parser.parse_args()
    with scratch(options.dir) as directory:
        print(json.dumps(measure(directory, options)))


if __name__ == "__main__":
    main()
