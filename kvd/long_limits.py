"""Limits of the long tier that both its flags and its parts go by."""

MAX_SLOT_BYTES = 32 << 20  # Must fit a frame; larger is a typing error, not a block.
MAX_SLOT_SIZES = 16  # A region has no more.
DEFAULT_SLOT_BYTES = 64 << 10
