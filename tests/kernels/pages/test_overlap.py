"""copy_overlap, both implementations, against the oracle: every element, and what must stay untouched."""

import pytest
import torch

from quire.kernels import copy_overlap
from tests.kernels.oracles import overlap as reference
from tests.support.helpers import DEVICE, NAN

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
CASES = {  # sequences, blocks that each may save, ratio, width, ring
    "small": (2, 1, 4, 16, 8),
    "width-of-no-power-of-two": (3, 2, 4, 24, 9),
    "another-ratio": (2, 3, 2, 16, 4),
    "one-sequence": (1, 1, 4, 16, 8),
    "nothing": (0, 0, 4, 16, 8),
}


def make_call(name):
    """Arguments; all tensors are parts of wider ones. Of the sequences every other loads, of the blocks every other is saved."""
    num_seqs, blocks, ratio, width, ring = CASES[name]
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    num_tokens, saved = 7, num_seqs * blocks * ratio
    both = normal(num_tokens, 4 * width + 3)
    index = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs]
    index[1::2] = -1
    page = torch.randperm(num_seqs * (1 + blocks), generator=generator) + 1
    to_pages = page[num_seqs:].clone()
    to_pages[1::2] = 0
    rows = torch.stack([torch.randperm(ring, generator=generator)[:ratio] for _ in range(num_seqs)] or [torch.zeros(0, ratio).long()])  # fmt: skip
    return {
        "kv": both[:, : 2 * width],
        "gate": both[:, 2 * width : 4 * width],
        "ape": normal(ratio, 2 * width),
        "state": normal(num_seqs + 3, ring, 2, 2 * width + 4)[..., : 2 * width],
        "pages": normal(num_seqs * (1 + blocks) + 1, ratio, 2, width + 8)[..., 8:],
        "from_pages": page[:num_seqs].to(DEVICE),
        "state_index": index.to(DEVICE),
        "state_rows": rows.view(num_seqs, ratio).to(DEVICE),
        "tokens": torch.randint(num_tokens, (saved,), generator=generator).to(DEVICE),
        "to_pages": to_pages.repeat_interleave(ratio).to(DEVICE),
    }


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_copy_overlap(impl, name):
    call = make_call(name)
    expected = {k: call[k].clone() for k in ("state", "pages")}
    reference.copy_overlap(**call | expected)
    copy_overlap(**call, impl=impl)
    assert call["state"].equal(expected["state"]) and call["pages"].equal(expected["pages"])


@IMPLS
def test_padding_rows(impl):
    """A padding row reads and writes nothing, whatever its other arguments say."""
    call = make_call("small")
    call["state_index"][:], call["to_pages"][:] = -1, 0
    call["from_pages"][:], call["state_rows"][:], call["tokens"][:] = 2**40, 2**40, 2**40
    before = call["state"].clone(), call["pages"].clone()
    copy_overlap(**call, impl=impl)
    assert call["state"].equal(before[0]) and call["pages"].equal(before[1])


@IMPLS
def test_nan_stays_where_it_is(impl):
    """Series b, and rows of the step that are not saved, reach neither a page nor the state."""
    call = make_call("small")
    width = call["pages"].shape[-1]
    for name in ("kv", "gate", "ape"):
        call[name][:, width:] = NAN
    copy_overlap(**call, impl=impl)
    assert call["state"].isfinite().all() and call["pages"][1:].isfinite().all()
