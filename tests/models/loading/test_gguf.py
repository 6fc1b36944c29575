"""GGUF files against transformers: the same logits from the same quantized weights."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from quire.models.chat import find_chat
from quire.models.loading.gguf import GGUF_FILE, GGUFFile, unpack
from quire.models.loading.weights import load_model
from quire.models.tokenizer import FileTokenizer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(path: Path, model, kind: str = "F32") -> dict[str, torch.Tensor]:
    """Write a model of transformers, and return its weights after quantization, by their names."""
    config, arch = model.config, "gemma3" if "gemma" in model.config.model_type else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if arch == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    else:
        writer.add_rope_dimension_count(config.head_dim)
        if rope["rope_type"] == "llama3":
            plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
            writer.add_tensor(
                "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy()
            )
    writer.add_rope_freq_base(rope["rope_theta"])
    tokens = [f"<{i}>" for i in range(3)] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += list("▁abcd")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3] * 3 + [6] * 256 + [1] * 5)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3": gguf.MODEL_ARCH.GEMMA3}[arch],
        config.num_hidden_layers,
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    dequantized = {}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        # llama.cpp's converter: pairs of RoPE side by side, and 1 + weight of Gemma's norms.
        num_heads = heads.get(module.split(".")[-1]) if arch == "llama" else None
        value, one = weight, int(arch == "gemma3" and module.endswith("norm"))
        if num_heads:
            value = value.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        quant = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        packed = gguf.quantize((value + one).numpy(), quant)
        writer.add_tensor(names.get_name(module) + ".weight", packed, raw_dtype=quant)
        value = torch.from_numpy(gguf.dequantize(packed, quant)) - one
        if num_heads:
            value = value.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(value.shape)
        dequantized[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantized
    return dequantized


def make(case: str):
    """A random model of transformers."""
    torch.manual_seed(0)
    if case.startswith("llama"):
        rope = LLAMA3 if case == "llama-rope" else {"rope_type": "default", "rope_theta": 5e4}
        config = transformers.LlamaConfig(
            **SHAPE, rope_parameters=rope, tie_word_embeddings=case == "llama-tied"
        )
    else:
        full = (
            {"rope_type": "default"} if case == "gemma3" else {"rope_type": "linear", "factor": 8.0}
        )
        config = transformers.Gemma3TextConfig(
            **SHAPE, sliding_window=16, query_pre_attn_scalar=32,
            rope_parameters={
                "full_attention": {"rope_theta": 1e6} | full,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, mean=0.0 if "gemma" in case else 1.0, std=0.3)
    return model


@pytest.mark.parametrize("case, kind", [
    ("llama", "F32"), ("llama-tied", "Q4_1"), ("llama-rope", "F16"),
    ("gemma3", "Q8_0"), ("gemma3-linear", "BF16"), ("gemma3", "Q5_0"), ("gemma3", "Q4_0"),
])  # fmt: skip
@torch.no_grad()
def test_logits_are_those_of_transformers_with_the_dequantized_weights(case, kind, tmp_path):
    theirs = make(case)
    theirs.load_state_dict(write(tmp_path / "tiny.gguf", theirs, kind), strict=False)
    folder = unpack(tmp_path / "tiny.gguf", tmp_path / "cache")
    ours = load_model(folder, dtype=torch.float32)
    ids = torch.randint(3, 264, (1, 60))
    got = ours.full_forward(ids[0])
    torch.testing.assert_close(got, theirs(ids).logits[0], rtol=0, atol=1e-4)
    assert ours.config.eos_token_ids == (2,) and ours.config.bos_token_id == 1


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, make("llama"), "Q8_0")
    return path


def test_the_directory_is_written_once_and_has_the_tokenizer(file, tmp_path):
    folder = unpack(file, tmp_path)
    at = folder.stat().st_mtime_ns
    assert unpack(file, tmp_path) == folder and folder.stat().st_mtime_ns == at
    assert (folder / GGUF_FILE).resolve() == file
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.encode("abcd ab") == theirs("abcd ab").input_ids
    assert find_chat(folder).render([{"role": "user", "content": "Hi"}]) == "Hi"


def test_a_slice_is_a_part_of_the_tensor(file):
    with GGUFFile(file) as opened:
        name = "model.layers.1.self_attn.q_proj.weight"
        part = opened.get_slice(name)
        assert part.get_shape() == [128, 64]
        assert torch.equal(part[32:64], opened.get_tensor(name)[32:64])


def test_changed_bytes_of_the_header_are_refused_or_change_a_value(file, tmp_path):
    """Also lengths of 2**63: nothing is allocated by what a header claims."""
    data, rng = file.read_bytes(), random.Random(0)
    for i in range(400):
        changed = bytearray(data[: rng.randrange(20_000)] if i % 4 == 0 else data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(8_000, len(changed) or 1))
            changed[at : at + 8] = rng.choice(
                [rng.randbytes(1), struct.pack("<Q", 2**63), b"\xff" * 8]
            )
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            with GGUFFile(tmp_path / "x.gguf") as opened:
                opened.config()
        except (ValueError, NotImplementedError) as error:
            assert "x.gguf" in str(error)
