"""vLLM engines and a daemon for the measurements of the connector."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvd
from kvd.replay.daemon import Daemon, scratch_daemon

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / "tests" / "connectors" / "engines"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
# Requests that are not measured leave nothing behind.
UNKEPT = {"kvd_retention": "none"}

Result = dict[str, Any]


def make_model(directory: Path, layers: int, hidden: int) -> tuple[str, int]:
    """Write a random Llama; return its path and how many parameters it has."""
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": 64,
    }
    path = directory / "model"
    command = [str(PYTHON), str(ENGINES / "tiny_model.py"), str(path), json.dumps(shape)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return str(path), int(said.split()[-1])


def prompt(length: int, start: int, **more: Any) -> dict[str, Any]:
    """Return a step that generates one token from one prompt."""
    return {"do": "generate", "prompts": [[length, start]], "tokens": 1, **more}


class Engine:
    """A running engine that goes through steps; "wait" among them waits for `go_on`."""

    def __init__(self, directory: Path, given: dict[str, Any], steps: list[Any]) -> None:
        # The connector as in use: without digests beside its blocks.
        given = {**given, "steps": steps, "extra": {"digests": False, **given.get("extra", {})}}
        self._log = directory / f"engine-{os.urandom(4).hex()}.log"
        with open(self._log, "wb") as errors:
            self.process = subprocess.Popen(
                [str(PYTHON), str(ENGINES / "run_vllm.py"), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def next(self) -> Result:
        """Return the next result."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                found: Result = json.loads(line[7:])
                return found
        raise SystemExit(f"the engine ended:\n{self._log.read_text()[-3000:]}")

    def go_on(self) -> None:
        """Let an engine that waits go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self, count: int) -> list[Result]:
        """Return so many results of prompts."""
        found: list[Result] = []
        while len(found) < count:
            each = self.next()
            if "tokens" in each:
                found.append(each)
        return found

    def end(self) -> None:
        """Wait until it is through, for a while; then end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=60)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[Daemon]:
    """Give a daemon that runs, with room for everything in both tiers."""
    with scratch_daemon(
        directory,
        max_bytes=2 << 30,
        long_bytes=4 << 30,
        slot_bytes="64K,256K,1M,4M",
        arguments=("--watermark=1.0",),
    ) as made:
        made.start()
        yield made


@contextlib.contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """Give a directory that is removed afterwards; refuse without an engine."""
    if not PYTHON.exists():
        raise SystemExit(f"no {PYTHON}: `python tools/engine_venv.py vllm` sets it up")
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-", dir=parent) as directory:
        yield Path(directory)


def wait_until_durable(socket: Path, timeout_s: float = 120.0) -> None:
    """Wait until the disk has what the daemon was given."""
    with kvd.Client(str(socket), map_arena=False) as client:
        pending = client.flush(timeout_s).pending
    if pending:
        raise SystemExit(f"{pending} blocks are not on the disk after {timeout_s:.0f} s")
