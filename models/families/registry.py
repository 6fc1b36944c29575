"""Families of models: all that config reading, weight loading, `LLM` and the benches know of each.

A family is one file, here or in a package of its own, that ends with `register_family`::

    register_family(
        Family("qwen3", ("qwen3",), config_from_hf=..., config_to_hf=..., build=Qwen3)
    )

From then on `load_model` and `LLM` take its Hugging Face directories. Where
`EngineConfig.tensor_parallel_size` starts processes, they import the family's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

SHIPPED = ("gemma3", "gemma4", "gpt_oss", "llama")


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: what its configurations have as ``family``.
        model_types: values of ``model_type`` in config.json, that of text-only files first.
        config_from_hf: (keys of config.json, name of the model) -> configuration, a `ModelConfig`
            unless the family brings its own loader. Keys of a multimodal file's ``text_config``
            come alone, with those beside it that belong to the text model.
        build: (configuration, device=, dtype=, group=) -> model with uninitialized weights, a
            `Decoder` or what answers the same calls. Parameters have the names of the
            checkpoint's tensors, without "model.".
        config_to_hf: the reverse of config_from_hf, without ``model_type``; None = its checkpoints
            are not written.
        weight_name: (name of a stored tensor without "model.", configuration) -> name of the
            parameter, None where the tensor is not read; None = the same name.
        draw: (name, weight, configuration, generator) fills a weight with random numbers; None =
            as `quire.models.loading.random_weights.draw`.
        load: loads a directory otherwise than `quire.models.loading.weights.load_model` does:
            (path, configuration, device, dtype, fp8, group) -> model.
        configs: named configurations, which `LLM` and the benches take.
    """

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any], str], Any]
    build: Callable[..., Any]
    config_to_hf: Callable[[Any], dict[str, Any]] | None = None
    weight_name: Callable[[str, Any], str | None] | None = None
    draw: Callable[..., None] | None = None
    load: Callable[..., Any] | None = None
    configs: Sequence[Any] = ()


_registered: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a family known; one of the same name is replaced.

    Raises:
        ValueError: a ``model_type`` that another family has.
    """
    for other in _registered.values():
        taken = set(family.model_types) & set(other.model_types)
        if taken and other.name != family.name:
            raise ValueError(
                f"model_types: expected none of another family, got {sorted(taken)} of "
                f"{other.name!r}"
            )
    _registered[family.name] = family


def families() -> list[Family]:
    """All families: those of this package, and registered ones."""
    for name in SHIPPED:
        import_module(f".{name}", __package__)
    import_module("..deepseek_v4.hf", __package__)
    return list(_registered.values())


def family_of(config: Any) -> Family:
    """The family of a configuration.

    Raises:
        ValueError: it is not registered.
    """
    for family in families():
        if family.name == config.family:
            return family
    known = sorted(family.name for family in families())
    raise ValueError(f"family: expected one of {known}, got {config.family!r}")


def family_of_type(model_type: str) -> Family:
    """The family of a config.json.

    Raises:
        NotImplementedError: none has this ``model_type``, naming those that are supported.
    """
    for family in families():
        if model_type in family.model_types:
            return family
    known = [model_type for family in families() for model_type in family.model_types]
    raise NotImplementedError(
        f"model_type: supported are {sorted(known)}, and what register_family adds; got "
        f"{model_type!r}"
    )
