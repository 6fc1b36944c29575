"""Cache groups of real models: block sizes and bytes of their pages."""

from __future__ import annotations

from quire.kvcore import GroupSpec


def _v4(page_bytes: int) -> list[GroupSpec]:
    # A page of 256 tokens holds the compressed entries and index keys of all layers. Window rows
    # lie in two groups of 64 tokens a page. At a multiple of 256 the compressors carry over only
    # the last 4 rows of the ratio-4 ones: a window of 5, one page.
    return [
        GroupSpec("compressed", "dense", 256, page_bytes),
        *(GroupSpec(f"window.{i}", "window", 64, page_bytes, 128) for i in range(2)),
        GroupSpec("overlap", "window", 256, page_bytes, 5),
    ]


PRESETS: dict[str, list[GroupSpec]] = {
    "v4-flash": _v4(1_002_240),  # fp8 rows; 21 + 20 compressed layers and 21 of index keys
    "v4-pro": _v4(1_435_968),
    # 10 global layers of 8,192 B a token; 50 local ones of 16,384 B in five groups of 10.
    "gemma-4-31b": [
        GroupSpec("full", "dense", 32, 2_621_440),
        *(GroupSpec(f"sliding.{i}", "window", 16, 2_621_440, 1024) for i in range(5)),
    ],
    # 18 + 18 layers of 8 KV heads of 64, bf16.
    "gpt-oss-like": [
        GroupSpec("full", "dense", 64, 18 * 64 * 2048),
        GroupSpec("sliding", "window", 64, 18 * 64 * 2048, 128),
    ],
    # 80 layers of 8 KV heads of 128, bf16.
    "llama-like": [GroupSpec("full", "dense", 16, 80 * 16 * 4096)],
}
