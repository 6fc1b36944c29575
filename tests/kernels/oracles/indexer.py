"""Oracle of ``index_topk``: plain torch, one query, one entry and one byte at a time.

    score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w),
    w < floor((p_t + 1) / compress_ratio)

The ``topk`` highest are kept, among equals those of the lowest ids.

Source: DeepSeek-V4, lightning indexer.
"""

import torch

from .latent_write import e4m3_value


def index_key(data, page, row, num_rows, dim):
    """One index key in float64.

    Args:
        data: [num_pages, num_rows, dim] rows, or [num_pages, *] uint8 of num_rows * dim e4m3 bytes,
            then num_rows fp32 scales.
        page, row: where the key is.
        num_rows, dim: keys of a page, channels of a key.
    """
    if data.dtype != torch.uint8:
        return data[page, row].double()
    values = [e4m3_value(byte) for byte in data[page, row * dim : (row + 1) * dim].tolist()]
    first = num_rows * dim + 4 * row
    scale = data[page, first : first + 4].clone().view(torch.float32).item()
    return torch.tensor(values, dtype=torch.float64) * scale


def index_scores(
    q, weights, data, storage_block_size, block_table, seq_lens, cu_seqlens_q, *, compress_ratio=4
):
    """The scores of each query's visible entries, float64.

    Args:
        data, storage_block_size: the pages, as in ``index_key``; the rest as in ``index_topk``.
    """
    scores = []
    for s, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        for token in range(first, last):
            position = seq_len - (last - token)
            row = []
            visible = min(
                (position + 1) // compress_ratio, block_table.shape[1] * storage_block_size
            )
            for w in range(max(0, visible)):
                page = block_table[s, w // storage_block_size].item()
                key = index_key(data, page, w % storage_block_size, storage_block_size, q.shape[2])
                dots = q[token].double() @ key
                row.append((weights[token].double() * dots.clamp(min=0)).sum())
            scores.append(torch.stack(row) if row else torch.zeros(0, dtype=torch.float64))
    return scores


def select(scores, topk):
    """(out, lens) as ``index_topk`` returns them, from the scores of each query."""
    out = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for t, row in enumerate(scores):
        best = sorted(range(len(row)), key=lambda w: (-row[w].item(), w))[:topk]
        out[t, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return out, (out >= 0).sum(1).to(torch.int32)
