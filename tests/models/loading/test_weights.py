"""Models of a directory: their dtype and stop ids; random ones, and the sizes of released ones."""

import json

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.hf import load_config
from quire.models.config.named import CONFIGS, get_config
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model, load_model

CONFIG = get_config("gemma4-tiny")


def write(path, config=lambda c: c, model=None):
    """A checkpoint with a changed config.json."""
    model = model or random_model(CONFIG)
    save_checkpoint(model, path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config(raw)))
    return model


def test_dtype_comes_from_the_file_unless_given(tmp_path):
    model = write(tmp_path, model=random_model(CONFIG, dtype=torch.bfloat16))
    assert load_model(tmp_path).dtype == torch.bfloat16
    wide = load_model(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.norm.weight, model.norm.weight.float())
    write(
        tmp_path,
        config=lambda raw: {"model_type": "gemma4", "text_config": raw | {"dtype": "float32"}},
    )
    assert load_model(tmp_path).dtype == torch.float32
    write(tmp_path, config=lambda raw: {k: v for k, v in raw.items() if k != "dtype"})
    assert load_model(tmp_path).dtype == torch.bfloat16


def test_stop_ids_of_generation_config_win(tmp_path):
    write(tmp_path)
    assert load_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert load_config(tmp_path).eos_token_ids == (1, 106)


def test_random_weights_follow_the_seed():
    models = [random_model(CONFIG, seed=seed) for seed in (3, 3, 4)]
    weights = zip(*(model.named_parameters() for model in models), strict=True)
    for (name, first), (_, same), (_, other) in weights:
        assert torch.equal(first, same) and not torch.equal(first, other), name
        assert first.numel() == 1 or first.std() > 0, name  # a constant could hide a missing rule


BILLIONS = {
    "gemma-3-1b": 1.0, "gemma-3-4b": 3.9, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0,  # 4b: 4.3 with its tower
    "gemma-4-31b": 30.7, "gemma-4-26b-a4b": 25.2, "gemma-4-e4b": 7.5, "gemma-4-e2b": 4.6,
    "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_real_models_have_their_size(name, billions):
    model = build_model(CONFIGS[name], device="meta", dtype=torch.bfloat16)
    total = sum(weight.numel() for weight in model.parameters())
    assert total / 1e9 == pytest.approx(billions, rel=0.02)
