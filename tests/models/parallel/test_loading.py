"""Ranks read their part of a checkpoint and no more: together they are the whole model, however its weights are stored."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models import v4_release
from tests.support.models.quantized import write_fp8, write_mxfp4
from tests.support.models.ranks import on_ranks
from tests.support.models.tolerance import tolerance

IDS = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(0))


def assert_together_the_whole(path, size, **options):
    """Logits of all ranks are those of the whole model, up to the order of sums; returns whole and ranks' models."""
    whole = load_model(path, dtype=torch.float32, fp8="dequantize")
    want = whole.full_forward(IDS)

    def work(group):
        model = load_model(path, dtype=torch.float32, group=group, **options)
        return model, model.full_forward(IDS)

    models, logits = zip(*on_ranks(size, work), strict=True)
    allowed = tolerance(whole)
    for got in logits:
        assert (got - want).abs().max() <= allowed
    return whole, models


def num_bytes(model):
    return sum(w.numel() * w.element_size() for w in model.parameters())


def plain(path, name):
    save_checkpoint(random_model(get_config(name), seed=3), path)


def v4(path, experts):
    """As released, experts one by one, values and scales in other files."""
    v4_release.write_release(path, random_model(v4_release.CONFIG), experts)


def is_fp8(model):
    return torch.float8_e4m3fn in {w.dtype for w in model.parameters()}


def is_fp4(model):
    return model.layers[0].mlp.experts.down_proj.dtype == torch.uint8


STORED = [
    # (write, arguments, ranks, options, what holds of the last rank's model)
    (plain, ("gemma4-e-tiny",), 4, {}, None),
    (plain, ("gpt-oss-tiny",), 2, {}, None),
    # Blocks of 32 by 32: widths of 96 and 40 are not cut between them.
    (write_fp8, ("gemma3-tiny", "_scale_inv", "fp8"), 2, {"fp8": "keep"}, is_fp8),
    (write_fp8, ("gemma4-moe-tiny", "_scale", "compressed-tensors"), 2, {"fp8": "dequantize"},
     lambda model: not is_fp8(model)),
    # 96 values are three groups of 32: the second rank has one of them, and zeros.
    (write_mxfp4, (64,), 2, {"fp8": "dequantize"}, lambda model: not is_fp4(model)),
    (write_mxfp4, (96,), 2, {"fp8": "keep"}, is_fp4),
    # A width of 192 is one block of 128 and a half.
    (v4, ("fp4",), 2, {"fp8": "keep"}, lambda model: model.config.moe_intermediate_size == 96),
    (v4, ("fp8",), 2, {"fp8": "dequantize"}, lambda model: model.config.moe_intermediate_size == 128),
]  # fmt: skip


@pytest.mark.parametrize(("write", "arguments", "size", "options", "holds"), STORED)
def test_ranks_read_their_part(tmp_path, write, arguments, size, options, holds):
    write(tmp_path / "stored", *arguments)
    whole, models = assert_together_the_whole(tmp_path / "stored", size, **options)
    shapes = [[(n, w.shape) for n, w in m.named_parameters()] for m in models]
    assert all(one == shapes[0] for one in shapes)
    if holds is not None:
        assert holds(models[-1])
    else:  # most weights are divided
        assert num_bytes(models[0]) < 0.75 * num_bytes(whole)


def test_widths_that_are_no_multiples_are_filled_up(tmp_path):
    config = replace(get_config("llama-tiny"), intermediate_size=97, vocab_size=263)
    save_checkpoint(random_model(config, seed=3), tmp_path)
    _, models = assert_together_the_whole(tmp_path, 4)
    last = models[-1].layers[0].mlp
    assert len(last.gate_proj.weight) == 25 and not last.gate_proj.weight[22:].any()
    assert last.gate_proj.weight[21].any() and not last.down_proj.weight[:, 22:].any()


def test_blocks_that_heads_cut_are_dequantized_or_refused(tmp_path):
    write_fp8(tmp_path, "gemma4-tiny", "_scale", "fp8")  # heads of 16
    assert_together_the_whole(tmp_path, 4, fp8="dequantize")

    def refused(group):
        with pytest.raises(ValueError, match="fp8: expected 'dequantize' for 4 ranks"):
            load_model(tmp_path, fp8="keep", group=group)

    on_ranks(4, refused)  # each of them
