"""Steps as SGLang gives them to an attention backend, over CPU pools, beside float64 attention.

Imports only files beside it, so that a process that has loaded SGLang's wheel can run it.
"""

from __future__ import annotations

import enum
from itertools import accumulate
from types import SimpleNamespace

import torch

from quire.bench.common.bounds import allowed

try:
    from .exact_attention import attention
except ImportError:  # imported by a program from its folder
    from exact_attention import attention

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 6
NAN = float("nan")


class Mode(enum.IntEnum):
    """SGLang's ``ForwardMode``, as far as a backend asks it."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self):
        return self in (Mode.DECODE, Mode.IDLE)

    def is_decode(self):
        return self == Mode.DECODE


def layer(layer_id, window=-1, cap=0.0, **changed):
    """SGLang's ``RadixAttention``, as far as a backend reads it."""
    given = {
        "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": DIM, "v_head_dim": DIM,
        "scaling": 0.3, "layer_id": layer_id, "logit_cap": cap, "logit_capping_method": "tanh",
        "sliding_window_size": window, "is_cross_attention": False, "attn_type": "decoder",
    }  # fmt: skip
    return SimpleNamespace(**given | changed)


class Pool:
    """Two layers, layer 1 in a pool of its own if ``hybrid``; page 0 is nobody's, as in SGLang's."""

    def __init__(self, size, window_size, page_size, hybrid):
        sizes = [size, window_size if hybrid else size]
        self.rows = [torch.zeros(2, n + page_size, KV_HEADS, DIM) for n in sizes]
        if hybrid:
            self.translate_loc_from_full_to_swa = lambda slots: self.mapping[slots]

    def register_mapping(self, mapping):
        self.mapping = mapping

    def get_key_buffer(self, layer_id):
        return self.rows[layer_id][0]

    def get_value_buffer(self, layer_id):
        return self.rows[layer_id][1]


class Host:
    """The work of SGLang's runner, scheduler and allocators for a few requests.

    Slots are given out by pages, in any order. Of a hybrid pool the window's rows are freed, by
    whole pages, once no later query sees them: then their slots map to 0, and the rows turn NaN.
    """

    def __init__(self, page_size, hybrid, make_pool=Pool):
        self.page_size, self.hybrid = page_size, hybrid
        self.generator = torch.Generator().manual_seed(0)
        sizes = (160, 80)
        self.pool = make_pool(*sizes, page_size, hybrid)
        for one in (0, 1):
            for rows in self.rows(one):
                rows.fill_(NAN)
        if hybrid:
            self.mapping = torch.zeros(sizes[0] + page_size + 1, dtype=torch.int64)
            self.pool.register_mapping(self.mapping)
        pages = [torch.randperm(n // page_size, generator=self.generator) + 1 for n in sizes]
        self.free = [p.tolist() for p in pages]
        self.req_to_token = torch.zeros(5, 40, dtype=torch.int32)
        self.history = {r: [[], [], []] for r in range(5)}  # tokens; keys and values of each layer
        self.runner = SimpleNamespace(
            use_mla_backend=False, model_config=SimpleNamespace(is_encoder_decoder=False),
            dtype=torch.float32, kv_cache_dtype=torch.float32, page_size=page_size,
            spec_algorithm=SimpleNamespace(is_none=lambda: True), token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
        )  # fmt: skip

    def rows(self, layer_id):
        """Keys and values of a layer, [num_slots, kv_heads, dim] each."""
        return self.pool.get_key_buffer(layer_id), self.pool.get_value_buffer(layer_id)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def allocate(self, request, length):
        """Slots of tokens [length of the request so far, length)."""
        before, size, slots = (
            len(self.history[request][0]),
            self.page_size,
            self.req_to_token[request],
        )
        for position in range(before, length):
            if position % size == 0:
                first, rows = self.free[0].pop() * size, torch.arange(size)
                slots[position : position + size] = first + rows
                if self.hybrid:
                    self.mapping[first + rows] = self.free[1].pop() * size + rows
        return slots[before:length].long()

    def evict(self, request):
        """Free the window's rows that the next query does not see."""
        length = len(self.history[request][0])
        end = max(0, length - WINDOW + 1) // self.page_size * self.page_size
        slots = self.req_to_token[request, :end].long()
        for rows in self.rows(1):
            rows[self.mapping[slots]] = NAN
        self.mapping[slots] = 0

    def step(self, modes, kind, lengths, padding=0, fill=0):
        """Requests 1, 2, ... that get new tokens, and the ``ForwardBatch`` as far as it is read.

        Args:
            modes, kind: ``ForwardMode`` and a name of it.
            lengths: new tokens of each request; 0 leaves it out.
            padding: rows of a decode that belong to no request, with ``fill`` keys.
        """
        chosen = [(r, n) for r, n in enumerate(lengths, 1) if n]
        slots = torch.cat([self.allocate(r, len(self.history[r][0]) + n) for r, n in chosen])
        none = torch.zeros(padding, dtype=torch.long)
        seq_lens = [len(self.history[r][0]) + n for r, n in chosen] + [fill] * padding
        new = None if kind == "DECODE" else [n for _, n in chosen]
        return chosen, SimpleNamespace(
            forward_mode=getattr(modes, kind), batch_size=len(seq_lens),
            req_pool_indices=torch.cat([torch.tensor([r for r, _ in chosen]), none]),
            seq_lens=torch.tensor(seq_lens), seq_lens_cpu=torch.tensor(seq_lens),
            out_cache_loc=torch.cat([slots, none]), extend_seq_lens_cpu=new,
            extend_seq_lens=None if new is None else torch.tensor(new, dtype=torch.int32),
        )  # fmt: skip

    def run(self, backend, chosen, batch, layers, sinks):
        """Both layers of a step; each result is compared, and the written rows are those given."""
        total = len(batch.out_cache_loc)
        keys = [self.normal(2, total, KV_HEADS, DIM) for _ in layers]
        first = [0, *accumulate(n for _, n in chosen)]
        for i, (r, n) in enumerate(chosen):
            for j in range(first[i], first[i] + n):
                self.history[r][0].append(None)
                for index in (0, 1):
                    self.history[r][1 + index].append(keys[index][:, j])
        for index, one in enumerate(layers):
            q = self.normal(total, HEADS * DIM)
            k, v = keys[index]
            out = backend.forward(q, k.flatten(1), v.flatten(1), one, batch, sinks=sinks)
            assert out.shape == (total, HEADS * DIM), out.shape
            for i, (r, n) in enumerate(chosen):
                rows = torch.stack(self.history[r][1 + index], 1)  # [2, length, kv_heads, dim]
                mine = slice(first[i], first[i + 1])
                expect_attention(out[mine], q[mine], rows, one, sinks)
                slots = self.req_to_token[r, rows.shape[1] - n : rows.shape[1]].long()
                if self.hybrid and index == 1:
                    slots = self.mapping[slots]
                for held, given in zip(self.rows(index), rows, strict=True):
                    assert held[slots].equal(given[-n:])
        if self.hybrid:
            for r, _ in chosen:
                self.evict(r)


def expect_attention(out, q, rows, layer, sinks=None):
    """``out`` of a layer for q [n, heads * dim] over rows [2, length, kv_heads, dim] is that of float64."""
    mask = {"left": layer.sliding_window_size, "softcap": layer.logit_cap, "scale": layer.scaling}
    exact, _ = attention(q.view(-1, HEADS, DIM), *rows, **mask, sinks=sinks)
    error = (out.view(-1, HEADS, DIM).double() - exact).abs()
    assert (error <= allowed(exact, torch.float32)).all(), error.max()


STEPS = [
    ("EXTEND", [9, 1, 14, 0]),
    ("EXTEND", [5, 3, 7, 0]),  # chunks behind what the pool holds
    ("DECODE", [1, 1, 1, 0]),
    ("MIXED", [1, 1, 0, 6]),
    ("DECODE", [1, 0, 1, 1]),
    ("DECODE", [1, 1, 1, 1]),
]


def play(
    backend_of, page_size, hybrid, *, modes=Mode, make_layer=layer, make_pool=Pool, sinks=None,
    cap=0.0, graph=False,
):  # fmt: skip
    """A few steps of a full and a window layer; returns the backend.

    Args:
        backend_of: makes a backend of a runner.
        page_size, hybrid: of the pools.
        modes: ``ForwardMode``.
        make_layer, make_pool: as `layer` and `Pool`.
        sinks: [num_heads] fp32 or None.
        cap: soft cap of logits, 0 = none.
        graph: a graph of four rows holds the decodes, and reads the tensors of its capture.
    """
    host, captured = Host(page_size, hybrid, make_pool), None
    backend = backend_of(host.runner)
    backend.init_cuda_graph_state(6, 6)
    layers = [make_layer(0, -1, cap), make_layer(1, WINDOW - 1, cap)]
    for kind, lengths in STEPS:
        if graph and kind == "DECODE":
            fill = backend.get_cuda_graph_seq_len_fill_value()
            chosen, batch = host.step(modes, kind, lengths, lengths.count(0), fill)
            backend.init_forward_metadata_out_graph(batch, in_capture=captured is None)
            captured = captured or backend.forward_metadata
            backend.forward_metadata = captured
        else:
            chosen, batch = host.step(modes, kind, lengths)
            backend.init_forward_metadata(batch)
        host.run(backend, chosen, batch, layers, sinks)
    return backend
