"""kvd's exceptions. A miss or a refused put is a return value, never an exception."""


class KvdError(Exception):
    """Base of everything kvd raises on purpose."""


class UnavailableError(KvdError):
    """No daemon answers on the socket, or it left while a call was under way."""


class ConfigError(KvdError):
    """A flag, a path or the machine does not allow the daemon to start.

    The message names the thing and the remedy.
    """


class RefusedError(KvdError):
    """Another daemon holds the socket or the region. The message names the holder."""


class ProtocolError(KvdError):
    """A peer sent something that is not the protocol.

    Parameters
    ----------
    code : str
        The stable code, see `kvd.protocol`.
    message : str
        What was wrong, for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
