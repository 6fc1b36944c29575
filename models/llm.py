"""`LLM`: prompts in, outputs out, for scripts and benches."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .chat import PLAIN, ChatTemplate, find_chat
from .chat_deepseek_v4 import DeepseekV4Chat
from .config.fields import naming, shown
from .config.hf import load_config, read_generation_config
from .config.named import named_configs
from .deepseek_v4.drafters import DSparkDrafter, MTPDrafter
from .device import find_device
from .engine.engine import Engine, EngineConfig, interrupts_wait
from .engine.memory import free_memory, weight_bytes
from .engine.outputs import OutputDelta, RequestOutput
from .engine.report import StepReport
from .engine.request import SamplingParams
from .engine.speculative import Drafter, NGramDrafter
from .families.gemma4_assistant import Gemma4Drafter, load_assistant
from .families.registry import Family, family_of, register_family
from .loading.locate import locate_checkpoint
from .loading.random_weights import random_model
from .loading.weights import build_model, find_dtype, load_model
from .parallel.group import Group
from .parallel.heartbeat import EXIT_STATUS
from .parallel.launch import join_ranks
from .parallel.steps import StepSender
from .progress import tqdm
from .tokenizer import ByteTokenizer, Tokenizer, find_tokenizer, no_panic

DRAFTERS: dict[str, Callable[[Any, int], Drafter]] = {
    "ngram": lambda model, draft_tokens: NGramDrafter(draft_tokens),
    "mtp": MTPDrafter,
    "dspark": DSparkDrafter,
}
"""Drafters by name: (model, drafts of a step) -> drafter."""


def make_drafter(name: str, draft_tokens: int, model: Any) -> Drafter:
    """A drafter by its name in `DRAFTERS`, or by the directory of a Gemma-4 assistant.

    Raises:
        ValueError: neither, or a drafter that does not fit the model.
    """
    if name in DRAFTERS:
        return DRAFTERS[name](model, draft_tokens)
    if not Path(name).is_dir():
        raise ValueError(
            f"drafter: expected one of {sorted(DRAFTERS)} or a directory, got {name!r}"
        )
    assistant = load_assistant(name, device=model.device, dtype=model.dtype)
    return Gemma4Drafter(model, assistant, draft_tokens)


@dataclass(frozen=True)
class ModelSource:
    """Arguments of an `LLM`, from which each rank builds its part of the model.

    Attributes:
        directory: a Hugging Face directory; None = random weights.
        family: of the configuration; started processes register it too.
    """

    config: Any
    directory: Path | None
    family: Family
    engine: EngineConfig
    drafter: Any
    device: torch.device | str | None
    dtype: torch.dtype | None
    seed: int

    def build(
        self, device: torch.device, group: Group | None = None
    ) -> tuple[nn.Module, Drafter | None]:
        """The model, or one rank's part of it, and its drafter."""
        register_family(self.family)
        if self.directory is not None:
            model = load_model(self.directory, device=device, dtype=self.dtype, group=group)
        else:
            dtype = self.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
            expect_room(self.config, device, dtype)
            model = random_model(
                self.config, seed=self.seed, device=device, dtype=dtype, group=group
            )
        return model, self.drafter(model) if callable(self.drafter) else self.drafter


class LLM:
    """A model with an engine and, where there is one, a tokenizer.

    It belongs to one thread, as its `Engine`. In the main thread, Ctrl-C ends `generate` and
    `stream` between two steps: their requests are aborted, and the `LLM` can be used again. A
    second Ctrl-C does not wait for the step.

    Args:
        model: a Hugging Face directory, a .gguf file, a name on the Hugging Face Hub, a named
            configuration (random weights), or a built model.
        engine: settings; default `EngineConfig()`. With tensor_parallel_size above 1, and a name or
            a directory as model, this process is rank 0 and starts the others. Under ``torchrun``,
            and where torch.distributed is initialized, all ranks make the same `LLM`. Rank 0's is
            used; in the others this call ends the process when rank 0's `LLM` is closed.
        drafter: speculates (`quire.models.engine.speculative`), or a function that makes it from
            the model; None = no speculation.
        device: default: the GPU if there is one. None with a built model.
        dtype: one of torch, or its name; default: that of the checkpoint; for random weights
            bfloat16 on a GPU and float32 on a CPU. None with a built model.
        seed: seed of random weights.

    Attributes:
        model, engine, tokenizer (None where prompts must be token ids).
        default_params: SamplingParams of prompts without (`default_params`).

    Raises:
        ValueError: a model that is not found or does not fit the memory; errors of `find_device`,
            `locate_checkpoint`, `load_model` and `Engine`.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        engine: EngineConfig | None = None,
        drafter: Drafter | Callable[[Any], Drafter] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        seed: int = 0,
    ) -> None:
        settings, is_built = engine or EngineConfig(), isinstance(model, nn.Module)
        has_ranks = settings.tensor_parallel_size > 1
        self._directory: Path | None = None
        if is_built:
            if device is not None or dtype is not None:
                raise ValueError("device, dtype: expected None with a built model")
            if has_ranks:
                raise ValueError("tensor_parallel_size: expected 1 with a built model")
            config = model.config
        else:
            device, dtype = find_device(device), None if dtype is None else find_dtype(dtype)
            config = named_configs().get(str(model))
            if config is None:
                self._directory = locate_checkpoint(model)
                config = load_config(self._directory)
            # Refuses a number of ranks that does not fit before any process starts.
            config.shard(settings.tensor_parallel_size)
        # Errors in small files come before weights are read.
        self.default_params = default_params(self._directory)
        self.tokenizer: Tokenizer | None = find_tokenizer(config, self._directory)
        self._streams: dict[str, deque[OutputDelta]] = {}
        if is_built:
            loaded = model, drafter(model) if callable(drafter) else drafter
        else:
            source = ModelSource(
                config, self._directory, family_of(config), settings, drafter, device, dtype, seed
            )
            loaded = None if has_ranks else source.build(device)
        if loaded is None:
            self.engine = self._with_ranks(source)
        else:
            model, drafter = loaded
            self.engine = Engine(model, settings, tokenizer=self.tokenizer, drafter=drafter)
        self.model = self.engine.model

    def _with_ranks(self, source: ModelSource) -> Engine:
        """The engine of rank 0; on other ranks this ends the process when rank 0 is done."""
        ranks = join_ranks(source)
        if ranks.channel.rank != 0:
            try:
                ranks.follow()
            except Exception as error:
                print(f"quire: rank {ranks.channel.rank}: {error}", file=sys.stderr, flush=True)
                raise SystemExit(EXIT_STATUS) from error
            raise SystemExit(0)
        with ranks.failing():
            model, drafter = source.build(ranks.group.device, ranks.group)
            sender = StepSender(ranks)
            engine = Engine(
                model, source.engine, tokenizer=self.tokenizer, drafter=drafter, ranks=sender
            )
        weakref.finalize(self, sender.close)  # the other ranks end with this object, or the process
        return engine

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once.

        Args:
            prompts: texts (where the model has a tokenizer) or lists of token ids; one text stands
                for a list of one.
            params: for all prompts, or one for each; default: ``default_params``.
            progress: show a bar with tokens per second on stderr.

        Returns:
            Outputs in the order of the prompts; the n samples of a prompt (`SamplingParams.n`) one
            after another. One with finish_reason "nan" or "error" failed alone, with its ``error``.

        Raises:
            ValueError: prompts that the engine refuses (none is then queued), texts without a
                tokenizer, or another number of params than of prompts.
        """
        if not isinstance(prompts, Iterable):
            raise ValueError(f"prompts: expected a list of texts or of ids, got {shown(prompts)}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        given = len(params) if isinstance(params, Sequence) else shown(params)
        if given != len(prompts):
            raise ValueError(
                f"params: expected one for each of {len(prompts)} prompts, got {given}"
            )
        token_ids = [
            self.engine.check(self._encode(prompt), one)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        queued: dict[str, dict[int, RequestOutput]] = {}
        num_outputs, num_done, num_tokens = sum(one.n for one in params), 0, 0
        with (
            interrupts_wait() as handle_interrupt,
            tqdm(total=num_outputs, unit="request", disable=not progress) as bar,
        ):
            try:
                for ids, one in zip(token_ids, params, strict=True):
                    queued[self.engine.add_request(ids, one)] = {}
                while num_done < num_outputs:
                    handle_interrupt()
                    report = self._step()
                    num_tokens += report.num_tokens
                    for output in report.finished:
                        if output.request_id in queued:
                            queued[output.request_id][output.sample] = output
                            num_done += 1
                    speed = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
                    bar.update(num_done - bar.n)
            finally:
                self._abort(queued)
        return [outputs[sample] for outputs in queued.values() for sample in sorted(outputs)]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[OutputDelta]:
        """Generate for one prompt, and yield the additions of each step.

        Ending the iteration early aborts the request.

        Args:
            prompt: text or token ids.
            params: as in `generate`; with n samples, each delta has the number of its sample.

        Raises:
            ValueError: at once, for a prompt that the engine refuses.
        """
        ids, params = self._encode(prompt), params or self.default_params
        self.engine.check(ids, params)
        return self._deltas(ids, params)

    def close(self) -> None:
        """End the other ranks, and wait for the copies of the host tier, as `Engine.close`."""
        with interrupts_wait():
            self.engine.close()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a chat whose next message is the model's.

        Arguments as in `ChatTemplate.render`; of a DeepSeek-V4 without template as in
        `quire.models.chat_deepseek_v4.DeepseekV4Chat.render`.

        Raises:
            ValueError: without tokenizer or template, or for messages that the template refuses.
            ImportError: without jinja2.
        """
        if self.tokenizer is None:
            raise ValueError("chat: expected a model with a tokenizer.json, this one has none")
        text = self._template.render(messages, tools=tools, **variables)
        return self._encode(text, special=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers to a chat: `generate` for the ids of `encode_chat`, without a bar.

        Args:
            messages, tools, variables: as in `encode_chat`, such as ``enable_thinking=True``.
            params: as in `generate`.

        Returns:
            One output, or params.n of them.
        """
        ids = self.encode_chat(messages, tools=tools, **variables)
        return self.generate([ids], params, progress=False)

    @cached_property
    def _template(self) -> ChatTemplate | DeepseekV4Chat:
        if self._directory is not None:
            return find_chat(self._directory)
        if isinstance(self.tokenizer, ByteTokenizer):
            return ChatTemplate(PLAIN)
        raise ValueError("chat: expected a Hugging Face directory, whose template is known")

    def _deltas(self, ids: Sequence[int], params: SamplingParams) -> Iterator[OutputDelta]:
        mine: deque[OutputDelta] = deque()
        queued: list[str] = []
        try:
            try:
                with interrupts_wait():
                    queued.append(self.engine.add_request(ids, params, stream=True))
                    self._streams[queued[0]] = mine
                while mine or queued[0] in self.engine.unfinished:
                    if mine:
                        yield mine.popleft()
                    else:
                        self._step()
            finally:
                self._abort(queued)
        finally:  # once more, as an interrupt may have come at the first line of the one above
            self._abort(queued)

    def _abort(self, request_ids: Collection[str]) -> None:
        with interrupts_wait():
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            for request_id in self.engine.unfinished.intersection(request_ids):
                self.engine.abort(request_id)

    def _step(self) -> StepReport:
        with interrupts_wait():
            report = self.engine.step()
            for delta in report.deltas:
                if delta.request_id in self._streams:
                    self._streams[delta.request_id].append(delta)
        return report

    def _encode(self, prompt: str | Sequence[int], special: bool = True) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(
                "prompts: expected token ids, got text, and this model has no tokenizer.json"
            )
        try:
            with no_panic():
                return self.tokenizer.encode(prompt, special=special)
        except Exception as error:
            raise ValueError(
                f"prompts: expected text that the tokenizer takes, got {shown(prompt)}: {error}"
            ) from error


def default_params(directory: Path | None) -> SamplingParams:
    """Sampling parameters of a checkpoint: greedy unless its generation config has ``do_sample``.

    Raises:
        ValueError: a file that is no JSON, or has a value out of range.
    """
    if directory is None:
        return SamplingParams()
    given = read_generation_config(directory)
    names = ["repetition_penalty"]
    if given.get("do_sample"):
        given = {"temperature": 1.0} | given
        given["top_k"] = max(0, given.get("top_k", 0))  # -1 = all
        names += ["temperature", "top_k", "top_p", "min_p"]
    with naming(directory / "generation_config.json"):
        return SamplingParams(**{n: given[n] for n in names if given.get(n) is not None})


def expect_room(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse random weights of more than the free memory, for which the system kills a process.

    Raises:
        ValueError: naming the bytes needed and free.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return
    needed = weight_bytes(build_model(config, device="meta", dtype=dtype))
    if needed > (free := free_memory(device)):
        raise ValueError(
            f"model: {config.name!r} takes {needed / 2**30:.4g} GiB of memory, and "
            f"{free / 2**30:.4g} GiB are free"
        )
