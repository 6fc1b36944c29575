"""Checkpoints in fp8 and mxfp4, and what loading costs in memory."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.engine import memory
from quire.models.layers.basic import Linear
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models.quantized import write_fp8

FP8 = torch.float8_e4m3fn


def test_fp8_is_kept_where_the_converted_model_does_not_fit(tmp_path, monkeypatch):
    write_fp8(tmp_path, "gemma3-tiny", "_scale", "compressed-tensors")
    num_bytes = sum(w.numel() * w.element_size() for w in load_model(tmp_path).parameters())

    def kept(free):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        return any(
            isinstance(m, Linear) and m.scale is not None for m in load_model(tmp_path).modules()
        )

    assert not kept(1.3 * num_bytes) and kept(1.2 * num_bytes)
    with pytest.raises(ValueError, match=r"fp8: expected one of .*'auto'.*, got 'yes'"):
        load_model(tmp_path, fp8="yes")


KV_SCALES = {
    "attention": ("k_scale", "v_scale"),
    "projection": ("k_proj.k_scale", "v_proj.v_scale"),
    "output": ("k_proj.output_scale", "v_proj.output_scale"),
    "both": ("kv_scale",),
    "inner": ("attn.k_scale", "attn.v_scale"),
}


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


@pytest.mark.parametrize("names", KV_SCALES.values(), ids=KV_SCALES)
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
        ({"v_scale": 0}, r"a finite number above 0, got 0\.0 of model\.layers\.0\.self_attn\.v_scale"),
    ],
)  # fmt: skip
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
    large = replace(
        get_config("gemma3-tiny"), hidden_size=512, intermediate_size=2048, vocab_size=8192
    )
    save_checkpoint(random_model(get_config("gemma3-tiny")), tmp_path / "warm")
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
