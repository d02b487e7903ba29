"""Where the daemon listens when nobody says, and where clients look."""

import os

from kvd.errors import ProtocolError

SYSTEM_SOCKET = "/var/run/kvd.sock"
SOCKET_VARIABLE = "KVD_SOCKET"
OLD_SOCKET_VARIABLE = "INFERA_KVD_SOCKET"


def default_socket() -> str:
    """Return the system's path for those who may write there, else one of the user's own."""
    if os.access(os.path.dirname(SYSTEM_SOCKET), os.W_OK):
        return SYSTEM_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "kvd.sock")
    return f"/tmp/kvd-{os.getuid()}.sock"


def client_socket(given: str | os.PathLike[str] | None) -> str:
    """Return the path a client connects to: the one given, $KVD_SOCKET, or the default.

    An older system's variable is taken where $KVD_SOCKET is not set.
    """
    if given is not None:
        return os.fspath(given)
    named = os.environ.get(SOCKET_VARIABLE) or os.environ.get(OLD_SOCKET_VARIABLE)
    if named:
        return named
    own = default_socket()
    if not os.path.exists(own) and os.path.exists(SYSTEM_SOCKET):
        return SYSTEM_SOCKET
    return own


def no_session(path: str, error: Exception) -> str:
    """Return why no session could be opened on a socket, and the remedy."""
    if isinstance(error, ProtocolError):
        return f"the kvd daemon on {path} refused: {error}"
    if isinstance(error, TimeoutError | BlockingIOError):
        return (
            f"a kvd daemon is on {path} and does not answer; its log may say why, else restart it"
        )
    why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if isinstance(error, PermissionError):
        return (
            f"the kvd socket {path} is not for this user: {why}; its daemon serves others by "
            "--allow-uid or --allow-gid"
        )
    return (
        f"no kvd daemon answers on {path}: {why}; start one there (python -m kvd --socket "
        f"{path}), or name its socket by KVD_SOCKET"
    )
