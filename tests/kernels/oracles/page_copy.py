"""Oracle of ``gather_pages`` and ``scatter_pages``: one byte after the other."""


def gather_pages(pages, page_ids, buffer, rows):
    """Fill ``buffer``; arguments as in ``quire.kernels.gather_pages``."""
    for t, page, row, byte, place in _bytes(pages, page_ids, rows):
        buffer[row, place] = pages.tensors[t][page, byte]


def scatter_pages(pages, page_ids, buffer, rows):
    """Fill ``pages``; arguments as in ``quire.kernels.scatter_pages``."""
    for t, page, row, byte, place in _bytes(pages, page_ids, rows):
        pages.tensors[t][page, byte] = buffer[row, place]


def _bytes(pages, page_ids, rows):
    """(tensor, page, row, byte of the page, byte of the row) of all that is copied."""
    size = pages.page_bytes
    for page, row in zip(page_ids.tolist(), rows.tolist(), strict=True):
        for t in range(len(pages.tensors)):
            yield from ((t, page, row, byte, t * size + byte) for byte in range(size))
