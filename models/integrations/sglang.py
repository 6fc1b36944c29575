"""SGLang's attention backend ``quire``: full and sliding-window layers by this project's kernels.

    sglang serve --attention-backend quire --disable-prefill-cuda-graph --model-path MODEL

SGLang finds it by the entry point ``sglang.srt.plugins``. Each step has a block table of its
requests' slots in SGLang's pools, and another one where window layers have a pool of their own. New
rows are attended to as they come, and written to the pool. CUDA graphs hold decode steps.
Source: sglang 0.5.23, ``srt/plugins``, ``srt/layers/attention/base_attn_backend.py``.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels import attention_for, write_kv

NAME, SERVED = "quire", "0.5.23"


def register() -> None:
    """Add the backend to SGLang's registry and to the choices of its command line.

    Raises:
        NotImplementedError: SGLang has another version than was tested.
    """
    version = importlib.metadata.version("sglang")
    if version != SERVED:
        raise NotImplementedError(f"sglang: expected {SERVED}, got {version}")
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    register_attention_backend(NAME)(backend_class(AttentionBackend))
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])


@dataclass(frozen=True)
class SGLangStep:
    """The tensors that the layers of a step share.

    Attributes:
        table, window_table: [num_seqs, width] int32, page ids of full and of window layers; the
            same tensor where window layers have no pool of their own.
        slots, window_slots: [num_tokens] int64, where the new rows go; None: nowhere.
        seq_lens: [num_seqs] int32, keys with the new ones.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        max_seqlen_q, max_seq_len: host ints, at least the longest.
    """

    table: Tensor
    window_table: Tensor
    slots: Tensor | None
    window_slots: Tensor | None
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seq_len: int


def backend_class(base: type) -> type:
    """The backend as a subclass of SGLang's ``AttentionBackend``."""
    return type("QuireAttentionBackend", (QuireAttention, base), {})


class QuireAttention:
    """The methods of the backend. Args: SGLang's model runner, whose pools are kept."""

    forward_metadata: SGLangStep | None = None

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _refuse(
            use_mla_backend=model_runner.use_mla_backend,
            is_encoder_decoder=model_runner.model_config.is_encoder_decoder,
            kv_cache_dtype=model_runner.kv_cache_dtype != model_runner.dtype,
            spec_algorithm=not model_runner.spec_algorithm.is_none(),
        )
        self.page_size = model_runner.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        # Of hybrid models window layers have a pool and slots of their own.
        self.to_window = getattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa", None)
        self._graph: SGLangStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        longest = forward_batch.seq_lens_cpu
        longest = self.req_to_token.shape[1] if longest is None else int(longest.max())
        self.forward_metadata = self._step(forward_batch, max(1, longest))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs of decode read."""
        device, longest = self.req_to_token.device, self.req_to_token.shape[1]
        width = -(-longest // self.page_size)
        table = torch.zeros(max_bs, width, dtype=torch.int32, device=device)
        slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        window = self.to_window is not None
        self._graph = SGLangStep(
            table, torch.zeros_like(table) if window else table,
            slots, torch.zeros_like(slots) if window else slots,
            torch.ones(max_bs, dtype=torch.int32, device=device),
            torch.arange(max_bs + 1, dtype=torch.int32, device=device), 1, longest,
        )  # fmt: skip

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a decode step of a graph: write in place what the graph reads."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                f"forward_mode: expected DECODE in a CUDA graph, got {forward_batch.forward_mode}"
            )
        if self._graph is None:
            raise RuntimeError("init_cuda_graph_state: expected a call before a graph's step")
        static, bs = self._graph, forward_batch.batch_size
        new = self._step(forward_batch, static.max_seq_len)
        kept = {"cu_seqlens_q": static.cu_seqlens_q[: bs + 1]}
        for name in ("table", "window_table", "slots", "window_slots", "seq_lens"):
            kept[name] = getattr(static, name)[:bs].copy_(getattr(new, name))
        self.forward_metadata = replace(static, **kept)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a padding row of a graph's batch."""
        return 1

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of each request's new tokens, behind what the pool holds of it.

        Args:
            q: [num_tokens, num_heads * head_dim], or with heads apart.
            k, v: [num_tokens, num_kv_heads, head_dim]; None: the pool has the rows already.
            layer: SGLang's ``RadixAttention``.
            forward_batch: the batch that ``init_forward_metadata`` got.
            save_kv_cache: write k and v to the pool.
            kwargs: ``sinks`` [num_heads]; others only as None.

        Returns:
            [num_tokens, num_heads * head_dim].

        Raises:
            NotImplementedError: the layer or an argument is not served.
        """
        sinks = kwargs.pop("sinks", None)
        _expect_served(layer, forward_batch, kwargs)
        step, window = self.forward_metadata, None
        assert step is not None, "init_forward_metadata comes before the layers"
        table, slots = step.table, step.slots
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            window = layer.sliding_window_size + 1  # SGLang counts the keys before the query's own
            table, slots = step.window_table, step.window_slots
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        pool, q = self.token_to_kv_pool, q.reshape(-1, heads, dim)
        rows = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        pages = [self._pages(x, kv_heads, dim) for x in rows]
        if k is not None and v is not None:
            k, v = k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
            if save_kv_cache and slots is not None:
                write_kv(k, v, *pages, slots[: k.shape[0]])
        out = attention_for(window)(
            q, *pages, table, step.seq_lens, step.cu_seqlens_q, k=k, v=v,
            max_seqlen_q=step.max_seqlen_q, max_seq_len=step.max_seq_len,
            softmax_scale=layer.scaling, softcap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.float(),
            out=torch.zeros_like(q),  # rows of padding belong to no request
        )  # fmt: skip
        return out.view(-1, heads * dim)

    forward_decode = forward_extend

    def _pages(self, rows: Tensor, kv_heads: int, dim: int) -> Tensor:
        """A layer's rows [num_slots, kv_heads, dim] as pages of SGLang's size."""
        if rows.dim() != 3 or tuple(rows.shape[1:]) != (kv_heads, dim):
            raise NotImplementedError(
                f"token_to_kv_pool: expected rows [*, {kv_heads}, {dim}], got {list(rows.shape)}"
            )
        whole = rows.shape[0] // self.page_size * self.page_size
        return rows[:whole].unflatten(0, (-1, self.page_size))

    def _step(self, forward_batch: Any, longest: int) -> SGLangStep:
        """The step of a batch whose requests have at most ``longest`` keys."""
        seq_lens = forward_batch.seq_lens.int()
        device, bs = seq_lens.device, forward_batch.batch_size
        cu_seqlens_q, max_seqlen_q = torch.arange(bs + 1, dtype=torch.int32, device=device), 1
        if not forward_batch.forward_mode.is_decode_or_idle():
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=cu_seqlens_q[1:])
            lens = forward_batch.extend_seq_lens_cpu
            max_seqlen_q = int(max(forward_batch.extend_seq_lens if lens is None else lens))
        # Of each page the slot of its first row, in the window's pool too, which is freed by pages.
        first = self.req_to_token[:, : longest : self.page_size]
        tokens = first[forward_batch.req_pool_indices.long()]
        slots = forward_batch.out_cache_loc
        slots = window_slots = None if slots is None else slots.long()
        table = window_table = (tokens // self.page_size).int()
        if self.to_window is not None:
            window_table = (self.to_window(tokens.long()) // self.page_size).int()
            window_slots = None if slots is None else self.to_window(slots).long()
        return SGLangStep(
            table, window_table, slots, window_slots, seq_lens, cu_seqlens_q, max_seqlen_q, longest
        )


def _expect_served(layer: Any, forward_batch: Any, kwargs: dict[str, Any]) -> None:
    """Require a layer, a batch and arguments that the kernels serve."""
    cap, xai = layer.logit_cap, getattr(layer, "xai_temperature_len", -1)
    _refuse(
        is_cross_attention=layer.is_cross_attention,
        attn_type=getattr(layer.attn_type, "value", layer.attn_type) != "decoder",
        v_head_dim=layer.v_head_dim != layer.qk_head_dim,
        xai_temperature_len=xai > 0,
        logit_capping_method=bool(cap) and layer.logit_capping_method != "tanh",
        forward_mode=forward_batch.forward_mode.name not in ("DECODE", "EXTEND", "MIXED"),
        mha_return_lse=getattr(forward_batch, "mha_return_lse", False),
        **{name: value is not None and value is not False for name, value in kwargs.items()},
    )


def _refuse(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise NotImplementedError(f"{name}: is not served by attention backend {NAME!r}")
