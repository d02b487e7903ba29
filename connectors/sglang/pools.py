"""The host pools of one engine as kvd keeps them: their namespaces, and the clients they share."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import kvd
from kvd_connectors.counting import Counts
from kvd_connectors.sglang.facts import (
    ENGINE,
    MAIN,
    engine_arguments,
    engine_facts,
    name_of,
    pool_facts,
)
from kvd_connectors.sglang.kept import KeptPages
from kvd_connectors.sglang.options import Options
from kvd_connectors.sglang.pages import FlatPages, LayoutError, Pages, TensorPages, pages_of
from kvd_connectors.sglang.speeds import Speeds

logger = logging.getLogger(__name__)


class KeptPools:
    """Keeps the pools that were added. Look-ups and transfers may go on in any thread.

    The main pool's pages have two namespaces, one for each of SGLang's interfaces: in some
    layouts their bytes differ.

    Parameters
    ----------
    config : HiCacheStorageConfig
    options : Options

    Attributes
    ----------
    flat : KeptPages or None
        The main pool, for pages given as tensors.
    """

    def __init__(self, config: Any, options: Options) -> None:
        self.counts = Counts()
        self.speeds = Speeds()
        self.flat: KeptPages | None = None
        self._config = config
        self._options = options
        self._engine = engine_facts(config, engine_arguments(), options.salt)
        # Each size of pages says it to the daemon, which has slots for those.
        self._clients: dict[int, list[kvd.Client]] = {}
        self._by_name: dict[str, KeptPages] = {}
        self._must_clear = False
        self._clearing = threading.Lock()

    def get(self, name: str) -> KeptPages | None:
        """Return a pool, None where it is not kept."""
        return self._by_name.get(name)

    def add_main(self, pool: Any) -> None:
        """Keep the main pool, which is the first; what was kept before is let go."""
        self.close()
        self._add(MAIN, pool)
        try:
            flat = FlatPages(pool)
        except LayoutError as error:
            logger.info("SGLang's generic interface cannot be served: %s", error)
            return
        self.flat = self._kept(MAIN, pool, TensorPages(flat.page_bytes))

    def add(self, name: str, pool: Any) -> None:
        """Keep another pool."""
        if name != MAIN:
            self._add(name, pool)

    def is_open(self) -> bool:
        """Say whether pages may be looked for and stored."""
        if self._options.retention == "none":
            return False
        return not self._must_clear or self._clear()

    def clear(self) -> bool:
        """Remove all pages; say whether that worked. Until it has, nothing is found."""
        self._must_clear = True
        return self._clear()

    def close(self) -> None:
        """Let go of all pools and leave the daemon."""
        self._by_name = {}
        self.flat = None
        clients, self._clients = self._clients, {}
        for client in itertools.chain(*clients.values()):
            client.close()

    def _clear(self) -> bool:
        with self._clearing:
            if not self._must_clear:
                return True
            try:
                for kept in (*self._by_name.values(), self.flat):
                    if kept is not None:
                        kept.clear()
            except kvd.UnavailableError as error:
                logger.warning("pages are hidden until they can be removed: %s", error)
                return False
            self._must_clear = False
            return True

    def _add(self, name: str, pool: Any) -> None:
        self._by_name.pop(name, None)
        try:
            pages = pages_of(pool)
        except LayoutError as error:
            logger.warning(
                "pool %s keeps nothing: %s in layout %s: %s",
                name,
                type(pool).__name__,
                getattr(pool, "layout", None),
                error,
            )
            return
        self._by_name[name] = self._kept(name, pool, pages)

    def _kept(self, name: str, pool: Any, pages: Pages) -> KeptPages:
        loading, saving = self._connect(pool, pages.page_bytes)
        facts = pool_facts(self._config, pool, name, pages.form, pages.sizes)
        space = name_of(self._engine, facts)
        logger.info(
            "kvd keeps pool %s: layout %s, pages of %d bytes (%s), in %s through %s",
            name,
            getattr(pool, "layout", None),
            pages.page_bytes,
            pages.form,
            space,
            loading.socket,
        )
        options = self._options
        return KeptPages(
            pages,
            space,
            loading,
            saving,
            options.keep,
            options.digests,
            self.counts,
            self.speeds,
        )

    def _connect(self, pool: Any, page_bytes: int) -> list[kvd.Client]:
        """Return the clients for loading and for saving pages of one size."""
        if page_bytes not in self._clients:
            options = self._options
            self._clients[page_bytes] = [
                kvd.Client(
                    options.socket,
                    timeout_s=seconds,
                    block_bytes=page_bytes,
                    # Of the memory that kvd's lies below.
                    l1_bytes=int(getattr(pool, "size", 0) * getattr(pool, "size_per_token", 0)),
                    engine=ENGINE,
                )
                for seconds in (options.load_timeout_s, options.save_timeout_s)
            ]
        return self._clients[page_bytes]
