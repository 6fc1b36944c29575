"""Oracle of ``copy_overlap``: one row at a time, in the order of the step.

Source: DeepSeek-V4, compressed sparse attention: entries that overlap the window before.
"""


def copy_overlap(
    kv, gate, ape, state, pages, *, from_pages, state_index, state_rows, tokens, to_pages
):
    """Fills ``state`` and ``pages`` in place; arguments as in ``quire.kernels.copy_overlap``."""
    _, ratio, _, width = pages.shape
    for s, (page, index) in enumerate(zip(from_pages, state_index, strict=True)):
        if index >= 0:
            for r in range(ratio):
                state[index, state_rows[s, r], :, :width] = pages[page, r]
    for i, (token, page) in enumerate(zip(tokens, to_pages, strict=True)):
        if page > 0:
            pages[page, i % ratio, 0] = kv[token, :width]
            pages[page, i % ratio, 1] = gate[token, :width] + ape[i % ratio, :width]
