"""Free-threaded CPython is not supported, and no module says it were."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = ROOT / "tablespace"
# Cython's directive, and what it makes of it in C.
DECLARATIONS = re.compile(r"freethreading_compatible\s*=\s*True|Py_MOD_GIL_NOT_USED")


def declares(text: str) -> bool:
    return DECLARATIONS.search(text) is not None


def test_no_source_and_no_build_file_declares_it() -> None:
    sources = [
        path
        for path in (ENGINE / "src").rglob("*")
        if path.suffix in (".pyx", ".pxd", ".h", ".c", ".build")
    ]
    sources += [ENGINE / "meson.build", ENGINE / "pyproject.toml", ROOT / "pyproject.toml"]
    assert len(sources) > 30
    assert [str(path) for path in sources if declares(path.read_text())] == []
    # The directive would be seen where it usually stands.
    assert declares("# cython: freethreading_compatible=True")
    assert declares("cython_args = ['-X', 'freethreading_compatible=True']")


def test_documents_say_so_and_no_classifier_claims_more() -> None:
    for path in (ENGINE / "README.md", ROOT / "docs" / "decisions" / "free-threading.md"):
        assert "free-threaded" in path.read_text().lower()
    for path in (ENGINE / "pyproject.toml", ROOT / "pyproject.toml"):
        assert "Free Threading ::" not in path.read_text()
