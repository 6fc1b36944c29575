"""copy_overlap, both implementations, against the oracle: every element, and what must stay
untouched."""

import pytest
import torch

from quire.kernels import copy_overlap
from tests.kernels.oracles import overlap as reference
from tests.support.helpers import DEVICE, NAN, drawing

CASES = {  # sequences, blocks that each may save, ratio, width, ring
    "small": (2, 1, 4, 16, 8),
    "width-of-no-power-of-two": (3, 2, 4, 24, 9),
    "several-programs-a-row": (2, 1, 2, 600, 4),
    "another-ratio": (2, 3, 2, 16, 4),
    "one-sequence": (1, 1, 4, 16, 8),
    "nothing": (0, 0, 4, 16, 8),
}


def make_call(name):
    """Arguments; all tensors are parts of wider ones. Every other sequence loads, and every other
    block is saved; what belongs to the rest, and series b, is poison."""
    num_seqs, blocks, ratio, width, ring = CASES[name]
    generator, normal = drawing(2)
    num_tokens, num_pages = 7, num_seqs * (1 + blocks) + 1
    both, ape = normal(num_tokens, 4 * width + 3), normal(ratio, 2 * width)
    for series_b in (both[:, width : 2 * width], both[:, 3 * width :], ape[:, width:]):
        series_b[:] = NAN
    page = torch.randperm(num_pages - 1, generator=generator) + 1
    from_pages, to_pages = page.split([num_seqs, num_seqs * blocks])
    index = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs]
    rows = torch.rand(num_seqs, ring, generator=generator).argsort(1)[:, :ratio]
    tokens = torch.randint(num_tokens, (num_seqs * blocks, ratio), generator=generator)
    from_pages[1::2], index[1::2], rows[1::2] = 2**40, -1, 2**40
    to_pages[1::2], tokens[1::2] = 0, 2**40
    call = {
        "pages": normal(num_pages, ratio, 2, width + 8)[..., 8:],
        "kv": both[:, : 2 * width],
        "gate": both[:, 2 * width : 4 * width],
        "ape": ape,
        "state": normal(num_seqs + 3, ring, 2, 2 * width + 4)[..., : 2 * width],
        "from_pages": from_pages,
        "state_index": index,
        "state_rows": rows,
        "tokens": tokens.flatten(),
        "to_pages": to_pages.repeat_interleave(ratio),
    }
    return {name: tensor.to(DEVICE) for name, tensor in call.items()}


@pytest.mark.parametrize("name", CASES)
def test_copy_overlap(impl, name):
    call = make_call(name)
    expected = {name: call[name].clone() for name in ("state", "pages")}
    reference.copy_overlap(**call | expected)
    copy_overlap(**call, impl=impl)
    assert call["state"].equal(expected["state"]) and call["pages"].equal(expected["pages"])
