"""vLLM 0.33's host tier behind the pool of a replay: its `CPUOffloadingManager`, called as its
offloading connector calls it.

A chunk is a page, so the tier has as many as it has pages. Chunks of full attention are stored as
soon as they are computed. Of window groups, those of the tails are that its default
(``prefix_cache_retention_interval`` 0) retains: of the last boundary of a prompt, of the end of a
sequence, and of a boundary where a prompt leaves a chain that is stored. The pool before it is
`KVCache`'s. A load is taken for tokens that are computed in no time.
"""

from __future__ import annotations

from importlib import import_module, metadata, util
from types import SimpleNamespace
from typing import Any, Literal

from quire.kvcore import KVCache, Prompt

from .engine import Engine
from .links import Link, Transfer

KEY_BYTES = 32
KNOWN = "0.33."
USED = {
    "vllm.v1.kv_offload.base": "LookupResult ReqContext make_offload_key",
    "vllm.v1.kv_offload.cpu.manager": "CPUOffloadingManager",
}


def available() -> str | None:
    """The version of vLLM where it can be driven, else None; imports nothing of it."""
    try:
        version = metadata.version("vllm") if util.find_spec("vllm") else None
    except Exception:  # an installation too broken to say its version
        return None
    return version if version is not None and version.startswith(KNOWN) else None


def _api() -> SimpleNamespace:
    names = {}
    for module, used in USED.items():
        found = import_module(module)
        names.update({name: getattr(found, name) for name in used.split()})
    return SimpleNamespace(**names)


class VllmHost:
    """Host memory that vLLM's manager keeps.

    Args:
        cache: an empty one.
        chains: keys of each prompt with its answer.
        pages: chunks that there is room for.
        link: bytes a second of each direction.
        policy: of vLLM's.
    """

    def __init__(
        self, cache: KVCache, *, chains: list[bytes], pages: int, link: float, policy: str = "lru"
    ) -> None:
        self._api = _api()
        self._manager = self._api.CPUOffloadingManager(pages, policy)
        self._cache, self._chains = cache, chains
        self._page_bytes = cache.layout.page_bytes
        self._alignment = cache.alignment
        groups = [(g.block_size, g.sliding_window) for g in cache.layout.groups]
        self._dense = [(i, size) for i, (size, window) in enumerate(groups) if window is None]
        self._windows = [
            (i, size, -(-window // size))
            for i, (size, window) in enumerate(groups)
            if window is not None
        ]
        self.links = {"device>host": Link(link), "host>device": Link(link)}
        self._contexts: dict[int, Any] = {}
        self._stored: dict[int, int] = {}  # tokens
        self._boundaries: dict[int, set[int]] = {}
        self._due: list[Transfer] = []
        self._loading: set[Any] = set()
        self._refused = 0

    # Keys. A chunk that is smaller than a segment has the key of the segment and its place there.

    def _key(self, chain: bytes, group: int, size: int, chunk: int) -> Any:
        segment, place = divmod(chunk * size, self._alignment)
        key = chain[segment * KEY_BYTES : (segment + 1) * KEY_BYTES]
        return self._api.make_offload_key(key + bytes([place // size]), group)

    def _context(self, number: int) -> Any:
        context = self._contexts.get(number)
        if context is None:
            context = self._contexts[number] = self._api.ReqContext(str(number))
            self._manager.on_new_request(context)
            self._stored[number] = 0
            self._boundaries[number] = set()
        return context

    def _keys(self, number: int, group: int, size: int, first: int, end: int) -> list[Any]:
        """Keys of the chunks of tokens [first, end), with their positions."""
        chain, context = self._chains[number], self._contexts[number]
        found = []
        for chunk in range(first // size, end // size):
            key = self._key(chain, group, size, chunk)
            context.set_offload_key_position(key, (chunk + 1) * size)
            found.append(key)
        return found

    def _tail(self, number: int, boundary: int, after: int) -> list[Any]:
        """Keys of the window chunks that a hit at `boundary` needs of tokens from `after` on."""
        found = []
        for group, size, chunks in self._windows:
            first = max(after // size, boundary // size - chunks, 0) * size
            found += self._keys(number, group, size, first, boundary)
        return found

    # Loads.

    def look(self, engine: Engine, number: int) -> Transfer | Literal["later"] | None:
        """As of `engine.Behind`."""
        prompt = engine.prompts[number]
        local = self._cache.match(prompt).num_tokens
        context = self._context(number)
        hit, dense = self._hit(number, prompt, local)
        self._boundaries[number] |= {
            (prompt.num_tokens - 1) // self._alignment * self._alignment,
            len(self._chains[number]) // KEY_BYTES * self._alignment,
            dense,
        }
        if hit <= local:
            return None
        keys = self._tail(number, hit, local)
        for group, size in self._dense:
            keys += self._keys(number, group, size, local, hit)
        pending = self._api.LookupResult.HIT_PENDING
        if not self._cache.num_free_slots or any(
            key in self._loading or self._manager.lookup(key, context) is pending for key in keys
        ):
            return "later"
        self._manager.prepare_load(keys, context)
        self._loading.update(keys)
        engine.admit(number)
        engine.loaded_to[number] = engine.hits[number] = hit

        def done(seconds: float) -> None:
            self._manager.complete_load(keys, context)
            self._loading.difference_update(keys)

        return Transfer({"host>device": len(keys) * self._page_bytes}, done)

    def _hit(self, number: int, prompt: Prompt, local: int) -> tuple[int, int]:
        """(tokens that tier and device can serve together, those whose dense chunks they have)."""
        a, context = self._alignment, self._contexts[number]
        miss, lookup = self._api.LookupResult.MISS, self._manager.lookup
        chain = self._chains[number]
        most = (prompt.num_tokens - 1) // a * a
        dense = most
        for group, size in self._dense:
            at = local
            while (
                at < dense
                and lookup(self._key(chain, group, size, at // size), context) is not miss
            ):
                at += size
            dense = min(dense, at // a * a)
        for hit in range(dense, local, -a):
            if all(
                lookup(self._key(chain, group, size, chunk), context) is not miss
                for group, size, chunks in self._windows
                for chunk in range(
                    hit // size - 1, max(hit // size - chunks, local // size, 0) - 1, -1
                )
            ):
                return hit, dense
        return local, dense

    # Stores.

    def prefetch(self, engine: Engine, number: int) -> None:
        """As of `engine.Behind`: vLLM's tier takes no hints."""

    def computed(self, number: int, start: int, end: int, seconds: float) -> None:
        """As of `engine.Behind`: stores the chunks that are whole now."""
        context = self._context(number)
        first = self._stored[number]
        end = min(end // self._alignment, len(self._chains[number]) // KEY_BYTES) * self._alignment
        keys: list[Any] = []
        for group, size in self._dense:
            keys += self._keys(number, group, size, first, end)
        for boundary in sorted(self._boundaries[number]):
            if first < boundary <= end:
                keys += self._tail(number, boundary, 0)
        if not keys:
            return
        made = self._manager.prepare_store(list(dict.fromkeys(keys)), context)
        if made is None:
            self._refused += 1
            return
        self._stored[number] = end
        if made.keys_to_store:
            new = list(made.keys_to_store)
            size = {"device>host": len(new) * self._page_bytes}
            self._due.append(
                Transfer(size, lambda seconds: self._manager.complete_store(new, context))
            )

    def stores(self, engine: Engine) -> list[Transfer]:
        """As of `engine.Behind`: vLLM starts them at once."""
        due, self._due = self._due, []
        return due

    def released(self, number: int) -> None:
        """As of `engine.Behind`."""
        self._manager.on_request_finished(self._contexts.pop(number))
        del self._stored[number], self._boundaries[number]

    def report(self) -> dict[str, float | int]:
        """As of `engine.Behind`; the waste is of the chunks that are there at the end."""
        moved = {f"bytes {name}": link.num_bytes for name, link in self.links.items()}
        context, hit = self._api.ReqContext("report"), self._api.LookupResult.HIT
        here, useful = set[Any](), set[Any]()
        a = self._alignment

        def has(key: Any) -> bool:
            found = self._manager.lookup(key, context) is hit
            if found:
                here.add(key)
            return found

        for chain in self._chains:
            end = len(chain) // KEY_BYTES * a
            dense = {
                group: [self._key(chain, group, size, i) for i in range(end // size)]
                for group, size in self._dense
            }
            reach = end
            for group, size in self._dense:
                found = [has(key) for key in dense[group]]
                reach = min(reach, ([*found, False].index(False) * size) // a * a)
            windows = {
                group: [self._key(chain, group, size, i) for i in range(end // size)]
                for group, size, _ in self._windows
            }
            there = {group: [has(key) for key in keys] for group, keys in windows.items()}
            last = 0
            for boundary in range(a, reach + 1, a):
                spans = [
                    (group, slice(max(0, boundary // size - chunks), boundary // size))
                    for group, size, chunks in self._windows
                ]
                if all(all(there[group][span]) for group, span in spans):
                    last = boundary
                    for group, span in spans:
                        useful.update(windows[group][span])
            for group, size in self._dense:
                useful.update(dense[group][: last // size])
        return {
            **moved, "refused_stores": self._refused, "used_pages": len(here),
            "waste": 1 - len(useful & here) / len(here) if here else 0.0,
        }  # fmt: skip
