"""Wrong tensors of each kind in six checkpoints: an error names tensor and file."""

import functools
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.deepseek_v4.checkpoint import target
from quire.models.loading.checkpoint import INDEX_FILE
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models import v4_release
from tests.support.models.quantized import write_fp8, write_mxfp4

FILE = "model.safetensors"
BATCH = 20  # tensors that an error names
E8M0, BYTES = torch.float8_e8m0fnu, (torch.int8, torch.uint8)


def write_random(name, path):
    save_checkpoint(random_model(get_config(name)), path)


def write_v4(experts, path):
    path.rmdir()
    v4_release.write_release(path, random_model(v4_release.CONFIG), experts, num_files=1)
    (path / "model-00001-of-00001.safetensors").rename(path / FILE)
    (path / INDEX_FILE).unlink()


WRITERS = {
    "dense": functools.partial(write_random, "llama-tiny"),
    "moe": functools.partial(write_random, "gemma4-moe-tiny"),
    "fp8": lambda path: write_fp8(path, "gemma3-tiny", "_scale_inv", "fp8"),
    "mxfp4": write_mxfp4,
    "v4-fp8": functools.partial(write_v4, "fp8"),
    "v4-fp4": functools.partial(write_v4, "fp4"),
}


class Checkpoint:
    """A directory, its tensors, and one name of each kind."""

    def __init__(self, path):
        self.path, self.tensors = path, load_file(path / FILE)
        kinds = {re.sub(r"\d+", "#", name): name for name in sorted(self.tensors)}
        self.names = [name for name in kinds.values() if not name.endswith("input_scale")]
        # A drafter is a layer, and a little more.
        twins = {n for n in self.names if re.sub(r"^mtp\.\d+", "layers.2", n) in self.tensors}
        self.names = [n for n in self.names if n not in twins or not n.startswith("mtp.")]
        if torch.int8 in {tensor.dtype for tensor in self.tensors.values()}:
            self.names = [name for name in self.names if ".experts." in name]  # all else as in fp8

    def batches(self, wanted=lambda *_: True):
        """Names in few errors; one by one those of DeepSeek-V4 experts, which have one format."""
        names = [name for name in self.names if wanted(name, self.tensors[name])]
        alone = [name for name in names if ".ffn.experts." in name]
        names = [name for name in names if name not in alone]
        return [names[i : i + BATCH] for i in range(0, len(names), BATCH)] + [[n] for n in alone]

    def error(self, changed=(), absent=(), **options):
        """Words of the error for changed and absent tensors."""
        tensors = {n: t for n, t in (self.tensors | dict(changed)).items() if n not in absent}
        save_file({name: t.contiguous() for name, t in tensors.items()}, self.path / FILE)
        with pytest.raises((ValueError, NotImplementedError)) as error:
            load_model(self.path, **options)
        assert FILE in str(error.value) or absent
        return str(error.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By name, the directory of a checkpoint, which is written when it is first asked for."""

    @functools.cache
    def write(name):
        path = tmp_path_factory.mktemp(name)
        WRITERS[name](path)
        return path

    return write


@pytest.fixture(params=WRITERS)
def checkpoint(request, written, tmp_path):
    shutil.copytree(written(request.param), tmp_path, dirs_exist_ok=True)
    return Checkpoint(tmp_path)


SHAPES = {
    "one axis more": lambda tensor: tensor[None],
    "one row less": lambda tensor: tensor[:-1],
    "twice the rows": lambda tensor: torch.stack([tensor.view(torch.uint8)] * 2).view(tensor.dtype).flatten(0, 1),
    "empty": lambda tensor: tensor[:0],
    "no axis": lambda tensor: tensor.flatten()[0],
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(checkpoint, shape):
    for names in checkpoint.batches():
        changed = {name: SHAPES[shape](checkpoint.tensors[name]) for name in names}
        message = checkpoint.error(changed)
        assert "misshaped" in message
        for name, tensor in changed.items():
            assert name in message and f" {[*tensor.shape]} (exp" in message, message


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.complex64, torch.int16, torch.float8_e5m2]
)
def test_dtypes(checkpoint, dtype):
    """No format has these, but for bytes of fp4."""
    for names in checkpoint.batches(lambda _, t: dtype != torch.int8 or t.dtype not in BYTES):
        message = checkpoint.error(
            {name: torch.ones(checkpoint.tensors[name].shape).to(dtype) for name in names}
        )
        assert all(name in message for name in names), message


def is_scale(name):
    """Of quantised weights: some other tensors are called scales too."""
    return name.endswith(("_scale_inv", "_scales")) or bool(
        re.search(r"\.(w[123kqo]\w*|[eh]_proj)\.scale$", name)
    )


def test_missing_tensors(checkpoint):
    """Under the model's name for them, or that of the weights whose scales they are."""
    scales = [name for name in checkpoint.names if is_scale(name)]
    others = [name for name in checkpoint.names if name not in scales]
    for names in (others[:BATCH], others[BATCH:], scales[:BATCH], scales[BATCH:]):
        message = checkpoint.error(absent=names[:BATCH]) if names else ""
        for name in names[:BATCH]:
            ours = re.sub(r"^model\.|_(blocks|scales|scale_inv)$", "", name)
            ours = ours.replace(".scale", ".weight") if name in scales else ours
            assert ours in message or target(name).parameter in message, message
            assert re.search(r"(missing|unscaled) \[", message), message
            assert not (name in scales and "unexpected" in message), message


@pytest.mark.parametrize("other", ["file", "prefix"])
def test_tensors_that_are_there_twice(checkpoint, other):
    """In two shards, or under two names that mean the same."""
    is_v4 = "layers.0.attn.wkv.weight" in checkpoint.tensors
    prefix = "" if other == "file" else "model." if is_v4 else "language_model."
    for names in checkpoint.batches(lambda name, _: not name.endswith("_scales")):
        new = {prefix + name: checkpoint.tensors[name].clone() for name in names}
        save_file(new, checkpoint.path / "extra.safetensors")
        index = dict.fromkeys(checkpoint.tensors, FILE) | dict.fromkeys(new, "extra.safetensors")
        (checkpoint.path / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
        message = checkpoint.error()
        for name, again in zip(names, new, strict=True):
            assert f"{again} in extra.safetensors and {name} in {FILE}" in message, message


def broken(tensor, last):
    """The tensor with one bad element: no finite number, or no expert."""
    flat = tensor.clone().flatten()
    at = -1 if last else 0
    if tensor.element_size() == 1:
        code = 0x7F + 128 * last if tensor.dtype == torch.float8_e4m3fn else 0xFF
        flat.view(torch.uint8)[at] = code
    elif tensor.dtype == torch.int64:
        flat[at] = -1 if last else 4
    else:
        flat[at] = float("inf" if last else "nan")
    return flat.view(tensor.shape)


@pytest.mark.parametrize("checkpoint", ["dense", "moe", "mxfp4", "v4-fp4"], indirect=True)
@pytest.mark.slow
def test_weights_that_are_no_finite_numbers(checkpoint):
    """First and last element by turns, in each way to load."""
    for i, name in enumerate(checkpoint.names):
        tensor = checkpoint.tensors[name]
        if tensor.dtype == torch.int8 or name.endswith("_blocks"):
            continue  # every code of e2m1 is finite
        is_quantized = ".experts." in name and "scale" in name
        for mode in ("dequantize", "keep") if is_quantized else ("dequantize",):
            message = checkpoint.error({name: broken(tensor, i % 2)}, fp8=mode)
            value = re.sub(r"_?(scale_inv|scales|scale)$", "", name)
            words = r"expected (finite weights|indices in 0\.\.3)"
            assert value in message and re.search(words, message), message
            if "scale" not in name.rpartition(".")[2]:  # else where its block begins
                at = [n - 1 for n in tensor.shape] if i % 2 else [0] * tensor.ndim
                assert message.endswith(f" at {at}"), message


@pytest.mark.parametrize(
    ("dtype", "over"),
    [(torch.bfloat16, torch.finfo(torch.float32).max), (torch.float16, 7e4), (torch.float32, 1e39)],
)
def test_weights_that_overflow(written, tmp_path, dtype, over):
    """Finite in the file and infinite in the model's dtype."""
    shutil.copytree(written("dense"), tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / FILE), "model.layers.1.mlp.up_proj.weight"
    weight = tensors[name] = tensors[name].double()
    weight[5, 7] = largest = torch.finfo(dtype).max
    save_file(tensors, tmp_path / FILE)
    assert load_model(tmp_path, dtype=dtype).layers[1].mlp.up_proj.weight[5, 7] == largest
    weight[5, 7] = -over
    save_file(tensors, tmp_path / FILE)
    words = rf"got 1 in {dtype} .* of '{name}' \(F64\) .*; the first is -inf at \[5, 7\]"
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path, dtype=dtype)


V4_EXPERT = ("layers.2.ffn.experts.3.w2.weight", "layers.2.ffn.experts.3.w2.scale")
MXFP4 = "model.layers.1.mlp.experts.down_proj_"


@pytest.mark.parametrize("mode", ["keep", "dequantize"])
@pytest.mark.parametrize(
    ("checkpoint", "weight", "scale"),
    [
        ("fp8", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"),
        ("mxfp4", f"{MXFP4}blocks", f"{MXFP4}scales"),
        ("v4-fp8", *V4_EXPERT),
        ("v4-fp4", *V4_EXPERT),
    ],
    indirect=["checkpoint"],
)
def test_products_that_overflow(checkpoint, weight, scale, mode):
    """Values and scales are finite, and a weight is not."""
    scales = checkpoint.tensors[scale].clone()
    if scales.dtype == torch.float32:
        scales[0, 0] = 3e38
    else:
        scales.view(torch.uint8)[0, 0] = 254
    message = checkpoint.error({scale: scales}, fp8=mode, dtype=torch.float32)
    assert "expected finite weights" in message and f"'{weight}'" in message


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x" * 300, "a\0b"],
)
def test_shards_outside_of_the_directory(written, tmp_path, name):
    shutil.copytree(written("dense"), tmp_path, dirs_exist_ok=True)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    words = f"^weight_map: expected names of files in the directory, got .*{INDEX_FILE}'$"
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)
