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


@pytest.mark.parametrize(
    ("name", "size"),
    [("gemma4-e-tiny", 4), ("gpt-oss-tiny", 2)],
)
def test_plain(tmp_path, name, size):
    save_checkpoint(random_model(get_config(name), seed=3), tmp_path)
    whole, models = assert_together_the_whole(tmp_path, size)
    shapes = [[(n, w.shape) for n, w in m.named_parameters()] for m in models]
    assert all(one == shapes[0] for one in shapes)
    # Most weights are divided.
    assert num_bytes(models[0]) < 0.75 * num_bytes(whole)


def test_widths_that_are_no_multiples_are_filled_up(tmp_path):
    config = replace(get_config("llama-tiny"), intermediate_size=97, vocab_size=263)
    save_checkpoint(random_model(config, seed=3), tmp_path)
    _, models = assert_together_the_whole(tmp_path, 4)
    last = models[-1].layers[0].mlp
    assert len(last.gate_proj.weight) == 25 and not last.gate_proj.weight[22:].any()
    assert last.gate_proj.weight[21].any() and not last.down_proj.weight[:, 22:].any()


@pytest.mark.parametrize(
    ("name", "suffix", "method", "fp8"),
    [
        ("gemma3-tiny", "_scale_inv", "fp8", "keep"),
        ("gemma4-moe-tiny", "_scale", "compressed-tensors", "dequantize"),
    ],
)
def test_fp8(tmp_path, name, suffix, method, fp8):
    """Blocks of 32 by 32: widths of 96 and 40 are not cut between them."""
    write_fp8(tmp_path, name, suffix, method)
    _, models = assert_together_the_whole(tmp_path, 2, fp8=fp8)
    kept = {w.dtype for w in models[0].parameters()}
    assert (torch.float8_e4m3fn in kept) == (fp8 == "keep")


def test_blocks_that_heads_cut_are_dequantized_or_refused(tmp_path):
    write_fp8(tmp_path, "gemma4-tiny", "_scale", "fp8")  # heads of 16
    assert_together_the_whole(tmp_path, 4, fp8="dequantize")

    def refused(group):
        with pytest.raises(ValueError, match="fp8: expected 'dequantize' for 4 ranks"):
            load_model(tmp_path, fp8="keep", group=group)

    on_ranks(4, refused)  # each of them


@pytest.mark.parametrize(("width", "fp8"), [(64, "dequantize"), (96, "keep")])
def test_mxfp4(tmp_path, width, fp8):
    """96 values are three groups of 32: the second rank has one of them, and zeros."""
    write_mxfp4(tmp_path, width)
    _, models = assert_together_the_whole(tmp_path, 2, fp8=fp8)
    held = models[1].layers[0].mlp.experts.down_proj
    assert (held.dtype == torch.uint8) == (fp8 == "keep")


@pytest.mark.parametrize(("experts", "fp8"), [("fp4", "keep"), ("fp8", "dequantize")])
def test_deepseek_v4(tmp_path, experts, fp8):
    """As released, experts one by one, values and scales in other files; a width of 192 is one block of 128 and a half."""
    v4_release.write_release(tmp_path / "release", random_model(v4_release.CONFIG), experts)
    _, models = assert_together_the_whole(tmp_path / "release", 2, fp8=fp8)
    assert models[0].config.moe_intermediate_size == (96 if experts == "fp4" else 128)
