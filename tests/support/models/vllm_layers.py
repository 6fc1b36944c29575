"""Attention of vLLM's layers through `vllm_attention`, row by row beside float64.

vLLM's `KVCacheManager` gives blocks to requests with common prefixes, chunked prompts and decodes;
its layers, its planning of KV cache groups and its views of one allocation for all groups are what
serves in production. Its tensor is NaN at first.

Runs where vLLM is: python vllm_layers.py CHECKOUT; an error if anything is not as it should be.
"""

import sys

import from_checkout  # noqa: F401
import msgspec
import numpy as np
import torch
from exact_attention import attention
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_events import KVEventBatch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from quire.bench.common.bounds import allowed
from quire.kvcore import EventLog, GroupSpec, KVCache
from quire.models.integrations.kv_events import encode_batch, lora_key

BLOCK, HEADS, KV_HEADS, SIZE, VOCAB, LONGEST, CHUNK = 16, 4, 2, 32, 50, 160, 32
CASES = {
    "full": {"windows": [None, None]},
    "hybrid": {"windows": [None, 24, 24]},
    "hybrid, blocks outermost": {"windows": [None, 24, 24], "layout": "BLNHC"},
    "heads before rows": {"windows": [None, 24], "layout": "LBHNC"},
    "sinks and softcap": {"windows": [None, 24], "softcap": 2.0, "sinks": True},
    "shared keys": {"windows": [None, 24, None], "donor": {2: 0}},
    "bf16": {"windows": [None, 24], "dtype": torch.bfloat16, "cache_dtype": "bfloat16"},
    "e4m3": {"windows": [None, 24], "cache_dtype": "fp8", "scales": (0.5, 2.0)},
}


class Case:
    """Layers, pages and requests of one case."""

    def __init__(
        self, windows, dtype=torch.float16, cache_dtype="auto", layout="LBNHC", softcap=None,
        sinks=False, donor=None, scales=(1.0, 1.0),
    ):  # fmt: skip
        self.dtype, self.windows, self.softcap, self.scales = dtype, windows, softcap, scales
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        # A row depends on its token and position alone, so a shared prefix has the same rows.
        self.tokens = draw(3, len(windows), VOCAB, HEADS, SIZE)
        self.places = draw(3, len(windows), LONGEST, HEADS, SIZE)
        self.sinks = [draw(HEADS) for _ in windows] if sinks else None
        cache = CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype, enable_prefix_caching=True)
        cache.kv_cache_layout = layout
        self.config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=cache)
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        names = [f"model.layers.{i}.self_attn.attn" for i in range(len(windows))]
        self.donor = [(donor or {}).get(i, i) for i in range(len(windows))]  # whose keys layers use
        backend = AttentionBackendEnum.CUSTOM.get_class()
        torch.set_default_dtype(dtype)
        with set_current_vllm_config(self.config):
            self.layers = [self.layer(backend, names, i) for i in range(len(windows))]
            specs = {
                names[i]: self.layers[i].get_kv_cache_spec(self.config)
                for i in sorted(set(self.donor))
            }
            groups = get_kv_cache_groups(self.config, specs)
            # So few pages that some are evicted, and that a block's next owner is of another group.
            size = max(len(g.layer_names) for g in groups) * specs[names[0]].page_size_bytes
            self.kv = get_kv_cache_config_from_groups(self.config, groups, 64 * size)
        torch.set_default_dtype(torch.float32)
        resolved = cache.get_resolved_kv_cache_layout()
        assert resolved.name == layout
        caches = allocate_kv_cache(self.kv, torch.device("cpu"), resolved)
        storage = next(iter(caches.values())).untyped_storage()  # one for all
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN of each dtype
        for layer, d in zip(self.layers, self.donor, strict=True):
            layer.kv_cache = caches[names[d]]
            layer._k_scale.fill_(scales[0])
            layer._v_scale.fill_(scales[1])
        self.groups = []  # of each its layers, also those that share keys, and its builder
        for group in self.kv.kv_cache_groups:
            own = group.layer_names
            members = [n for n, d in zip(names, self.donor, strict=True) if names[d] in own]
            make = backend.get_builder_cls()
            builder = make(group.kv_cache_spec, members, self.config, torch.device("cpu"))
            self.groups.append((members, builder))
        sizes = {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
        self.manager = KVCacheManager(self.kv, LONGEST, **sizes)

    def layer(self, backend, names, i):
        shared = names[self.donor[i]] if self.donor[i] != i else None
        more = {"sinks": self.sinks[i]} if self.sinks else {}
        return Attention(
            HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS, logits_soft_cap=self.softcap,
            cache_config=self.config.cache_config, per_layer_sliding_window=self.windows[i],
            prefix=names[i], attn_backend=backend, kv_sharing_target_layer_name=shared, **more,
        )  # fmt: skip

    def rows(self, part, layer, tokens, first):
        """Rows of q, k or v [n, heads, SIZE] of tokens at positions from `first` on."""
        at = torch.arange(first, first + len(tokens))
        rows = self.tokens[part, layer, tokens] + self.places[part, layer, at]
        return rows[:, : HEADS if part == 0 else KV_HEADS].to(self.dtype)

    def step(self, batch):
        """Runs all layers for (request, tokens) pairs, decodes first, and checks each row."""
        batch = sorted(batch, key=lambda pair: pair[1] > 1)
        batch = [(r, r.num_computed_tokens, r.num_computed_tokens + n) for r, n in batch]
        cu = torch.tensor([0, *np.cumsum([end - start for _, start, end in batch])]).int()
        lens = torch.tensor([end for *_, end in batch]).int()
        metadata, slots = {}, {}
        for g, (names, builder) in enumerate(self.groups):
            table = torch.zeros(len(batch), -(-LONGEST // BLOCK), dtype=torch.int32)
            mapping = []
            for row, (request, start, end) in enumerate(batch):
                ids = self.manager.get_block_ids(request.request_id)[g]
                table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
                at = torch.arange(start, end)
                mapping.append(table[row, at // BLOCK].long() * BLOCK + at % BLOCK)
            common = CommonAttentionMetadata(
                query_start_loc=cu, query_start_loc_cpu=cu, seq_lens=lens, num_reqs=len(batch),
                num_actual_tokens=int(cu[-1]), max_query_len=int(cu.diff().max()),
                max_seq_len=int(lens.max()), block_table_tensor=table,
                slot_mapping=torch.cat(mapping),
            )  # fmt: skip
            metadata |= dict.fromkeys(names, builder.build(0, common))
            slots |= dict.fromkeys(names, common.slot_mapping)
        with set_forward_context(metadata, self.config, num_tokens=int(cu[-1]), slot_mapping=slots):
            for i, layer in enumerate(self.layers):
                padding = torch.full((2, HEADS, SIZE), float("nan"), dtype=self.dtype)
                parts = []
                for part, of in enumerate((i, self.donor[i], self.donor[i])):
                    rows = [self.rows(part, of, r.all_token_ids[s:e], s) for r, s, e in batch]
                    parts.append(torch.cat([*rows, padding[:, : rows[0].shape[1]]]).flatten(1))
                out = layer(*parts)
                for row, (request, start, end) in enumerate(batch):
                    ids = request.all_token_ids[:end]
                    self.check(i, ids, start, out[cu[row] : cu[row + 1]])

    def check(self, i, ids, start, out):
        """Attention of the tokens from `start` on, beside float64."""
        q, owner = self.rows(0, i, ids[start:], start), self.donor[i]
        k, v = (self.rows(part, owner, ids, 0).double() for part in (1, 2))
        from_pages = start if owner == i else len(ids)
        if self.config.cache_config.cache_dtype == "fp8":
            for x, scale in zip((k, v), self.scales, strict=True):
                held = (x[:from_pages].float() / scale).to(torch.float8_e4m3fn)
                x[:from_pages] = held.double() * scale
        mask = {"softcap": self.softcap, "left": (self.windows[i] or 0) - 1}
        sinks = self.sinks[i].to(self.dtype) if self.sinks else None
        exact, _ = attention(q, k, v, sinks=sinks, **mask)
        budget = allowed(exact, self.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            off = (out.view(q.shape).double() - exact.as_subclass(torch.Tensor)).abs()
        assert (off <= budget).all(), (i, start, off.max())  # NaN is no good

    def requests(self, random):
        """Twelve with one of three prefixes."""
        prefixes = random.integers(0, VOCAB, (3, 80))
        hasher = get_request_block_hasher(BLOCK, sha256)
        for name in range(12):
            prefix = prefixes[name % 3][: random.integers(30, 80)]
            ids = [*prefix, *random.integers(0, VOCAB, random.integers(5, 40))]
            params = SamplingParams(max_tokens=10)
            yield Request(str(name), [int(x) for x in ids], params, None, block_hasher=hasher)

    def run(self):
        random = np.random.default_rng(1)
        waiting, running, hits = [*self.requests(random)], [], 0
        while waiting or running:
            self.manager.new_step_starts()
            batch = []
            for request in [*running, *waiting[: 4 - len(running)]]:
                hit, blocks = 0, None
                if request not in running:
                    blocks, hit, _ = self.manager.get_computed_blocks(request)
                n = min(CHUNK, request.num_tokens - request.num_computed_tokens - hit)
                given = self.manager.allocate_slots(request, n, hit, blocks)
                assert given is not None, "the pool holds four requests"
                if request not in running:
                    waiting.remove(request)
                    running.append(request)
                    request.num_computed_tokens, hits = hit, hits + hit
                batch.append((request, n))
            self.step(batch)
            for request, n in batch:
                request.num_computed_tokens += n
                if request.num_computed_tokens == request.num_tokens:
                    request.append_output_token_ids(int(random.integers(VOCAB)))
                if request.num_output_tokens > 8:
                    self.manager.free(request)
                    running.remove(request)
        assert hits > 0


SERVED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
    "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder", "has_sliding_window": True,
}  # fmt: skip
# Changes of a configuration, and the reasons that vLLM gets.
REASONS = [
    ({}, []),
    ({"kv_cache_dtype": "fp8"}, []),
    ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype not supported"]),
    ({"head_size": 80}, ["head_size not supported"]),
    ({"use_mla": True}, ["MLA not supported"]),
    ({"use_mm_prefix": True}, ["partial multimodal token full attention not supported"]),
    ({"attn_type": "encoder_only"}, ["attention type encoder_only not supported"]),
    ({"block_size": 8}, ["block_size not supported"]),
    ({"use_non_causal": True}, ["non-causal attention not supported"]),
    ({"use_rswa": True}, ["R-SWA not supported"]),
    ({"use_dcp": True}, ["DCP not supported"]),
    ({"use_pcp": True}, ["PCP not supported"]),
    ({"use_per_head_quant_scales": True}, ["per-head quant scales not supported"]),
]


def check_refusals():
    backend = AttentionBackendEnum.CUSTOM.get_class()
    for change, reasons in REASONS:
        assert backend.validate_configuration(**SERVED | change) == reasons, change
    for wrong in ({"alibi_slopes": [0.5]}, {"kv_cache_dtype": "fp8_e5m2"}):
        try:
            backend.get_impl_cls()(4, 32, 1.0, 2, **wrong)
        except NotImplementedError as error:
            assert str(error) == f"QuireBackend: supported are decoders, got {wrong}"
        else:
            raise AssertionError(wrong)


def check_events():
    """vLLM's own subscribers read adapter, images, salt and session of an event."""
    log = EventLog(identities=True)
    groups = [GroupSpec("full", "dense", 4, 1), GroupSpec("local", "window", 4, 1, 6)]
    kv = KVCache(groups, num_pages=40, max_requests=1, max_model_len=64, events=log)
    tokens, keys = list(range(12)), [(0, None, lora_key("sql")), (5, 7, b"c0ffee00" * 8)]
    slot = kv.admit("r1", kv.match(tokens, salt=b"tenant", extra_keys=keys))
    kv.commit(kv.plan([slot], [12]), tokens)
    kv.release("r1")
    kv.clear()
    payload = encode_batch(log.take()[1], ts=1.0, data_parallel_rank=0, session_of={"r1": "s"}.get)
    full, *rest = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert full.lora_name == "sql" and full.session_id == "s"
    images = ["c0ffee00" * 8, 1]
    assert [*map(list, full.extra_keys)] == [["sql", "tenant"], ["sql", images], ["sql"]]
    assert (full.group_idx, full.kv_cache_spec_kind) == (0, "full_attention")
    stored = [event for event in rest if type(event).__name__ == "BlockStored"]
    assert stored and type(rest[-1]).__name__ == "AllBlocksCleared"
    for event in stored:
        assert event.lora_name == "sql"
        assert (event.group_idx, event.kv_cache_spec_kind) == (1, "sliding_window")


def main():
    torch.set_num_threads(1)
    init_none_hash(sha256)
    load_general_plugins()  # of quire's entry point
    path = "quire.models.integrations.vllm_attention.QuireBackend"
    assert AttentionBackendEnum.CUSTOM.get_path() == path
    check_refusals()
    check_events()
    for name, case in CASES.items():
        print(name, file=sys.stderr)
        Case(**case).run()


if __name__ == "__main__":
    main()
