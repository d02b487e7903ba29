"""What docs/ tells operators, against the daemon as it is: flags, metrics, dashboard, examples."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd import demo
from kvd.config import all_flags
from kvd.config.command_line import COMMAND_LINE_ONLY
from kvd.config.file import read_file
from kvd.config.names import flag_of_variable
from kvd.policy import cli as size
from kvd.replay import cli as replay
from kvd.results import Status
from kvd.sight.exported import exported
from kvd.soak import cli as soak

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
URL = re.compile(r"(http://127\.0\.0\.1:\d+)/ for a browser")
OF_OTHERS = {"--now", "--block-tokens", "--version"}  # Of systemctl, statctl, argparse.


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The names of all samples that a live daemon exports."""
    import time
    import urllib.request

    directory = tmp_path_factory.mktemp("live")
    command = [
        *(sys.executable, "-m", "kvd", "--socket", str(directory / "s"), "--max-bytes", "8M"),
        *("--long-path", str(directory / "long"), "--long-bytes", "16M", "--metrics", "0"),
        *("--follow", str(directory / "other")),
    ]
    with (
        open(directory / "log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as daemon,
    ):
        try:
            deadline = time.monotonic() + 30
            while not (found := URL.search((directory / "log").read_text())):
                assert time.monotonic() < deadline and daemon.poll() is None
                time.sleep(0.02)
            with urllib.request.urlopen(f"{found[1]}/metrics", timeout=20) as reply:
                text = reply.read().decode()
        finally:
            daemon.terminate()
            daemon.wait(30)
    return {
        sample.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvd_")
    } | set(re.findall(r"^# TYPE (kvd_\w+)", text, re.M))


def whole(names):
    """Return names without what a histogram adds to its own."""
    return {re.sub(r"_seconds_(?:bucket|count|sum)$", "_seconds", name) for name in names}


def test_the_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, "tools/write_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cli_names_every_flag():
    text = (DOCS / "cli.md").read_text()
    for name in [*COMMAND_LINE_ONLY, *(flag.name for flag in all_flags().values())]:
        assert f"| `{name}" in text


def test_the_list_of_metrics_is_what_a_live_daemon_exports(live):
    documented = set(re.findall(r"^\| `(kvd_\w+)`", (DOCS / "metrics.md").read_text(), re.M))
    assert documented == {each.name for each in exported()}
    assert documented == whole(live) - {"kvd_info"}


def test_every_metric_of_the_dashboard_is_exported(live):
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [each["query"] for each in dashboard["templating"]["list"]]
    named = {name for text in texts for name in re.findall(r"\bkvd_\w+", text)}
    assert len(texts) > 20
    assert named <= live
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", ["operations.md", "migration.md", "kubernetes.yaml"])
def test_metrics_named_elsewhere_are_exported(live, name):
    named = set(re.findall(r"\bkvd_\w+", (DOCS / name).read_text()))
    assert named <= live | whole(live)


@pytest.mark.parametrize(
    "name", ["operations.md", "migration.md", "kvd.service", "kubernetes.yaml", "cli.md"]
)
def test_flags_named_for_operators_exist(name):
    known = {flag.name for flag in all_flags().values()} | set(COMMAND_LINE_ONLY) | OF_OTHERS
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / name).read_text()))
    assert found
    assert found <= known | {"--help"}


def test_the_file_in_the_kubernetes_example_has_known_names(tmp_path):
    text = (DOCS / "kubernetes.yaml").read_text()
    block = re.search(r"kvd\.toml: \|\n((?:    .*\n)+)", text)[1]
    path = tmp_path / "kvd.toml"
    path.write_text("".join(line[4:] for line in block.splitlines(keepends=True)))
    flags = all_flags()
    given = read_file(str(path), flags)
    for field, each in given.items():
        if field != "long_path":
            flags[field].value(each.text)
    port = re.search(r"containerPort: (\d+)", text)[1]
    assert flags["metrics"].value(given["metrics"].text)[1] == int(port)
    assert f'prometheus.io/port: "{port}"' in text
    assert f"KVD_SOCKET, value: {given['socket'].text}" in text


def test_the_file_in_operations_is_one_that_the_unit_can_use(tmp_path):
    """The unit's own directories are in it, and what every engine can reach is its socket."""
    path = tmp_path / "kvd.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", page("operations.md"), re.S)[1])
    flags = all_flags()
    given = read_file(str(path), flags)
    for field, each in given.items():
        if field != "long_path":
            flags[field].value(each.text)
    unit = page("kvd.service")
    socket = re.search(r"^ExecStart=.* --socket (\S+)$", unit, re.M)[1]
    assert socket == f"/run/{re.search(r'^RuntimeDirectory=(.+)$', unit, re.M)[1]}/kvd.sock"
    assert f"KVD_SOCKET={socket}" in unit and f"KVD_SOCKET={socket}" in page("operations.md")
    assert given["long_path"].text == f"/var/lib/{re.search('StateDirectory=(.+)', unit)[1]}"
    assert "socket" not in given  # The unit's flag would win.


def test_tools_names_every_flag_of_the_tools():
    for tool in (demo, replay, size, soak):
        for flag in re.findall(r"(?<![\w-])--[a-z-]+", tool.parser().format_help()):
            assert flag == "--help" or f"| `{flag}" in page("tools.md"), flag


def test_admin_names_every_key_of_the_status():
    table = page("admin.md").partition("## kvd status")[2].partition("\n\nCounters")[0]
    assert set(Status.__struct_fields__) <= set(re.findall(r"`(\w+)`", table))


def test_old_names_stand_for_what_the_page_says():
    rows = re.findall(r"^\| `(INFERA_KVD_\w+)`[^|]* \| `(--[a-z-]+)`", page("migration.md"), re.M)
    rows += re.findall(r"^\| .*`(INFERA_KVD_\w+)` \| `(--[a-z-]+)`", page("cli.md"), re.M)
    assert len(rows) > 9
    for variable, flag in rows:
        assert flag_of_variable(variable) == flag


def page(name):
    return (DOCS / name).read_text()
