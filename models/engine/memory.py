"""Size of the page pool, and the requests that fit it.

    bytes of pages = (free bytes - bytes of the largest step) * memory_fraction

with the weights already loaded. A request needs its blocks of each dense group; of a window group
at most its ring and one more block, however long the request is.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.kvcore import GroupSpec
from quire.kvcore.policies.retention import parse_retention
from quire.kvcore.spec import GroupClass, Layout

if TYPE_CHECKING:
    from .config import EngineConfig

CPU_CACHE_BYTES = 256 * 2**20
MEMORY_FRACTION = 0.9
LOGITS_COPIES = 11  # fp32, while rows are sorted, filtered and drawn from, and their probs kept
MAX_PROMPT_LOGITS = 2**25  # of a step; longer chunks of prompts that want them are cut
PROMPT_LOGITS_COPIES = 3  # fp32, while logits are capped or become log-probabilities
MIN_LENGTH = 2  # a prompt of one token, and one token of output
WORKING_SHARE = 0.8  # of the free memory may be weights before "auto" keeps fp8


@dataclass(frozen=True)
class ModelCache:
    """The cache of a model, as its ``make_cache`` describes it to the engine.

    Attributes:
        groups: as `quire.kvcore.KVCache` takes them.
        page_bytes: bytes behind one page id, of all its layers.
        allocate: makes the page tensors for a number of pages.
        fixed_bytes: bytes that it allocates besides, for all requests.
    """

    groups: Sequence[GroupSpec]
    page_bytes: int
    allocate: Callable[[int], Any]
    fixed_bytes: int = 0


def model_cache(
    model: Any,
    *,
    kv_cache_dtype: str = "auto",
    max_requests: int = 1,
    max_draft_tokens: int = 0,
    drafter_layers: bool = False,
) -> ModelCache:
    """Cache of a model for max_requests with as many drafts, and for layers that only draft.

    Raises:
        NotImplementedError: a kv_cache_dtype that is not in the model's ``kv_cache_dtypes``.
    """
    supported = getattr(model, "kv_cache_dtypes", ("auto",))
    if kv_cache_dtype not in supported:
        raise NotImplementedError(
            f"kv_cache_dtype: {type(model).__name__} supports {list(supported)}, got "
            f"{kv_cache_dtype!r}"
        )
    return model.make_cache(
        kv_cache_dtype=kv_cache_dtype,
        max_requests=max_requests,
        max_draft_tokens=max_draft_tokens,
        drafter_layers=drafter_layers,
    )


def pages_of_request(
    groups: Sequence[GroupSpec], num_tokens: int, max_draft_tokens: int = 0
) -> int:
    """Pages needed to decode one request of ``num_tokens`` tokens."""
    total = 0
    for spec in Layout(groups, num_tokens, max_draft_tokens).classes:
        pages = spec.num_tables * -(-num_tokens // spec.block_size)
        if spec.spec.kind == "window":
            pages = min(pages, _fixed_pages(spec))
        total += _fixed_pages(spec) if spec.spec.kind == "state" else pages
    return total


def _fixed_pages(spec: GroupClass) -> int:
    """Pages of a ring and the block planned before its oldest one goes, or of a state's copies."""
    return spec.num_tables * (spec.width + 1)


@dataclass(frozen=True)
class MemoryPlan:
    """A pool, and the requests that fit it.

    Attributes:
        num_pages: pages, page 0 (never owned) included.
        page_bytes: bytes behind one page id.
        max_model_len: longest sequence in tokens.
        max_num_seqs: requests at once.
        retention: argument of `quire.kvcore.KVCache`.
        free_bytes: free memory that the pool was sized from; None = the size was given.
        fixed_bytes: memory of requests that is not in pages.
        host_bytes: bytes of the host tier.
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
    host_bytes: int = 0

    @property
    def _layout(self) -> Layout:
        return Layout(self.groups, self.max_model_len, self.max_draft_tokens)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all page tensors."""
        return self.num_pages * self.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of each further token of a long request: those of dense groups."""
        return sum(self.page_bytes / g.block_size for g in self.groups if g.kind == "dense")

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a long request that do not depend on its length: rings and states."""
        fixed = [c for c in self._layout.classes if c.spec.kind != "dense"]
        return self.page_bytes * sum(map(_fixed_pages, fixed))

    def num_fitting(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` tokens that fit at once, if they share nothing."""
        pages = pages_of_request(self.groups, num_tokens, self.max_draft_tokens)
        return min(self.max_num_seqs, (self.num_pages - 1) // pages)

    def describe(self) -> str:
        """The plan in words."""
        lengths = {4**i for i in range(5, 12) if 4**i < self.max_model_len} | {self.max_model_len}
        fits = ", ".join(f"{self.num_fitting(n)} of {n}" for n in sorted(lengths))
        of = "" if self.free_bytes is None else f" of {_size(self.free_bytes)} free"
        fixed = f", and {_size(self.fixed_bytes)} besides" if self.fixed_bytes else ""
        interval = parse_retention(self.retention, self._layout)
        lines = [
            f"pool      {_size(self.cache_bytes)}{of}: {self.num_pages} pages of "
            f"{_size(self.page_bytes)}{fixed}",
            f"request   {_size(self.bytes_per_token)} a token + "
            f"{_size(self.bytes_per_request)}, at most {self.max_model_len} tokens",
            f"hits      multiples of {self._layout.alignment} tokens, retention "
            f"{self.retention!r}" + (f" (every {interval})" if interval else ""),
            f"fits      requests of so many tokens at once: {fits} (at most {self.max_num_seqs})",
        ]
        if self.host_bytes:
            lines.insert(1, f"behind    {_size(self.host_bytes)} of host memory")
        return "\n".join(lines)


def plan_memory(
    model: nn.Module, cache: ModelCache, config: EngineConfig, *, max_draft_tokens: int = 0
) -> MemoryPlan:
    """Size the pool.

    Without ``config.max_model_len`` the longest sequence is the model's limit, or the longest that
    the pool holds.

    Raises:
        ValueError: more pages than a CPU's memory holds, or a pool without the pages for a request
            of max_model_len (of two tokens where that was not given). The error names the pages.
    """
    longest = model.config.max_position_embeddings
    max_model_len = longest if config.max_model_len is None else config.max_model_len
    if not MIN_LENGTH <= max_model_len <= longest:
        raise ValueError(f"max_model_len: expected {MIN_LENGTH}..{longest}, got {max_model_len}")
    host_bytes = int((config.host_cache_gib or 0) * 2**30)
    num_pages, free, on_cpu = config.num_pages, None, model.device.type == "cpu"
    if num_pages is None:
        cache_bytes = CPU_CACHE_BYTES
        if config.memory_fraction is not None or not on_cpu:
            free = free_memory(model.device)
            used = step_bytes(model, config, max_draft_tokens)
            fraction = config.memory_fraction or MEMORY_FRACTION
            cache_bytes = int(max(0, free - used) * fraction)
        num_pages = max(0, cache_bytes - cache.fixed_bytes) // cache.page_bytes
    elif on_cpu and sys.platform == "linux":
        needed_bytes = num_pages * cache.page_bytes + cache.fixed_bytes + host_bytes
        if needed_bytes > (left := free_memory(model.device)):
            raise ValueError(
                f"num_pages: expected pages that fit the memory, got {num_pages} "
                f"({_size(needed_bytes)} with the fixed memory of requests and the host tier), "
                f"and {_size(left)} are free"
            )
    fits = bisect_left(
        range(1, max_model_len + 1),
        num_pages,
        key=lambda n: pages_of_request(cache.groups, n, max_draft_tokens),
    )
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
        host_bytes=host_bytes,
    )


def step_bytes(model: nn.Module, config: EngineConfig, max_draft_tokens: int) -> int:
    """Bytes of the largest step: activations, and logits of sampled rows and of prompts."""
    tokens, vocab_size = config.max_num_batched_tokens, model.config.vocab_size
    sampled = config.max_num_seqs * (1 + max_draft_tokens)
    scored = min(tokens, max_prompt_rows(vocab_size))
    logits = 4 * vocab_size * (sampled * LOGITS_COPIES + scored * PROMPT_LOGITS_COPIES)
    return logits + tokens * model.config.activation_size * model.dtype.itemsize


def max_prompt_rows(vocab_size: int) -> int:
    """Rows of a step that may have logits for `SamplingParams.prompt_logprobs`."""
    return max(1, MAX_PROMPT_LOGITS // vocab_size)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights; an embedding that is tied to the output projection counts once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def fits(model: nn.Module, device: torch.device) -> bool:
    """True if the weights of a model, which may be on the meta device, leave room to work in."""
    return weight_bytes(model) <= WORKING_SHARE * free_memory(device)


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; on a CPU those that the system calls available."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the driver does not count freed tensors that torch keeps
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        raise NotImplementedError("memory_fraction: supported on GPUs and on Linux; give num_pages")
    lines = meminfo.read_text(encoding="ascii").splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
