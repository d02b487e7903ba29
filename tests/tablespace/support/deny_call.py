"""Run a script with a system call refused by a seccomp filter: deny_call.py NAME ERRNO SCRIPT."""

import ctypes
import platform
import runpy
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
# Those of io_uring are the same on every architecture.
NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "statx": {"x86_64": 332}.get(platform.machine(), 291),
}


def deny(name: str, errno: int) -> None:
    """Make a system call fail with `errno` for this process and its children."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the system call's number
            (0x15, 0, 1, NUMBERS[name]),  # not ours: skip one
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
    deny(sys.argv[1], int(sys.argv[2]))
    runpy.run_path(sys.argv[3], run_name="__main__")
