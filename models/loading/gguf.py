"""GGUF files: a model's configuration, tokenizer and quantized weights in one file.

`unpack` makes a directory that loads as a Hugging Face one, once per file; the weights stay where
they are, and `GGUFFile` reads them.

Source: llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.fields import naming, shown
from .gguf_header import Header, StoredTensor

GGUF_FILE = "model.gguf"
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
_FORMAT = 1  # of what `unpack` writes
_ROPE_FACTORS = "rope_freqs.weight"
_NEEDED = (
    "GGUF files need the packages gguf and transformers (pip install 'quire-attention[hf,gguf]')"
)

_MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Modules of the architectures that are supported, by their names in a file.
MODULES = {
    "llama": _MODULES | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _MODULES
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Keys of config.json, and those of the metadata without the architecture in front.
_CONFIG_KEYS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Files have the factor of each frequency; releases of Llama 3 differ in the largest one alone.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUFFile:
    """An open GGUF file, with those methods of safetensors' ``safe_open`` that loading uses.

    Tensors have their Hugging Face names and layouts, and are dequantized to float32.

    Raises:
        ImportError: without the package gguf.
        ValueError, NotImplementedError: as `Header`; a file of another architecture or without
            metadata that a model needs.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(_NEEDED) from error
        self.path = Path(path)
        with naming(self.path):
            header = self._read_header(gguf)
        self._tensors = {self._name(name): one for name, one in header.tensors.items()}
        self._rope_factors = self._tensors.pop(_ROPE_FACTORS, None)
        self._dequantize, self._kinds = gguf.dequantize, gguf.GGMLQuantizationType

    def _read_header(self, gguf: Any) -> Header:
        sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
        with open(self.path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = Header(self._data, sizes)
        self.metadata = header.metadata
        self.architecture = self._value("general.architecture")
        if self.architecture not in MODULES:
            raise NotImplementedError(
                f"general.architecture: supported are {sorted(MODULES)}, got {self.architecture!r}"
            )
        if (num_files := self._value("split.count", 1)) != 1:
            raise NotImplementedError(
                f"split.count: supported is 1 file, got {num_files}: join them with llama.cpp's "
                "gguf-split --merge"
            )
        for name, one in header.tensors.items():
            if (kind := gguf.GGMLQuantizationType(one.type).name) not in TYPES:
                raise NotImplementedError(
                    f"type: supported are {TYPES}, got {kind!r} of tensor {name!r}"
                )
        return header

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        """A tensor in float32."""
        tensor, module = self._read(self._tensors[name]), name.split(".")[-2]
        if self.architecture == "gemma3" and module.endswith("norm"):
            return tensor - 1  # a file has the whole factor
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        if self.architecture == "llama" and module in heads:
            # A file has both elements that RoPE rotates side by side.
            with naming(self.path):
                count = self._of_model(heads[module])
                if not isinstance(count, int) or count < 1 or len(tensor) % (2 * count):
                    raise ValueError(
                        f"{heads[module]}: expected heads of an even number of the {len(tensor)} "
                        f"rows of {name!r}, got {shown(count)}"
                    )
            pairs = tensor.unflatten(0, (count, -1, 2))
            return pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def config(self) -> dict[str, Any]:
        """The ``config.json`` of a Hugging Face checkpoint with these weights."""
        with naming(self.path):
            return self._config()

    def _config(self) -> dict[str, Any]:
        found = {ours: self._of_model(key, None) for ours, key in _CONFIG_KEYS.items()}
        config = {key: value for key, value in found.items() if value is not None}
        for key, value in config.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{key}: expected a number, got {shown(value)}")
        if self.architecture == "llama":
            config["model_type"] = "llama"
            config.setdefault("head_dim", self._of_model("rope.dimension_count"))
        else:
            config["model_type"] = "gemma3_text"
            scalar = self._of_model("attention.key_length")
            if self._of_model("block_count") == 62:  # of the 27B model, which no key names
                scalar = config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
            config["query_pre_attn_scalar"] = scalar
        if (scaling := self._rope_scaling()) is not None:
            config["rope_scaling"] = scaling
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ValueError("path: expected a tensor 'token_embd.weight'")
        special = "tokenizer.ggml.{}_token_id"
        stops = dict.fromkeys(
            self.metadata.get(special.format(name)) for name in ("eos", "eot", "eom")
        )
        return config | {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.metadata.get(special.format("bos")),
            "eos_token_id": [stop for stop in stops if stop is not None],
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if self._rope_factors is not None:
            return _LLAMA3_ROPE | {"factor": self._read(self._rope_factors).max().item()}
        kind = self._of_model("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise NotImplementedError(
                f"rope.scaling.type: supported are 'none' and 'linear', got {kind!r}"
            )
        factor = self._of_model("rope.scaling.factor") if kind == "linear" else None
        return None if factor is None else {"rope_type": kind, "factor": factor}

    def _read(self, stored: StoredTensor) -> Tensor:
        rows = np.frombuffer(self._data, np.uint8, stored.num_bytes, stored.start)
        rows = rows.reshape(math.prod(stored.shape[:-1]), -1)
        values = self._dequantize(rows, self._kinds(stored.type))
        return torch.from_numpy(np.array(values, np.float32)).reshape(stored.shape)

    def _name(self, name: str) -> str:
        """The Hugging Face name of a tensor; one that is not known stays."""
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if parts is None:
            return name
        layer, module, kind = parts.groups()
        if layer is None and module == "output":
            return f"lm_head.{kind}"
        module = MODULES[self.architecture].get(module)
        within = "model" if layer is None else f"model.layers.{layer}"
        return name if module is None else f"{within}.{module}.{kind}"

    def _of_model(self, key: str, *default: Any) -> Any:
        return self._value(f"{self.architecture}.{key}", *default)

    def _value(self, key: str, *default: Any) -> Any:
        value = self.metadata.get(key, *default)
        if value is None and not default:
            raise ValueError(f"path: expected metadata {key!r}, got none")
        return value


def unpack(file: Path, cache: Path | None = None) -> Path:
    """Write the configuration and the tokenizer of a GGUF file, unless they were written before.

    Args:
        cache: directory of such directories; default: that of huggingface_hub for assets.

    Returns:
        A directory that `quire.models.loading.weights.load_model` and `LLM` take.

    Raises:
        ImportError: without the packages gguf and transformers.
        ValueError, NotImplementedError: errors of `GGUFFile`, or no tokenizer that can be read.
    """
    file = file.resolve()
    with GGUFFile(file) as opened:
        config = opened.config()
    try:
        from huggingface_hub import cached_assets_path
        from transformers import AutoTokenizer, __version__
    except ImportError as error:
        raise ImportError(_NEEDED) from error
    at = file.stat()
    key = f"{file} {at.st_size} {at.st_mtime_ns} {__version__} {_FORMAT}"
    cache = cache or cached_assets_path("quire", namespace="gguf")
    target = cache / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder, "made")
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:  # transformers raises whatever a wrong array leads to
            raise ValueError(
                f"path: expected a tokenizer that transformers reads in {str(file)!r}, got "
                f"{type(error).__name__}: {error}"
            ) from error
        tokenizer.save_pretrained(made)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / GGUF_FILE).symlink_to(file)
        with suppress(OSError):  # another process was faster
            made.rename(target)
    return target
