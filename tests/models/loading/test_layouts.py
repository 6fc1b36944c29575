"""Directories as they are published: each loads, with the logits of transformers on what its bytes stand for, or one line names what is not supported."""

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models import LLM, SamplingParams
from quire.models.config.hf import from_hf, to_hf
from quire.models.config.named import get_config
from quire.models.families.gemma4_assistant import Assistant, AssistantKeys, load_assistant
from quire.models.llm import make_drafter
from quire.models.loading.checkpoint import INDEX_FILE
from quire.models.loading.gguf import unpack
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models import v4_release
from tests.support.models.quantized import write_fp8, write_mxfp4
from tests.support.models.tolerance import tolerance

transformers = pytest.importorskip("transformers")
IDS = torch.randint(3, 259, (60,), generator=torch.Generator().manual_seed(0))
FILE = "model.safetensors"


def plain(name, exact=(), **keys):
    """config.json and tensors of a random model, by transformers' names; exact: other values, by the model's."""
    model = random_model(from_hf(to_hf(get_config(name)) | keys))
    tensors = dict(model.named_parameters()) | dict(exact)
    stored = {n if n == "lm_head.weight" else f"model.{n}": w for n, w in tensors.items()}
    mine = {n: w.detach().clone() for n, w in stored.items() if not n.startswith("model.mtp.")}
    return to_hf(model.config) | {"dtype": "float32"}, mine


def save(path, config, tensors, num_files=1):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(tensors, path / FILE)
        return
    files = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: w for n, w in tensors.items() if files[n] == file}, path / file)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


# Each of these writes a directory, and returns transformers' configuration and its weights.


def write_plain(path, name, num_files=1, extra=(), **keys):
    config, tensors = plain(name, **keys)
    save(path, config, tensors | {n: torch.zeros(16) for n in extra}, num_files)
    return config, tensors


def write_wrapped(path, name, prefix, model_type, extra=(), **keys):
    """Text under a prefix, beside other towers and an output projection that is tied."""
    config, tensors = plain(name, **keys)
    names = (
        "lm_head.weight", "language_model.lm_head.weight", "lm_head.weight_scale",
        "vision_tower.layer.weight", "model.vision_tower.layer.weight",
        "model.audio_tower.layer.weight", "multi_modal_projector.weight",
        "model.vision_embedder.pos_embedding", "model.embed_audio.embedding_projection.weight",
        "model.embed_vision.embedding_projection.weight", *extra,
    )  # fmt: skip
    renamed = {prefix + n.removeprefix("model."): w for n, w in tensors.items()}
    whole = {"model_type": model_type, "text_config": config, "vision_config": {"hidden_size": 8}}
    save(path, whole, renamed | {n: torch.zeros(2) for n in names})
    return config, tensors


def write_older(path):
    """Keys and tensors as they were before transformers 4.43, in fp16."""
    config, tensors = plain("llama-tiny")
    config = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    config |= {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}  # fmt: skip
    tensors = {name: weight.half() for name, weight in tensors.items()}
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save(path, config, tensors | frequencies)
    return config, {name: weight.float() for name, weight in tensors.items()}


def write_links(path):
    """As Hugging Face's cache has them."""
    written = write_plain(path / "blobs", "llama-tiny")
    for file in ("config.json", FILE):
        (path / file).symlink_to(path / "blobs" / file)
    return written


def write_fp8_of(path, name, suffix, method, scales="block"):
    exact = write_fp8(path, name, suffix, method, scales)
    if scales == "block":
        edit_config(path, quantization_config={"quant_method": method, "weight_block_size": [32, 32]})  # fmt: skip
    return plain(name, exact)


def write_mxfp4_of(path):
    return plain("gpt-oss-tiny", write_mxfp4(path), intermediate_size=64)


def write_v4(
    path, experts=None, e8m0=True, edit=None, make=lambda: random_model(v4_release.CONFIG)
):
    model = make()
    exact = v4_release.write_release(path / "release", model, experts, e8m0, edit=edit)
    for file in (path / "release").iterdir():
        file.rename(path / file.name)
    tensors = v4_release.of_transformers(model, exact)
    return to_hf(random_model(v4_release.CONFIG).config), tensors


def with_copies(stored):
    """What drafters share with the trunk, once more."""
    stored["mtp.0.emb.tok_emb.weight"] = stored["embed.weight"].clone()
    stored["mtp.0.head.weight"] = stored["head.weight"].clone()


def write_v4_of_0731(path, edit=None):
    """The keys that DeepSeek-V4-Flash-0731 has: one layer of its drafter is counted, and three are there."""
    config, tensors = write_v4(path, "fp8", edit=edit, make=v4_release.with_dspark)
    raw = json.loads((path / "config.json").read_text())
    del raw["layer_types"]
    raw |= {"compress_ratios": [0, 4, 128, 0, 0, 0], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(raw))
    return config, tensors


def write_v4_of_transformers(path):
    """As transformers saves it: a mixture of both schemes of names."""
    config, tensors = plain("deepseek-v4-tiny")
    theirs(config, tensors).save_pretrained(path)
    return config, tensors


def write_gguf(path, case, kind):
    gguf_files = pytest.importorskip("tests.support.models.gguf_files", exc_type=ImportError)
    model = gguf_files.make(case, kind)
    return model.config.to_dict(), gguf_files.write(path / "tiny.gguf", model, kind)


def edit_config(path, **keys):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


SHARED_KEYS = [f"model.layers.{i}.self_attn.{n}.weight" for i in (6, 8) for n in ("k_proj", "v_proj", "k_norm")]  # fmt: skip
SCALED = ("dequantize", "keep")
# What writes it, and the ways to load it.
LOADS = {
    "Gemma-3": (partial(write_plain, name="gemma3-tiny"), ["auto"]),
    "Gemma-3, as Gemma3ForConditionalGeneration saved it": (
        partial(write_wrapped, name="gemma3-tiny", prefix="language_model.model.", model_type="gemma3"), ["auto"]),
    "Gemma-3, as Gemma3ForConditionalGeneration saves it": (
        partial(write_wrapped, name="gemma3-tiny", prefix="model.language_model.", model_type="gemma3"), ["auto"]),
    "Gemma-3, fp8 blocks": (
        partial(write_fp8_of, name="gemma3-tiny", suffix="_scale_inv", method="fp8"), SCALED),
    "Gemma-4": (
        partial(write_wrapped, name="gemma4-tiny", prefix="model.language_model.", model_type="gemma4"), ["auto"]),
    "Gemma-4 without k_eq_v": (partial(write_plain, name="gemma4-tiny", attention_k_eq_v=False), ["auto"]),
    "Gemma-4 E, with towers": (
        partial(write_wrapped, name="gemma4-e-tiny", prefix="language_model.", model_type="gemma4"), ["auto"]),
    "Gemma-4 E, keys of layers that share them": (
        partial(write_plain, name="gemma4-e-tiny", extra=SHARED_KEYS), ["auto"]),
    "Gemma-4 E, compressed-tensors fp8": (
        partial(write_fp8_of, name="gemma4-e-tiny", suffix="_scale", method="compressed-tensors"), SCALED),
    "Gemma-4 MoE, names without a prefix": (
        partial(write_wrapped, name="gemma4-moe-tiny", prefix="", model_type="gemma4"), ["auto"]),
    "Gemma-4 MoE, fp8 blocks": (
        partial(write_fp8_of, name="gemma4-moe-tiny", suffix="_scale_inv", method="fp8"), SCALED),
    "DeepSeek-V4, transformers' names": (partial(write_plain, name="deepseek-v4-tiny"), ["auto"]),
    "DeepSeek-V4, as transformers saves it": (write_v4_of_transformers, ["auto"]),
    "DeepSeek-V4, release names": (partial(write_v4, edit=with_copies), ["auto"]),
    "DeepSeek-V4, fp8 with E8M0 scales": (partial(write_v4, experts="fp8"), SCALED),
    "DeepSeek-V4, fp8 with fp32 scales": (partial(write_v4, experts="fp8", e8m0=False), SCALED),
    "DeepSeek-V4, fp4 experts": (partial(write_v4, experts="fp4"), SCALED),
    "DeepSeek-V4-0731, with DSpark": (write_v4_of_0731, SCALED),
    "DeepSeek-V4-0731, trunk alone": (
        partial(write_v4_of_0731, edit=v4_release.without_drafters), ["auto"]),
    "gpt-oss": (partial(write_plain, name="gpt-oss-tiny"), ["auto"]),
    "gpt-oss, mxfp4": (write_mxfp4_of, SCALED),
    "Llama": (partial(write_plain, name="llama-tiny"), ["auto"]),
    "Llama, tied": (partial(write_plain, name="llama-tiny", tie_word_embeddings=True), ["auto"]),
    "Llama, tied, with an output projection": (
        partial(write_plain, name="llama-tiny", tie_word_embeddings=True, extra=["lm_head.weight"]), ["auto"]),
    "Llama, five files with an index": (partial(write_plain, name="llama-tiny", num_files=5), ["auto"]),
    "Llama, older keys, fp16": (write_older, ["auto"]),
    "Llama, links of a cache": (write_links, ["auto"]),
    "Llama, fp8 by tensor": (
        partial(write_fp8_of, name="llama-tiny", suffix="_scale", method="fp8", scales="tensor"), SCALED),
    "Llama, compressed-tensors fp8 by channel": (
        partial(write_fp8_of, name="llama-tiny", suffix="_scale", method="compressed-tensors", scales="channel"), SCALED),
    "Llama, fp8 blocks": (
        partial(write_fp8_of, name="llama-tiny", suffix="_scale_inv", method="fp8"), SCALED),
} | {
    f"GGUF {kind}, {case}": (partial(write_gguf, case=case, kind=kind), ["auto"])
    for kind, case in {
        "F32": "llama", "F16": "llama-rope", "BF16": "gemma3-linear", "Q4_0": "gemma3", "Q4_1": "llama-tied",
        "Q5_0": "gemma3", "Q8_0": "gemma3", "Q4_K": "llama", "Q5_K": "llama-tied", "Q6_K": "llama-rope",
    }.items()
}  # fmt: skip


def theirs(config, tensors):
    """transformers' model with these weights, none missing."""
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and (
        not missing or config.tie_word_embeddings
    )  # fmt: skip
    return model.eval()


@pytest.mark.parametrize("layout", LOADS)
@torch.no_grad()
def test_loads(layout, tmp_path):
    write, modes = LOADS[layout]
    expected = theirs(*write(tmp_path))(IDS[None], use_cache=False).logits[0]
    path, bound = tmp_path, None
    if (tmp_path / "tiny.gguf").is_file():
        path = unpack(tmp_path / "tiny.gguf", tmp_path / "cache")
    for mode in modes:
        model = load_model(path, dtype=torch.float32, fp8=mode)
        bound = bound or tolerance(model)
        assert expected.std() > 10 * bound
        assert (model.full_forward(IDS) - expected).abs().max() <= bound


@torch.no_grad()
def test_gemma4_with_its_assistant(tmp_path):
    """Two directories: the tokens are transformers' of the target alone, and drafts are among them."""
    config, tensors = write_plain(tmp_path / "target", "gemma4-tiny")
    keys = AssistantKeys(backbone_hidden_size=64)
    text = from_hf(config | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]})  # fmt: skip
    assistant = Assistant(keys, text, device=torch.device("cpu"), dtype=torch.float32)
    for weight in assistant.parameters():
        weight.normal_(0.0, weight.shape[-1] ** -0.5)
    names = ("model.", "")  # layers and norms, projections
    stored = {names["projection.weight" in n] + n: w.detach() for n, w in assistant.named_parameters()}  # fmt: skip
    whole = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64, "text_config": to_hf(text)}  # fmt: skip
    save(tmp_path / "assistant", whole, stored)
    expected = theirs(config, tensors).generate(
        IDS[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    drafter = partial(make_drafter, str(tmp_path / "assistant"), 3)
    llm = LLM(tmp_path / "target", dtype="float32", device="cpu", drafter=drafter)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([IDS.tolist()], params, progress=False)
    assert list(output.token_ids) == expected[0, len(IDS) :].tolist()
    assert llm.engine.totals.num_drafts > 0
    loaded = dict(load_assistant(tmp_path / "assistant", dtype=torch.float32).named_parameters())
    assert all(torch.equal(loaded[n], w) for n, w in assistant.named_parameters())
    with pytest.raises(ValueError, match=r"drafter: expected one of .*or a directory, got 'none'"):
        make_drafter("none", 3, None)


# A directory that is refused: the model, keys of its config.json, what happens to its tensors, and
# what the error says.
KEYS = {
    "GPTQ": ("llama-tiny", {"quantization_config": {"quant_method": "gptq"}},
        r"quantization_config\.quant_method: supported is 'fp8' or .*, got 'gptq'"),
    "AWQ": ("gemma3-tiny", {"quantization_config": {"quant_method": "awq"}}, "quant_method.*got 'awq'"),
    "bitsandbytes": ("gpt-oss-tiny", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quant_method.*got 'bitsandbytes'"),
    "compressed-tensors of int4": ("gemma4-tiny", {"quantization_config": {"quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}},
        "group_0.weights.type: supported is 'float', got 'int'; .*num_bits: supported is 8, got 4"),
    "AWQ of DeepSeek-V4": ("deepseek-v4-tiny", {"quantization_config": {"quant_method": "awq"}}, "got 'awq'"),
    "unknown model_type": ("llama-tiny", {"model_type": "mamba"}, r"model_type: supported are \[.*got 'mamba'"),
    "vision alone": ("llama-tiny", {"model_type": "siglip_vision_model"}, "got 'siglip_vision_model'"),
    "EmbeddingGemma": ("gemma3-tiny", {"use_bidirectional_attention": True},
        "use_bidirectional_attention: .*got True"),
    "ModelOpt": ("llama-tiny", {"quantization_config": {"quant_method": "modelopt"}}, "got 'modelopt'"),
    "Gemma-3n": ("gemma4-e-tiny", {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        "'gemma3n': .*AltUp"),
    "Gemma-3n, text": ("gemma4-e-tiny", {"model_type": "gemma3n_text"}, "'gemma3n_text': .*AltUp"),
    "Gemma-4's assistant": ("gemma4-tiny", {"model_type": "gemma4_assistant", "text_config": {}},
        "'gemma4_assistant': a drafter.*give it as drafter"),
    "Gemma-4's unified assistant": ("gemma4-tiny", {"model_type": "gemma4_unified_assistant"}, "a drafter"),
    "DeepSeek-V4.1": ("deepseek-v4-tiny", {"model_type": "deepseek_v41"},
        "'deepseek_v41': .*compress_ratios of 1 and 2, two-level top-k and Engram"),
    "DeepSeek-V4.1, text": ("deepseek-v4-tiny", {"model_type": "deepseek_v41_text"}, "of DeepSeek-V4.1"),
    "RoPE of a type": ("llama-tiny", {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
        "rope_type: .*got 'longrope'"),
    "dynamic RoPE of an older file": ("gemma3-tiny", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
        "got 'dynamic'"),
    "biases of Llama's MLP": ("llama-tiny", {"mlp_bias": True}, "mlp_bias: supported is False, got True"),
    "embeddings of Gemma that are not tied": ("gemma3-tiny", {"tie_word_embeddings": False},
        "tie_word_embeddings: supported is True, got False"),
    "a dtype": ("llama-tiny", {"dtype": "int8"}, "dtype: supported are .*'bfloat16'.*got 'int8'"),
}  # fmt: skip


def assert_refused(path, message):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        load_model(path)
    assert re.search(message, str(error.value)), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", KEYS)
def test_keys_are_refused_before_a_file_is_read(layout, tmp_path):
    name, keys, message = KEYS[layout]
    save(tmp_path, to_hf(get_config(name)) | keys, {})
    (tmp_path / FILE).unlink()
    assert_refused(tmp_path, message)


def edit_tensors(path, name, edit):
    write_plain(path, name)
    tensors = load_file(path / FILE)
    edit(tensors)
    save_file(tensors, path / FILE)


def misfits(tensors):
    del tensors["model.layers.1.layer_scalar"], tensors["model.norm.weight"]
    tensors["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(32, 64)  # this layer has k_eq_v
    tensors["model.layers.0.self_attn.k_norm.weight"] = torch.zeros(17)


def vision_alone(tensors):
    tensors.clear()
    tensors["vision_tower.layer.weight"] = torch.zeros(2)


def packed(tensors):
    for name in [n for n in tensors if n.endswith("q_proj.weight")]:
        prefix = name.removesuffix("weight")
        tensors[f"{prefix}qweight"] = torch.zeros(8, 64, dtype=torch.int32)
        del tensors[name]


def nothing(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][5, 7] = float("nan")


def without_scales(path):
    write_fp8(path, "llama-tiny", "_scale", "fp8")
    tensors = load_file(path / FILE)
    save_file(
        {n: w for n, w in tensors.items() if not n.endswith("up_proj.weight_scale")}, path / FILE
    )


def two_formats(path):
    def edit(stored):
        for name in [n for n in stored if n.startswith("layers.0.ffn.experts.1.")]:
            if name.endswith("weight"):
                stored[name] = torch.zeros(stored[name].shape[0], 2 * stored[name].shape[1])

    write_v4(path, "fp4", edit=edit)


def lacking(path, what):
    """Five files with an index, of which something is absent or wrong."""
    write_plain(path, "llama-tiny", num_files=5)
    file = path / "model-1.safetensors"
    if what == "file":
        file.unlink()
    elif what == "index":
        (path / INDEX_FILE).unlink()
    elif what == "end":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        index = json.loads((path / INDEX_FILE).read_text())
        index["weight_map"]["model.absent.weight"] = "model-1.safetensors"
        (path / INDEX_FILE).write_text(json.dumps(index))


REFUSED = {
    "tensors that do not fit": (partial(edit_tensors, name="gemma4-tiny", edit=misfits),
        r"missing \['layers\.1\.layer_scalar', 'norm\.weight'\]; unexpected \['model\.layers\.2\.self_attn\.v_proj\."
        r"weight in model\.safetensors'\]; misshaped \['model\.layers\.0\.self_attn\.k_norm\.weight \[17\] \(expected "
        r"\[16\]\) in model\."),
    "a norm of values of a layer that has none": (
        partial(write_plain, name="gemma4-e-tiny", extra=["model.layers.5.self_attn.v_norm.weight"]),
        r"unexpected \['model\.layers\.5\.self_attn\.v_norm\.weight in model\.safetensors'\]"),
    "vision tensors alone": (partial(edit_tensors, name="gemma3-tiny", edit=vision_alone), r"missing \['embed_tokens"),
    "integers of GPTQ that no key names": (partial(edit_tensors, name="llama-tiny", edit=packed),
        r"unexpected \['model\.layers\.0\.self_attn\.q_proj\.qweight in"),
    "a NaN": (partial(edit_tensors, name="llama-tiny", edit=nothing), r"'model\.layers\.0\.mlp\.up_proj\.weight'.*\[5, 7\]"),
    "fp8 without scales": (without_scales, r"unscaled \['model\.layers\.0\.mlp\.up_proj\.weight in"),
    "experts in two formats": (two_formats, "experts: expected one format for all"),
    "a file that is missing": (partial(lacking, what="file"), r"expected the files \['model-1\.safetensors'\]"),
    "files without an index": (partial(lacking, what="index"),
        r"expected the files \['model\.safetensors'\] in .*, got \['model-0\.safetensors', "),
    "a file that is cut off": (partial(lacking, what="end"), r"complete safetensors file, got '.*model-1\.safe"),
    "a tensor that only the index has": (partial(lacking, what="tensor"), r"got none of \['model\.absent\.weight'\]"),
    "a directory of nothing": (lambda path: None, r"expected a directory with a config\.json"),
}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_refused(layout, tmp_path):
    write, message = REFUSED[layout]
    write(tmp_path)
    assert_refused(tmp_path, message)


def other_architecture(writer):
    writer.arch = "qwen2"
    writer.add_architecture()


def other_type(writer):
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)


@pytest.mark.parametrize(("edit", "message"), [
    (other_architecture, r"general\.architecture: supported are \['gemma3', 'llama'\], got 'qwen2'"),
    (other_type, r"type: supported are .*, got 'IQ4_NL' of tensor 'blk\.0\.ffn_up\.weight'"),
    (lambda writer: writer.add_uint16("split.count", 2), r"split\.count: supported is 1 file, got 2"),
    (lambda writer: None, r"expected metadata 'llama\.rope\.dimension_count'"),
    (lambda writer: writer.add_rope_dimension_count(32), r"expected a tensor 'token_embd\.weight'"),
])  # fmt: skip
def test_gguf_is_refused(edit, message, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        unpack(tmp_path / "x.gguf", tmp_path / "cache")
    assert "\n" not in str(error.value)
