"""Models: Gemma-3, Gemma-4, Llama, gpt-oss and DeepSeek-V4 text models on paged attention, their weights, and a continuous-batching runner.

The only package where the integers of ``kvcore`` and the tensors of ``kernels`` meet. Public names load on first use.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "CONFIGS": "configs",
    "ChatTemplate": "chat",
    "Decoder": "decoder",
    "Engine": "runner",
    "EngineConfig": "engine_config",
    "Gemma": "gemma",
    "GptOss": "gpt_oss",
    "LLM": "llm",
    "Llama": "llama",
    "MTPDrafter": "deepseek_v4.draft",
    "MemoryPlan": "memory",
    "ModelConfig": "configs",
    "NGramDrafter": "speculative",
    "OutputDelta": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "SchedulerPolicy": "scheduler",
    "TokenLogprobs": "request",
    "cache_groups": "cache",
    "from_hf": "hf_config",
    "get_config": "configs",
    "load_model": "weights",
    "random_model": "weights",
    "save_checkpoint": "weights",
}

__all__ = [
    "CONFIGS",
    "LLM",
    "ChatTemplate",
    "Decoder",
    "Engine",
    "EngineConfig",
    "Gemma",
    "GptOss",
    "Llama",
    "MTPDrafter",
    "MemoryPlan",
    "ModelConfig",
    "NGramDrafter",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
    "SchedulerPolicy",
    "TokenLogprobs",
    "cache_groups",
    "from_hf",
    "get_config",
    "load_model",
    "random_model",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Loads the module that defines a public name when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted([*globals(), *_HOME])
