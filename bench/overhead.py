"""What a call of a wrapper costs the host: microseconds of Python, of Triton and of the driver.

    python -m bench.overhead [--json FILE]

``first`` is a call unlike any before, which is checked and prepared in full; ``again`` one that
differs from earlier calls in its tensors alone, as the calls of a model's layers do. Of both,
everything but the launch itself is timed, which is replaced by nothing: no GPU is needed. Where
there is one, ``whole`` is a call like ``again`` that launches, and ``launch`` what is more of it:
Triton's launcher and the driver. With ``out`` and ``workspace`` given, nothing is allocated;
`sample_tokens` and the five around experts and residual streams make their results. Processor time
of the thread, the least of some rounds that take all wrappers in turn: of ``first`` one call a round, else the mean of a
round's calls. In a captured graph none of this is paid.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.overhead")

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from types import SimpleNamespace
from unittest import mock

import torch
from triton.compiler import CompiledKernel

from quire.kernels import (
    IndexPages,
    LatentPages,
    PoolPages,
    collapse_streams,
    combine_experts,
    compress,
    compressed_attention,
    compressed_attention_workspace_numel,
    copy_overlap,
    expand_streams,
    expert_mlp,
    flash_mla_with_kvcache,
    gated_product,
    gather_pages,
    index_topk,
    index_topk_workspace_numel,
    merge_partials,
    mla_attention,
    norm_rope,
    page_bytes,
    paged_attention,
    residual_norm,
    route_tokens,
    sample_tokens,
    scatter_pages,
    sliding_window_attention,
    workspace_numel,
    write_kv,
    write_latent,
)
from quire.kernels.common import bound_launch, impls, launch_cache, launching
from quire.models.command import Parser, integer, output_file, program

from .common.table import aligned

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 16, 32, 8, 128, 16, 1024
LATENT, ROPE = 512, 64
RATIO, TOPK, INDEX_HEADS, INDEX_DIM = 4, 512, 64, 128
# The indexer passes over what all queries see anyway: it needs contexts where they do not.
INDEXED = 65536
HIDDEN, STREAMS, EXPERTS, ROUTED, EXPERT_WIDTH, VOCABULARY = 4096, 4, 256, 6, 64, 129280


def calls(device: str = "cpu") -> dict[str, Callable[[], object]]:
    """Calls of every wrapper, by name: a batch of decodes with in-step K/V, the prefill path, and
    what else a model asks for.

    Args:
        device: of the tensors; on "meta" they have no values that a wrapper could read.
    """

    with torch.device(device):
        q, out = torch.zeros(2, BATCH, HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(0)
        k, v = torch.zeros(2, BATCH, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(0)
        pages = torch.zeros(64, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
        quantized = [rows.to(torch.float8_e4m3fn) for rows in pages]
        row_scales = torch.ones(2, 64, BLOCK_SIZE, KV_HEADS).unbind(0)
        table = torch.zeros(BATCH, CONTEXT // BLOCK_SIZE, dtype=torch.int32)
        seq_lens = torch.full((BATCH,), CONTEXT, dtype=torch.int32)
        cu = torch.arange(BATCH + 1, dtype=torch.int32)
        slots = torch.arange(BATCH)
        numel = workspace_numel(
            num_decodes=BATCH, max_seqlen_q=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_sms=132
        )  # fmt: skip
        workspace = torch.zeros(numel)
        latent = torch.zeros(BATCH, HEADS, LATENT + ROPE, dtype=q.dtype)
        latent_row = torch.zeros(BATCH, LATENT + ROPE, dtype=q.dtype)
        latent_pages = torch.zeros(64, BLOCK_SIZE, LATENT + ROPE, dtype=q.dtype)
        latent_out = torch.zeros(BATCH, HEADS, LATENT, dtype=q.dtype)
        latent_workspace = torch.zeros(numel * LATENT // HEAD_DIM * KV_HEADS)
        rows = torch.zeros(BATCH, HEADS, LATENT, dtype=q.dtype)
        row, row_out = torch.zeros(2, BATCH, LATENT, dtype=q.dtype).unbind(0)
        norm_weight = torch.ones(LATENT, dtype=q.dtype)
        row_bytes = torch.zeros(2, 64, page_bytes(BLOCK_SIZE), dtype=torch.uint8).unbind(0)
        topk_indices = torch.zeros(BATCH, TOPK, dtype=torch.int32)
        sinks, cos_sin = torch.zeros(HEADS), torch.zeros(CONTEXT, ROPE)
        numel = compressed_attention_workspace_numel(head_dim=LATENT, num_sms=132)
        row_workspace = torch.zeros(numel)
        index_q = torch.zeros(BATCH, INDEX_HEADS, INDEX_DIM, dtype=q.dtype)
        index_weights = torch.zeros(BATCH, INDEX_HEADS)
        index_bytes = torch.zeros(64, page_bytes(BLOCK_SIZE, INDEX_DIM + 4), dtype=torch.uint8)
        numel = index_topk_workspace_numel(
            num_tokens=BATCH, topk=TOPK, compress_ratio=RATIO, max_seq_len=INDEXED
        )
        index_workspace = torch.zeros(numel)
        parts, part_lse = torch.zeros(2, *q.shape, dtype=q.dtype), torch.zeros(2, HEADS, BATCH)
        lse = torch.zeros(HEADS, BATCH)
        pooled, gate = torch.zeros(2, BATCH, 2 * LATENT, dtype=q.dtype).unbind(0)
        ape = torch.zeros(RATIO, 2 * LATENT)
        ring, short_ring = (
            torch.zeros(BATCH, rows, 2, 2 * LATENT) for rows in (2 * RATIO, 2 * RATIO - 1)
        )
        blocks = torch.zeros(64, BLOCK_SIZE, 1, 584, dtype=torch.uint8)
        queries, queries_out = rows[:, None], latent_out[:, None]
        window_rows, entry_rows = (torch.zeros(BATCH, 1, n, dtype=torch.int32) for n in (128, TOPK))
        # Of half as many sequences.
        pairs, pairs_out = (rows.view(-1, 2, *rows.shape[1:]) for rows in (rows, latent_out))
        pair_rows, pair_lens = window_rows.view(-1, 2, 128), seq_lens[: BATCH // 2]
        branch, residual, normed = torch.zeros(3, BATCH, HIDDEN, dtype=q.dtype).unbind(0)
        hidden_weight = torch.ones(HIDDEN, dtype=q.dtype)
        gate_proj, up_proj = torch.zeros(BATCH, 2 * HIDDEN, dtype=q.dtype).chunk(2, dim=1)
        qkv = torch.zeros(BATCH, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=q.dtype)
        qk = torch.zeros(BATCH, HEADS + KV_HEADS, HEAD_DIM, dtype=q.dtype)
        cos, sin = torch.zeros(2, BATCH, HEAD_DIM // 2).unbind(0)
        head_weight = torch.ones(HEAD_DIM, dtype=q.dtype)
        streams = torch.zeros(BATCH, STREAMS, HIDDEN, dtype=q.dtype)
        mixed = (2 + STREAMS) * STREAMS
        mix, mix_base = torch.zeros(mixed, STREAMS * HIDDEN), torch.zeros(mixed)
        mix_scale, post = torch.zeros(3), torch.zeros(BATCH, STREAMS)
        comb = torch.zeros(BATCH, STREAMS, STREAMS)
        logits, expert_weights = torch.zeros(BATCH, EXPERTS), torch.zeros(BATCH, ROUTED)
        expert_rows = torch.zeros(BATCH * ROUTED, HIDDEN, dtype=q.dtype)
        expert_ids = torch.zeros(BATCH, ROUTED, dtype=torch.int64)
        gate_up = torch.zeros(2, 2, EXPERT_WIDTH, HIDDEN, dtype=q.dtype)
        down = torch.zeros(2, HIDDEN, EXPERT_WIDTH, dtype=q.dtype)
        fp4 = [w.view(torch.uint8)[..., : w.shape[-1] // 2].contiguous() for w in (gate_up, down)]
        fp4_scales = [w[..., ::16].contiguous() for w in fp4]
        gate_up_bias, down_bias = gate_up[..., 0], down[..., 0]
        vocabulary, rows_of_one = torch.zeros(BATCH, VOCABULARY), torch.ones(BATCH)
        draws = {
            "temperature": rows_of_one,
            "top_k": seq_lens,
            "top_p": rows_of_one,
            "min_p": rows_of_one,
            "u": torch.zeros(BATCH, dtype=torch.float64),
        }
        series, series_gate = torch.zeros(2, BATCH, 2 * LATENT).unbind(0)
        series_pages = torch.zeros(64, RATIO, 2, LATENT)
        ring_rows = torch.zeros(BATCH, RATIO, dtype=torch.int64)
        states, lens = torch.zeros(2, BATCH, dtype=torch.int32).unbind(0)
        states += torch.arange(BATCH, dtype=torch.int32)
        pool_rows = PoolPages(row_bytes)
        page_rows = torch.zeros(BATCH, pool_rows.num_bytes, dtype=torch.uint8)
    batch = (table, seq_lens, cu)
    impl = {"impl": "triton"}
    more = {"max_seqlen_q": 1, "k": k, "v": v, "out": out, "workspace": workspace, **impl}
    scales = dict(zip(("k_scale", "v_scale"), row_scales, strict=True))
    options = {"sinks": sinks, "lse": lse}
    pool = {
        "ratio": RATIO,
        "overlap": True,
        "norm_weight": norm_weight,
        "cos_sin": cos_sin,
        "max_seqlen_q": 1,
    }
    window_pages, entries = (LatentPages(data, BLOCK_SIZE) for data in row_bytes)
    index_pages = IndexPages(index_bytes, BLOCK_SIZE)
    return {
        "paged_attention, decode and merge": lambda: paged_attention(q, *pages, *batch, **more),
        "paged_attention, e4m3 pages": lambda: paged_attention(q, *quantized, *batch, **more, **scales),
        "paged_attention, e4m3 pages, one scale, sinks, softcap and lse": lambda: paged_attention(
            q, *quantized, *batch, **more, **options, k_scale=0.5, v_scale=0.25, softcap=50.0
        ),
        "paged_attention, prefill": lambda: paged_attention(q, *pages, *batch, num_decodes=0, **more),
        "sliding_window_attention, decode": lambda: sliding_window_attention(
            q, *pages, *batch, sliding_window=128, **more
        ),
        "sliding_window_attention, e4m3 pages, sinks and lse": lambda: sliding_window_attention(
            q, *quantized, *batch, sliding_window=128, **more, **options, **scales
        ),
        "mla_attention, decode and merge": lambda: mla_attention(
            latent, latent_pages, *batch, max_seqlen_q=1, softmax_scale=0.1, kv=latent_row,
            out=latent_out, workspace=latent_workspace, **impl,
        ),
        "compressed_attention, decode and merge": lambda: compressed_attention(
            rows, window_pages, *batch, sliding_window=128, max_seqlen_q=1, kv=row, compressed_pages=entries,
            compressed_table=table, compress_ratio=RATIO, topk_indices=topk_indices, topk_lens=seq_lens, sinks=sinks,
            cos_sin=cos_sin, out=latent_out, workspace=row_workspace, **impl,
        ),
        "flash_mla_with_kvcache": lambda: flash_mla_with_kvcache(
            queries, blocks, None, None, LATENT, indices=window_rows, topk_length=seq_lens, attn_sink=sinks, is_fp8_kvcache=True,
            extra_k_cache=blocks, extra_indices_in_kvcache=entry_rows, extra_topk_length=seq_lens, out=queries_out,
            lse=lse, workspace=row_workspace, **impl,
        ),
        "flash_mla_with_kvcache, two tokens a sequence": lambda: flash_mla_with_kvcache(
            pairs, blocks, None, None, LATENT, indices=pair_rows, topk_length=pair_lens, is_fp8_kvcache=True,
            out=pairs_out, lse=lse, workspace=row_workspace, **impl,
        ),
        "compress": lambda: compress(
            pooled, gate, ape, ring, states, seq_lens, cu, pages=entries, slot_mapping=slots, **pool, **impl
        ),
        "compress, a full ring": lambda: compress(
            pooled, gate, ape, short_ring, states, seq_lens, cu, pages=entries, slot_mapping=slots, **pool, **impl
        ),
        "index_topk": lambda: index_topk(
            index_q, index_weights, index_pages, *batch, topk=TOPK, compress_ratio=RATIO, max_seqlen_q=1,
            max_seq_len=INDEXED, out=topk_indices, lens=lens, workspace=index_workspace, **impl,
        ),
        "write_latent": lambda: write_latent(
            row, entries, slots, positions=slots, cos_sin=cos_sin, norm_weight=norm_weight, out=row_out, **impl
        ),
        "write_kv": lambda: write_kv(k, v, *pages, slots, **impl),
        "write_kv, e4m3 pages": lambda: write_kv(k, v, *quantized, slots, **scales, **impl),
        "merge_partials": lambda: merge_partials(parts, part_lse, out=out, **impl),
        "merge_partials, sinks and lse": lambda: merge_partials(parts, part_lse, out=out, **options, **impl),
        "residual_norm": lambda: residual_norm(
            branch, hidden_weight, eps=1e-6, residual=residual, post_weight=hidden_weight, out=normed, **impl
        ),
        "norm_rope": lambda: norm_rope(
            qkv, cos, sin, num_kv_heads=KV_HEADS, q_weight=head_weight, k_weight=head_weight, out=qk, **impl
        ),
        "gated_product": lambda: gated_product(gate_proj, up_proj, activation="silu", out=normed, **impl),
        "collapse_streams": lambda: collapse_streams(
            streams, mix, mix_base, mix_scale, norm_weight=hidden_weight, **impl
        ),
        "expand_streams": lambda: expand_streams(
            streams, branch, post, comb, rows=expert_rows, weights=expert_weights, **impl
        ),
        "route_tokens": lambda: route_tokens(logits, top_k=ROUTED, **impl),
        "expert_mlp": lambda: expert_mlp(
            branch, expert_ids, gate_up, down, activation="silu", limit=10.0, **impl
        ),
        "expert_mlp, fp4, biases": lambda: expert_mlp(
            branch, expert_ids, *fp4, gate_up_scale=fp4_scales[0], down_scale=fp4_scales[1], gate_up_bias=gate_up_bias,
            down_bias=down_bias, activation="silu", **impl,
        ),
        "combine_experts": lambda: combine_experts(expert_rows, expert_weights, addend=branch, **impl),
        "sample_tokens, greedy": lambda: sample_tokens(vocabulary, **impl),
        "sample_tokens": lambda: sample_tokens(vocabulary, **draws, **impl),
        "copy_overlap": lambda: copy_overlap(
            series, series_gate, ape, ring, series_pages, from_pages=slots, state_index=slots, state_rows=ring_rows,
            tokens=slots, to_pages=slots, **impl,
        ),
        "gather_pages": lambda: gather_pages(pool_rows, slots, page_rows, **impl),
        "scatter_pages": lambda: scatter_pages(pool_rows, slots, page_rows, slots, **impl),
    }  # fmt: skip


def measure(
    rounds: int, repeats: int, timed: dict[str, Callable[[], object]], launched: bool = False
) -> list[dict[str, object]]:
    """One row for each wrapper: microseconds of a first call and of one like it.

    Args:
        repeats: calls like it whose mean is taken.
        timed: as from ``calls``.
        launched: whether there is a driver, so that whole calls can be timed as well.
    """
    first, again, whole = ({name: float("inf") for name in timed} for _ in range(3))
    for _ in range(rounds):
        for name, call in timed.items():
            launch_cache.clear()
            with _nothing_launched():
                first[name] = min(first[name], _seconds(call, 1))
                call()  # binds its launches
                again[name] = min(again[name], _seconds(call, repeats))
            launch_cache.clear()
            if launched:
                call()
                call()
                torch.cuda.synchronize()
                whole[name] = min(whole[name], _seconds(call, repeats))
    rows: list[dict[str, object]] = []
    for name in timed:
        rows.append({"wrapper": name, "first_us": 1e6 * first[name], "again_us": 1e6 * again[name]})
        if launched:
            launch = whole[name] - again[name]
            rows[-1] |= {"launch_us": 1e6 * launch, "whole_us": 1e6 * whole[name]}
    return rows


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Triton returns a compiled kernel that does nothing, and the wrappers launch that."""
    compiled = CompiledKernel.__new__(CompiledKernel)
    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    vars(compiled).update(
        metadata=metadata, packed_metadata=(), module=None, function=0, _run=lambda *launch: None
    )
    with (
        mock.patch.object(launching, "launch", lambda *launch: compiled),
        mock.patch.object(bound_launch, "current_stream", lambda device: 0),
        mock.patch.object(impls, "expect_impl", lambda *args: None),  # there may be no GPU
    ):
        yield


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Of the mean of some calls one after another."""
    start = thread_time()
    for _ in range(repeats):
        call()
    return (thread_time() - start) / repeats


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    launched = torch.cuda.is_available()
    rows = measure(args.rounds, args.repeats, calls("cuda" if launched else "cpu"), launched)
    columns = [name for name in rows[0] if name != "wrapper"]
    lines = [("wrapper", *(name.replace("_", " ") for name in columns))]
    lines += [(str(r["wrapper"]), *(f"{r[name]:.1f}" for name in columns)) for r in rows]
    print("\n".join(aligned(lines)))
    if not launched:
        print("no GPU: wrappers only")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser("bench.overhead", __doc__)
    parser.add_argument("--rounds", type=integer(most=10**5), default=15)
    parser.add_argument("--repeats", type=integer(most=10**6), default=200, help="calls of a round")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the rows as a list of objects"
    )
    return parser
