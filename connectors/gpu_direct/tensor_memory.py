"""Memory of a torch tensor, on a GPU or not: what a GPU's blocks are gathered into for a chunk."""

from __future__ import annotations

from typing import Any

import torch

from kvd_connectors.gpu_direct import checksum
from kvd_connectors.gpu_direct.memory import ALIGNMENT, Bytes, aligned

# Rows of the checksum that are mixed at a time: 32 MiB, and as much twice for temporaries.
ROWS_AT_A_TIME = 128


class TensorMemory:
    """A buffer on a device, as `Memory`.

    Attributes
    ----------
    tensor : torch.Tensor
        Shape [size_bytes], dtype uint8: the memory itself. Work queued on it by the caller has to
        be done before the memory is written to a file: drivers know no streams.
    """

    def __init__(self, size_bytes: int, device: Any) -> None:
        self.size_bytes = aligned(size_bytes)
        whole = torch.zeros(self.size_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -whole.data_ptr() % ALIGNMENT
        self.tensor = whole[skipped : skipped + self.size_bytes]
        self.pointer = int(self.tensor.data_ptr())
        self.is_host = self.tensor.device.type == "cpu"
        numbers = torch.arange(1, checksum.ROW_WORDS + 1, dtype=torch.int64, device=device)
        self._salts = checksum.salts_from(numbers)

    def checksum(self, size_bytes: int) -> int:
        """Return the checksum of the first bytes, computed on the device."""
        words = self.tensor[:size_bytes].view(torch.int64)
        whole = len(words) // checksum.ROW_WORDS * checksum.ROW_WORDS
        rows = words[:whole].view(-1, checksum.ROW_WORDS)
        parts = [
            checksum.row_sums(rows[first : first + ROWS_AT_A_TIME], self._salts)
            for first in range(0, len(rows), ROWS_AT_A_TIME)
        ]
        rest = words[whole:]
        if len(rest):
            parts.append(checksum.row_sums(rest[None, :], self._salts[: len(rest)]))
        sums = torch.cat(parts).tolist() if parts else []
        return checksum.combine(size_bytes, sums)

    def zero(self, first: int, last: int) -> None:
        """Zero the bytes from one place to before another."""
        self.tensor[first:last] = 0
        self._settle()

    def copy_out(self, offset_bytes: int, target: Bytes) -> None:
        """Copy into host memory."""
        torch.from_numpy(target).copy_(self.tensor[offset_bytes : offset_bytes + len(target)])

    def copy_in(self, offset_bytes: int, source: Bytes) -> None:
        """Copy from host memory."""
        self.tensor[offset_bytes : offset_bytes + len(source)].copy_(torch.from_numpy(source))
        self._settle()

    def _settle(self) -> None:
        """Wait for what was queued: a driver reads and writes beside every stream."""
        if not self.is_host:
            torch.cuda.current_stream(self.tensor.device).synchronize()
