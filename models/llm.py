"""`LLM`: prompts in, outputs out, for scripts and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from quire.models.configs import CONFIGS
from quire.models.gemma import Gemma
from quire.models.request import RequestOutput, SamplingParams
from quire.models.runner import Engine, EngineConfig
from quire.models.tokenizer import Tokenizer, find_tokenizer
from quire.models.weights import load_model, random_model


class LLM:
    """A model with an engine and, where there is one, a tokenizer.

    model: a named configuration (random weights), a Hugging Face directory, or a built `Gemma`.
    engine: settings; default `EngineConfig()`.
    device: default: the GPU if there is one. dtype: default: that of the checkpoint; for random weights bfloat16 on a GPU
        and float32 on a CPU. Both are the model's own where it is already built.
    seed: of random weights.

    Attributes:
        model, engine, tokenizer (None where prompts must be token ids).

    Raises: ValueError for a model that is neither a name, a directory nor a `Gemma`, and what `load_model` raises.
    """

    def __init__(
        self,
        model: str | Path | Gemma,
        *,
        engine: EngineConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        directory = None
        if isinstance(model, Gemma):
            if device is not None or dtype is not None:
                raise ValueError(
                    "device, dtype: expected None with a built model, which has its own"
                )
            self.model = model
        else:
            device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            if str(model) in CONFIGS:
                if dtype is None:
                    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
                self.model = random_model(
                    CONFIGS[str(model)], seed=seed, device=device, dtype=dtype
                )
            elif Path(model).is_dir():
                directory = Path(model)
                self.model = load_model(directory, device=device, dtype=dtype)
            else:
                raise ValueError(
                    f"model: expected one of {sorted(CONFIGS)}, a directory or a Gemma, got {str(model)!r}"
                )
        self.tokenizer: Tokenizer | None = find_tokenizer(self.model.config, directory)
        self.engine = Engine(self.model, engine)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generates for all prompts at once.

        prompts: texts (where the model has a tokenizer) or lists of token ids; one text stands for a list of one.
        params: for all prompts, or one for each. progress: show a bar with tokens per second on stderr.

        Returns: outputs in the order of the prompts.
        Raises: ValueError for prompts that the engine refuses (none is then queued), for texts without a tokenizer, or for
            params of another count; RuntimeError when a request does not fit the pool even alone (the others are aborted).
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"params: expected one for each of {len(prompts)} prompts, got {len(params)}"
            )
        token_ids = [self._encode(prompt) for prompt in prompts]
        queued: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for ids, one in zip(token_ids, params, strict=True):
                queued.append(self.engine.add_request(ids, one))
            with tqdm(total=len(queued), unit="request", disable=not progress) as bar:
                self._run(queued, outputs, bar)
        finally:
            for request_id in queued:
                if request_id in self.engine.unfinished:
                    self.engine.abort(request_id)
        return [self._with_text(outputs[request_id]) for request_id in queued]

    def _run(self, queued: list[str], outputs: dict[str, RequestOutput], bar: tqdm) -> None:
        mine = set(queued)
        num_tokens = 0
        while len(outputs) < len(mine):
            report = self.engine.step()
            assert report is not None, "unfinished requests always make a step"
            num_tokens += report.num_tokens
            for output in report.finished:
                if output.request_id in mine:
                    outputs[output.request_id] = output
                    bar.update()
            bar.set_postfix_str(
                f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False
            )

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(
                "prompts: expected token ids, got text, and this model has no tokenizer.json"
            )
        return self.tokenizer.encode(prompt)

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        if self.tokenizer is None:
            return output
        ids = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        return replace(output, text=self.tokenizer.decode(ids))
