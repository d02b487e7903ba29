"""Command lines whose names begin with a dash."""

import pytest

from kvd.commands import arguments
from kvd.commands.arguments import UsageError
from kvd.commands.verdict import judge
from kvd.results import Choices, Latency, PathHealth, Status, TierUse


def parsed(*argv):
    parser = arguments.new_parser("x", None)
    parser.add_argument("--namespace", action="append", default=[])
    parser.add_argument("--yes", action="store_true")
    options, names = arguments.parse(parser, argv)
    return options.namespace, names, options.yes


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["--namespace=-x"], (["-x"], [], False)),
        (["--namespace", "-x", "--yes"], (["-x"], [], True)),
        (["--namespace", "--yes"], (["--yes"], [], False)),
        (["--models--M--x", "--yes"], ([], ["--models--M--x"], True)),
        (["--yes", "--", "--yes"], ([], ["--yes"], True)),
        (["-", "--yesno", "--yes=1x"][:2], ([], ["-", "--yesno"], False)),
        (["--namespace=--", "--namespace", "--", "--yes"], (["--", "--"], [], True)),
        (["--yes", "--", "--"], ([], ["--"], True)),
        (["--namespace==x"], (["=x"], [], False)),
        (["--namesp=x"], ([], ["--namesp=x"], False)),
        (["a=b"], ([], ["a=b"], False)),
    ],
)
def test_what_is_no_option_is_a_name(argv, meant):
    assert parsed(*argv) == meant


@pytest.mark.parametrize(
    "argv",
    [["--namespace"], ["--yes=1"], ["--socket"], ["a\udcff"], ["--namespace", "\udcff"]],
)
def test_an_option_without_its_value_is_a_usage_error(argv):
    with pytest.raises(UsageError):
        parsed(*argv)


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("12h", 43200), ("1.5m", 90), ("9s", 9), ("9", 9)]
)
def test_ages(text, seconds):
    assert arguments.seconds("--interval", text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "7 d", "7y", "nan", "inf", "1e9"])
def test_what_is_no_age(text):
    with pytest.raises(UsageError, match=r"--interval: .* is no time"):
        arguments.seconds("--interval", text)


def test_one_place_is_meant(tmp_path):
    parser = arguments.new_parser("x", None)
    with pytest.raises(UsageError):
        arguments.directories(arguments.parse(parser, ["--socket=s", "--long-path=d"])[0])
    with pytest.raises(UsageError):
        arguments.directories(arguments.parse(parser, ["--long-path="])[0])
    options, _ = arguments.parse(parser, ["--long-path=a,b", "--long-path", "c"])
    assert [str(path) for path in arguments.directories(options)] == ["a", "b", "c"]


COUNTS = (
    "used_bytes",
    "free_bytes",
    "max_bytes",
    "value_bytes",
    "allocated_bytes",
    "index_bound_bytes",
    "evictions",
    "reclaimed_bytes",
    "rejected_writes",
    "dropped",
    "tmp_files",
    "tmp_files_bytes",
    "written_blocks",
    "written_bytes",
    "written_never_read_blocks",
    "written_never_read_bytes",
    "read_blocks",
    "corrupt",
)
MAPS = (
    "per_namespace_bytes",
    "per_namespace_value_bytes",
    "namespaces",
    "quotas",
    "rejected_by_namespace",
)


def status(**changed):
    numbers = dict.fromkeys(COUNTS, 0)
    maps = {name: {} for name in MAPS}
    base = {
        "state": "running",
        "version": "0",
        "usage_fraction": 0.0,
        "soft_pressure": False,
        "tiers": {"long": TierUse(0, 0, 0, 0, Latency(0, 0.0, 0.0))},
        "health": [PathHealth("d", "ok", "")],
        "choices": Choices("", "", "", "", "", 0, 0.0, []),
        "notes": [],
    }
    return Status(**{**numbers, **maps, **base, **changed})


@pytest.mark.parametrize(
    ("changed", "verdict", "advice"),
    [
        ({"written_blocks": 10}, "too early", "only 10"),
        ({"written_blocks": 2000, "read_blocks": 3000}, "pays", "nothing to change"),
        (
            {
                "written_blocks": 2000,
                "read_blocks": 20,
                "written_bytes": 100,
                "written_never_read_bytes": 99,
            },
            "does not pay",
            "second-hit",
        ),
        (
            {"written_blocks": 2000, "read_blocks": 20, "evictions": 1500},
            "does not pay",
            "raise --long-bytes",
        ),
        (
            {"written_blocks": 2000, "read_blocks": 20, "written_bytes": 100},
            "does not pay",
            "smaller",
        ),
        ({"written_blocks": 2000, "read_blocks": 3000, "dropped": 3}, "pays", "keep up"),
        ({"written_blocks": 2000, "read_blocks": 3000, "rejected_writes": 3}, "pays", "quota"),
        ({"state": "stopped"}, "unknown", "no counters"),
        ({"health": []}, "unknown", "no long tier"),
    ],
)
def test_the_verdict_follows_the_counters(changed, verdict, advice):
    found = judge(status(**changed))
    assert found.verdict == verdict
    assert advice in " ".join(found.advice)
