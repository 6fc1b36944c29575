"""Every family against transformers, over whole sequences and over pages."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.models.layers import rotary
from tests.models.conftest import ROPES, rope_config
from tests.support.models.hand_paged import HandPaged, difference
from tests.support.models.tolerance import tolerance


@pytest.mark.parametrize("ring", [False, True], ids=["linear", "ring"])
def test_logits_rows_selects_rows(every_oracle, ring):
    """Any rows: with rings, the chunk's last rows take the places of just those that its first row sees."""
    ids, expected = every_oracle.input_ids, every_oracle.ours_logits
    rows = torch.tensor([63, 0, 40])
    paged = HandPaged(every_oracle.model, 1, 131, ring=ring)
    for width, group in zip(paged.widths, paged.groups, strict=True):
        assert not ring or group.kind == "dense" or 64 % (width * group.block_size) == 0
    paged.step({0: ids[:40]}, logits_rows=torch.tensor([], dtype=torch.int64))
    logits = paged.step({0: ids[40:104]}, logits_rows=rows)
    assert difference(logits, expected[40 + rows]) < tolerance(every_oracle.model)
    logits = every_oracle.model.full_forward(ids, logits_rows=rows)
    assert difference(logits, expected[rows]) < tolerance(every_oracle.model)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(oracle_root, name):
    frequencies, amplitude = torch.load(oracle_root / "ropes.pt")[list(ROPES).index(name)]
    rope = rope_config(ROPES[name]).full.rope
    # Each of the two errs by 3 units in a frequency (a power, a reciprocal), and so by 6 in the turns of which llama3 takes high - low. With
    # the ramp's other operations, 16 units of the share that keeps its value, which counts ``factor`` times where all else is divided by it.
    rtol = 2 * (4 + 16 * rope.factor) * UNIT
    torch.testing.assert_close(rotary.inverse_frequencies(rope, 64), frequencies, rtol=rtol, atol=0)
    assert rope.amplitude == amplitude
