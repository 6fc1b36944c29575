"""Registry of model families, for config reading, weight loading, `LLM` and the benches.

A family is one file, here or in another package, that ends with `register_family`. From then on
`load_model` and `LLM` take its Hugging Face directories. The command ``quire`` imports no module of
another package, so it has only the families of this one. Where
`EngineConfig.tensor_parallel_size` starts processes, they import the family's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# Modules of this folder; `families` also imports deepseek_v4, which is a package of its own.
SHIPPED = ("gemma3", "gemma4", "gpt_oss", "llama")


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: value of ``family`` in its configurations.
        model_types: values of ``model_type`` in config.json, first the one of text-only files.
        config_from_hf: (keys of the text model, name) -> a `ModelConfig`, or with `load` another.
        build: (configuration, device=, dtype=, group=) -> a `Decoder` with uninitialized weights.
            Parameters have the names of the checkpoint's tensors, without "model.".
        config_to_hf: reverse of config_from_hf, without ``model_type``; None = not written.
        weight_name: (stored name without "model.", configuration) -> name of the parameter, or None
            for a tensor that is not read; default: the same name.
        draw: (name, weight, configuration, generator) fills a weight with random numbers; default:
            `quire.models.loading.random_weights.draw`.
        load: (path, configuration, device, dtype, fp8, group) -> model; default:
            `quire.models.loading.weights.load_decoder`.
        refused: values of ``model_type`` that are not supported, each with the reason.
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
    refused: Mapping[str, str] = field(default_factory=dict)
    configs: Sequence[Any] = ()


_registered: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Register or replace a family; ValueError for a ``model_type`` that another one has."""
    for other in _registered.values():
        taken = set(family.model_types) & set(other.model_types)
        if taken and other.name != family.name:
            raise ValueError(
                f"model_types: expected none of another family, got {sorted(taken)} of "
                f"{other.name!r}"
            )
    _registered[family.name] = family


def families() -> list[Family]:
    for name in SHIPPED:
        import_module(f".{name}", __package__)
    import_module("..deepseek_v4.checkpoint", __package__)
    return list(_registered.values())


def family_of(config: Any) -> Family:
    """The family of a configuration; ValueError where it is not registered."""
    for family in families():
        if family.name == config.family:
            return family
    known = sorted(family.name for family in families())
    raise ValueError(f"family: expected one of {known}, got {config.family!r}")


def refuse_type(model_type: str) -> None:
    """Raise NotImplementedError for a ``model_type`` that a family refuses, with its reason."""
    for family in families():
        if model_type in family.refused:
            raise NotImplementedError(f"model_type {model_type!r}: {family.refused[model_type]}")


def family_of_type(model_type: str) -> Family:
    """The family of a config.json; NotImplementedError where none supports its ``model_type``."""
    refuse_type(model_type)
    for family in families():
        if model_type in family.model_types:
            return family
    known = [model_type for family in families() for model_type in family.model_types]
    raise NotImplementedError(
        f"model_type: supported are {sorted(known)}, and what register_family adds; got "
        f"{model_type!r}"
    )
