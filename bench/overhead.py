"""What a wrapper costs the host: microseconds of Python before a kernel is launched.

    python -m bench.overhead [--json FILE]

Everything but the launch itself is timed, which is replaced by nothing: no GPU is needed, and what Triton and the driver add is not in it.
``first`` is a call unlike any before, which is checked and prepared in full; ``again`` one that differs from an earlier call in its tensors
alone, as the calls of a model's layers do. With ``out`` and ``workspace`` given, nothing is allocated. Medians; in a captured graph none of
this is paid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch

from quire.bench.text import aligned
from quire.kernels import (
    _launch,
    merge_partials,
    paged_attention,
    recipes,
    sliding_window_attention,
    workspace_numel,
    write_kv,
)
from quire.kernels.mla import (
    IndexPages,
    LatentPages,
    compressed_attention,
    compressed_attention_workspace_numel,
    index_topk,
    index_topk_workspace_numel,
    mla_attention,
    page_bytes,
    write_latent,
)

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 16, 32, 8, 128, 16, 1024
LATENT, ROPE = 512, 64
RATIO, TOPK, INDEX_HEADS, INDEX_DIM = 4, 512, 64, 128
# The indexer passes over what all queries see anyway: it needs contexts where they do not.
INDEXED = 65536


def calls(device: str = "cpu") -> dict[str, Callable[[], object]]:
    """One call of each wrapper, by name: a batch of decodes with fresh rows, and the prefill path.

    device: of the tensors; on "meta" they have no values that a wrapper could read.
    """

    with torch.device(device):
        q, out = torch.zeros(2, BATCH, HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(0)
        k, v = torch.zeros(2, BATCH, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(0)
        pages = torch.zeros(64, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
        codes = [rows.to(torch.float8_e4m3fn) for rows in pages]
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
        picks = torch.zeros(BATCH, TOPK, dtype=torch.int32)
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
    batch = (table, seq_lens, cu)
    impl = {"impl": "triton"}
    more = {"max_seqlen_q": 1, "k": k, "v": v, "out": out, "workspace": workspace, **impl}
    scales = dict(zip(("k_scale", "v_scale"), row_scales, strict=True))
    window_pages, entries = (LatentPages(data, BLOCK_SIZE) for data in row_bytes)
    index_pages = IndexPages(index_bytes, BLOCK_SIZE)
    return {
        "paged_attention, decode and merge": lambda: paged_attention(q, *pages, *batch, **more),
        "paged_attention, e4m3 pages": lambda: paged_attention(q, *codes, *batch, **more, **scales),
        "paged_attention, prefill": lambda: paged_attention(q, *pages, *batch, num_decodes=0, **more),
        "sliding_window_attention, decode": lambda: sliding_window_attention(
            q, *pages, *batch, sliding_window=128, **more
        ),
        "mla_attention, decode and merge": lambda: mla_attention(
            latent, latent_pages, *batch, max_seqlen_q=1, softmax_scale=0.1, kv=latent_row,
            out=latent_out, workspace=latent_workspace, **impl,
        ),
        "compressed_attention, decode and merge": lambda: compressed_attention(
            rows, window_pages, *batch, sliding_window=128, max_seqlen_q=1, kv=row, compressed_pages=entries,
            compressed_table=table, compress_ratio=RATIO, topk_indices=picks, topk_lens=seq_lens, sinks=sinks,
            cos_sin=cos_sin, out=latent_out, workspace=row_workspace, **impl,
        ),
        "index_topk": lambda: index_topk(
            index_q, index_weights, index_pages, *batch, topk=TOPK, compress_ratio=RATIO, max_seqlen_q=1,
            max_seq_len=INDEXED, out=picks, lens=seq_lens, workspace=index_workspace, **impl,
        ),
        "write_latent": lambda: write_latent(
            row, entries, slots, positions=slots, cos_sin=cos_sin, norm_weight=norm_weight, out=row_out, **impl
        ),
        "write_kv": lambda: write_kv(k, v, *pages, slots, **impl),
        "write_kv, e4m3 pages": lambda: write_kv(k, v, *codes, slots, **scales, **impl),
        "merge_partials": lambda: merge_partials(parts, part_lse, out=out, **impl),
    }  # fmt: skip


def measure(repeats: int) -> list[dict[str, object]]:
    """One row for each wrapper: microseconds of a first call and of one like it."""
    found: list[dict[str, object]] = []
    with mock.patch.object(_launch, "launch", lambda *launch: None):
        for name, call in calls().items():
            first, again = [], []
            for _ in range(repeats):
                recipes.forget()
                first.append(_seconds(call))
                again.append(_seconds(call))
            found.append(
                {
                    "wrapper": name,
                    "first_us": 1e6 * statistics.median(first),
                    "again_us": 1e6 * statistics.median(again),
                }
            )
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=500, help="calls of each kind")
    parser.add_argument("--json", metavar="FILE", help="write the rows as a list of objects")
    args = parser.parse_args(argv)
    rows = measure(args.repeats)
    lines = [("wrapper", "first us", "again us")]
    lines += [(str(r["wrapper"]), f"{r['first_us']:.1f}", f"{r['again_us']:.1f}") for r in rows]
    print("\n".join(aligned(lines)))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
