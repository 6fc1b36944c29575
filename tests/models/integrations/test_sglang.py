"""SGLang's attention backend over stand-ins of its pools and batches, and over its wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.models.integrations import sglang
from tests.support.models import sglang_steps as steps
from tests.support.models.sglang_steps import HEADS, Host, Mode, layer, play

ROOT = Path(__file__).resolve().parents[3]
# A folder with the unpacked wheel: `pip download --no-deps sglang==0.5.23`, then `unzip`.
WHEEL = Path(os.environ.get("QUIRE_SGLANG") or ROOT / ".peers" / "sglang")


class Base:
    """A stand-in for `AttentionBackend.forward`."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        one = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return one(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


Backend = sglang.backend_class(Base)


@pytest.mark.parametrize(
    ("page_size", "hybrid", "more"),
    [
        (1, False, {}),
        (1, True, {"graph": True}),
        (4, False, {"graph": True}),
        (4, True, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "cap": 3.0}),
    ],
)
def test_steps_against_float64(page_size, hybrid, more):
    play(Backend, page_size, hybrid, **more)


def started(lengths):
    """A host, a backend, the batch of a first step of it, and q, k and v of its tokens."""
    host, n = Host(4, False), sum(lengths)
    backend = Backend(host.runner)
    _, batch = host.step(Mode, "EXTEND", lengths)
    backend.init_forward_metadata(batch)
    return host, backend, batch, [host.normal(n, heads * 16) for heads in (HEADS, 2, 2)]


def test_a_layer_without_rows_of_its_own_reads_those_of_the_pool():
    """Layers that share another's cache get no k and v; nothing is written where the host says so."""
    host, backend, batch, (q, k, v) = started([9])
    unsaved = backend.forward(q, k, v, layer(0), batch, save_kv_cache=False)
    assert all(held.isnan().all() for held in host.rows(0))
    saved = backend.forward(q, k, v, layer(0), batch)
    torch.testing.assert_close(unsaved, saved, rtol=0, atol=0)
    shared = backend.forward(q, None, None, layer(0), batch)
    steps.expect_attention(shared, q, (k.view(9, 2, 16), v.view(9, 2, 16)), layer(0))


# What is changed of a layer, of a batch and of the call.
REFUSED = {
    "is_cross_attention": ({"is_cross_attention": True}, {}, {}),
    "attn_type": ({"attn_type": "encoder_only"}, {}, {}),
    "v_head_dim": ({"v_head_dim": 8}, {}, {}),
    "xai_temperature_len": ({"xai_temperature_len": 4}, {}, {}),
    "logit_capping_method": ({"logit_cap": 2.0, "logit_capping_method": "other"}, {}, {}),
    "forward_mode": ({}, {"forward_mode": Mode.TARGET_VERIFY}, {}),
    "mha_return_lse": ({}, {"mha_return_lse": True}, {}),
    "score_mod": ({}, {}, {"score_mod": 1}),
    "token_to_kv_pool": ({"tp_k_head_num": 1}, {}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name_and_nothing_is_written(name):
    host, backend, batch, qkv = started([3])
    of_layer, of_batch, of_call = REFUSED[name]
    vars(batch).update(of_batch)
    with pytest.raises(NotImplementedError, match=f"^{name}: (is not served|expected rows)"):
        backend.forward(*qkv, layer(0, **of_layer), batch, **of_call)
    assert all(held.isnan().all() for held in host.rows(0))
    backend.init_cuda_graph_state(2, 2)
    with pytest.raises(NotImplementedError, match=r"^forward_mode: expected DECODE"):
        backend.init_forward_metadata_out_graph(batch)


def test_a_host_that_is_not_served_is_refused_by_name(monkeypatch):
    for name, owner, value in (
        ("use_mla_backend", "", True),
        ("is_encoder_decoder", "model_config", True),
        ("kv_cache_dtype", "", torch.float8_e4m3fn),
        ("spec_algorithm", "spec_algorithm", lambda: False),
    ):
        runner = Host(4, False).runner
        attribute = "is_none" if name == "spec_algorithm" else name
        setattr(getattr(runner, owner) if owner else runner, attribute, value)
        with pytest.raises(NotImplementedError, match=f"^{name}: is not served"):
            Backend(runner)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.24")
    with pytest.raises(NotImplementedError, match=r"sglang: expected 0.5.23, got 0.5.24"):
        sglang.register()


def test_the_entry_point_is_the_one_that_sglang_asks_for():
    point = "quire.models.integrations.sglang:register"
    assert f'plugins"]\nquire = "{point}"' in (ROOT / "pyproject.toml").read_text()


# SGLang's own `__init__` wants its whole installation; the modules below it load without. What
# they import that is not installed (CUDA libraries, servers, codecs) is a module of nothings.
HOST = r"""
import importlib, importlib.abc, importlib.machinery, importlib.util, inspect, sys, types

wheel, helper = sys.argv[1:]

class Nothing(str):
    def __new__(cls, *args, **kwargs):
        return str.__new__(cls, "x")
    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs
        return args[0] if decorates else Nothing()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()
    def __mro_entries__(self, bases):
        return ()

class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = set()
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if top == "sglang" or (top not in self.names and not frame.f_code.co_filename.startswith(wheel)):
            return None
        self.names.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Nothing(), name)
        return module
    def exec_module(self, module):
        pass

package = types.ModuleType("sglang")
package.__path__ = [wheel + "/sglang"]
sys.modules["sglang"] = package
sys.path.append(wheel)  # for its metadata
import torch, transformers
sys.meta_path.append(Missing())

sys.path.append(helper)
import sglang_steps as steps

from sglang.srt.plugins import hook_registry, load_plugins
from quire.models.integrations import sglang as adapter
load_plugins()  # finds the entry point, where quire is installed with it
from sglang.srt.layers.attention import attention_registry, base_attn_backend
from sglang.srt.arg_groups import choices
if "quire" not in attention_registry.ATTENTION_BACKENDS:
    print("not by the entry point")
    adapter.register()
assert choices.ATTENTION_BACKEND_CHOICES.count("quire") == 1
backend_of = attention_registry.ATTENTION_BACKENDS["quire"]
base = base_attn_backend.AttentionBackend
assert issubclass(backend_of, base)

# Each method of ours that SGLang calls is one of the base's and takes its arguments; extras come by name.
ours = {n: f for n, f in vars(adapter.QuireAttention).items() if inspect.isfunction(f) and n[0] != "_"}
assert {"forward_decode", "forward_extend", "init_forward_metadata", "init_cuda_graph_state"} <= ours.keys()
for name, function in ours.items():
    theirs = inspect.signature(getattr(base, name)).parameters
    mine = inspect.signature(function).parameters
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [(p.name, p.kind, p.default) for p in mine.values()], name

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

def layer(layer_id, window, cap):
    return RadixAttention(
        steps.HEADS, steps.DIM, 0.3, steps.KV_HEADS, layer_id, logit_cap=cap, sliding_window_size=window
    )

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

def pool(size, window_size, page_size, hybrid):
    sizes = dict(head_num=steps.KV_HEADS, head_dim=steps.DIM, dtype=torch.float32, page_size=page_size)
    if hybrid:
        ids = dict(swa_attention_layer_ids=[1], full_attention_layer_ids=[0])
        return SWAKVPool(size, window_size, device="cpu", **ids, **sizes)
    return MHATokenToKVPool(size, layer_num=2, device="cpu", enable_memory_saver=False, **sizes)

for page_size in (1, 4):
    for hybrid in (False, True):
        backend = steps.play(
            backend_of, page_size, hybrid, modes=ForwardMode, make_layer=layer, make_pool=pool, cap=5.0
        )
assert isinstance(backend, base)
print("stood in for:", *sorted(Missing.names))
"""


@pytest.mark.slow
def test_the_classes_of_the_wheel(tmp_path):
    if not (WHEEL / f"sglang-{sglang.SERVED}.dist-info").is_dir():
        pytest.skip(f"no unpacked wheel of sglang {sglang.SERVED} in {WHEEL} (QUIRE_SGLANG)")
    command = [sys.executable, "-c", HOST, str(WHEEL), str(Path(steps.__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
