"""Oracle of ``write_kv``: plain torch, one row at a time."""

import torch


def write_kv(k, v, k_pages, v_pages, slot_mapping, k_scale=None, v_scale=None):
    """Write rows to pages one at a time; shapes as in ``quire.kernels.write_kv``."""
    block_size = k_pages.shape[1]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, row = slot // block_size, slot % block_size
        for rows, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
            for head in range(rows.shape[1]):
                new = rows[i, head]
                if scale is not None:
                    one = scale
                    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
                        largest = torch.max(new.abs()).float()
                        if torch.isinf(largest):
                            largest = torch.tensor(torch.finfo(torch.float32).max)
                        one = torch.maximum(largest / 448.0, torch.tensor(2.0**-126))
                        scale[page, row, head] = one
                    new = torch.clamp(new.float() / torch.as_tensor(one), -448.0, 448.0)
                    new = new.to(torch.float8_e4m3fn)
                pages[page, row, head].copy_(new)
