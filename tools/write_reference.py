"""Write docs/cli.md and docs/metrics.md from what the daemon has: its flags and its counters.

    python tools/write_reference.py [--check]

With --check nothing is written, and the exit status is 1 when a page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.config import GROUPS
from kvd.config.command_line import COMMAND_LINE_ONLY
from kvd.config.flag import flags_of
from kvd.config.names import OLD_PREFIX, OLD_VARIABLES
from kvd.sight.exported import Exported, exported

DOCS = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "This page is written by `python tools/write_reference.py`."


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def cli_page() -> str:
    """Return docs/cli.md."""
    lines = [
        "# Flags of the daemon",
        "",
        GENERATED,
        "",
        "`python -m kvd`, or the script `kvd`, serves; no flag is required. `kvd --help` shows "
        "the same. Flags win over",
        "environment variables, those over the file of `--config`; a name that no flag has is an "
        "error that names the nearest.",
        "Sizes take K, M, G, T.",
        "",
        "## on the command line only",
        "",
        "| flag | default | what |",
        "|---|---|---|",
        *(f"| `{name}` |  | {cell(text)} |" for name, text in COMMAND_LINE_ONLY.items()),
        "",
    ]
    older = {flag: variable for variable, flag in OLD_VARIABLES.items()}
    for title, group in GROUPS:
        flags = flags_of(group)
        if not flags:
            continue
        lines += [f"## {title}", "", "| flag | default | what |", "|---|---|---|"]
        for flag in flags.values():
            named = f"`{flag.name} {flag.metavar}`".replace(" `", "`")
            default = f"`{flag.default}`" if flag.default is not None else ""
            lines.append(f"| {cell(named)} | {default} | {cell(flag.help)} |")
        lines.append("")
    lines += [
        "## Variables of an older system",
        "",
        f"Taken as the flags they stand for, and said in one line at start; `{OLD_PREFIX}` and a "
        "flag's name in capitals",
        "is that flag.",
        "",
        "| variable | flag |",
        "|---|---|",
    ]
    for _, group in GROUPS:
        for flag in flags_of(group).values():
            usual = OLD_PREFIX + flag.name[2:].upper().replace("-", "_")
            also = f", `{older[flag.name]}`" if flag.name in older else ""
            lines.append(f"| `{usual}`{also} | `{flag.name}` |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        GENERATED,
        "",
        "`--metrics ADDR:PORT` serves them at `/metrics`. Every number of STATS is one; what "
        "holds for a tier has",
        "the label `tier` (`memory`, `long`). Counters begin at 0 with the process. Beside them "
        "there are `process_*`,",
        "of the process, and `kvd_info`, whose labels are what was chosen at start.",
        "",
        "| metric | type | labels | what |",
        "|---|---|---|---|",
    ]
    lines += [_metric_row(each) for each in exported()]
    return "\n".join(lines) + "\n"


def _metric_row(each: Exported) -> str:
    labels = ", ".join(f"`{label}`" for label in each.labels)
    return f"| `{each.name}` | {each.kind} | {labels} | {cell(each.help)} |"


PAGES = {"cli.md": cli_page, "metrics.md": metrics_page}


def main() -> int:
    """Write the pages, or say which one is out of date."""
    stale = []
    for name, write in PAGES.items():
        text = write()
        path = DOCS / name
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python tools/write_reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
