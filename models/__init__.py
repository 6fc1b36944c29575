"""Text models on paged attention, their weights, and a continuous-batching runner.

Gemma-3, Gemma-4, Llama, gpt-oss and DeepSeek-V4.

The only package where the integers of ``kvcore`` and the tensors of ``kernels`` meet. Public names
load on first use.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "CONFIGS": "config.named",
    "ChatTemplate": "chat",
    "Decoder": "families.decoder",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Family": "families.registry",
    "Gemma": "families.gemma",
    "Gemma4Drafter": "families.gemma4_assistant",
    "GptOss": "families.gpt_oss",
    "LLM": "llm",
    "Llama": "families.llama",
    "DSparkDrafter": "deepseek_v4.drafters",
    "MTPDrafter": "deepseek_v4.drafters",
    "MemoryPlan": "engine.memory",
    "ModelConfig": "config.model",
    "NGramDrafter": "engine.speculative",
    "OutputDelta": "engine.outputs",
    "RankError": "parallel.heartbeat",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.request",
    "TokenLogprobs": "engine.outputs",
    "cache_groups": "layers.kv_cache",
    "from_hf": "config.hf",
    "get_config": "config.named",
    "load_assistant": "families.gemma4_assistant",
    "load_model": "loading.weights",
    "random_model": "loading.random_weights",
    "register_family": "families.registry",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Load the module that defines a public name when the name is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted([*globals(), *_HOME])
