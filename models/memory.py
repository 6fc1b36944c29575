"""How many pages a pool gets, and what fits them.

    bytes of pages = (free memory - activations of the largest step) * memory_fraction

with the weights already loaded. A request of n tokens needs, of each group, its blocks of n tokens; of a window group at most its ring
and one block more, however long the request is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.kvcore import GroupSpec
from quire.kvcore.retention import parse_retention
from quire.kvcore.spec import GroupClass, Layout

CPU_CACHE_BYTES = 256 * 2**20
MEMORY_FRACTION = 0.9
MIN_LENGTH = 2  # a prompt of one token, and one token of output
KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True)
class ModelCache:
    """What an engine knows of a model's cache.

    groups: as `quire.kvcore.KVCache` takes them. page_bytes: bytes behind one page id, of all its layers.
    allocate: makes the page tensors for a number of pages. fixed_bytes: what it allocates besides, for all requests.
    """

    groups: Sequence[GroupSpec]
    page_bytes: int
    allocate: Callable[[int], Any]
    fixed_bytes: int = 0


def model_cache(
    model: Any,
    *,
    base_block_size: int = 16,
    kv_cache_dtype: str = "auto",
    max_requests: int = 1,
    max_draft_tokens: int = 0,
    drafter_layers: bool = False,
) -> ModelCache:
    """Cache of a model: of its own ``make_cache`` where it has one, else keys and values of its attention layers.

    base_block_size: tokens in a page of the heaviest kind of layer; a model with a cache of its own may have other rules.
    kv_cache_dtype: one of `KV_CACHE_DTYPES`; "auto" = the model's own. A model says in ``kv_cache_dtypes`` which ones it can, and
        its ``make_cache`` is given ``kv_cache_dtype=`` where that is not "auto".
    max_requests: running at once. max_draft_tokens: of a step. drafter_layers: whether layers that only draft run too.

    Raises: ValueError for another kv_cache_dtype, NotImplementedError for one that the model cannot.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype: expected one of {list(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}"
        )
    supported = getattr(model, "kv_cache_dtypes", ("auto",))
    if kv_cache_dtype not in supported:
        raise NotImplementedError(
            f"kv_cache_dtype: {type(model).__name__} supports {list(supported)}, got {kv_cache_dtype!r}"
        )
    if hasattr(model, "make_cache"):
        more = {} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}
        return model.make_cache(
            base_block_size,
            max_requests=max_requests,
            max_draft_tokens=max_draft_tokens,
            drafter_layers=drafter_layers,
            **more,
        )
    from quire.models.cache import PagePool, cache_groups, num_slots

    dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else model.dtype
    groups, placement = cache_groups(model.config, dtype, base_block_size=base_block_size)

    def allocate(num_pages: int) -> PagePool:
        return PagePool(
            model.config,
            groups,
            placement,
            num_pages=num_pages,
            dtype=dtype,
            device=model.device,
        )

    return ModelCache(groups, groups[0].page_bytes * num_slots(placement), allocate)


def pages_of_request(
    groups: Sequence[GroupSpec], num_tokens: int, max_draft_tokens: int = 0
) -> int:
    """Pages that are enough for one request of ``num_tokens`` tokens while it decodes, whatever is cached besides."""
    total = 0
    for spec in Layout(groups, num_tokens, max_draft_tokens).classes:
        pages = spec.num_tables * -(-num_tokens // spec.block_size)
        if spec.spec.kind == "window":
            pages = min(pages, _fixed_pages(spec))
        total += _fixed_pages(spec) if spec.spec.kind == "state" else pages
    return total


def _fixed_pages(spec: GroupClass) -> int:
    """Pages of a ring and the block that is planned before its oldest one goes; of a state, the live one, the newest snapshot and
    the next."""
    return spec.num_tables * (spec.width + 1)


def longest_request(
    groups: Sequence[GroupSpec], num_pages: int, limit: int, max_draft_tokens: int = 0
) -> int:
    """Tokens of the longest request, at most ``limit``, that a pool of ``num_pages`` (page 0 included) holds alone; 0 = none."""
    return bisect_left(
        range(1, limit + 1), num_pages, key=lambda n: pages_of_request(groups, n, max_draft_tokens)
    )


@dataclass(frozen=True)
class MemoryPlan:
    """A pool, and what fits it.

    num_pages: pages, page 0 (never owned) included. page_bytes: bytes behind one page id. max_model_len: longest sequence in tokens.
    max_num_seqs: requests at once. retention: as in `quire.kvcore.KVCache`.
    free_bytes: memory that was free for it; None where the caller named the size of the pool.
    fixed_bytes: memory of requests that is not in pages.
    """

    groups: tuple[GroupSpec, ...]
    num_pages: int
    page_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_draft_tokens: int
    retention: Any
    free_bytes: int | None = None
    fixed_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all page tensors."""
        return self.num_pages * self.page_bytes

    @property
    def alignment(self) -> int:
        """Tokens that hits are multiples of."""
        return Layout(self.groups, self.max_model_len, self.max_draft_tokens).alignment

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each further token of a long request costs: those of dense groups."""
        return sum(
            g.pages_per_block * self.page_bytes / g.block_size
            for g in self.groups
            if g.kind == "dense"
        )

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a long request that do not depend on its length: rings and states."""
        classes = Layout(self.groups, self.max_model_len, self.max_draft_tokens).classes
        return self.page_bytes * sum(_fixed_pages(c) for c in classes if c.spec.kind != "dense")

    @property
    def interval(self) -> int:
        """Tokens between the boundaries inside a prompt that stay resumable; 0 for none."""
        layout = Layout(self.groups, self.max_model_len, self.max_draft_tokens)
        return parse_retention(self.retention, layout)

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of the pages of one request of ``num_tokens`` tokens."""
        return self.page_bytes * pages_of_request(self.groups, num_tokens, self.max_draft_tokens)

    def num_fitting(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` tokens that hold their pages at once, if they share nothing; at most max_num_seqs."""
        pages = pages_of_request(self.groups, num_tokens, self.max_draft_tokens)
        return min(self.max_num_seqs, (self.num_pages - 1) // pages)

    def describe(self, lengths: Sequence[int] = ()) -> str:
        """The plan in words. lengths: in tokens, to say how many such requests fit; default: powers of 4 up to max_model_len."""
        lengths = lengths or sorted(
            {*(4**i for i in range(5, 12) if 4**i < self.max_model_len), self.max_model_len}
        )
        of = "" if self.free_bytes is None else f" of {_size(self.free_bytes)} free"
        fits = ", ".join(f"{self.num_fitting(n)} of {n}" for n in lengths)
        kept = f" (every {self.interval})" if self.interval else ""
        besides = f", and {_size(self.fixed_bytes)} besides" if self.fixed_bytes else ""
        return "\n".join(
            [
                f"pool      {_size(self.cache_bytes)}{of}: {self.num_pages} pages of {_size(self.page_bytes)}{besides}",
                f"request   {_size(self.bytes_per_token)} a token + {_size(self.bytes_per_request)}, at most {self.max_model_len} tokens",
                f"hits      multiples of {self.alignment} tokens, retention {self.retention!r}{kept}",
                f"fits      requests of so many tokens at once: {fits} (at most {self.max_num_seqs})",
            ]
        )


def plan_memory(
    cache: ModelCache,
    *,
    device: torch.device,
    max_model_len: int,
    max_model_len_is_given: bool,
    max_num_seqs: int,
    max_draft_tokens: int = 0,
    retention: Any = "auto",
    num_pages: int | None = None,
    cache_bytes: int | None = None,
    memory_fraction: float | None = None,
    activation_bytes: int = 0,
) -> MemoryPlan:
    """Sizes the pool, and refuses one that is too small for a single request.

    max_model_len: tokens; where it was not given by the caller, it is cut to what the pool holds.
    num_pages, cache_bytes, memory_fraction: one of them at most; default: 256 MiB on a CPU, a fraction of 0.9 on a GPU. Bytes
        include what the model keeps besides pages.
    activation_bytes: of the free memory, what a step needs.

    Raises: ValueError, naming the pages needed, for a pool that does not hold one request of max_model_len (or, where that was not
        given, of two tokens), for more than one size, or for a fraction outside (0, 1].
    """
    if sum(value is not None for value in (num_pages, cache_bytes, memory_fraction)) > 1:
        raise ValueError(
            f"num_pages, cache_bytes, memory_fraction: expected one of them at most, got {num_pages}, {cache_bytes}, {memory_fraction}"
        )
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction: expected a number in (0, 1], got {memory_fraction}")
    free = None
    if num_pages is None:
        if cache_bytes is None and (memory_fraction is not None or device.type == "cuda"):
            free = free_memory(device)
            cache_bytes = int(
                max(0, free - activation_bytes) * (memory_fraction or MEMORY_FRACTION)
            )
        cache_bytes = CPU_CACHE_BYTES if cache_bytes is None else cache_bytes
        num_pages = max(0, cache_bytes - cache.fixed_bytes) // cache.page_bytes
    fits = longest_request(cache.groups, num_pages, max_model_len, max_draft_tokens)
    needed = max_model_len if max_model_len_is_given else MIN_LENGTH
    if fits < needed:
        pages = 1 + pages_of_request(cache.groups, needed, max_draft_tokens)
        raise ValueError(
            f"num_pages: expected at least {pages} ({_size(pages * cache.page_bytes)}) for one request of {needed} tokens, "
            f"got {num_pages}"
        )
    return MemoryPlan(
        groups=tuple(cache.groups),
        num_pages=num_pages,
        page_bytes=cache.page_bytes,
        max_model_len=fits,
        max_num_seqs=max_num_seqs,
        max_draft_tokens=max_draft_tokens,
        retention=retention,
        free_bytes=free,
        fixed_bytes=cache.fixed_bytes,
    )


def activation_bytes(
    config: Any, itemsize: int, *, max_num_batched_tokens: int, max_num_rows: int
) -> int:
    """Bytes that the largest step holds besides weights and pages, estimated: the widest MLP's three intermediates and a handful of
    hidden states (of each residual stream) for each token, and three fp32 copies of the logits of each sampled row."""
    hidden = 6 * config.hidden_size * getattr(config, "hc_mult", 1)
    widths = 3 * getattr(config, "intermediate_size", 4 * config.hidden_size) + hidden
    return max_num_batched_tokens * widths * itemsize + 3 * 4 * max_num_rows * config.vocab_size


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights; an embedding that is tied to the output projection counts once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; on a CPU those that the system calls available."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what torch keeps of freed tensors the driver knows nothing
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        raise NotImplementedError(
            "memory_fraction: supported on GPUs and on Linux; give num_pages or cache_bytes"
        )
    lines = meminfo.read_text(encoding="ascii").splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
