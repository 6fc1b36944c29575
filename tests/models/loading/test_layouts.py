"""Published directories: each loads with transformers' logits, or one line refuses it.

`tests.models.families.test_parity` loads what transformers saves.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.config.hf import from_hf, to_hf
from quire.models.config.named import get_config
from quire.models.engine.memory import weight_bytes
from quire.models.loading.checkpoint import INDEX_FILE, NUM_NAMED
from quire.models.loading.gguf import unpack
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models import v4_release
from tests.support.models.quantized import write_fp8, write_mxfp4
from tests.support.models.tolerance import tolerance

IDS = torch.randint(3, 259, (60,), generator=torch.Generator().manual_seed(0))
FILE, GGUF = "model.safetensors", "tiny.gguf"


def plain(name, exact=(), **keys):
    """config.json and tensors of a random model, by transformers' names; exact: other values, by
    the model's.
    """
    model = random_model(from_hf(to_hf(get_config(name)) | keys))
    tensors = dict(model.named_parameters()) | dict(exact)
    stored = {n if n == "lm_head.weight" else f"model.{n}": w for n, w in tensors.items()}
    mine = {n: w.detach().clone() for n, w in stored.items() if not n.startswith("model.mtp.")}
    return to_hf(model.config) | {"dtype": "float32"}, mine


def save(path, config, tensors, num_files=1):
    (path / "config.json").write_text(json.dumps(config))
    names = [FILE] if num_files == 1 else [f"model-{i}.safetensors" for i in range(num_files)]
    files = {name: names[i % num_files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: w for n, w in tensors.items() if files[n] == file}, path / file)
    if num_files > 1:
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


# Each of these writes a directory, and returns transformers' configuration and its weights.


def write_plain(path, name, keys=(), extra=(), num_files=1, dtype="float32"):
    config, tensors = plain(name, **dict(keys))
    stored = {n: w.to(getattr(torch, dtype)) for n, w in tensors.items()}
    more = {n: torch.zeros(16) for n in extra}
    save(path, config | {"dtype": dtype}, stored | more, num_files)
    return config, {n: w.float() for n, w in stored.items()}


def write_wrapped(path, name, prefix):
    """Text under a prefix, beside other towers and an output projection that is tied."""
    config, tensors = plain(name)
    names = (
        "lm_head.weight", "language_model.lm_head.weight", "lm_head.weight_scale",
        "vision_tower.layer.weight", "model.vision_tower.layer.weight",
        "model.audio_tower.layer.weight", "multi_modal_projector.weight",
        "model.vision_embedder.pos_embedding", "model.embed_audio.embedding_projection.weight",
        "model.embed_vision.embedding_projection.weight",
    )  # fmt: skip
    whole = {"model_type": get_config(name).family, "text_config": config, "vision_config": {}}
    renamed = {prefix + n.removeprefix("model."): w for n, w in tensors.items()}
    save(path, whole, renamed | {n: torch.zeros(2) for n in names})
    return config, tensors


def write_older(path):
    """Keys as they were before transformers 4.43; files are links, as in Hugging Face's cache."""
    (path / "blobs").mkdir()
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    config, tensors = write_plain(path / "blobs", "llama-tiny", extra=[inverse], dtype="float16")
    config = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    config |= {
        "rope_theta": 5e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "float16",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / FILE).symlink_to(path / "blobs" / FILE)
    return config, tensors


def write_fp8_of(path, name, *layout):
    return plain(name, write_fp8(path, name, *layout))


def write_mxfp4_of(path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_mxfp4(path)
    stored, exact = load_file(path / FILE), {}
    for name in [n.removesuffix("_blocks") for n in stored if n.endswith("_blocks")]:
        blocks = (stored[f"{name}_blocks"], stored[f"{name}_scales"])
        values = convert_moe_packed_tensors(*blocks, dtype=torch.float32)
        exact[name.removeprefix("model.")] = values.contiguous()
    return plain("gpt-oss-tiny", exact, intermediate_size=64)


def write_v4(path, experts=None, e8m0_scales=True, edit=None, model=None):
    model = model or random_model(v4_release.CONFIG)
    path.rmdir()
    exact = v4_release.write_release(path, model, experts, e8m0_scales, edit=edit)
    config = to_hf(replace(model.config, dspark=None, num_mtp_layers=0))
    return config, v4_release.of_transformers(model, exact)


def with_copies(stored):
    """Copies of the tensors that drafters share with the trunk."""
    stored["mtp.0.emb.tok_emb.weight"] = stored["embed.weight"].clone()
    stored["mtp.0.head.weight"] = stored["head.weight"].clone()


def write_v4_of_0731(path, edit=None):
    """The keys of DeepSeek-V4-Flash-0731: one drafter layer is counted, and three are there."""
    written = write_v4(path, "fp8", edit=edit, model=v4_release.with_dspark())
    v4_release.say_ratios(path, 1)
    return written


def write_v4_of_transformers(path):
    """As transformers saves it: a mixture of both schemes of names."""
    config, tensors = plain("deepseek-v4-tiny")
    theirs(config, tensors).save_pretrained(path)
    return config, tensors


def write_gguf(path, case, kind):
    gguf_files = pytest.importorskip("tests.support.models.gguf_files", exc_type=ImportError)
    model = gguf_files.make(case, kind)
    return model.config.to_dict(), gguf_files.write(path / GGUF, model, kind)


SHARED_KEYS = [f"model.layers.6.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")]
TIED = {"tie_word_embeddings": True}
# By layout: what writes it, and its arguments.
PLAIN = {
    "Gemma-3, multimodal as it was saved": (write_wrapped, "gemma3-tiny", "language_model.model."),
    "Gemma-3, multimodal as it is saved": (write_wrapped, "gemma3-tiny", "model.language_model."),
    "Gemma-4 without k_eq_v": (write_plain, "gemma4-tiny", {"attention_k_eq_v": False}),
    "Gemma-4 E": (write_wrapped, "gemma4-e-tiny", "language_model."),
    "Gemma-4 E, with keys of layers that share them": (write_plain, "gemma4-e-tiny", {}, SHARED_KEYS),
    "Gemma-4 MoE, names without a prefix": (write_wrapped, "gemma4-moe-tiny", ""),
    "DeepSeek-V4, as transformers saves it": (write_v4_of_transformers,),
    "DeepSeek-V4, release names": (write_v4, None, True, with_copies),
    "DeepSeek-V4-0731, trunk alone": (write_v4_of_0731, v4_release.without_drafters),
    "gpt-oss, bf16": (write_plain, "gpt-oss-tiny", {}, (), 1, "bfloat16"),
    "Llama, tied, five files with an index": (write_plain, "llama-tiny", TIED, (), 5),
    "Llama, tied, with an output projection": (write_plain, "llama-tiny", TIED, ["lm_head.weight"]),
    "Llama, older keys, fp16, links": (write_older,),
    "Llama, GGUF F32": (write_gguf, "llama", "F32"),
    "Llama, scaled RoPE, GGUF F16": (write_gguf, "llama-rope", "F16"),
    "Gemma-3, linear RoPE, GGUF BF16": (write_gguf, "gemma3-linear", "BF16"),
    "Gemma-3, GGUF Q4_0": (write_gguf, "gemma3", "Q4_0"),
    "Llama, tied, GGUF Q4_1": (write_gguf, "llama-tied", "Q4_1"),
    "Gemma-3, GGUF Q5_0": (write_gguf, "gemma3", "Q5_0"),
    "Gemma-3, GGUF Q8_0": (write_gguf, "gemma3", "Q8_0"),
    "Llama, GGUF Q4_K": (write_gguf, "llama", "Q4_K"),
    "Llama, tied, GGUF Q5_K": (write_gguf, "llama-tied", "Q5_K"),
    "Llama, scaled RoPE, GGUF Q6_K": (write_gguf, "llama-rope", "Q6_K"),
}  # fmt: skip
# These are also loaded with weights that stay as they are stored.
QUANTIZED = {
    "Gemma-3, fp8 by block": (write_fp8_of, "gemma3-tiny", "_scale_inv", "fp8"),
    "Gemma-4 E, compressed-tensors fp8 by block": (write_fp8_of, "gemma4-e-tiny", "_scale", "compressed-tensors"),
    "Gemma-4 MoE, fp8 by block": (write_fp8_of, "gemma4-moe-tiny", "_scale_inv", "fp8"),
    "DeepSeek-V4, fp8 with E8M0 scales": (write_v4, "fp8"),
    "DeepSeek-V4, fp8 with fp32 scales": (write_v4, "fp8", False),
    "DeepSeek-V4, fp8 and fp4 experts": (write_v4, "fp4"),
    "DeepSeek-V4-0731, fp8, with DSpark": (write_v4_of_0731,),
    "gpt-oss, mxfp4": (write_mxfp4_of,),
    "Llama, fp8 by tensor": (write_fp8_of, "llama-tiny", "_scale", "fp8", "tensor", True),
    "Llama, fp8 by 32 rows": (write_fp8_of, "llama-tiny", "_scale", "fp8", "rows"),
    "Llama, fp8 by channel, flat scales": (write_fp8_of, "llama-tiny", "_scale", "fp8", "channel", True),
    "Llama, compressed-tensors fp8 by channel": (write_fp8_of, "llama-tiny", "_scale", "compressed-tensors", "channel"),
}  # fmt: skip


def theirs(config, tensors):
    """transformers' model with these weights, none missing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and (config.tie_word_embeddings or not missing)
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.parametrize("layout", PLAIN | QUANTIZED)
@torch.no_grad()
def test_loads(layout, tmp_path):
    write, *args = (PLAIN | QUANTIZED)[layout]
    path = tmp_path / "model"
    path.mkdir()
    expected = theirs(*write(path, *args))(IDS[None], use_cache=False).logits[0]
    if (path / GGUF).is_file():
        path = unpack(path / GGUF, path / "cache")
    model = load_model(path, dtype=torch.float32, fp8="dequantize")
    bound = tolerance(model)
    assert expected.std() > 10 * bound
    assert (model.full_forward(IDS) - expected).abs().max() <= bound
    if layout in QUANTIZED:
        kept = load_model(path, dtype=torch.float32, fp8="keep")
        assert weight_bytes(kept) < weight_bytes(model)
        assert (kept.full_forward(IDS) - expected).abs().max() <= bound


def edited(path, name, edit):
    write_plain(path, name)
    save_file(edit(load_file(path / FILE)), path / FILE)


def damaged(path, damage):
    """Five files with an index, of which something is absent or wrong."""
    write_plain(path, "llama-tiny", num_files=5)
    damage(path / "model-1.safetensors", path / INDEX_FILE)


def with_absent(file, index):
    data = json.loads(index.read_text())
    data["weight_map"]["model.absent.weight"] = file.name
    index.write_text(json.dumps(data))


# By what is wrong: what writes it, its arguments, and what the error says.
V_NORM = "model.layers.5.self_attn.v_norm.weight"
REFUSED = {
    "a norm of values of a layer that has none": (write_plain, "gemma4-e-tiny", {}, [V_NORM],
        rf"unexpected \['{V_NORM} in"),
    "vision tensors alone": (edited, "gemma3-tiny",
        lambda tensors: {"vision_tower.layer.weight": torch.zeros(2)}, r"missing \['embed_tokens"),
    "another prefix": (edited, "gemma4-tiny",
        lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()},
        rf"missing \[('[^']+', ){{{NUM_NAMED - 1}}}'[^']+'\] and \d+ more; "
        r"unexpected \[('other\.[^']+'(, )?)+\] and \d+ more"),
    "integers that no key names": (edited, "llama-tiny",
        lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(2).int()},
        r"unexpected \['model\.layers\.0\.self_attn\.q_proj\.qw"),
    "a file that is missing": (damaged, lambda file, index: file.unlink(),
        r"expected the files \['model-1\.safetensors'\]"),
    "files without an index": (damaged, lambda file, index: index.unlink(),
        r"the files \['model\.safe.*, got \['model-0\.safetensors', "),
    "a file that is cut off": (damaged,
        lambda file, index: file.write_bytes(file.read_bytes()[:1000]),
        r"complete safetensors file, got '.*model-1\.safe"),
    "a tensor that only the index has": (damaged, with_absent,
        r"got none of \['model\.absent\.weight'\]"),
    "a dtype": (save, to_hf(get_config("llama-tiny")) | {"dtype": "int8"}, {},
        "dtype: supported are .*'bfloat16'.*got 'int8'"),
    "a directory of nothing": (lambda path: None, r"expected a directory with a config\.json"),
}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_refused(layout, tmp_path):
    write, *args, message = REFUSED[layout]
    write(tmp_path, *args)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        load_model(tmp_path)
    assert re.search(message, str(error.value)), error.value
    assert "\n" not in str(error.value)
