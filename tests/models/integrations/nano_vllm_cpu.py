"""nano-vllm on a CPU with quire's kernels as its flash_attn: it answers the requests of a file.

Usage: python nano_vllm_cpu.py JOB.json SAID.json
"""

import json
import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"  # for nano-vllm's own kernel, which writes K and V to pages

import torch
import torch.distributed as dist

from quire.models.integrations import flash_attn

with open(sys.argv[1], encoding="utf-8") as file:
    job = json.load(file)


def changed(function, *first, without=()):
    """The function with its first arguments replaced, and without some."""

    def call(*args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name not in without}
        return function(*first, *args[len(first) :], **kwargs)

    return call


def copying(function):
    def call(tensor, *args, **kwargs):
        return function(tensor, *args, **{"copy": True} | kwargs)

    return call


def counted(owner, name, seen):
    """Count the calls of a function, those with a block table by another name."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        seen[name + ("-paged" if kwargs.get("block_table") is not None else "")] += 1
        return function(*args, **kwargs)

    setattr(owner, name, call)


# The device is the CPU.
for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
    setattr(torch.cuda, name, lambda *args: None)
torch.cuda.mem_get_info = lambda: (job["memory"], job["memory"])
torch.cuda.memory_stats = lambda: dict.fromkeys(
    ("allocated_bytes.all.peak", "allocated_bytes.all.current"), 0
)
torch.set_default_device = changed(torch.set_default_device, "cpu")
torch.tensor = changed(torch.tensor, without=("pin_memory",))
torch.Tensor.cuda = lambda tensor, **kwargs: tensor
torch.compile = lambda function: function
start = dist.init_process_group
dist.init_process_group = lambda *args, **kwargs: start("gloo", store=dist.HashStore(), **kwargs)

# nano-vllm works in place on what float() and to() return. In 16 bits those are copies; so they are
# here in fp32, in which its tokens can be compared with another program's.
torch.Tensor.to = copying(torch.Tensor.to)
torch.Tensor.float = lambda tensor: tensor.to(torch.float32)

flash_attn.install()  # before the engine is imported

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.engine.scheduler import Scheduler  # noqa: E402
from nanovllm.layers import attention  # noqa: E402

llm = LLM(job["model"], enforce_eager=True, max_model_len=1024, max_num_batched_tokens=400)
seen = Counter()
counted(Scheduler, "preempt", seen)
counted(attention, "flash_attn_varlen_func", seen)
counted(attention, "flash_attn_with_kvcache", seen)
greedy = SamplingParams(temperature=1e-9, max_tokens=job["max_tokens"], ignore_eos=True)
answers = [x["token_ids"] for x in llm.generate(job["prompts"], greedy, use_tqdm=False)]
said = {"answers": answers, "seen": seen, "pages": len(llm.scheduler.block_manager.blocks)}
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump(said, file)
