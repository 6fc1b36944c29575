"""Wrong tensors of each kind in six checkpoints: an error names tensor and file."""

import functools
import json
import re
import shutil
from functools import partial
from pathlib import Path

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
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def write_dense(path):
    path.mkdir(exist_ok=True)
    save_checkpoint(random_model(get_config("llama-tiny")), path)


def write_moe(path):
    save_checkpoint(random_model(get_config("gemma4-moe-tiny")), path)


def write_blocks(path):
    write_fp8(path, "gemma3-tiny", "_scale_inv", "fp8")


def write_v4(experts):
    def write(path):
        shutil.rmtree(path)
        v4_release.write_release(path, random_model(v4_release.CONFIG), experts, num_files=1)
        (path / "model-00001-of-00001.safetensors").rename(path / FILE)
        (path / INDEX_FILE).unlink()

    return write


# What writes it, and how often its kinds of tensors are looked at: as often as there are ways to
# load it.
CHECKPOINTS = {
    "dense": (write_dense, ("auto",)),
    "moe": (write_moe, ("auto",)),
    "fp8": (write_blocks, ("dequantize", "keep")),
    "mxfp4": (write_mxfp4, ("dequantize", "keep")),
    "v4-fp8": (write_v4("fp8"), ("dequantize", "keep")),
    "v4-fp4": (write_v4("fp4"), ("dequantize", "keep")),
}


class Checkpoint:
    """A directory, its tensors, and one name of each kind."""

    def __init__(self, path: Path, modes: tuple[str, ...]) -> None:
        self.path, self.modes = path, modes
        self.tensors = load_file(path / FILE)
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

    def write(self, changed, absent=()):
        tensors = {name: t for name, t in (self.tensors | changed).items() if name not in absent}
        save_file({name: t.contiguous() for name, t in tensors.items()}, self.path / FILE)

    def error(self, mode=None):
        with pytest.raises((ValueError, NotImplementedError)) as error:
            load_model(self.path, fp8=mode or self.modes[0])
        assert FILE in str(error.value)
        return str(error.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By name, the directory of a checkpoint, which is written when it is first asked for."""

    @functools.cache
    def write(name):
        path = tmp_path_factory.mktemp("written") / "checkpoint"
        path.mkdir()
        CHECKPOINTS[name][0](path)
        return path

    return write


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request, written, tmp_path):
    shutil.copytree(written(request.param), tmp_path, dirs_exist_ok=True)
    return Checkpoint(tmp_path, CHECKPOINTS[request.param][1])


# Dtypes that mean the same for a tensor that has one of them.
SAME = ({torch.int8, torch.uint8}, {torch.uint8, E8M0}, {torch.float32, E8M0})
OTHER = [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.int16, torch.float8_e5m2, E8M0]


def is_no_format(dtype, name, tensor):
    """True if no format declares the dtype for a tensor."""
    if dtype == torch.uint8 and name.endswith("_scale_inv"):
        return False  # scales may be bytes of E8M0
    return dtype != tensor.dtype and not any({dtype, tensor.dtype} <= same for same in SAME)


SHAPES = {
    "one axis more": lambda tensor: tensor[None],
    "one row less": lambda tensor: tensor[:-1],
    "twice the rows": lambda tensor: torch.stack([tensor.view(torch.uint8)] * 2).view(tensor.dtype).flatten(0, 1),
    "empty": lambda tensor: tensor[:0],
    "no axis": lambda tensor: tensor.flatten()[0],
}  # fmt: skip


# (tensors that are changed, the change, a word of the error)
CHANGES = {name: (lambda *_: True, change, "misshaped") for name, change in SHAPES.items()} | {
    str(dtype): (partial(is_no_format, dtype), lambda tensor, to=dtype: torch.ones(tensor.shape).to(to), "")
    for dtype in OTHER
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_shapes_and_dtypes(checkpoint, change):
    wanted, make, word = CHANGES[change]
    for names in checkpoint.batches(wanted):
        changed = {name: make(checkpoint.tensors[name]) for name in names}
        checkpoint.write(changed)
        message = checkpoint.error()
        assert word in message and all(name in message for name in names), message
        if word:
            assert all(f" {[*tensor.shape]} (exp" in message for tensor in changed.values()), (
                message
            )


def is_scale(name):
    """Of quantised weights: some other tensors are called scales too."""
    return name.endswith(("_scale_inv", "_scales")) or bool(
        re.search(r"\.(w[123kqo]\w*|[eh]_proj)\.scale$", name)
    )


@pytest.mark.parametrize("scales", [False, True])
def test_missing_tensors(checkpoint, scales):
    """Under the model's name for them, or that of the weights whose scales they are."""
    names = [name for name in checkpoint.names if is_scale(name) == scales]
    for i in range(0, len(names), BATCH):
        checkpoint.write({}, absent=names[i : i + BATCH])
        with pytest.raises(ValueError) as error:
            load_model(checkpoint.path)
        message = str(error.value)
        assert re.search(r"(missing|unscaled) \[", message), message
        assert not (scales and "unexpected" in message), message
        for name in names[i : i + BATCH]:
            ours = re.sub(r"^model\.|_(blocks|scales|scale_inv)$", "", name)
            ours = ours.replace(".scale", ".weight") if scales else ours
            where = target(name)  # of the release's scheme
            assert ours in message or where.parameter in message, message


@pytest.mark.parametrize("other", ["file", "prefix"])
def test_tensors_that_are_there_twice(checkpoint, other):
    """In two shards, or under two names that mean the same."""
    for names in checkpoint.batches():
        names = [name for name in names if not name.endswith("_scales")]
        v4_names = "layers.0.attn.wkv.weight" in checkpoint.tensors
        prefix = "model." if v4_names else "language_model."
        new = {
            name if other == "file" else prefix + name: checkpoint.tensors[name].clone()
            for name in names
        }
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
    if tensor.dtype in (torch.uint8, torch.int8, E8M0, FP8):
        code = 0xFF if tensor.dtype != FP8 else 0x7F + 128 * last
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
        checkpoint.write({name: broken(tensor, i % 2)})
        packed = ".experts." in name or (tensor.dtype == FP8 and name.startswith("model."))
        for mode in checkpoint.modes if packed or "_scale" in name else checkpoint.modes[:1]:
            message = checkpoint.error(mode)
            value = re.sub(r"_?(scale_inv|scales|scale)$", "", name)
            assert value in message and re.search(
                r"expected (finite weights|indices in 0\.\.3)", message
            ), message
            if "scale" not in name.rpartition(".")[2]:  # else where its block begins
                at = [n - 1 for n in tensor.shape] if i % 2 else [0] * tensor.ndim
                assert message.endswith(f" at {at}"), message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_overflow(tmp_path, dtype):
    """Finite in the file and infinite in the model's dtype."""
    write_dense(tmp_path)
    tensors, name = load_file(tmp_path / FILE), "model.layers.1.mlp.up_proj.weight"
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    over = {
        torch.bfloat16: torch.finfo(torch.float32).max,
        torch.float16: 70000,
        torch.float32: 1e39,
    }[dtype]
    weight = tensors[name].double()
    weight[5, 7] = largest
    save_file(tensors | {name: weight}, tmp_path / FILE)
    assert load_model(tmp_path, dtype=dtype).layers[1].mlp.up_proj.weight[5, 7] == largest
    weight[5, 7] = -over
    save_file(tensors | {name: weight}, tmp_path / FILE)
    with pytest.raises(
        ValueError,
        match=rf"got 1 in {dtype} .* of '{name}' \(F64\) .*; the first is -inf at \[5, 7\]",
    ):
        load_model(tmp_path, dtype=dtype)


@pytest.mark.parametrize("mode", ["keep", "dequantize"])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "v4-fp8", "v4-fp4"])
def test_products_that_overflow(tmp_path, name, mode):
    """Values and scales are finite, and a weight is not."""
    write, _ = CHECKPOINTS[name]
    write(tmp_path)
    tensors = load_file(tmp_path / FILE)
    if name == "fp8":
        weight = "model.layers.1.mlp.up_proj.weight"
        scale = f"{weight}_scale_inv"
    elif name == "mxfp4":
        weight, scale = (f"model.layers.1.mlp.experts.down_proj_{n}" for n in ("blocks", "scales"))
    else:
        weight, scale = (f"layers.2.ffn.experts.3.w2.{n}" for n in ("weight", "scale"))
    if tensors[scale].dtype == torch.float32:
        tensors[scale][0, 0] = 3e38
    else:
        tensors[scale].view(torch.uint8)[0, 0] = 254
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"expected finite weights, .*'{weight}'"):
        load_model(tmp_path, fp8=mode, dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x" * 300, "a\0b"],
)
def test_shards_outside_of_the_directory(tmp_path, name):
    write_dense(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(
        ValueError,
        match=f"^weight_map: expected names of files in the directory, got .*{INDEX_FILE}'$",
    ):
        load_model(tmp_path)
