"""Pages of a host pool as bytes, wherever they lie: three forms that a page can have.

A place is what a form's `at` returns for a page. A form's bytes mean nothing to another form.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
# (address, bytes) of each run of bytes, in order
Pieces = tuple[tuple[int, int], ...]

DIGEST_BYTES = 16


class Pages(Protocol):
    """What a form of pages can do.

    Attributes
    ----------
    form : str
        Part of the namespace.
    page_bytes : int
    sizes : tuple of int
        Bytes of each run of bytes.
    """

    form: str
    page_bytes: int
    sizes: tuple[int, ...]

    def at(self, where: Any, count: int) -> list[Any]:
        """Return the places of so many pages."""

    def gather(self, place: Any, target: memoryview) -> None:
        """Copy a page into a buffer of `page_bytes`."""

    def scatter(self, place: Any, source: memoryview) -> None:
        """Copy a buffer of `page_bytes` into a page."""

    def digest(self, place: Any) -> bytes:
        """Return a digest of a page where it lies."""


class LayoutError(Exception):
    """Reports a host pool whose pages cannot be read."""


class PiecePages:
    """Pages as runs of bytes in the pool's own memory, named by the pool: nothing between.

    Parameters
    ----------
    pool : HostKVCache
        With `get_page_buffer_meta`.
    first : indices
        Those of the first page, to learn a page's size.

    Raises
    ------
    LayoutError
        The pool cannot name them.
    """

    form = "pieces"

    def __init__(self, pool: Any, first: Any) -> None:
        self._pool = pool
        try:
            (pieces,) = self.at(first, 1)
        except Exception as error:
            # Whatever a pool of some version of SGLang does where it cannot.
            raise LayoutError(f"{type(error).__name__}: {error}") from error
        self.sizes = tuple(size for _, size in pieces)
        self.page_bytes = sum(self.sizes)
        if not self.page_bytes:
            raise LayoutError("its pages are empty")

    def at(self, indices: Any, count: int) -> list[Pieces]:
        """Return the places of pages.

        Parameters
        ----------
        indices : tensor of int
            Of every token, page after page.
        count : int
            How many pages these are.
        """
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        each, rest = divmod(len(addresses), count)
        if rest or not each or len(sizes) != len(addresses):
            raise ValueError(f"{len(addresses)} runs of bytes make up no {count} pages")
        runs = list(zip(addresses, sizes, strict=True))
        return [tuple(runs[at : at + each]) for at in range(0, len(runs), each)]

    def gather(self, place: Pieces, target: memoryview) -> None:
        """Copy a page into a buffer of `page_bytes`."""
        self._check(place, target)
        into = ctypes.addressof(ctypes.c_char.from_buffer(target))
        for address, size in place:
            # Without the interpreter's lock: the engine's scheduler goes on meanwhile.
            ctypes.memmove(into, address, size)
            into += size

    def scatter(self, place: Pieces, source: memoryview) -> None:
        """Copy a buffer of `page_bytes` into a page."""
        self._check(place, source)
        out = np.frombuffer(source, dtype=np.uint8)
        start = out.ctypes.data
        for address, size in place:
            ctypes.memmove(address, start, size)
            start += size

    def digest(self, place: Pieces) -> bytes:
        """Return a digest of a page where it lies."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for address, size in place:
            found.update((ctypes.c_char * size).from_address(address))
        return found.digest()

    def _check(self, place: Pieces, buffer: memoryview) -> None:
        # Addresses are past all checks: sizes are not.
        if sum(size for _, size in place) != buffer.nbytes or buffer.nbytes != self.page_bytes:
            raise ValueError(f"a page of {self.page_bytes} bytes, a buffer of {buffer.nbytes}")


class TensorPages:
    """Pages that are given as tensors of their own: SGLang's generic interface."""

    form = "flat"

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.sizes: tuple[int, ...] = (page_bytes,)

    def at(self, tensors: Any, count: int) -> list[torch.Tensor]:
        """Return the tensors, each a page in one piece."""
        pages = list(tensors)
        sizes = {bytes_of(page).nbytes for page in pages}
        if len(pages) != count or sizes - {self.page_bytes}:
            raise ValueError(f"{len(pages)} tensors of {sizes} bytes are no {count} pages")
        return pages

    def gather(self, place: torch.Tensor, target: memoryview) -> None:
        """Copy a page into a buffer of `page_bytes`."""
        np.frombuffer(target, dtype=np.uint8)[:] = bytes_of(place)

    def scatter(self, place: torch.Tensor, source: memoryview) -> None:
        """Copy a buffer of `page_bytes` into a page."""
        bytes_of(place)[:] = np.frombuffer(source, dtype=np.uint8)

    def digest(self, place: torch.Tensor) -> bytes:
        """Return a digest of a page where it lies."""
        return hashlib.blake2b(bytes_of(place).data, digest_size=DIGEST_BYTES).digest()


class FlatPages:
    """Pages that the pool itself copies, for pools that cannot name their memory.

    Raises
    ------
    LayoutError
        The pool cannot copy them either.
    """

    form = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        try:
            dummy = pool.get_dummy_flat_data_page()
        except Exception as error:
            raise LayoutError(f"{type(error).__name__}: {error}") from error
        self._tensors = TensorPages(dummy.numel() * dummy.element_size())
        self.page_bytes = self._tensors.page_bytes
        self.sizes = self._tensors.sizes
        if not self.page_bytes:
            raise LayoutError("its pages are empty")

    def at(self, indices: Any, count: int) -> list[int]:
        """Return the places of pages, as `PiecePages.at`."""
        found: Sequence[int] = indices.tolist()
        each, rest = divmod(len(found), count)
        if rest or not each:
            raise ValueError(f"{len(found)} indices make up no {count} pages")
        return list(found[::each])

    def gather(self, place: int, target: memoryview) -> None:
        """Copy a page into a buffer of `page_bytes`."""
        self._tensors.gather(self._pool.get_data_page(place, flat=True), target)

    def scatter(self, place: int, source: memoryview) -> None:
        """Copy a buffer of `page_bytes` into a page."""
        page = self._pool.get_dummy_flat_data_page()
        self._tensors.scatter(page, source)
        self._pool.set_from_flat_data_page(place, page)

    def digest(self, place: int) -> bytes:
        """Return a digest of a page where it lies."""
        return self._tensors.digest(self._pool.get_data_page(place, flat=True))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous tensor of the host."""
    import torch

    if not tensor.is_contiguous():
        raise ValueError(f"a page of shape {tuple(tensor.shape)} is not in one piece")
    flat: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return flat


def pages_of(pool: Any) -> PiecePages | FlatPages:
    """Return a pool's pages, in place where the pool names its memory.

    Raises
    ------
    LayoutError
        Says why there is no way to them.
    """
    import torch

    tokens = getattr(pool, "logical_page_size", None) or pool.page_size
    try:
        return PiecePages(pool, torch.arange(tokens, dtype=torch.int64))
    except LayoutError as pieces:
        try:
            return FlatPages(pool)
        except LayoutError as flat:
            raise LayoutError(f"{pieces}; {flat}") from flat
