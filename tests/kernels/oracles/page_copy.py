"""Oracle of ``gather_pages`` and ``scatter_pages``: one byte after the other."""


def gather_pages(pages, page_ids, buffer, rows=None):
    """Fill ``buffer``; arguments as in ``quire.kernels.gather_pages``."""
    for i, page in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        for t, tensor in enumerate(pages.tensors):
            for byte in range(pages.page_bytes):
                buffer[row, t * pages.page_bytes + byte] = tensor[page, byte]


def scatter_pages(pages, page_ids, buffer, rows=None):
    """Fill ``pages``; arguments as in ``quire.kernels.scatter_pages``."""
    for i, page in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        for t, tensor in enumerate(pages.tensors):
            for byte in range(pages.page_bytes):
                tensor[page, byte] = buffer[row, t * pages.page_bytes + byte]
