"""The two distributions as a user meets them: versions, requirements, READMEs, installation."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = ROOT / "tablespace"
READMES = [ROOT / "README.md", ENGINE / "README.md"]

# In requirements-dev.txt for a reason that no pyproject can state.
ONLY_FOR_DEVELOPMENT = {
    "ninja": "meson's backend, needed by --no-build-isolation",
    "pytest-xdist": "two test files at a time",
    "types-pyyaml": "stubs for the type checker",
}
# Import names that differ from the distribution's.
DISTRIBUTION_OF = {"yaml": "pyyaml"}


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def constant_of(path: Path, name: str) -> str:
    """Return the string a module assigns to a name, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"{path} assigns no {name}")


# Versions.


def test_tablespace_has_one_version() -> None:
    meson = re.search(r"^  version: '([^']+)'", (ENGINE / "meson.build").read_text(), re.MULTILINE)
    assert meson is not None
    assert {
        toml(ENGINE / "pyproject.toml")["project"]["version"],
        meson[1],
        constant_of(ENGINE / "src" / "tablespace" / "__init__.py", "__version__"),
    } == {meson[1]}


def test_kvd_has_one_version_and_pins_the_engine_of_the_same_tree() -> None:
    version = toml(ROOT / "pyproject.toml")["project"]["version"]
    assert constant_of(ROOT / "kvd" / "version.py", "__version__") == version
    pinned = constant_of(ROOT / "setup.py", "VERSION")
    assert pinned == toml(ENGINE / "pyproject.toml")["project"]["version"]


def test_changelogs_name_the_version() -> None:
    for folder in (ROOT, ENGINE):
        version = toml(folder / "pyproject.toml")["project"]["version"]
        assert f"## {version}" in (folder / "CHANGELOG.md").read_text()


# Requirements.


def parse_requirement(line: str) -> tuple[str, str]:
    """Return (normalised name, version range) of a requirement, without its marker."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+)\s*([^;]*?)\s*(?:;.*)?", line.strip())
    assert found is not None, line
    return found[1].lower().replace("_", "-"), found[2]


def setup_requirements() -> list[str]:
    """Return the literal requirements in setup.py, which leaves out the computed engine."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            assert isinstance(node.value, ast.List)
            return [str(each.value) for each in node.value.elts if isinstance(each, ast.Constant)]
    raise AssertionError("setup.py has no install_requires")


def declared() -> dict[str, dict[str, str]]:
    """Return what is declared where: place to {name: version range}."""
    root, engine = toml(ROOT / "pyproject.toml"), toml(ENGINE / "pyproject.toml")
    return {
        place: dict(parse_requirement(line) for line in lines)
        for place, lines in {
            "pyproject.toml build": root["build-system"]["requires"],
            "pyproject.toml dev": root["project"]["optional-dependencies"]["dev"],
            "setup.py": setup_requirements(),
            "tablespace build": engine["build-system"]["requires"],
            "tablespace": engine["project"]["dependencies"],
            "tablespace lz4": engine["project"]["optional-dependencies"]["lz4"],
        }.items()
    }


def development() -> dict[str, str]:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return dict(parse_requirement(line) for line in lines if line and not line.startswith("#"))


def test_development_requirements_cover_everything_declared() -> None:
    installed = development()
    for place, requirements in declared().items():
        for name, versions in requirements.items():
            assert installed.get(name) == versions, f"{name} of {place}"


def test_development_requirements_hold_nothing_unexplained() -> None:
    known = {name for requirements in declared().values() for name in requirements}
    assert set(development()) - known - set(ONLY_FOR_DEVELOPMENT) == set()


def imported_by(folder: Path) -> dict[str, Path]:
    """Return the top-level modules that a package imports when it runs, with a file that does."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            names = []
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], path)
    return found


@pytest.mark.parametrize(
    ("package", "place"),
    [(ENGINE / "src" / "tablespace", "tablespace"), (ROOT / "kvd", "setup.py")],
)
def test_every_import_is_declared(package: Path, place: str) -> None:
    requirements = set(declared()[place]) | {"tablespace", package.name}
    for name, path in imported_by(package).items():
        if name in sys.stdlib_module_names or name == "tomllib":
            continue
        distribution = DISTRIBUTION_OF.get(name, name).replace("_", "-")
        assert distribution in requirements, f"{path} imports {name}"


# Stubs.


def test_every_native_module_has_a_stub() -> None:
    native = sorted((ENGINE / "src").rglob("*.pyx"))
    assert len(native) > 10
    assert [path.name for path in native if not path.with_suffix(".pyi").exists()] == []
    assert (ENGINE / "src" / "tablespace" / "py.typed").exists()


def test_every_native_module_is_built() -> None:
    meson = (ENGINE / "src" / "tablespace" / "meson.build").read_text()
    for path in (ENGINE / "src").rglob("*.pyx"):
        assert f"'{path.stem}'" in meson, f"{path.name} is in no extension_module"


def test_every_package_is_installed() -> None:
    """One was missing: nobody noticed in a tree that is installed as it stands."""
    listed = toml(ROOT / "pyproject.toml")["tool"]["setuptools"]
    there = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for name, folder in listed["package-dir"].items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert len(there) > 5 and set(listed["packages"]) == there
    for path in (ROOT / "kvd").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            parts = path.relative_to(ROOT / "kvd")
            assert any(parts.match(pattern) for pattern in listed["package-data"]["kvd"]), parts


# READMEs.


def python_blocks(readme: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", readme.read_text(), re.DOTALL | re.MULTILINE)


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


HIDE_KVD = textwrap.dedent(
    """
    import importlib.abc, sys

    class Hider(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("kvd", "kvd_connectors"):
                raise ModuleNotFoundError(f"{name} is hidden")
            return None

    sys.meta_path.insert(0, Hider())
    """
)


def test_the_hider_hides(tmp_path: Path) -> None:
    done = run_python(HIDE_KVD + "import kvd", tmp_path)
    assert done.returncode != 0
    assert "kvd is hidden" in done.stderr


def test_tablespace_runs_its_readme_without_kvd(tmp_path: Path) -> None:
    blocks = python_blocks(ENGINE / "README.md")
    assert blocks
    for block in blocks:
        done = run_python(HIDE_KVD + block, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_pass_the_strict_type_checker(tmp_path: Path, readme: Path) -> None:
    # `reader.refresh()` did not: `open` was said to return a Store whatever `read_only` was.
    for number, block in enumerate(python_blocks(readme)):
        # Types are not for examples; what they call must have them.
        untyped = ["--allow-untyped-defs", "--allow-untyped-calls"]
        path = tmp_path / f"example{number}.py"
        path.write_text(block)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", *untyped, str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    """Run a small daemon; yield its socket."""
    path = str(tmp_path / "kvd.sock")
    sizes = ["--max-bytes", "16M", "--long-path", str(tmp_path / "long"), "--long-bytes", "64M"]
    with (tmp_path / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "--socket", path, *sizes],
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
        try:
            deadline = time.monotonic() + 30
            while not os.path.exists(path) and process.poll() is None:
                assert time.monotonic() < deadline, "the daemon took too long to serve"
                time.sleep(0.02)
            assert process.poll() is None, (tmp_path / "daemon.log").read_text()
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def test_every_python_block_of_the_readmes_runs(tmp_path: Path, daemon: str) -> None:
    for readme in READMES:
        blocks = python_blocks(readme)
        assert blocks, f"{readme} shows no Python"
        for number, block in enumerate(blocks):
            folder = tmp_path / f"{readme.parent.name}-{number}"
            folder.mkdir()
            done = run_python(block, folder, KVD_SOCKET=daemon, PYTHONPATH=str(ROOT))
            assert done.returncode == 0, f"{readme}, block {number}:\n{done.stderr}"


# Installation, from a copy of the tree into a clean virtual environment.


def copy_tree(target: Path) -> None:
    """Copy what a clone would hold, and what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_tablespace_installs_and_stays_when_kvd_comes_and_goes(tmp_path: Path) -> None:
    tree, home, empty = tmp_path / "tree", tmp_path / "venv", tmp_path / "empty"
    copy_tree(tree)
    empty.mkdir()
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    # Nothing of this environment: no PYTHONPATH, and a directory without the packages.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *command], cwd=empty, env=clean, capture_output=True, text=True, check=False
        )

    def must(*command: str) -> str:
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def readme_runs() -> None:
        blocks = python_blocks(ENGINE / "README.md")
        assert blocks
        for block in blocks:
            must("-c", block)

    must("-m", "pip", "install", "--quiet", str(tree / "tablespace"))
    assert run("-c", "import kvd").returncode != 0
    readme_runs()
    files = must("-m", "pip", "show", "--files", "tablespace")
    for wanted in ("tablespace/py.typed", "tablespace/shared/lane.pyi", "licenses/LICENSE"):
        assert wanted in files
    assert "meson.build" not in files

    must("-m", "pip", "install", "--quiet", str(tree))
    must("-c", "import kvd, kvd.replay, kvd_connectors")
    assert "usage: kvd" in must("-m", "kvd", "--help")
    readme_runs()

    must("-m", "pip", "uninstall", "--quiet", "--yes", "kvd")
    assert run("-c", "import kvd").returncode != 0
    readme_runs()
    must("-m", "pip", "check")
