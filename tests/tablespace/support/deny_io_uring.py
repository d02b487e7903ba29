"""Run a script with a call of io_uring refused by a seccomp filter.

deny_io_uring.py ERRNO[:CALL] SCRIPT, where CALL is a system call's number (io_uring_setup's by
default).
"""

import ctypes
import runpy
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
IO_URING_SETUP = 425  # The same number on every architecture.


def deny(errno: int, call: int = IO_URING_SETUP) -> None:
    """Make a system call fail with `errno` for this process and its children."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the system call's number
            (0x15, 0, 1, call),  # not ours: skip one
            (0x06, 0, 0, SECCOMP_RET_ERRNO | errno),
            (0x06, 0, 0, SECCOMP_RET_ALLOW),
        )
    )
    filters = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    code = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)
    assert code == 0, ctypes.get_errno()


if __name__ == "__main__":
    deny(*map(int, sys.argv[1].split(":")))
    runpy.run_path(sys.argv[2], run_name="__main__")
