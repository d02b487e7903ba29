"""Style that a machine can check, over every file that is tracked or could be."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SOURCE = (".py", ".pyi", ".pyx", ".pxd", ".h", ".c")
TEXT = (*SOURCE, ".md", ".toml", ".build", ".txt", ".yaml", ".yml", ".cfg", ".json", ".supp")
MAX_LINE = 99
MAX_LINES = 500
# What a longer file must say in its header: "Long because <reason>".
LONG_FILE_REASON = re.compile(r"\bLong because \w+ \w+")
HEADER_LINES = 40

# Written so that this file does not contain what it looks for.
LATER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HAC[K])\b(?!\(?\w*\)?: *\w+ \w+ \w+)")
URING_HEADER = re.compile(r"(?:#\s*include|extern\s+from)\s*[<\"']+liburing")
PRINT = re.compile(r"(?<![\w.])print\s*\(")
WORKPLACE = re.compile(
    r"/wor[k]/|/roo[t]/|(?<!\w)\.librar[y]\b|\bfar[m]\b|\.\./share[d]\b"
    r"|pypi\.or[g]|pythonhoste[d]|\bissue #?\d",
    re.IGNORECASE,
)
STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*',
    re.DOTALL,
)
# Calls that assert: pytest's, hypothesis', and those of the shipped oracle.
ASSERTING = {"audit", "fail", "judge", "raises", "run_state_machine_as_test", "warns"}
LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)*")


# The rules. Each takes a path in the repository and a text, and yields complaints.


def not_ascii(path: str, text: str) -> Iterator[str]:
    """Source is ASCII: it looks the same in every editor and terminal."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            yield f"{path}:{number}: not ASCII"


def too_long_line(path: str, text: str) -> Iterator[str]:
    """Lines fit a screen."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            yield f"{path}:{number}: {len(line)} characters, at most {MAX_LINE}"


def trailing_space(path: str, text: str) -> Iterator[str]:
    """No invisible differences."""
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            yield f"{path}:{number}: space at the end of the line"
    if text and not text.endswith("\n"):
        yield f"{path}: no newline at the end"


def unexplained_later(path: str, text: str) -> Iterator[str]:
    """A note for later says why it waits."""
    for number, line in enumerate(text.splitlines(), 1):
        if LATER.search(line):
            yield f"{path}:{number}: a note for later without a reason"


def uring_header(path: str, text: str) -> Iterator[str]:
    """The project builds without liburing's headers."""
    for number, line in enumerate(text.splitlines(), 1):
        if URING_HEADER.search(line):
            yield f"{path}:{number}: includes liburing's header"


def too_long_file(path: str, text: str) -> Iterator[str]:
    """A file does one thing; a longer one says in its header why it is one."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES and not LONG_FILE_REASON.search("\n".join(lines[:HEADER_LINES])):
        yield f"{path}: {len(lines)} lines, more than {MAX_LINES}, and no 'Long because ...'"


def workplace_word(path: str, text: str) -> Iterator[str]:
    """The files speak of the project alone."""
    for number, line in enumerate(text.splitlines(), 1):
        found = WORKPLACE.search(line)
        if found:
            yield f"{path}:{number}: {found[0]!r}"


def no_docstring(path: str, text: str) -> Iterator[str]:
    """Every module says in a sentence what it is; an empty package marker is exempt."""
    if not text.strip():
        return
    if path.endswith(".py"):
        if not ast.get_docstring(ast.parse(text)):
            yield f"{path}: no docstring"
    elif not text[LEADING_COMMENTS.match(text).end() :].startswith('"""'):
        yield f"{path}: no docstring"


def stray_print(path: str, text: str) -> Iterator[str]:
    """Only command-line modules print; the rest logs, or writes to a stream it was given."""
    if path.endswith(".py"):
        tree = ast.parse(text)
        if path.endswith("/__main__.py") or any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
        ):
            return
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
                and not any(keyword.arg == "file" for keyword in node.keywords)
            ):
                yield f"{path}:{node.lineno}: print"
        return
    bare = STRINGS_AND_COMMENTS.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in PRINT.finditer(bare):
        yield f"{path}:{bare.count(chr(10), 0, found.start()) + 1}: print"


def asserts_nothing(path: str, text: str) -> Iterator[str]:
    """A test that asserts nothing, itself or in a function of its module, tests nothing."""
    tree = ast.parse(text)
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    sound = {function.name for function in functions if asserts(function)}
    while True:
        more = {function.name for function in functions if called_names(function) & sound}
        if more <= sound:
            break
        sound |= more
    for function in functions:
        if function.name.startswith("test_") and function.name not in sound:
            yield f"{path}:{function.lineno}: {function.name} asserts nothing"


def asserts(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in ASSERTING or name.startswith(("assert_", "check_", "expect_", "verify_")):
                return True
    return False


def called_names(function: ast.AST) -> set[str]:
    return {name_of(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


# The tree against the rules.


def files(
    *endings: str, under: tuple[str, ...] = ("",), but: tuple[str, ...] = ("\0",)
) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [
        path
        for path in sorted(set(listed))
        if path.endswith(endings)
        and path.startswith(under)
        and not path.startswith(but)
        and "/golden/" not in path  # Files as a release wrote them, not as we would.
        and (ROOT / path).is_file()
    ]


def texts() -> list[str]:
    """Every text file, also those without an ending (Makefile, .ci/run)."""
    return files(*TEXT) + [path for path in files("") if "." not in path.split("/")[-1]]


PACKAGES = ("tablespace/src/", "kvd/", "connectors/", "tools/")
RULES: list[tuple[Callable[[str, str], Iterator[str]], Callable[[], list[str]]]] = [
    (not_ascii, lambda: files(*SOURCE)),
    (too_long_line, lambda: files(".py", ".pyi", ".pyx", ".pxd", ".h")),
    (trailing_space, texts),
    (unexplained_later, lambda: files(*SOURCE)),
    (uring_header, lambda: files(*SOURCE)),
    (too_long_file, lambda: files(*SOURCE)),
    (workplace_word, texts),
    (no_docstring, lambda: files(".py", ".pyx")),
    (stray_print, lambda: files(".py", ".pyx", under=PACKAGES)),
    (
        asserts_nothing,
        lambda: [path for path in files(".py", under=("tests/",)) if "/test_" in path],
    ),
]


@pytest.mark.parametrize(("rule", "paths"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_the_tree_keeps_the_rule(
    rule: Callable[[str, str], Iterator[str]], paths: Callable[[], list[str]]
) -> None:
    looked_at = paths()
    assert len(looked_at) >= 5, "the rule looked at too few files to mean anything"
    complaints = [line for path in looked_at for line in rule(path, (ROOT / path).read_text())]
    assert complaints == [], rule.__doc__


# Each rule can fail, and leaves alone what it should.

BAD: list[tuple[Callable[[str, str], Iterator[str]], str, str]] = [
    (not_ascii, "a.py", "x = 'caf\u00e9'\n"),
    (too_long_line, "a.pyx", "x" * 100 + "\n"),
    (trailing_space, "a.md", "two  \n"),
    (trailing_space, "a.md", "no end"),
    (unexplained_later, "a.py", "# TO" + "DO\n"),
    (unexplained_later, "a.py", "# TO" + "DO: faster\n"),
    (unexplained_later, "a.pyx", "# FIX" + "ME later\n"),
    (uring_header, "a.pxd", 'cdef extern from "libur' + 'ing.h" nogil:\n'),
    (uring_header, "a.h", "#  include <libur" + "ing/io_uring.h>\n"),
    (too_long_file, "a.py", "x\n" * 501),
    (workplace_word, "a.md", "see /wor" + "k/notes\n"),
    (workplace_word, "a.md", "a far" + "m of hosts\n"),
    (workplace_word, "a.py", "# fixes issue" + " #12\n"),
    (workplace_word, "Makefile", "\tls ../share" + "d/traces\n"),
    (no_docstring, "a.py", "import os\n"),
    (no_docstring, "a.pyx", "# cython: boundscheck=False\n# A comment.\nimport os\n"),
    (stray_print, "kvd/arena.py", "def f():\n    print('here')\n"),
    (stray_print, "tablespace/src/tablespace/_core/a.pyx", "cdef f():\n    print(1)\n"),
    (asserts_nothing, "tests/test_a.py", "def test_f():\n    f()\n"),
    (asserts_nothing, "tests/test_a.py", "class A:\n    def test_f(self):\n        g()\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_the_rule_sees_a_breach(
    rule: Callable[[str, str], Iterator[str]], path: str, text: str
) -> None:
    assert list(rule(path, text))


GOOD: list[tuple[Callable[[str, str], Iterator[str]], str, str]] = [
    (too_long_line, "a.py", "x" * 99 + "\n"),
    (unexplained_later, "a.py", "# TO" + "DO: wait for kernel 6.20 in CI\n"),
    (too_long_file, "a.py", '"""A.\n\nLong because the table is one state machine.\n"""\n' * 200),
    (workplace_word, "a.md", "the network, the workload, a wharf\n"),
    (no_docstring, "__init__.py", ""),
    (no_docstring, "a.pyx", '# cython: boundscheck=False\n\n"""A module."""\n'),
    (stray_print, "kvd/cli.py", "def main():\n    print('here')\n"),
    (stray_print, "kvd/progress.py", "print('half', file=stream)\n"),
    (stray_print, "a.pyx", '"""print(1)"""\n# print(2)\nconsole.print(3)\n'),
    (
        asserts_nothing,
        "tests/test_a.py",
        "def test_f():\n    with raises(E):\n        f()\n",
    ),
    (
        asserts_nothing,
        "tests/test_a.py",
        "def holds(x):\n    assert x\n\ndef test_f():\n    holds(1)\n",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_the_rule_passes_what_is_fine(
    rule: Callable[[str, str], Iterator[str]], path: str, text: str
) -> None:
    assert list(rule(path, text)) == []
