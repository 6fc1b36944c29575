"""Checkpoints: name variants, shards, and one error that names everything wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.hf import load_config
from quire.models.config.named import CONFIGS, get_config
from quire.models.loading.checkpoint import INDEX_FILE, NUM_NAMED
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model, load_model

CONFIG = get_config("gemma4-tiny")


def write(path, rename=lambda name: name, extra=(), config=lambda c: c, model=None):
    """A checkpoint whose tensors are renamed, with extra tensors and a changed config.json."""
    model = model or random_model(CONFIG)
    save_checkpoint(model, path)
    tensors = load_file(path / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()} | dict(extra)
    save_file(renamed, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config(raw)))
    return model


def assert_same_weights(a, b):
    mine, other = dict(a.named_parameters()), dict(b.named_parameters())
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def multimodal(raw):
    kind = raw["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": raw, "vision_config": {}}


PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gemma3-tiny"])
def test_name_variants(tmp_path, name, prefix):
    ignored = (  # output projections of tied models, and other towers
        "lm_head.weight", "lm_head.weight_scale", "language_model.lm_head.weight",
        "model.vision_tower.layer.weight", "vision_tower.layer.weight",
        "model.audio_tower.layer.weight", "multi_modal_projector.weight",
        "model.vision_embedder.pos_embedding", "model.embed_audio.embedding_projection.weight",
        "model.embed_vision.embedding_projection.weight",
    )  # fmt: skip
    extra = {name: torch.zeros(2) for name in ignored}
    written = write(
        tmp_path, lambda stored: prefix + stored.removeprefix("model."), extra, multimodal,
        random_model(get_config(name)),
    )  # fmt: skip
    loaded = load_model(tmp_path)
    assert_same_weights(loaded, written)
    assert loaded.config.layer_types == get_config(name).layer_types


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-oss-tiny"])
def test_output_projection_of_its_own(tmp_path, name):
    model = write(tmp_path, model=random_model(get_config(name)))
    loaded = load_model(tmp_path)
    assert_same_weights(loaded, model)
    assert not torch.equal(loaded.lm_head.weight, loaded.embed_tokens.weight)
    write(tmp_path, config=lambda raw: raw | {"tie_word_embeddings": True}, model=model)
    assert load_model(tmp_path).lm_head is None  # the file says so, whatever it ships


def test_keys_and_values_of_shared_layers_are_dropped(tmp_path):
    """Some repositories ship them for layers that use another layer's."""
    extra = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.zeros(16)
        for layer in (6, 7, 8)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    model = write(tmp_path, extra=extra, model=random_model(get_config("gemma4-e-tiny")))
    assert_same_weights(load_model(tmp_path), model)
    extra = {"model.layers.5.self_attn.v_norm.weight": torch.zeros(16)}
    write(tmp_path, extra=extra, model=model)
    with pytest.raises(
        ValueError, match=r"unexpected \['model.layers.5.self_attn.v_norm.weight in model.safe"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_cut_off_file_is_named(tmp_path, keep):
    save_checkpoint(random_model(CONFIG), tmp_path, max_shard_bytes=50_000)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"path: expected a complete .*, got '.*{file.name}'"):
        load_model(tmp_path)


def test_unsupported_before_anything_is_read(tmp_path):
    """Neither files nor memory are touched for a model that cannot run."""
    write(tmp_path, config=lambda raw: raw | {"model_type": "mamba"})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotImplementedError, match=r"model_type: supported are .*got 'mamba'"):
        load_model(tmp_path)
    write(tmp_path, config=lambda raw: raw | {"dtype": "int8"})
    with pytest.raises(NotImplementedError, match=r"dtype: supported are .*'bfloat16'.*got 'int8'"):
        load_model(tmp_path)


def test_shards(tmp_path):
    model = random_model(CONFIG)
    save_checkpoint(model, tmp_path, max_shard_bytes=50_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and (tmp_path / INDEX_FILE).is_file()
    assert_same_weights(load_model(tmp_path), model)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=rf"path: expected the files \['{files[1]}'\]"):
        load_model(tmp_path)


def test_one_error_names_missing_unexpected_and_misshaped(tmp_path):
    save_checkpoint(random_model(CONFIG), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.layer_scalar"], tensors["model.norm.weight"]
    tensors["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(32, 64)  # this layer has k_eq_v
    tensors["model.layers.0.self_attn.k_norm.weight"] = torch.zeros(17)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    message = str(error.value)
    assert "missing ['layers.1.layer_scalar', 'norm.weight']" in message
    assert "unexpected ['model.layers.2.self_attn.v_proj.weight in model.safetensors']" in message
    assert (
        "misshaped ['model.layers.0.self_attn.k_norm.weight [17] (expected [16]) in model."
        in message
    )


def test_an_error_names_the_first_of_many_tensors(tmp_path):
    write(tmp_path, rename=lambda name: f"other.{name}")
    num = len(list(random_model(CONFIG).named_parameters()))
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    for what in ("missing", "unexpected"):
        names = str(error.value).partition(f"{what} [")[2].partition("]")
        assert names[0].count("'") == 2 * NUM_NAMED and names[2].startswith(
            f" and {num - NUM_NAMED} more"
        )


def test_dtype_comes_from_the_file_unless_given(tmp_path):
    model = write(tmp_path, model=random_model(CONFIG, dtype=torch.bfloat16))
    assert load_model(tmp_path).dtype == torch.bfloat16
    wide = load_model(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.norm.weight, model.norm.weight.float())
    write(tmp_path, config=lambda raw: multimodal(raw | {"dtype": "float32"}))
    assert load_model(tmp_path).dtype == torch.float32
    write(tmp_path, config=lambda raw: {k: v for k, v in raw.items() if k != "dtype"})
    assert load_model(tmp_path).dtype == torch.bfloat16


def test_stop_ids_of_generation_config_win(tmp_path):
    write(tmp_path)
    assert load_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert load_config(tmp_path).eos_token_ids == (1, 106)


def test_no_directory(tmp_path):
    with pytest.raises(ValueError, match=r"path: expected a directory with a config\.json"):
        load_config(tmp_path / "absent")


def test_random_weights_follow_the_seed():
    assert_same_weights(random_model(CONFIG, seed=3), random_model(CONFIG, seed=3))
    a, b = random_model(CONFIG, seed=3), random_model(CONFIG, seed=4)
    for (name, first), second in zip(a.named_parameters(), b.parameters(), strict=True):
        assert not torch.equal(first, second), name
        assert first.numel() == 1 or first.std() > 0, name  # a constant could hide a missing rule


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_equal_transformers(oracle_root, name):
    model = build_model(CONFIGS[name], device="meta", dtype=torch.bfloat16)
    ours = {
        key if key == "lm_head.weight" else f"model.{key}": list(weight.shape)
        for key, weight in model.named_parameters()
    }
    assert ours == json.loads((oracle_root / f"{name}.json").read_text())


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
