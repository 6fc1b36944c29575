"""Sizes that the case tables of the kernels' tests have, as ``bench/results/tested.json`` lists them.

    python -m tests.tested    # writes the file

Only tables whose every case is compared with an oracle, over both implementations, count; tests with
sizes of their own add nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.kernels.attention import test_attention, test_fp8
from tests.kernels.cache_write import test_write_and_merge
from tests.kernels.compressed import test_compressed
from tests.kernels.compressor import test_compressor
from tests.kernels.indexer import test_indexer
from tests.kernels.latent_write import test_latent_write
from tests.kernels.mla import test_mla

PATH = Path(__file__).resolve().parent.parent / "bench" / "results" / "tested.json"
Size = tuple[str, int, torch.dtype, tuple[int, ...]]


def sizes() -> Iterator[Size]:
    """(operator, head_dim, dtype of pages, page sizes) of each case; quantised latents are uint8."""
    plain = [(case, case.dtype) for case in test_attention.FULL + test_attention.WINDOW]
    for case, pages in plain + [(case, torch.float8_e4m3fn) for case in test_fp8.CASES]:
        window = case.sliding_window is not None
        operator = "sliding_window_attention" if window else "paged_attention"
        yield operator, case.head_dim, pages, (case.block_size,)
    for _, case in test_write_and_merge.WRITES.values():
        yield "write_kv", case.head_dim, case.dtype, (case.block_size,)
    for _, case in test_fp8.WRITES.values():
        yield "write_kv", case.head_dim, torch.float8_e4m3fn, (case.block_size,)
    for case in test_write_and_merge.MERGES.values():
        yield "merge_partials", case.get("head_dim", 16), case.get("dtype", torch.float32), ()
    for case in test_mla.CASES:
        yield "mla_attention", case.head_dim_v, case.dtype, (case.block_size,)
    for case in test_compressed.CASES:
        rows = (case.rows,) if case.ratio is None else (case.rows, case.entry_rows)
        yield "compressed_attention", case.head_dim, torch.uint8 if case.fp8 else case.dtype, rows
    for case in test_indexer.CASES:
        pages = torch.uint8 if case.fp8 else case.dtype
        yield "index_topk", case.index_dim, pages, (case.rows,)
    for case in test_latent_write.CASES.values():
        if case.pages is not None:
            yield "write_latent", case.head_dim, case.pages, (case.block_size,)
    for case in test_compressor.CASES.values():
        yield "compress", case.dim, case.pages, (case.block_size,)


def rows() -> list[dict[str, Any]]:
    """One row for each operator, head_dim and dtype of pages."""
    found: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for operator, head_dim, pages, block_sizes in sizes():
        found[operator, head_dim, str(pages).removeprefix("torch.")] |= set(block_sizes)
    return [
        {"operator": key[0], "head_dim": key[1], "pages": key[2], "block_sizes": sorted(found[key])}
        for key in sorted(found)
    ]


def text() -> str:
    """Of the file: a row to a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows()) + "\n]\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
