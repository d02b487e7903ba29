"""The arrows of docs/architecture.md, enforced by reading import and cimport lines.

connectors -> kvd -> tablespace; inside tablespace layout, errors -> _core -> io -> the rest; and
only tablespace/io (and the shipped test kit) reaches the operating system's files.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "tablespace" / "src" / "tablespace"

# What each ring may import of the project besides itself.
RINGS = {"tablespace": set(), "kvd": {"tablespace"}, "kvd_connectors": {"kvd"}}

# Levels inside tablespace; a module imports only from its own level or below.
LEVELS = {
    "errors": 0,
    "layout": 0,
    "_core": 1,
    "shared": 1,
    "policy": 1,
    "io": 2,
    "testing": 4,
    "": 4,
}
OTHER_LEVEL = 3

# Packages of tablespace that others may use as they use tablespace itself.
PUBLIC_PACKAGES = ("policy", "shared")

# What os may be used for outside the seams: names of things, no files.
HARMLESS_OS_NAMES = {"PathLike", "fspath", "strerror"}
FILE_MODULES = {
    "_io",
    "fcntl",
    "glob",
    "io",
    "mmap",
    "pathlib",
    "posix",
    "select",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
}
FILE_HEADERS = {
    "dirent.h",
    "fcntl.h",
    "stdio.h",
    "sys/file.h",
    "sys/stat.h",
    "sys/uio.h",
    "unistd.h",
}


@dataclass(frozen=True)
class Import:
    """One imported module, and the name taken from it (None for the module itself)."""

    line: int
    module: str
    name: str | None


STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*',
    re.DOTALL,
)
CYTHON_FROM = re.compile(
    r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE
)
CYTHON_IMPORT = re.compile(r"^[ \t]*c?import[ \t]+([^\n]+)", re.MULTILINE)
CYTHON_EXTERN = re.compile(
    r"^[ \t]*cdef[ \t]+extern[ \t]+from[ \t]+[\"']<?([^\"'>]+)", re.MULTILINE
)
BARE_OPEN = re.compile(r"(?<![\w.])open\s*\(")
OS_NAME = re.compile(r"(?<![\w.])os\.(\w+)")


def without_strings(source: str) -> str:
    """Blank strings and comments of Cython source, keeping every line where it is."""
    return STRINGS_AND_COMMENTS.sub(lambda found: "\n" * found[0].count("\n"), source)


def line_of(source: str, position: int) -> int:
    return source.count("\n", 0, position) + 1


def imports_of(path: str, source: str) -> list[Import]:
    """Return every import of a .py or .pyi file, or import and cimport of a .pyx or .pxd file."""
    if path.endswith((".py", ".pyi")):
        return list(python_imports(path, source))
    return list(cython_imports(source))


def python_imports(path: str, source: str) -> Iterator[Import]:
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, module, alias.name)


def cython_imports(source: str) -> Iterator[Import]:
    text = without_strings(source)
    for found in CYTHON_FROM.finditer(text):
        for part in found[2].strip("()").replace("\n", " ").split(","):
            if part.split():
                yield Import(line_of(text, found.start()), found[1], part.split()[0])
    for found in CYTHON_IMPORT.finditer(text):
        for part in found[1].split(","):
            yield Import(line_of(text, found.start()), part.split()[0], None)


def module_name(path: str) -> str:
    """Return the dotted name of a module from its path in the repository."""
    for folder, package in (
        ("tablespace/src/tablespace/", "tablespace"),
        ("kvd/", "kvd"),
        ("connectors/", "kvd_connectors"),
    ):
        if path.startswith(folder):
            inside = path[len(folder) :].rsplit(".", 1)[0].replace("/", ".")
            return f"{package}.{inside}".removesuffix(".__init__")
    raise ValueError(f"{path} belongs to no ring")


def names_of_all(source: str) -> set[str]:
    """Return the names in a module's ``__all__``."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return set(ast.literal_eval(node.value))
    raise AssertionError("no __all__")


def public_names() -> dict[str, set[str]]:
    """Return what kvd may use of tablespace, and connectors of kvd: module to names."""
    return {
        "tablespace": names_of_all((ENGINE / "__init__.py").read_text())
        | {"__version__", *PUBLIC_PACKAGES},
        **{
            f"tablespace.{name}": names_of_all((ENGINE / name / "__init__.py").read_text())
            for name in PUBLIC_PACKAGES
        },
        "kvd": names_of_all((ROOT / "kvd" / "__init__.py").read_text()) | {"__version__"},
    }


# The rules. Each takes a path in the repository and a source, and returns complaints.


def ring_complaints(path: str, source: str) -> list[str]:
    """Imports that go outward, or skip a ring."""
    ring = module_name(path).split(".")[0]
    return [
        f"{path}:{each.line}: {ring} must not import {each.module}"
        for each in imports_of(path, source)
        for top in [each.module.split(".")[0]]
        if top in RINGS and top != ring and top not in RINGS[ring]
    ]


def public_name_complaints(path: str, source: str) -> list[str]:
    """Uses of another ring's names that are not public."""
    ring = module_name(path).split(".")[0]
    public = public_names()
    complaints = []
    for each in imports_of(path, source):
        if each.module.split(".")[0] not in RINGS[ring]:
            continue
        allowed = public.get(each.module)
        if allowed is None or (each.name is not None and each.name not in allowed):
            what = each.module if each.name is None else f"{each.module}.{each.name}"
            complaints.append(f"{path}:{each.line}: {what} is not public")
    return complaints + attribute_complaints(path, source, ring, public)


def attribute_complaints(
    path: str, source: str, ring: str, public: dict[str, set[str]]
) -> list[str]:
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in public and alias.name.split(".")[0] in RINGS[ring]:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    bound[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module == "tablespace":
            for alias in node.names:
                if alias.name in PUBLIC_PACKAGES:
                    bound[alias.asname or alias.name] = f"tablespace.{alias.name}"
    complaints = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        whole = ast.unparse(node.value)
        inner = whole if whole.startswith("tablespace.") and whole in public else ""
        module = bound.get(whole) or inner
        if module and node.attr not in public[module]:
            complaints.append(f"{path}:{node.lineno}: {module}.{node.attr} is not public")
    return complaints


def level_of(module: str) -> int:
    """Return the level of a module of tablespace."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1].startswith("__"):
        return LEVELS[""]
    return LEVELS.get(parts[1], OTHER_LEVEL)


def level_complaints(path: str, source: str) -> list[str]:
    """Imports inside tablespace that go upward."""
    own = level_of(module_name(path))
    complaints = []
    for each in imports_of(path, source):
        if each.module.split(".")[0] != "tablespace":
            continue
        module = each.module
        if module in ("tablespace", "tablespace.io", "tablespace._core") and each.name:
            # "from tablespace import layout": the name is the module, where there is one.
            inner = ENGINE.joinpath(*module.split(".")[1:])
            if any(inner.glob(f"{each.name}.*")) or (inner / each.name).is_dir():
                module = f"{module}.{each.name}"
        if level_of(module) > own:
            complaints.append(f"{path}:{each.line}: {module} lies above this module")
    return complaints


def seam_complaints(path: str, source: str) -> list[str]:
    """Reaches for files outside the seams."""
    complaints = [
        f"{path}:{each.line}: {each.module} reaches files"
        for each in imports_of(path, source)
        if each.module.split(".")[0] in FILE_MODULES
        or each.module in ("libc.stdio", "os.path")
        or (each.module == "os" and each.name and each.name not in HARMLESS_OS_NAMES)
    ]
    if path.endswith((".py", ".pyi")):
        return complaints + list(python_file_uses(path, source))
    return complaints + list(cython_file_uses(path, source))


def python_file_uses(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("open", "__import__"):
                yield f"{path}:{node.lineno}: {node.func.id}()"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr not in HARMLESS_OS_NAMES
        ):
            yield f"{path}:{node.lineno}: os.{node.attr}"


def cython_file_uses(path: str, source: str) -> Iterator[str]:
    text = without_strings(source)
    for found in BARE_OPEN.finditer(text):
        yield f"{path}:{line_of(text, found.start())}: open()"
    for found in OS_NAME.finditer(text):
        if found[1] not in HARMLESS_OS_NAMES:
            yield f"{path}:{line_of(text, found.start())}: os.{found[1]}"
    for found in CYTHON_EXTERN.finditer(source):
        if found[1] in FILE_HEADERS:
            yield f"{path}:{line_of(source, found.start())}: <{found[1]}>"


# The tree against the rules.


def sources(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [
        path
        for path in sorted(set(listed))
        if path.endswith((".py", ".pyi", ".pyx", ".pxd")) and (ROOT / path).exists()
    ]


def complaints(
    rule: Callable[[str, str], list[str]], paths: list[str], at_least: int = 1
) -> list[str]:
    assert len(paths) >= at_least, "the rule looked at too few files to mean anything"
    return [line for path in paths for line in rule(path, (ROOT / path).read_text())]


ENGINE_FOLDER = "tablespace/src/tablespace"


def test_imports_go_inward_only() -> None:
    paths = sources(ENGINE_FOLDER, "kvd", "connectors")
    assert complaints(ring_complaints, paths, at_least=60) == []


def test_kvd_and_connectors_use_only_public_names() -> None:
    assert complaints(public_name_complaints, sources("kvd", "connectors"), at_least=20) == []


def test_levels_inside_tablespace() -> None:
    assert complaints(level_complaints, sources(ENGINE_FOLDER), at_least=40) == []


def test_only_the_seams_reach_files() -> None:
    inside = (f"{ENGINE_FOLDER}/io/", f"{ENGINE_FOLDER}/testing/")
    paths = [path for path in sources(ENGINE_FOLDER) if not path.startswith(inside)]
    assert complaints(seam_complaints, paths, at_least=30) == []


def test_the_outer_rings_are_pure_python() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "kvd", "connectors"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert listed
    native = (".c", ".cpp", ".h", ".pxd", ".pyx", ".so")
    assert [path for path in listed if path.endswith(native)] == []


# Each rule can fail.


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (f"{ENGINE_FOLDER}/store.py", "import kvd"),
        (f"{ENGINE_FOLDER}/store.py", "def late():\n    from kvd.arena import Arena"),
        (f"{ENGINE_FOLDER}/_core/key_index.pyx", "from kvd.arena cimport thing"),
        (f"{ENGINE_FOLDER}/_core/key_index.pxd", "cimport kvd_connectors.chunking"),
        ("kvd/client.py", "import kvd_connectors.chunking"),
        ("kvd/replay/cli.py", "from kvd_connectors import chunking"),
        ("connectors/vllm_tier.py", "import tablespace"),
    ],
)
def test_an_outward_import_is_seen(path: str, source: str) -> None:
    assert ring_complaints(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvd/long_tier.py", "import tablespace.store"),
        ("kvd/long_tier.py", "from tablespace.io.directory import PosixDirectory"),
        ("kvd/long_tier.py", "from tablespace import plan_geometry"),
        ("kvd/long_tier.py", "import tablespace\ntablespace.store.Store"),
        ("kvd/long_tier.py", "import tablespace as engine\nengine._core"),
        ("kvd/arena.py", "from tablespace.shared import ts_load_acquire"),
        ("kvd/block.py", "from tablespace.policy.ranked import Ranked"),
        ("kvd/block.py", "from tablespace import policy\npolicy.ranked"),
        ("kvd/arena.py", "from tablespace import shared\nshared._word(b'', 0)"),
        ("kvd/arena.py", "import tablespace.shared\ntablespace.shared._word(b'', 0)"),
        ("connectors/vllm_tier.py", "from kvd.arena import Arena"),
        ("connectors/vllm_tier.py", "import kvd\nkvd.arena"),
    ],
)
def test_a_private_name_is_seen(path: str, source: str) -> None:
    assert public_name_complaints(path, source)


def test_public_names_pass() -> None:
    source = (
        "import tablespace\nimport tablespace.shared\nfrom tablespace import shared, open\n"
        "from tablespace.shared import SequencedSlots\n"
        "tablespace.open('x')\ntablespace.shared.copy_in(a, 0, b)\nshared.load_u64(a, 0)\n"
    )
    assert public_name_complaints("kvd/long_tier.py", source) == []
    assert public_name_complaints("connectors/vllm_tier.py", "import kvd\nkvd.Client()") == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (f"{ENGINE_FOLDER}/_core/key_index.pyx", "from tablespace.io.device cimport Device"),
        (f"{ENGINE_FOLDER}/_core/key_index.pyx", "from tablespace.io cimport device"),
        (f"{ENGINE_FOLDER}/_core/checksum.pyx", "from tablespace.region import Region"),
        (f"{ENGINE_FOLDER}/io/directory.py", "from tablespace.journal import Journal"),
        (f"{ENGINE_FOLDER}/io/directory.py", "from . import open\nfrom .. import journal"),
        (f"{ENGINE_FOLDER}/layout.py", "from tablespace._core.checksum import checksum64"),
        (f"{ENGINE_FOLDER}/store.py", "import tablespace"),
        (f"{ENGINE_FOLDER}/store.py", "from tablespace import Store"),
        (f"{ENGINE_FOLDER}/store.py", "from tablespace.testing import simulated_device"),
    ],
)
def test_an_upward_import_is_seen(path: str, source: str) -> None:
    assert level_complaints(path, source)


def test_downward_imports_pass() -> None:
    assert level_complaints(f"{ENGINE_FOLDER}/store.py", "from tablespace import layout") == []
    assert level_complaints(f"{ENGINE_FOLDER}/io/open.py", "from tablespace.io import host") == []
    source = "from tablespace._core.checksum cimport (\n    hash_key,\n    xxh3_64,\n)"
    assert level_complaints(f"{ENGINE_FOLDER}/io/read_batch.pyx", source) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("store.py", "import os\nos.open('x', 0)"),
        ("store.py", "import os\nos.rename('a', 'b')"),
        ("store.py", "import os\nos.path.exists('a')"),
        ("store.py", "from os import unlink"),
        ("store.py", "from os.path import exists"),
        ("store.py", "import fcntl"),
        ("store.py", "import mmap"),
        ("store.py", "from pathlib import Path"),
        ("store.py", "def late():\n    import tempfile"),
        ("store.py", "with open('x') as file: pass"),
        ("_core/key_index.pyx", "import os\nos.stat('x')"),
        ("_core/key_index.pyx", "import mmap"),
        ("_core/key_index.pyx", "from libc.stdio cimport fopen"),
        ("_core/key_index.pyx", "from posix.unistd cimport write"),
        ("_core/key_index.pyx", 'cdef extern from "unistd.h" nogil:\n    int fsync(int fd)'),
        ("_core/key_index.pyx", 'cdef extern from "<fcntl.h>":\n    pass'),
        ("_core/key_index.pyx", "def f(name):\n    return open(name)"),
    ],
)
def test_a_reach_for_files_is_seen(name: str, source: str) -> None:
    assert seam_complaints(f"{ENGINE_FOLDER}/{name}", source)


def test_harmless_uses_pass() -> None:
    source = (
        "import os\nfrom os import PathLike\n"
        "def f(path, directory, code):\n"
        "    '''Never calls open(path) or os.stat.'''\n"
        "    directory.open(path)\n"
        "    return os.fspath(path), os.strerror(code)  # not os.open\n"
    )
    assert seam_complaints(f"{ENGINE_FOLDER}/store.py", source) == []
    assert seam_complaints(f"{ENGINE_FOLDER}/_core/key_index.pyx", source) == []


def test_cython_imports_are_read_in_every_form() -> None:
    source = (
        '"""import kvd in a docstring"""\n'
        "from a.b cimport (\n    one, two,\n)\n"
        "from c import three as other, four\n"
        "cimport d.e, f\n"
        "import g  # import h\n"
    )
    found = {(each.line, each.module, each.name) for each in imports_of("x.pyx", source)}
    assert found == {
        (2, "a.b", "one"),
        (2, "a.b", "two"),
        (5, "c", "three"),
        (5, "c", "four"),
        (6, "d.e", None),
        (6, "f", None),
        (7, "g", None),
    }
