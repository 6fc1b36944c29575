"""How many pages a pool gets, and what fits them.

    bytes of pages = (free memory - activations of the largest step) * memory_fraction

with the weights already loaded. A request of n tokens needs, of each group, its blocks of n tokens;
of a window group at most its ring and one block more, however long the request is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.policies.retention import parse_retention
from quire.kvcore.spec import Layout

from .room import fixed_pages, longest_request, pages_of_request

if TYPE_CHECKING:
    from .config import EngineConfig

CPU_CACHE_BYTES = 256 * 2**20
MEMORY_FRACTION = 0.9
LOGITS_COPIES = 11  # fp32, while rows are sorted, filtered and drawn from, and their probs kept
MIN_LENGTH = 2  # a prompt of one token, and one token of output
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_per_tensor")


@dataclass(frozen=True)
class ModelCache:
    """What an engine knows of a model's cache.

    Attributes:
        groups: as `quire.kvcore.KVCache` takes them.
        page_bytes: bytes behind one page id, of all its layers.
        allocate: makes the page tensors for a number of pages.
        fixed_bytes: what it allocates besides, for all requests.
    """

    groups: Sequence[GroupSpec]
    page_bytes: int
    allocate: Callable[[int], Any]
    fixed_bytes: int = 0


def model_cache(
    model: Any,
    *,
    base_block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    max_requests: int = 1,
    max_draft_tokens: int = 0,
    drafter_layers: bool = False,
) -> ModelCache:
    """Cache of a model, from its ``make_cache``, which takes the same arguments.

    Args:
        base_block_size: tokens in a page of the heaviest kind of layer; None = the model's own
            choice.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`; "auto" = the model's own. A model says in
            ``kv_cache_dtypes`` which ones it can.
        max_requests: running at once.
        max_draft_tokens: of a step.
        drafter_layers: whether layers that only draft run too.

    Raises:
        ValueError: another kv_cache_dtype.
        NotImplementedError: one that the model cannot.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype: expected one of {list(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}"
        )
    supported = getattr(model, "kv_cache_dtypes", ("auto",))
    if kv_cache_dtype not in supported:
        raise NotImplementedError(
            f"kv_cache_dtype: {type(model).__name__} supports {list(supported)}, got "
            f"{kv_cache_dtype!r}"
        )
    return model.make_cache(
        base_block_size=base_block_size,
        kv_cache_dtype=kv_cache_dtype,
        max_requests=max_requests,
        max_draft_tokens=max_draft_tokens,
        drafter_layers=drafter_layers,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """A pool, and what fits it.

    Attributes:
        num_pages: pages, page 0 (never owned) included.
        page_bytes: bytes behind one page id.
        max_model_len: longest sequence in tokens.
        max_num_seqs: requests at once.
        retention: as in `quire.kvcore.KVCache`.
        free_bytes: memory that was free for it; None where the caller named the size of the pool.
        fixed_bytes: memory of requests that is not in pages.
        graph_bytes: memory of decode graphs, as far as it was measured before.
        host_bytes: behind the pool.
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
    graph_bytes: int = 0
    host_bytes: int = 0

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
        return sum(self.page_bytes / g.block_size for g in self.groups if g.kind == "dense")

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a long request that do not depend on its length: rings and states."""
        classes = Layout(self.groups, self.max_model_len, self.max_draft_tokens).classes
        return self.page_bytes * sum(fixed_pages(c) for c in classes if c.spec.kind != "dense")

    @property
    def interval(self) -> int:
        """Tokens between the boundaries inside a prompt that stay resumable; 0 for none."""
        layout = Layout(self.groups, self.max_model_len, self.max_draft_tokens)
        return parse_retention(self.retention, layout)

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of the pages of one request of ``num_tokens`` tokens."""
        return self.page_bytes * pages_of_request(self.groups, num_tokens, self.max_draft_tokens)

    def num_fitting(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` tokens that hold their pages at once, if they share nothing.

        At most max_num_seqs.
        """
        pages = pages_of_request(self.groups, num_tokens, self.max_draft_tokens)
        return min(self.max_num_seqs, (self.num_pages - 1) // pages)

    def describe(self, lengths: Sequence[int] = ()) -> str:
        """The plan in words.

        Args:
            lengths: in tokens, to say how many such requests fit; default: powers of 4 up to
                max_model_len.
        """
        lengths = lengths or sorted(
            {*(4**i for i in range(5, 12) if 4**i < self.max_model_len), self.max_model_len}
        )
        of = "" if self.free_bytes is None else f" of {_size(self.free_bytes)} free"
        fits = ", ".join(f"{self.num_fitting(n)} of {n}" for n in lengths)
        kept = f" (every {self.interval})" if self.interval else ""
        besides = f", and {_size(self.fixed_bytes)} besides" if self.fixed_bytes else ""
        besides += f", {_size(self.graph_bytes)} of decode graphs" if self.graph_bytes else ""
        behind = f"behind    {_size(self.host_bytes)} of host memory"
        return "\n".join(
            [
                f"pool      {_size(self.cache_bytes)}{of}: {self.num_pages} pages of "
                f"{_size(self.page_bytes)}{besides}",
                *([behind] if self.host_bytes else []),
                f"request   {_size(self.bytes_per_token)} a token + "
                f"{_size(self.bytes_per_request)}, at most {self.max_model_len} tokens",
                f"hits      multiples of {self.alignment} tokens, retention {self.retention!r}{kept}",
                f"fits      requests of so many tokens at once: {fits} (at most "
                f"{self.max_num_seqs})",
            ]
        )


def plan_memory(
    model: nn.Module,
    cache: ModelCache,
    config: EngineConfig,
    *,
    max_draft_tokens: int = 0,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """Sizes the pool, and refuses one that is too small for a single request.

    Where ``config.max_model_len`` is None, it is what the model allows, or the pool holds if that
    is less.

    Args:
        cache: of the model.
        max_draft_tokens: of a step.
        graph_bytes: of decode graphs, beside the pool.

    Raises:
        ValueError: naming the pages needed, for a pool that does not hold one request of
            max_model_len (or, where that was not given, of two tokens), for more than one size, for
            a fraction outside (0, 1], or for more pages than a CPU's memory holds.
    """
    longest = model.config.max_position_embeddings
    max_model_len = longest if config.max_model_len is None else config.max_model_len
    if not MIN_LENGTH <= max_model_len <= longest:
        raise ValueError(f"max_model_len: expected {MIN_LENGTH}..{longest}, got {max_model_len}")
    sizes = (config.num_pages, config.cache_bytes, config.memory_fraction)
    if sum(value is not None for value in sizes) > 1:
        raise ValueError(
            "num_pages, cache_bytes, memory_fraction: expected one of them at most, got "
            f"{', '.join(map(str, sizes))}"
        )
    num_pages, cache_bytes, fraction = sizes
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction: expected a number in (0, 1], got {fraction}")
    free = None
    if num_pages is None:
        if cache_bytes is None and (fraction is not None or model.device.type == "cuda"):
            free = free_memory(model.device)
            besides = activation_bytes(
                model,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_rows=config.max_num_seqs * (1 + max_draft_tokens),
            )
            cache_bytes = int(max(0, free - besides - graph_bytes) * (fraction or MEMORY_FRACTION))
        cache_bytes = CPU_CACHE_BYTES if cache_bytes is None else cache_bytes
        num_pages = max(0, cache_bytes - cache.fixed_bytes) // cache.page_bytes
    host_bytes = int((config.host_cache_gib or 0) * 2**30)
    named = config.num_pages is not None or config.cache_bytes is not None
    if named and model.device.type == "cpu" and sys.platform == "linux":
        needed_bytes = num_pages * cache.page_bytes + cache.fixed_bytes + host_bytes
        if needed_bytes > (left := free_memory(model.device)):
            raise ValueError(
                f"num_pages: expected pages that fit the memory, got {num_pages} "
                f"({_size(needed_bytes)} with what requests and the host tier take besides), "
                f"and {_size(left)} are free"
            )
    fits = longest_request(cache.groups, num_pages, max_model_len, max_draft_tokens)
    needed = config.max_model_len or MIN_LENGTH
    if fits < needed:
        pages = 1 + pages_of_request(cache.groups, needed, max_draft_tokens)
        raise ValueError(
            f"num_pages: expected at least {pages} ({_size(pages * cache.page_bytes)}) for one "
            f"request of {needed} tokens, got {num_pages}"
        )
    return MemoryPlan(
        groups=tuple(cache.groups),
        num_pages=num_pages,
        page_bytes=cache.page_bytes,
        max_model_len=fits,
        max_num_seqs=config.max_num_seqs,
        max_draft_tokens=max_draft_tokens,
        retention=config.retention,
        free_bytes=free,
        fixed_bytes=cache.fixed_bytes,
        graph_bytes=graph_bytes,
        host_bytes=host_bytes,
    )


def make_allocator(model: nn.Module, memory: MemoryPlan, config: EngineConfig) -> KVCache:
    """The allocator of a planned pool.

    Raises:
        ValueError: replay of a model that cannot, or settings that the allocator refuses.
    """
    replay_tokens = None
    if config.replay:
        if not hasattr(model.config, "replay_tokens"):
            raise ValueError(
                "replay: expected False for "
                f"{type(model).__name__}{getattr(model, 'no_replay', '')}; "
                "supported with models of full and sliding attention"
            )
        replay_tokens = model.config.replay_tokens
    return KVCache(
        memory.groups,
        num_pages=memory.num_pages,
        max_requests=config.max_num_seqs,
        max_model_len=memory.max_model_len,
        retention=config.retention,
        hash_seed=config.hash_seed,
        enable_caching=config.enable_caching,
        max_draft_tokens=memory.max_draft_tokens,
        replay_tokens=replay_tokens,
        track_deltas=True,
    )


def activation_bytes(model: nn.Module, *, max_num_batched_tokens: int, max_num_rows: int) -> int:
    """Bytes that the largest step holds besides weights and pages, estimated.

    What the model says of each token, and the logits of the sampled rows with what sampling makes
    of them.

    Args:
        max_num_rows: sampled in a step.
    """
    logits = 4 * model.config.vocab_size * LOGITS_COPIES * max_num_rows
    return max_num_batched_tokens * model.config.activation_size * model.dtype.itemsize + logits


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


WORKING_SHARE = 0.8  # of the free memory may be weights before "auto" keeps fp8


def fits(model: nn.Module, device: torch.device) -> bool:
    """Whether the weights of a model leave room on a device to work in.

    The model may be on the meta device.
    """
    return weight_bytes(model) <= WORKING_SHARE * free_memory(device)
