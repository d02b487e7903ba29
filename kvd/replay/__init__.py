"""Drives a daemon with a request trace and verifies every byte it serves."""

from kvd.replay.cli import main

__all__ = ["main"]
