"""The commands of ``python -m tablespace``, one module for each kind of work."""
