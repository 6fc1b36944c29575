"""DeepSeek-V4: residual streams, compressed and sliding attention, experts and drafters, over pages and rings of their own.

`config` shapes; `model` the whole of it, from `block`, `layers`, `mtp`; attention of `attention` (one sequence, no cache) or of `paged` over the
`cache`; `draft` speculates; `weights` reads, draws and writes checkpoints with `load`, `names`, `hf`; `memory` counts bytes.
"""
