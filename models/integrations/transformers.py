"""transformers' ``generate`` over pages: an attention function and a `Cache`; needs its extra.

What one call computed, the next ones find: turns of a chat, prompts with a common beginning::

    pool = QuirePool(model, num_pages=4096, max_model_len=8192)
    ids = model.generate(ids, past_key_values=QuireCache(pool, ids), max_new_tokens=100)

Before a forward its tokens become a plan of `quire.kvcore`, which reaches each layer's attention as
one more keyword argument; afterwards it is committed. Padding and tokens in pages already get 0.
"""

# ruff: noqa: E402  the version is checked before modules that others may not have

from __future__ import annotations

import weakref
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import attention_for, write_kv
from quire.kvcore import KVCache, OutOfPages, StepPlan

from ..layers.kv_cache import PageTensors, cache_groups
from . import require

require("transformers", "5.23", "5.24")

from transformers import AttentionInterface, AttentionMaskInterface, Cache

NAME = "quire"  # of the attention, as `set_attn_implementation` knows it
Shape = namedtuple("Shape", "num_kv_heads head_dim sliding_window")


def _layers_of(config: Any) -> Any:
    """Attributes that `cache_groups` and `PageTensors` read of a model, from its configuration."""
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [kind] * num_layers
    shared = getattr(config, "num_kv_shared_layers", 0) or config.is_encoder_decoder
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or shared or config.get_text_config(decoder=True) is not config:
        raise NotImplementedError(
            "model: supported are decoders of text alone, whose layers have full or sliding-window "
            f"attention and keys of their own, got {config.model_type!r}"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = [Shape(heads, size, window if t == "sliding_attention" else None) for t in types]
    return SimpleNamespace(
        num_layers=num_layers, num_kv_owners=num_layers, layer_types=types,
        attention=shapes.__getitem__, kv_donor=lambda layer: layer,
    )  # fmt: skip


def _cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache of a forward, which 5.24 calls ``cache``."""
    return kwargs.get("cache", kwargs.get("past_key_values"))


class QuirePool:
    """Pages of one model, for all its `QuireCache`s; switches it to attention over them.

    One ``generate`` at a time. The weights must not change while anything is cached.

    Args:
        model: of transformers, in evaluation mode.
        num_pages: pages of the pool, page 0 (never owned) included.
        max_model_len: longest sequence, tokens.
        block_size: tokens in a page.
        options: of `KVCache`, e.g. `max_requests` (rows of all `QuireCache`s that live at once; 16)
            and `max_draft_tokens` (at least ``prompt_lookup_num_tokens``).

    Attributes:
        kv: the allocator; its `stats` say what was reused.
        pages: the page tensors, in the model's dtype on its device.

    Raises:
        NotImplementedError, ValueError: a model with other layers, or that has a pool.
    """

    def __init__(
        self, model: Any, *, num_pages: int, max_model_len: int, block_size: int = 16,
        **options: Any,
    ) -> None:  # fmt: skip
        self._before, self._model = model.config._attn_implementation, model
        if self._before == NAME:
            raise ValueError("model: expected one without a QuirePool; close its pool first")
        self._layers = layers = _layers_of(model.config)
        groups, places = cache_groups(layers, model.dtype, base_block_size=block_size)
        options = {"max_requests": 16, "max_model_len": max_model_len} | options
        self.kv = KVCache(groups, num_pages=num_pages, **options)
        to = {"dtype": model.dtype, "device": model.device}
        self.pages = PageTensors(layers, groups, places, num_pages=num_pages, **to)
        self._open: QuireCache | None = None  # its last step waits for `crop`
        self._ended: list[object] = []  # requests of caches that nobody has any more
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        model.set_attn_implementation(NAME)
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._finish, with_kwargs=True),
        ]

    def close(self) -> None:
        """Give the model back the attention that it had."""
        for hook in self._hooks:
            hook.remove()
        self._model.set_attn_implementation(self._before)

    def _settle(self) -> None:
        if self._open is not None:
            self._open._commit(0)
        while self._ended:
            self.kv.release(self._ended.pop())

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache, ids = _cache_of(kwargs), kwargs.get("input_ids", *args[:1])
        given = ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
        mine = isinstance(cache, QuireCache) and cache.pool is self
        if not mine or ids is None or any(x is not None and x.ndim != 2 for x in given):
            raise NotImplementedError(
                "attention 'quire': supported are input_ids, a 2D attention_mask, and a QuireCache "
                f"of this model's QuirePool as past_key_values, got {type(cache).__name__}"
            )
        cache._begin(*(None if x is None else np.asarray(x.cpu()) for x in given))
        return args, kwargs | {"quire": cache}

    def _finish(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._open = _cache_of(kwargs)
        if not self._open._recording:
            self._settle()


class QuireCache(Cache):
    """Keys and values of the rows of one ``generate``, in the pages of a pool.

    It knows what is cached of the prompts, so ``generate`` computes the rest. Its requests end at
    `close`, or when nobody has it any more; what is cached of them stays.

    Args:
        pool: of the model.
        input_ids: [batch, num_tokens] ints, as ``generate`` will get them.
        attention_mask: [batch, num_tokens], 0 where a row is padded on the left; None = nowhere.
        salt: tenant or adapter; prompts of different salts never share.

    Attributes:
        matches: `Match` of each row.

    Raises:
        ValueError: other shapes or paddings, a prompt too long, more rows than free requests.
    """

    def __init__(
        self, pool: QuirePool, input_ids: Tensor, attention_mask: Any = None, salt: bytes = b""
    ) -> None:
        super().__init__(layers=[])
        self.pool, self._kv, self._recording = pool, pool.kv, False
        pool._settle()
        ids = np.asarray(input_ids.cpu())
        real = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask.cpu())
        free = pool.kv.num_free_slots
        if ids.ndim != 2 or not 0 < len(ids) <= free or real.shape != ids.shape:
            raise ValueError(
                f"input_ids, attention_mask: expected [batch <= {free} free requests, num_tokens], "
                f"got {list(ids.shape)} and {list(real.shape)}"
            )
        self._pads = ids.shape[1] - real.sum(1)
        if (real != (np.arange(ids.shape[1]) >= self._pads[:, None])).any():
            raise ValueError("attention_mask: expected ones and, on the left, zeros for padding")
        self._prompts = [row[pad:] for row, pad in zip(ids, self._pads, strict=True)]
        self.matches = [self._kv.match(prompt, salt=salt) for prompt in self._prompts]
        names = [object() for _ in self.matches]
        slots = [self._kv.admit(*each) for each in zip(names, self.matches, strict=True)]
        self._slots = np.array(slots, dtype=np.int64)
        self._plan: StepPlan | None = None
        # Garbage collection may come within a call of the allocator, so it only leaves a note.
        self._end = weakref.finalize(self, pool._ended.extend, names)

    def close(self) -> None:
        """End the requests; the tokens of a step that waits for `crop` are forgotten."""
        if self.pool._open is self:
            self.pool._open = None
        self._end()
        self.pool._settle()

    def _begin(self, ids: Any, mask: Any, positions: Any) -> None:
        """Plan the next forward of [batch, n] tokens, given as arrays."""
        self.pool._settle()
        if not self._end.alive or len(ids) != len(self._slots):
            raise ValueError(f"past_key_values: expected an open QuireCache of {len(ids)} rows")
        done = self._kv.num_computed[self._slots][:, None]
        if positions is None:
            positions = self.get_seq_length() + np.arange(ids.shape[1]) - self._pads[:, None]
        at = np.broadcast_to(positions, ids.shape)
        fed = at >= done  # what is in pages already is not computed again
        if mask is not None:
            fed &= mask[:, -ids.shape[1] :] != 0
        if (at - done != fed.cumsum(1) - 1)[fed].any():
            raise ValueError(f"position_ids: expected to go on at {done[:, 0]}, got {at.tolist()}")
        for row, prompt in enumerate(self._prompts):
            inside = fed[row] & (at[row] < len(prompt))
            if (ids[row, inside] != prompt[at[row, inside]]).any():
                raise ValueError("input_ids: expected those that the QuireCache was made with")
        self._plan, counts, device = None, fed.sum(1), self.pool.pages.tensors[0].device
        if not fed.any():
            return
        plan = self._kv.plan(self._slots[counts > 0], counts[counts > 0])
        if isinstance(plan, OutOfPages):
            raise MemoryError(f"QuirePool: {plan}")
        self._plan, self._ids = plan, ids[fed]
        tables = [self._kv.table(g)[plan.slots] for g in range(len(plan.slot_mapping))]
        arrays = [fed.reshape(-1).nonzero()[0], plan.seq_lens, plan.cu_seqlens_q]
        arrays += [plan.slot_mapping, *tables]
        self._rows, *step = (torch.from_numpy(x).to(device) for x in arrays)
        self._lens, (self._slot_mapping, *self._tables) = step[:2], step[2:]
        self._longest = int(plan.num_new_tokens.max())

    def _attend(self, layer: int, qkv: tuple[Tensor, ...], window: Any, **rest: Any) -> Tensor:
        """Attention [batch, n, heads, head_dim] of a layer; then its rows go to pages."""
        shape, cache = self.pool._layers.attention(layer), self.pool.pages.layers[layer]
        got = [Shape(*x.shape[1::2], window) for x in qkv[1:]]
        if got != [shape, shape]:
            raise NotImplementedError(f"layer {layer}: expected keys, values {shape}, got {got}")
        every = [x.transpose(1, 2).flatten(0, 1) for x in qkv]
        out = torch.zeros_like(every[0])
        if self._plan is not None:
            q, k, v = (x[self._rows] for x in every)
            attend, pages = attention_for(window), (cache.k_pages, cache.v_pages)
            step = (self._tables[cache.group], *self._lens)
            out[self._rows] = attend(q, *pages, *step, max_seqlen_q=self._longest, k=k, v=v, **rest)
            write_kv(k, v, *pages, self._slot_mapping[cache.group])
        return out.unflatten(0, (len(qkv[0]), -1))

    def _commit(self, rejected: int) -> None:
        """Commit the step that has run, but for the last `rejected` tokens of each row."""
        self.pool._open = None
        if self._plan is not None:
            accepted = self._plan.num_new_tokens - rejected if rejected else None
            self._kv.commit(self._plan, self._ids, accepted)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows as they are: attention writes them to pages."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that are computed in all rows."""
        return int((self._pads + self._kv.num_computed[self._slots]).min())

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a mask has, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        """From here on `crop` follows each step, and says how many of its tokens are wrong."""
        if not self._kv.max_draft_tokens:
            raise ValueError("max_draft_tokens: expected as many as are drafted, QuirePool has 0")
        self._recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of each row; not what is cached already."""
        if self.pool._open is self:
            self._commit(-tokens_to_remove)
        elif tokens_to_remove:
            for slot in self._slots.tolist():
                self._kv.rollback(slot, -tokens_to_remove)

    def _refuse(self, *_: Any) -> None:
        raise NotImplementedError("QuireCache: supported are greedy search, sampling and drafts")

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    cache, sinks = given.get("quire"), given.get("s_aux")
    if cache is None or attention_mask is not None or given.get("dropout"):
        raise NotImplementedError("attention 'quire': supported is generate with a QuireCache")
    rest = {"sinks": None if sinks is None else sinks.float(), "softcap": given.get("softcap")}
    rest |= {"softmax_scale": given.get("scaling"), "window": given.get("sliding_window")}
    return cache._attend(module.layer_idx, (query, key, value), **rest), None


def _mask(*, allow_is_causal_skip: bool = True, **_: Any) -> None:
    if not allow_is_causal_skip:
        raise NotImplementedError("attention 'quire': supported are causal masks alone")
