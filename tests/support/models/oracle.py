"""transformers as the oracle: random models of its own, and what they compute in fp32 without a cache."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@torch.no_grad()
def make(config, seed):
    """A random model of a config.json."""
    config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    (_randomise_v4 if config.model_type == "deepseek_v4" else _randomise)(model, seed)
    return model


def load(path):
    """The model of a checkpoint directory."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logits(model, input_ids):
    """[num_tokens, vocab_size] of one forward pass."""
    return model(torch.as_tensor(input_ids)[None], use_cache=False).logits[0]


def continued(model, input_ids, new_tokens):
    """(token ids, their logits), of a prompt and its greedy tokens."""
    for _ in range(new_tokens):
        input_ids = [*input_ids, logits(model, input_ids)[-1].argmax().item()]
    return input_ids, logits(model, input_ids)


def _randomise(model, seed):
    """Every tensor random: layer scalars are buffers, norm weights start out constant, and sinks and biases uninitialised."""
    generator = torch.Generator().manual_seed(seed)
    # Norms of the first Gemmas add one to their weights.
    offset = 0.0 if model.config.model_type in ("gemma2", "gemma3_text") else 1.0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue  # it is the embedding
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


def _randomise_v4(model, seed):
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
