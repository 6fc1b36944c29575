"""Oracle of ``compressed_attention``: plain torch, one token, one key and one byte at a time.

    out_i = R(-p) sum_j softmax_j(softmax_scale * q_i . c_j) c_j

over the raw rows p - sliding_window + 1 .. p and the entries w < floor((p + 1) / compress_ratio),
with one sink in the denominator.

Nothing but the list of arguments is shared with the implementations, which read quantized pages in
their own way too.

Source: DeepSeek-V4 report 2.3; transformers models/deepseek_v4; FlashMLA tests/quant.py for the
bytes.
"""

import functools

import torch

from .attention import one_query
from .latent_write import latent_values


def read_row(pages, page, row):
    """One row of ``LatentPages``: [head_dim] float64."""
    if pages.data.dtype != torch.uint8:
        return pages.data[page, row].double()
    n, data = pages.storage_block_size, pages.data[page]
    body = bytes(data[row * 576 : row * 576 + 576].tolist())
    scales = bytes(data[n * 576 + row * 8 : n * 576 + row * 8 + 7].tolist())
    values = latent_values(body, scales)
    return torch.tensor(values, dtype=torch.float64, device=data.device)


def compressed_attention(
    q, window_pages, window_table, seq_lens, cu_seqlens_q, *, sliding_window, kv=None,
    compressed_pages=None, compressed_table=None, compress_ratio=None, topk_indices=None,
    topk_lens=None, sinks=None, softmax_scale=None, cos_sin=None, lse=None, **hints,
):  # fmt: skip
    """Attend token by token.

    Args:
        q ... cos_sin: as in ``quire.kernels.compressed_attention``.
        lse: [num_heads, num_tokens] of any floating dtype, filled in place.
        hints: how to launch; not looked at.

    Returns:
        [num_tokens, num_heads, head_dim] float64.
    """
    entries = compressed_pages
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    window_size, window_width = window_pages.storage_block_size, window_table.shape[1]

    @functools.cache
    def entry_or_raw(is_entry, page, row):
        return read_row(entries if is_entry else window_pages, page, row)

    for s, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        context = seq_len - (last - first)
        # What the pages of the window hold: row j lies where row j + width * size comes to lie.
        oldest = (seq_len if kv is None else context) - window_width * window_size
        for token in range(first, last):
            position = context + token - first
            rows = []
            for j in range(max(0, oldest, position - sliding_window + 1), position + 1):
                if kv is not None and j >= context:
                    rows.append(kv[first + j - context].double())
                else:
                    page = window_table[s, j // window_size % window_width].item()
                    rows.append(entry_or_raw(False, page, j % window_size))
            if entries is not None:
                size = entries.storage_block_size
                visible = max(0, (position + 1) // compress_ratio)
                visible = min(visible, compressed_table.shape[1] * size)
                named = list(range(visible))
                if topk_indices is not None:
                    named = topk_indices[token].tolist()
                    if topk_lens is not None:
                        named = named[: max(0, topk_lens[token].item())]
                for w in named:
                    if 0 <= w < visible:
                        page = compressed_table[s, w // size].item()
                        rows.append(entry_or_raw(True, page, w % size))
            _attend_row(token, q, rows, scale, sinks, out, lse)
            if cos_sin is not None and rows:
                _inverse_rope(out[token], cos_sin[position].double())
    return out


def _attend_row(token, q, rows, scale, sinks, out, lse):
    keys = torch.stack(rows) if rows else q.new_empty(0, q.shape[2])
    for h in range(q.shape[1]):
        sink = None if sinks is None else sinks[h]
        out[token, h], found = one_query(q[token, h].double(), keys, keys, scale, sink)
        if lse is not None:
            lse[h, token] = found


def _inverse_rope(heads, cos_sin):
    """Rotate the trailing pairs of heads [num_heads, head_dim] by minus a position's angles."""
    num_pairs = cos_sin.shape[0] // 2
    start = heads.shape[1] - 2 * num_pairs
    for i in range(num_pairs):
        even, odd = heads[:, start + 2 * i].clone(), heads[:, start + 2 * i + 1].clone()
        cos, sin = cos_sin[i], cos_sin[num_pairs + i]
        heads[:, start + 2 * i] = even * cos + odd * sin
        heads[:, start + 2 * i + 1] = odd * cos - even * sin


def slots_attention(q, lists, *, softmax_scale, sinks):
    """Attend to lists of physical rows, FlashMLA's way.

    Args:
        q: [num_tokens, num_heads, head_dim].
        lists: (pages, [num_tokens, n] int32 physical rows with -1 = none, [num_tokens] how many of
            them count or None) each.
        softmax_scale, sinks: as in ``compressed_attention`` of this module.

    Returns:
        (out [num_tokens, num_heads, head_dim], lse [num_heads, num_tokens]), both float64; an
        empty row has lse -inf.
    """
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float64, device=q.device)
    for token in range(q.shape[0]):
        rows = []
        for pages, slots, lens in lists:
            named = slots[token].tolist()
            if lens is not None:
                named = named[: max(0, lens[token].item())]
            size = pages.storage_block_size
            rows += [read_row(pages, slot // size, slot % size) for slot in named if slot >= 0]
        _attend_row(token, q, rows, softmax_scale, sinks, out, lse)
    return out, lse
