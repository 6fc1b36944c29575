"""nano-vllm on a CPU with quire's kernels as its flash_attn."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # for nano-vllm's own kernel, which writes K and V to pages

import torch
import torch.distributed as dist

from quire.models.integrations import flash_attn

memory = 64 << 20  # bytes that nano-vllm finds on its device


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


# The device is the CPU.
for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
    setattr(torch.cuda, name, lambda *args: None)
torch.cuda.mem_get_info = lambda: (memory, memory)
torch.cuda.memory_stats = lambda: dict.fromkeys(
    ("allocated_bytes.all.peak", "allocated_bytes.all.current"), 0
)
torch.set_default_device = changed(torch.set_default_device, "cpu")
torch.tensor = changed(torch.tensor, without=("pin_memory",))
torch.Tensor.cuda = lambda tensor, **kwargs: tensor
torch.compile = lambda function: function
start = dist.init_process_group
dist.init_process_group = lambda *args, **kwargs: start("gloo", store=dist.HashStore(), **kwargs)

# nano-vllm works in place on what float() and to() return. In 16 bits those are copies; so they are here
# in fp32, in which its tokens can be compared with another program's.
torch.Tensor.to = copying(torch.Tensor.to)
torch.Tensor.float = lambda tensor: tensor.to(torch.float32)

flash_attn.install()  # before the engine is imported

from nanovllm import LLM, SamplingParams  # noqa: E402


def main():
    checkpoint, *prompts = sys.argv[1:]
    llm = LLM(checkpoint, enforce_eager=True, max_model_len=1024, max_num_batched_tokens=1024)
    greedy = SamplingParams(temperature=1e-9, max_tokens=16)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        print(f"{prompt!r}: {output['text']!r}")


if __name__ == "__main__":
    main()
