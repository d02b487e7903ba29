"""Write docs/cli.md, docs/tools.md and docs/metrics.md from what there is: flags and counters.

    python tools/write_reference.py [--check]

With --check nothing is written, and the exit status is 1 when a page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvd import demo
from kvd.commands import check_gpu_direct
from kvd.config import GROUPS
from kvd.config.command_line import build_parser
from kvd.config.flag import flags_of
from kvd.config.names import OLD_PREFIX, OLD_VARIABLES
from kvd.policy import cli as size
from kvd.replay import cli as replay
from kvd.sight.exported import Exported, exported
from kvd.soak import cli as soak

DOCS = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "This page is written by `python tools/write_reference.py`."


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def shown(action: argparse.Action) -> str:
    """Return a flag or argument with what it takes, as `--help` names it."""
    name = max(action.option_strings, default="", key=len)
    takes = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
    return f"{name} {takes}".strip()


def rows(actions: Iterable[argparse.Action]) -> Iterator[str]:
    """Yield a row for each flag; the help is not in its table."""
    for action in actions:
        if "--help" not in action.option_strings:
            text = (action.help or "").replace("%%", "%")
            yield f"| `{cell(shown(action))}` | {cell(text)} |"


def cli_page() -> str:
    """Return docs/cli.md."""
    settings = {flag.name for _, group in GROUPS for flag in flags_of(group).values()}
    alone = [
        action
        for action in build_parser(GROUPS)._actions
        if not settings.intersection(action.option_strings)
    ]
    lines = [
        "# Flags of the daemon",
        "",
        GENERATED,
        "",
        "`python -m kvd`, or the script `kvd`, serves; no flag is required. `kvd --help` shows "
        "the same. Sizes take K, M, G, T.",
        "",
        f"A flag wins over a variable `{OLD_PREFIX}*` ([below](#variables-of-an-older-system); no "
        "others count: `KVD_MAX_BYTES` is",
        "nothing), that one over the file of `--config`. A flag that there is not, or such a name "
        "in the file, is an error",
        "that names the nearest; such a variable is left aside, with a note at start.",
        "",
        "Without `--socket` the socket is `/var/run/kvd.sock` for whoever may write there, else",
        "`$XDG_RUNTIME_DIR/kvd.sock`, else `/tmp/kvd-UID.sock`. `KVD_SOCKET` is for clients: the "
        "daemon does not read it.",
        "",
        "**Exit status**: 0 after SIGTERM or SIGINT; 1 another process has the socket or the "
        "region, or the system refuses;",
        "2 anything else that stops a start: flags, the file, memory, a region that cannot be "
        "opened, the port of `--metrics`.",
        "With `--check` 1 where a start would fail.",
        "",
        "The flags of `kvd check-gpu-direct`, `demo`, `replay`, `size` and `soak` are in "
        "[tools.md](tools.md), the commands of a",
        "running daemon in [admin.md](admin.md).",
        "",
        "## on the command line only",
        "",
        "| flag | what |",
        "|---|---|",
        *rows(alone),
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


TOOLS = (check_gpu_direct.new_parser, demo.parser, replay.parser, size.parser, soak.parser)
NOTES = {
    "kvd check-gpu-direct": "`kvd check-gpu-direct ROOT ...`. [gpu-direct.md](gpu-direct.md) says "
    "what the answers mean.",
    "kvd replay": "With `--socket` the blocks stay in that daemon, in the namespace "
    "`kvd-replay/content-1/SIZES` (`65536`: blocks of 64K;\n`kvd status` has the name). They go "
    "with `kvd purge kvd-replay/content-1/65536 --yes`, or by eviction, before which\nother "
    "blocks may have gone for them.",
    "kvd demo": "What `make demo` runs. It takes 1.25 GiB of memory and 2.25 GiB of disk while it "
    "runs.",
}


def tools_page() -> str:
    """Return docs/tools.md."""
    lines = [
        "# kvd check-gpu-direct, demo, replay, size, soak",
        "",
        GENERATED,
        "",
        "Sizes take K, M, G, T.",
        "",
    ]
    for make in TOOLS:
        parser = make()
        lines += [f"## {parser.prog}", "", str(parser.description).replace("%%", "%")]
        lines += [parser.epilog.replace("%%", "%")] if parser.epilog else []
        lines += ["", NOTES[parser.prog]] if parser.prog in NOTES else []
        lines += ["", "| flag | what |", "|---|---|", *rows(parser._actions), ""]
    return "\n".join(lines[:-1]) + "\n"


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


PAGES = {"cli.md": cli_page, "tools.md": tools_page, "metrics.md": metrics_page}


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
