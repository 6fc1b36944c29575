"""Models of a directory: their dtype and stop ids, what stays quantized, scales of a cache, and what loading costs; random ones."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.hf import load_config
from quire.models.config.named import CONFIGS, get_config
from quire.models.engine import memory
from quire.models.layers.basic import Linear
from quire.models.layers.moe import PackedExperts
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model, load_model
from tests.support.models import v4_release
from tests.support.models.quantized import write_fp8

CONFIG = get_config("gemma4-tiny")


def test_dtype_and_stop_ids_come_from_the_files_unless_given(tmp_path):
    model = random_model(CONFIG, dtype=torch.bfloat16)
    save_checkpoint(model, tmp_path)
    wide = load_model(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.norm.weight, model.norm.weight.float())
    raw = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "gemma4", "text_config": raw | {"dtype": "float32"}}
    absent = {key: value for key, value in raw.items() if key != "dtype"}
    for config, dtype in (
        (raw | {"dtype": "float16"}, torch.float16),
        (nested, torch.float32),
        (absent, torch.bfloat16),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_model(tmp_path).dtype == dtype
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


def is_packed(model):
    modules = list(model.layers[0].modules())
    scales = [m.scale for m in modules if isinstance(m, Linear) and m.scale is not None]
    return bool(scales) or any(isinstance(m, PackedExperts) for m in modules)


def test_weights_stay_quantized_where_the_converted_model_does_not_fit(tmp_path, monkeypatch):
    write_fp8(tmp_path / "gemma", "gemma3-tiny", "_scale", "compressed-tensors")
    v4_release.write_release(tmp_path / "v4", random_model(v4_release.CONFIG), "fp8")
    for name in ("gemma", "v4"):
        monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
        model = load_model(tmp_path / name)
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        monkeypatch.setattr(memory, "free_memory", lambda device, n=num_bytes: 1.2 * n)
        assert not is_packed(model) and is_packed(load_model(tmp_path / name))
        monkeypatch.setattr(memory, "free_memory", lambda device, n=num_bytes: 1.3 * n)
        assert not is_packed(load_model(tmp_path / name))
    with pytest.raises(ValueError, match=r"fp8: expected one of .*'auto'.*, got 'yes'"):
        load_model(tmp_path / "v4", fp8="yes")


def write_kv_scales(path, scales):
    """scales: {name behind ``self_attn.``: number or tensor}, the same in all layers but for their number, which is added."""
    model = random_model(get_config("gemma3-tiny"))
    save_checkpoint(model, path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(model.config.num_layers):
        for name, scale in scales.items():
            scale = torch.as_tensor(scale, dtype=torch.float32) + layer
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scale
    save_file(tensors, path / "model.safetensors")
    return model.config.num_layers


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("kv_scale",),
    ],
)
def test_scales_of_the_fp8_cache(tmp_path, names):
    num_layers = write_kv_scales(tmp_path, dict(zip(names, (0.5, [0.25]), strict=False)))
    scales = [(0.5 + i, (0.25 if len(names) == 2 else 0.5) + i) for i in range(num_layers)]
    model = load_model(tmp_path)
    assert model.kv_scales == scales
    cache = model.make_cache(
        base_block_size=None, kv_cache_dtype="fp8_per_tensor", drafter_layers=False
    ).allocate(4)
    assert [(c.k_scale, c.v_scale) for c in cache.layers] == scales


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": 1, "kv_scale": 1}, r"doubled .*layers\.0\.self_attn\.k.*_scale"),
        ({"k_scale": [1, 1]}, r"one number, got model\.layers\.0\.self_attn\.k_scale .*\[2\]"),
        ({"v_scale": 0}, r"a finite number above 0, got 0\.0 of model\.layers\.0\.self_attn\.v_sc"),
    ],
)
def test_scales_of_the_fp8_cache_that_are_refused(tmp_path, scales, message):
    write_kv_scales(tmp_path, scales)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


MEASURE = """
import ctypes, sys, torch
from quire.models.loading.weights import load_model
from safetensors import safe_open

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

load_model(sys.argv[1])  # what is imported on the way is not the weights'
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = status("VmRSS")
model = load_model(sys.argv[2])
total = sum(w.numel() * w.element_size() for w in model.parameters())
print(status("VmHWM") - before - total, total)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_host_memory_is_below_the_largest_shard(tmp_path):
    """Beside the weights themselves, loading has less than 1.2 times the largest file in memory, here a fifth of the model."""
    tiny = get_config("gemma3-tiny")
    large = replace(tiny, hidden_size=512, intermediate_size=2048, vocab_size=8192)
    save_checkpoint(random_model(tiny), tmp_path / "warm")
    save_checkpoint(random_model(large), tmp_path / "large")
    whole = tmp_path / "large" / "model.safetensors"
    save_torch_state_dict(load_file(whole), whole.parent, max_shard_size=25 * 2**20)
    whole.unlink(missing_ok=True)
    shard = max(f.stat().st_size for f in (tmp_path / "large").glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    extra, total = map(int, done.stdout.split())
    assert total > 4 * shard and extra < 1.2 * shard
