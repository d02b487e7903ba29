"""Where the daemon listens when nobody says, and where clients look."""

import os

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
