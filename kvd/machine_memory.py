"""How much memory this process may still take: the machine's free memory and every cgroup's."""

from pathlib import Path

from kvd.slab_geometry import HUGE_PAGE_BYTES

# A v1 hierarchy without a limit says a number near 2**63; anything above this is "no limit".
NO_LIMIT_BYTES = 1 << 60


def free_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that may still be taken, and what bounds them.

    Parameters
    ----------
    root : Path
        Where /proc and /sys are; another one for tests.

    Notes
    -----
    proc(5) MemAvailable; cgroups(7): the tightest limit on the way to the hierarchy's root
    counts, and file pages that can be reclaimed do not count as used.
    """
    free, bound = _machine_free(root), "the machine"
    for directory, (used_name, *limit_names) in _cgroup_directories(root):
        limits = [_number(directory / name) for name in limit_names]
        limit = min((each for each in limits if each is not None), default=NO_LIMIT_BYTES)
        used = _number(directory / used_name)
        if used is None or limit >= NO_LIMIT_BYTES:
            continue
        left = max(0, limit - used + _reclaimable(directory / "memory.stat"))
        if left < free:
            free, bound = left, f"the cgroup {directory}"
    return free, bound


def reserved_huge_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of reserved 2 MiB pages that are free; `free_bytes` has none of them."""
    directory = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free = _number(directory / "free_hugepages") or 0
    # Promised to mappings that exist.
    taken = _number(directory / "resv_hugepages") or 0
    return max(0, free - taken) * HUGE_PAGE_BYTES


def _machine_free(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_directories(root: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Return this process's memory cgroups from leaf to root, with the files of use and limits."""
    found: list[tuple[Path, tuple[str, ...]]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    names: tuple[str, ...]
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and not parts[1]:
            base = root / "sys/fs/cgroup"
            # Above memory.high the kernel slows the process down until it is hardly alive.
            names = ("memory.current", "memory.max", "memory.high")
        elif "memory" in parts[1].split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        leaf = base / parts[2].lstrip("/")
        chain = [leaf, *leaf.parents]
        found += [(directory, names) for directory in chain if directory.is_relative_to(base)]
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
