"""Kernels that a session of the engine would compile on a GPU, and when, without a GPU, in a process that does not interpret Triton.

Triton's own launcher specialises each launch, for a driver that says it is sm_90; a hook refuses the compilation, so nothing runs.
"""

import random
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from quire.kernels.common import checks, launching
from quire.kvcore.device import batch

SMS = 132
# Long enough for every block of a top-k, with entries of 4 tokens.
MAX_LEN, LONGEST = 40000, 38000
# Of the named configurations: keys of a query that are worth splitting, and so many heads that a
# query tile is of one token, as in the released models; and experts whose rows are whole groups of fp4.
LARGER = {"deepseek-v4-tiny": {"index_topk": 300, "num_heads": 64, "moe_intermediate_size": 64}}


def record():
    """The list that each new variant is added to, as (kernel, what decides of it)."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: target,
        )
    )
    seen, found = set(), []

    def hook(*, key, fn, compile, **_):
        name = fn.jit_function.__name__
        if (name, key) not in seen:
            seen.add((name, key))
            found.append(
                (name, f"{compile['signature']} {compile['constants']} {compile['configs']}")
            )
        return True  # do not compile

    knobs.runtime.jit_cache_hook = hook
    return found


def pretend():
    """Kernels that do not run leave zeros, and tensors of a CPU are taken for those of a GPU of 132 SMs."""
    launching.INTERPRETER_SMS = SMS
    checks.is_readable = lambda tensor: False
    batch.Staging = partial(batch.Staging, packed=True)
    torch.empty_like = lambda x, **more: torch.zeros_like(x, **more)
    torch.empty = lambda *shape, pin_memory=False, **more: torch.zeros(*shape, **more)
    torch.Tensor.new_empty = lambda x, *shape, **more: x.new_zeros(*shape, **more)
    # No value is looked at, and products in bf16 take a CPU long.
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(
        *x.shape[:-1], len(weight)
    )
    torch.empty_strided = lambda shape, stride, **more: torch.zeros(shape, **more)
    for name, module in list(sys.modules.items()):
        if name.startswith("quire.") and hasattr(module, "expect_impl"):
            module.expect_impl = lambda *args: None


def pack_experts(model, kind):
    """Experts of a DeepSeek-V4 model as they are released, "fp8" or "fp4", of zeros: no value is looked at."""
    from quire.models.layers.basic import WeightPlacement
    from quire.models.layers.moe import PackedExperts

    config, place = model.config, WeightPlacement(torch.device("cpu"), torch.bfloat16)
    sizes = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
    for layer in model.layers:
        packed = PackedExperts(kind, *sizes, place, limit=config.swiglu_limit)
        for weight in packed.parameters():
            weight.data = torch.zeros(weight.shape, dtype=weight.dtype)
        layer.mlp.experts = packed


def session(name, steps, experts=None):
    """Variants compiled at start, and those of a session of varied requests with the step that met them first.

    experts: how those of DeepSeek-V4 are packed; None = not.

    Returns:
        {"start": kernels that a start compiles, "later": [[step, kernel, what it was compiled for]]}.
    """
    from quire.models.engine import graphs
    from quire.models.engine.engine import Engine, EngineConfig
    from quire.models.engine.request import SamplingParams
    from quire.models.engine.speculative import NGramDrafter
    from quire.models.loading.random_weights import random_model
    from tests.support.models.few import few

    found = record()
    config = replace(few(name), max_position_embeddings=MAX_LEN, **LARGER.get(name, {}))
    model = random_model(config, device="cpu", dtype=torch.bfloat16)
    if experts is not None:
        pack_experts(model, experts)
    pretend()
    if hasattr(model, "expect_impl"):
        model.expect_impl = lambda impl: None

    def capture(work):
        work()
        return work

    graphs.default_capture = lambda device: capture
    config = EngineConfig(
        num_pages=20000, max_num_seqs=140, max_num_batched_tokens=1024, max_model_len=MAX_LEN, impl="triton", decode_graphs=True,
    )  # fmt: skip
    engine = Engine(model, config, drafter=NGramDrafter(2, min_ngram=1))
    start, later = len(found), []
    random_numbers, count = random.Random(0), 0
    for step in range(steps):
        while len(engine.unfinished) < random_numbers.choice([1, 2, 3, 8, 24, 140]):
            length = int(random_numbers.lognormvariate(5, 2.0)) % LONGEST + 1
            ids = [random_numbers.randrange(50) for _ in range(length)]
            num_tokens = random_numbers.randrange(1, 40)
            sampling = {"temperature": 0.5, "top_k": count} if count % 3 == 0 else {}
            engine.add_request(ids, SamplingParams(num_tokens, ignore_eos=True, **sampling))
            count += 1
        engine.step()
        later += [(step, *variant) for variant in found[start + len(later) :]]
    assert engine.totals.num_drafts > 0 and count > 10
    return {"start": [name for name, _ in found[:start]], "later": later}
