"""Runs a daemon with clients that are killed, restarts it, and holds it to its accounts."""

from kvd.soak.cli import main

__all__ = ["main"]
