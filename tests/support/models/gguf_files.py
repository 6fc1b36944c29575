"""GGUF files of random models, written from transformers' as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from . import oracle

SHAPE = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


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
        if quant.name in ("Q4_K", "Q5_K", "Q6_K"):
            packed = k_blocks(quant, value.shape)
        else:
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


def k_blocks(quant: gguf.GGMLQuantizationType, shape: torch.Size) -> np.ndarray:
    """Random blocks of 256 values of a kind that the package reads and does not write."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    blocks = np.random.default_rng(0).integers(0, 256, (shape.numel() // size, num_bytes), np.uint8)
    if quant.name == "Q6_K":
        scales, at = [1e-4], slice(-2, None)
    else:  # of the values, and of what is subtracted: half of the largest value
        scales, at = [3e-4, 3e-4 * (15 if quant.name == "Q5_K" else 7)], slice(0, 4)
    blocks[:, at] = np.array(scales, np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def make(case: str, kind: str = "F32"):
    """A random model of transformers, wide enough for the blocks of a kind."""
    config = SHAPE
    if kind.endswith("_K"):
        config = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    if case.startswith("llama"):
        rope = LLAMA3 if case == "llama-rope" else {"rope_type": "default", "rope_theta": 5e4}
        config = config | {"model_type": "llama", "tie_word_embeddings": case == "llama-tied"}
    else:
        scaling = {"rope_type": "linear", "factor": 8.0} if "linear" in case else {}
        rope = {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6} | scaling,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        config = config | {
            "model_type": "gemma3_text",
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
        }
    return oracle.make(config | {"rope_parameters": rope}, 0)
