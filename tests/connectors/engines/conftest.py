"""Real engines in virtual environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
MODEL_TIMEOUT_S = 120
ENGINE_TIMEOUT_S = 600

# What every process of an SGLang needs on a processor without a GPU.
SGLANG_ENVIRON = {
    "KVD_TEST_SGLANG": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(HERE / "sglang_cpu"),
}

Result = dict[str, Any]


def python_of(engine: str) -> Path:
    """Return the interpreter of an engine's environment; skip, with the reason, without one."""
    given = os.environ.get(f"KVD_{engine.upper()}_PYTHON")
    python = Path(given) if given else ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: `make engines` sets it up")
    return python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return python_of("vllm")


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama."""
    return make_model(vllm_python, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return python_of("sglang")


@pytest.fixture(scope="session")
def sglang_model(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, made where only SGLang is."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_model(sglang_python, path, environ=SGLANG_ENVIRON)


def make_model(
    python: Path, path: Path, environ: dict[str, str] | None = None, **changes: Any
) -> Path:
    subprocess.run(
        [str(python), str(HERE / "tiny_model.py"), str(path), json.dumps(changes)],
        check=True,
        capture_output=True,
        timeout=MODEL_TIMEOUT_S,
        env={**os.environ, **(environ or {})},
    )
    return path


class Engine:
    """A running engine: hand it lines, take its results."""

    def __init__(
        self,
        python: Path,
        given: dict[str, Any],
        log: Path,
        script: str = "run_vllm.py",
        environ: dict[str, str] | None = None,
    ) -> None:
        self._log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [str(python), str(HERE / script), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # An engine that fails to start ends its whole process group.
                start_new_session=True,
                env={
                    **{key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"},
                    **(environ or {}),
                },
            )

    def next(self) -> Result:
        """Return the next result."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                found: Result = json.loads(line[7:])
                return found
        self.process.wait(ENGINE_TIMEOUT_S)
        raise AssertionError(f"the engine ended: {self.log()[-4000:]}")

    def go_on(self) -> None:
        """Let an engine that waits go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rest(self) -> list[Result]:
        """Return all other results; the engine has to end well."""
        output, _ = self.process.communicate(timeout=ENGINE_TIMEOUT_S)
        assert self.process.returncode == 0, self.log()[-4000:]
        return [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def vllm(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines: ``vllm(steps, socket=..., extra=..., engine=...)``."""
    engines: list[Engine] = []

    def start(steps: list[dict[str, Any]], **given: Any) -> Engine:
        given.setdefault("model", str(tiny_model))
        log = tmp_path / f"engine-{len(engines)}.log"
        engines.append(Engine(vllm_python, {**given, "steps": steps}, log))
        return engines[-1]

    yield start
    end_all(engines)


@pytest.fixture
def sglang(
    sglang_python: Path, sglang_model: Path, tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """Starts engines: ``sglang(steps, socket=..., kvd=..., engine=..., environ=...)``."""
    engines: list[Engine] = []

    def start(
        steps: list[dict[str, Any]], environ: dict[str, str] | None = None, **given: Any
    ) -> Engine:
        given.setdefault("model", str(sglang_model))
        engines.append(
            Engine(
                sglang_python,
                {**given, "steps": steps},
                tmp_path / f"engine-{len(engines)}.log",
                "run_sglang.py",
                {**SGLANG_ENVIRON, **(environ or {})},
            )
        )
        return engines[-1]

    yield start
    end_all(engines)


@pytest.fixture(scope="module")
def sglang_parts(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """Goes through steps with parts of an SGLang: ``sglang_parts(steps, socket)``."""
    engines: list[Engine] = []

    def start(steps: list[dict[str, Any]], socket: Path) -> Engine:
        given = {"socket": str(socket), "steps": steps}
        log = tmp_path_factory.mktemp("parts") / "log"
        engines.append(Engine(sglang_python, given, log, "sglang_parts.py", SGLANG_ENVIRON))
        return engines[-1]

    yield start
    end_all(engines)


def end_all(engines: list[Engine]) -> None:
    for engine in engines:
        engine.end()
        if engine.process.returncode:
            sys.stdout.write(engine.log()[-4000:])
