"""Runs transformers on checkpoints and saves what it computes. A program of its own, because transformers looks for a package
named ``kernels`` and must not find this repository's: start it in another directory.

Usage: python oracle.py JOBS.json, a list of
    {"load": checkpoint directory, "input_ids": [...], "out": file}    logits [num_tokens, vocab_size] of one uncached forward
    {..., "new_tokens": n}                                             (token ids, their logits), of the prompt with n greedy tokens
    {"make": directory, "config": {...}, "seed": n}                    a random checkpoint, saved by transformers itself
    {"keys": [model_type, ...], "out": file}                           {model_type: keys of its config.json} as JSON
    {"ropes": [{config}, ...], "out": file}                            [(frequencies, amplitude)] of llama configurations
    {"chats": [directory, ...], "texts": [...], "messages": [...], "tools": [...], "out": file}
                                       for each directory, as JSON: ids of the texts, the rendered chat without tools and with them
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def randomise(model, seed):
    """Every tensor random: layer scalars are buffers, norm weights start out constant, and sinks and biases uninitialised."""
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    for name, tensor in own_tensors(model):
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.8, 1.2, generator=generator)
        elif name.endswith(("bias", "sinks")):
            # Some gates of gpt-oss must pass the limit of their clamp.
            std = 4.0 if name.endswith("gate_up_proj_bias") else 1.0
            tensor.normal_(0.0, std, generator=generator)
        elif tensor.ndim == 1:
            tensor.normal_(offset, 0.3, generator=generator)
            if name.endswith("q_norm.weight") and model.config.model_type.startswith("gemma4"):
                # Their softmax has no scale: without one in the norms it is so sharp that rounding
                # decides.
                tensor *= len(tensor) ** -0.5
        elif "embed_tokens" in name:
            tensor.normal_(0.0, 0.15, generator=generator)
        else:
            in_axis = 1 if model.config.model_type == "gpt_oss" and tensor.ndim == 3 else -1
            tensor.normal_(0.0, tensor.shape[in_axis] ** -0.5, generator=generator)


def randomise_v4(model, seed):
    """Every tensor of a DeepSeek-V4 random; most start out constant, and such a bug could not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        leaf = name.split(".")[-1]
        if leaf == "tid2eid":
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
            tensor.copy_(order.argsort(dim=1)[:, : tensor.shape[1]])
        elif leaf in ("scale", "hc_scale") or (leaf == "weight" and tensor.ndim == 1):
            tensor.normal_(1.0, 0.3, generator=generator)
        elif leaf in ("sinks", "position_bias") or "embed_tokens" in name:
            tensor.normal_(0.0, 1.0, generator=generator)
        elif leaf in ("base", "hc_base", "e_score_correction_bias"):
            tensor.normal_(0.0, 0.5 if "base" in leaf else 0.2, generator=generator)
        elif leaf in ("fn", "hc_fn"):
            tensor.normal_(0.0, 0.05, generator=generator)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def own_tensors(model):
    """Names and tensors, without an output projection that is the embedding."""
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield name, tensor


def logits(path, input_ids, new_tokens=None):
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def run(ids):
        return model(torch.tensor([ids]), use_cache=False).logits[0]

    if new_tokens is None:
        return run(input_ids)
    for _ in range(new_tokens):
        input_ids = [*input_ids, run(input_ids)[-1].argmax().item()]
    return input_ids, run(input_ids)


def ropes(configs):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    modules = [LlamaRotaryEmbedding(AutoConfig.for_model(**config)) for config in configs]
    return [(module.inv_freq, module.attention_scaling) for module in modules]


def chats(directories, texts, messages, tools):
    for directory in directories:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        yield {
            "ids": [tokenizer(text).input_ids for text in texts],
            "rendered": [
                tokenizer.apply_chat_template(
                    messages, tools=given, add_generation_prompt=True, tokenize=False
                )
                for given in (None, tools)
            ],
        }


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if "make" in job:
            config = AutoConfig.for_model(**job["config"])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            (randomise_v4 if config.model_type == "deepseek_v4" else randomise)(model, job["seed"])
            model.save_pretrained(job["make"])
        elif "keys" in job:
            keys = {kind: [*AutoConfig.for_model(kind).to_dict()] for kind in job["keys"]}
            Path(job["out"]).write_text(json.dumps(keys))
        elif "ropes" in job:
            torch.save(ropes(job["ropes"]), job["out"])
        elif "chats" in job:
            results = chats(job["chats"], job["texts"], job["messages"], job["tools"])
            Path(job["out"]).write_text(json.dumps(list(results)))
        else:
            torch.save(logits(job["load"], job["input_ids"], job.get("new_tokens")), job["out"])


if __name__ == "__main__":
    main()
