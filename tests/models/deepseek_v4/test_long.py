"""Positions up to 1,048,575, by construction: tables of a full-length context over a few pages, without a million real steps."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounding
from quire.kvcore import KVCache, StepPlan
from quire.kvcore.device import AttnMetadata
from quire.models.deepseek_v4.attention import (
    Attention,
    PagedAttend,
    rope_table,
)
from quire.models.deepseek_v4.cache import CacheFormat, V4PagePool, plan_cache
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, MOE, SLIDING
from quire.models.layers.rotary import inverse_frequencies
from tests.kernels.oracles import compressor as reference_compress
from tests.support.helpers import assert_within_budget

LENGTH = 1_048_576
NUM_NEW = 5  # the last tokens: the last one closes a window of every kind
CONFIG = replace(
    CONFIGS["deepseek-v4-tiny"],
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(MOE,) * 3,
    num_mtp_layers=0,
    max_position_embeddings=LENGTH,
)


@pytest.fixture(scope="module")
def tables():
    """Rotary tables with angles in fp64: {compressed: [LENGTH, rope_dim]}."""
    return {
        compressed: rope_table(inverse_frequencies(rope, CONFIG.rope_dim), LENGTH)
        for compressed, rope in enumerate((CONFIG.rope, CONFIG.compress_rope))
    }


def test_rotary_table_at_its_end(tables):
    """The last position's angles, as the fp32 product that models are trained with, to the last bit of sine and cosine."""
    frequencies = inverse_frequencies(CONFIG.rope, CONFIG.rope_dim)
    angles = (torch.tensor(float(LENGTH - 1)) * frequencies).double()
    got = tables[False][-1].double()
    # Sine and cosine are within a unit in the last place of numbers up to 1.
    assert (got - torch.cat([angles.cos(), angles.sin()])).abs().max() <= UNIT
    assert len(tables[False]) == LENGTH


def random_attention(layer, generator):
    attention = Attention(CONFIG, layer, torch.device("cpu"), torch.float32)
    for weight in attention.parameters():
        weight.normal_(0.0, weight.shape[-1] ** -0.5 if weight.ndim == 2 else 1.0, generator=generator)  # fmt: skip
    return attention


@pytest.mark.parametrize("layer", range(3), ids=["sliding", "csa", "hca"])
def test_last_tokens_of_a_full_context(tables, layer):
    """Every page of a table is one of 7, with random content: 262,144 and 131,072 entries, indices that need more than 16 bits,
    windows that open, close and are rotated at the very end. Compared with plain attention over the same rows in fp64. A sum of 131,072
    may be off by 2 %, so two blocks of the table have entries that outweigh all others, and so does the last one: an entry elsewhere changes the result."""
    generator = torch.Generator().manual_seed(layer)
    plan = plan_cache(CONFIG, CacheFormat(torch.float32))
    pool = V4PagePool(CONFIG, plan, num_pages=1 + 7 * len(plan.groups), max_requests=1)
    pool.data.view(torch.float32).normal_(generator=generator)
    cache = pool.layers[layer]
    for ring in pool.rings:
        ring.normal_(generator=generator)
    before = None if cache.compressed is None else cache.compressed.ring[0].clone()
    context = LENGTH - NUM_NEW
    positions = torch.arange(context, LENGTH)
    block_tables, mappings = [], []
    for g, group in enumerate(plan.groups):
        num_blocks, first = LENGTH // group.block_size, 1 + 7 * g
        table = torch.randint(first, first + 4, (1, num_blocks), generator=generator).int()
        table[0, num_blocks // 2 + 1], table[0, -2] = first + 4, first + 5
        table[0, -1] = first + 6  # the block that the step writes
        block_tables.append(table)
        pages = table[0, positions // group.block_size].long()
        mappings.append(pages * group.block_size + positions % group.block_size)
    for part in (cache.compressed, cache.index_keys):
        if part is not None:  # of group 0; outweighs all else, wherever it is read
            part.pages.data[[5, 6]] *= 16
    attn = AttnMetadata(
        cu_seqlens_q=torch.tensor([0, NUM_NEW], dtype=torch.int32),
        seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
        block_tables=tuple(block_tables),
        slot_mappings=tuple(mappings),
        max_seqlen_q=NUM_NEW,
        max_seq_len=LENGTH,
        num_decodes=0,
        request_slots=torch.zeros(1, dtype=torch.int32),
    )
    attention = random_attention(layer, generator)
    if attention.compressor is not None:  # so does the entry that the last token closes
        attention.compressor.kv_norm.weight.mul_(64)
    if cache.index_keys is not None:
        attention.compressor.indexer.kv_norm.weight.mul_(64)
    cos_sin = tables[layer > 0]
    seen = {}

    class Seen(PagedAttend):
        def __call__(self, module, rows):
            seen["rows"], seen["out"] = rows, super().__call__(module, rows)
            return seen["out"]

    x = torch.randn(NUM_NEW, CONFIG.hidden_size, generator=generator)
    attention(x, positions, cos_sin, Seen(attn, pool, impl="torch"))
    rows, out = seen["rows"], seen["out"]

    # All rows as the pages have them now, the step's own included.
    window_table = block_tables[cache.window_group][0].long()
    at = torch.arange(context - CONFIG.sliding_window + 1, LENGTH)
    block, within = at // cache.window.storage_block_size, at % cache.window.storage_block_size
    raw = cache.window.data[window_table[block], within].double()
    entries = index_keys = torch.zeros(0, CONFIG.head_dim).double()
    if cache.compressed is not None:
        entries = cache.compressed.pages.data[block_tables[0][0].long()].flatten(0, 1).double()
        assert len(entries) == LENGTH // CONFIG.compress_ratio(layer)
    if cache.index_keys is not None:
        index_keys = cache.index_keys.pages.data[block_tables[0][0].long()].flatten(0, 1).double()
    for i in (0, NUM_NEW - 1):
        position = LENGTH - NUM_NEW + i
        keys = raw[i : i + CONFIG.sliding_window]
        if len(entries):
            ratio = CONFIG.compress_ratio(layer)
            visible = entries[: (position + 1) // ratio]
            if len(index_keys):
                dots = (index_keys[: len(visible)] @ rows.index_q[i].double().T).relu()
                scores = dots @ rows.index_weights[i].double()
                visible = visible[scores.topk(CONFIG.index_topk).indices]
            keys = torch.cat([keys, visible])
        with bounding():
            scores = rows.q[i].double() @ keys.T * CONFIG.head_dim**-0.5
            sinks = attention.sinks[:, None].double()
            want = torch.softmax(torch.cat([scores, sinks], dim=1), 1)[:, :-1] @ keys
            cos, sin = cos_sin[position].double().chunk(2)
            even, odd = (want[:, -CONFIG.rope_dim :].unflatten(1, (-1, 2))).unbind(2)
            turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], 2).flatten(1)
            want = torch.cat([want[:, : -CONFIG.rope_dim], turned], 1)
        assert_within_budget("out", out[i], want)
    # The entry that the last token closed is in its page, and turned by the position of its window's start.
    if len(entries):
        pooling = attention.compressor
        ratio, overlap = pooling.ratio, pooling.overlap
        first = LENGTH - ratio * (1 + overlap)
        kept = before[torch.arange(first, context) % len(before)].double()
        # The ring has a gate with its position's bias.
        bias = pooling.position_bias.double()[torch.arange(first, context) % ratio]
        kv, gate = (row.double() for row in rows.pooled)
        with bounding():
            want = reference_compress.compress(
                torch.cat([kept[:, 0], kv]),
                torch.cat([kept[:, 1] - bias, gate]),
                pooling.position_bias,
                ratio=ratio,
                overlap=overlap,
                norm_weight=pooling.kv_norm.weight,
                eps=pooling.kv_norm.eps,
                cos_sin=cos_sin,
                first=first,
            )
        assert_within_budget("entry", entries[-1].float(), want[LENGTH // ratio - 1])


def test_the_allocator_at_full_length():
    """A million tokens in chunks of 65,536: page ids and slots stay right, and window groups hold a few pages all along."""
    plan = plan_cache(CONFIGS["deepseek-v4-flash"], CacheFormat(torch.bfloat16, fp8=True))
    kv = KVCache(
        plan.groups, num_pages=4200, max_requests=1, max_model_len=LENGTH, retention="latest"
    )
    tokens = torch.randint(0, 1000, (LENGTH,), generator=torch.Generator().manual_seed(0)).numpy()
    slot = kv.admit("a", kv.match(tokens))
    while (done := int(kv.num_computed[slot])) < LENGTH:
        count = min(65536, LENGTH - done)
        step = kv.plan([slot], [count])
        assert isinstance(step, StepPlan)
        assert step.positions[-1] == done + count - 1
        assert step.slot_mapping[0].max() < 4200 * 256 and step.slot_mapping[0].min() >= 0
        kv.commit(step, tokens[done : done + count])
    assert kv.num_pages - 1 - kv.num_free_pages <= LENGTH // 256 + 3 * 5 + 6
    kv.check_invariants()
