"""What can go wrong with chunk files: what stops a start, and what costs one chunk."""

from __future__ import annotations

import os


class GpuDirectError(Exception):
    """A setting or the machine does not allow a start; the message has the remedy."""


class GpuIoError(Exception):
    """One transfer or registration failed.

    Parameters
    ----------
    call : str
        The entry point that failed.
    code : int
        A status of the library (above 5000), or an errno.
    words : str
        What it means.
    """

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({code})")
        self.call = call
        self.code = code


def io_error(call: str, number: int) -> GpuIoError:
    """Return the error of an errno."""
    return GpuIoError(call, number, os.strerror(number))
