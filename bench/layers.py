"""A few layers of a named model at their real widths, end to end: engine, allocator, kernels.

    python -m bench.layers --model gemma-4-31b --layers 6 --batch 16 --context 8192 --json layers.json
    python -m bench.layers --model deepseek-v4-flash --layers 4 --experts 32

First the logits of a short run are compared with full forward passes without a cache: the engine's may
be at most twice as far from those in fp32 as a full pass in the model's dtype is, counting one
rounding (an estimate, as in `bench.prefill_decode.verify`); of DeepSeek-V4, where rounding decides
which experts and entries a token sees, those of most tokens. Exit status 1, and no numbers, if they
are not. Then all prompts are prefilled in chunks, and decoded together.

Printed: tokens a second of prefill and decode steps and their time over the floor (`bench.common.floors`); where the time of a decode step goes;
and the forward pass of one decode step replayed as a CUDA graph (on a CPU: called again), with the allocator's share of a step that would
consist of that and the host's work.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.layers")

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.command import MAX_TOKENS, Parser, integer, number, output_file, program
from quire.models.config.named import ModelConfig, get_config
from quire.models.deepseek_v4.config import DeepseekV4Config
from quire.models.device import find_device
from quire.models.engine.engine import Engine, EngineConfig, StepReport
from quire.models.engine.request import SamplingParams
from quire.models.families.decoder import Decoder
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model

from .common.floors import Rates, decode_bytes, measure_rates, prefill_flops
from .common.machine import describe_machine
from .common.results import write_json
from .common.timing import time_calls

SCHEMA = 1
CHECK_TOKENS = 4


class WrongOutput(Exception):
    """The engine's logits differ from those of a full forward pass by more than their budget."""


class Recorder:
    """Runs requests on an engine, and keeps the logits of each step and the arguments of the last forward pass of the whole batch."""

    def __init__(self, model: Decoder, settings: EngineConfig) -> None:
        # Replayed graphs do not call the hook that `run` registers.
        one_by_one = {"decode_graphs": False, "async_scheduling": False}
        self.engine = Engine(model, dataclasses.replace(settings, **one_by_one))
        self.steps: list[StepReport] = []
        self.logits: list[Tensor] = []
        self.call: tuple[tuple, dict] = ((), {})

    def run(self, prompts: list[np.ndarray], max_tokens: list[int], keep: bool) -> list[Any]:
        """Outputs of all requests in order. keep: collect the logits of every step."""
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in max_tokens]
        ids = [self.engine.add_request(p, q) for p, q in zip(prompts, params, strict=True)]

        def record(module: Any, args: tuple, kwargs: dict, output: Tensor) -> None:
            if len(args[2].seq_lens) == len(prompts):
                self.call = (args, kwargs)
            if keep:
                self.logits.append(output)

        hook = self.engine.model.register_forward_hook(record, with_kwargs=True)
        outputs = {}
        while self.engine.has_work:
            report = self.engine.step()
            self.steps.append(report)
            outputs |= {output.request_id: output for output in report.finished}
        hook.remove()
        return [outputs[request_id] for request_id in ids]


def few_layers(
    name: str, num_layers: int, num_experts: int | None = None
) -> ModelConfig | DeepseekV4Config:
    """The first layers of a named configuration, of DeepSeek-V4 without drafters.

    Args:
        num_experts: of DeepSeek-V4, those that a layer keeps; None = all.

    Raises:
        ValueError: an unknown name, or more than the model has.
    """
    config = get_config(name)
    if not 1 <= num_layers <= len(config.layer_types):
        raise ValueError(f"layers: expected 1..{len(config.layer_types)}, got {num_layers}")
    shared = {
        "name": f"{name}, {num_layers} layers",
        "layer_types": config.layer_types[:num_layers],
    }
    if isinstance(config, ModelConfig):
        if num_experts is not None:
            raise ValueError(f"experts: expected a model of DeepSeek-V4 with it, got {name}")
        owners = max(0, num_layers - config.num_kv_owners)
        return dataclasses.replace(config, **shared, num_kv_shared_layers=owners)
    kept = num_experts or config.num_experts
    if not config.num_experts_per_tok <= kept <= config.num_experts:
        least = config.num_experts_per_tok
        raise ValueError(f"experts: expected {least}..{config.num_experts}, got {kept}")
    if num_experts is not None:
        shared["name"] += f" of {kept} experts"
    mlp = config.mlp_layer_types[:num_layers]
    return dataclasses.replace(
        config, **shared, mlp_layer_types=mlp, num_experts=kept, num_mtp_layers=0
    )


def check_logits(model: Decoder, settings: EngineConfig, length: int) -> float:
    """Compares every logit that the engine samples from, for a prompt of ``length`` tokens and a few more, with full passes.

    Returns: the largest error over its budget, at most 1. Raises: WrongOutput.
    """
    settings = dataclasses.replace(settings, max_num_batched_tokens=max(2, length // 3))
    recorder = Recorder(model, settings)
    [output] = recorder.run([prompt(model, length, 0)], [CHECK_TOKENS], keep=True)
    if output.error is not None:  # logits that are not finite, for example
        raise WrongOutput(f"request: {output.error}")
    # Chunks that do not end the prompt have no logits.
    got = torch.cat(recorder.logits).float()
    sequence = torch.tensor([*output.prompt_token_ids, *output.token_ids][:-1], device=model.device)
    rows = torch.arange(length - 1, len(sequence), device=model.device)
    plain = model.full_forward(sequence, logits_rows=rows).float()
    wide = build_model(model.config, device=model.device, dtype=torch.float32)
    for target, source in zip(wide.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    exact = wide.full_forward(sequence, logits_rows=rows)
    size = exact.abs().max().item()
    rounding = torch.finfo(model.dtype).eps / 2 * size
    budget = 2 * ((plain - exact).abs().max().item() + rounding)
    errors = (got - exact).abs().amax(1)
    # Another expert or entry in a few tokens of DeepSeek-V4 is no mistake.
    several = isinstance(model.config, DeepseekV4Config)
    error = (errors.median() if several else errors.max()).item()
    # "not <=" rather than ">": NaN fails.
    if not error <= budget:
        raise WrongOutput(
            f"logits: error {error:.3g}, budget {budget:.3g}, largest logit {size:.3g}"
        )
    return error / budget


def prompt(model: Decoder, length: int, seed: int) -> np.ndarray:
    """Random token ids [length]."""
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, length)


def measure(
    model: Decoder, settings: EngineConfig, *, batch: int, context: int, num_steps: int
) -> Iterator[dict[str, Any]]:
    """Prefills ``batch`` prompts of ``context`` tokens and decodes them together for ``num_steps`` steps or more.

    Yields parts of the result as they are known.
    """
    recorder = Recorder(model, settings)
    chunk = settings.max_num_batched_tokens
    # Each prompt has its turn; the first ones decode while the last are prefilled, so they answer longer.
    waiting = -(-batch * context // max(1, chunk - batch))
    prompts = [prompt(model, context, 1 + i) for i in range(batch)]
    recorder.run(prompts, [waiting + num_steps + 1] * batch, keep=False)
    decodes = [s for s in recorder.steps if not s.num_prefills and s.num_decodes == batch]
    prefills = [s for s in recorder.steps if s.num_tokens == chunk and s.num_prefills]
    rates = measure_rates(model)
    yield {
        "rates": dataclasses.asdict(rates),
        "prefill": _prefill(model.config, prefills, rates),
        "decode": _decode(model, decodes, rates),
    }
    yield {"graph": _graph(model, recorder.call, decodes, rates)}


def _graph(
    model: Decoder, call: tuple[tuple, dict], steps: list[StepReport], rates: Rates
) -> dict[str, Any]:
    """The forward pass of one decode step replayed. What cannot be captured is said, and costs no other result."""
    args, kwargs = call
    try:
        replay = time_calls([lambda: model(*args, **kwargs)], model.device).p50
    except RuntimeError as error:
        return {"failed": str(error).split("\n")[0]}
    seq_lens = args[2].seq_lens.cpu().numpy()
    return {
        "sequences": len(seq_lens),
        "ms": 1e3 * replay,
        "over_floor": replay / _decode_floor(model, seq_lens, rates),
        # Of a step whose forward pass takes as long as its replay.
        "allocator_share": statistics.median(
            s.allocator / (s.total - s.model + replay) for s in steps
        )
        if steps
        else None,
    }


def _prefill(config: ModelConfig, steps: list[StepReport], rates: Rates) -> dict[str, Any]:
    """Of steps as full as they can be; medians, as the first ones may compile."""
    if not steps:
        return {"steps": 0}
    flops = [prefill_flops(config, s.q_lens, s.seq_lens) for s in steps]
    floors = [f / rates.matmul_flops_per_s for f in flops]
    over = [s.total / floor for s, floor in zip(steps, floors, strict=True)]
    return {
        "steps": len(steps),
        "tokens_per_s": statistics.median(s.num_tokens / s.total for s in steps),
        "over_floor": statistics.median(over),
        "allocator_share": statistics.median(s.allocator / s.total for s in steps),
    }


def _decode(model: Decoder, steps: list[StepReport], rates: Rates) -> dict[str, Any]:
    if not steps:
        return {"steps": 0}
    over = [s.total / _decode_floor(model, s.seq_lens, rates) for s in steps]
    return {
        "steps": len(steps),
        "ms": 1e3 * statistics.median(s.total for s in steps),
        "tokens_per_s": statistics.median(s.num_tokens / s.total for s in steps),
        "over_floor": statistics.median(over),
        "model_ms": 1e3 * statistics.median(s.model for s in steps),
        "allocator_us": 1e6 * statistics.median(s.allocator for s in steps),
        "rest_us": 1e6 * statistics.median(s.total - s.model - s.allocator for s in steps),
        "allocator_share": statistics.median(s.allocator / s.total for s in steps),
    }


def _decode_floor(model: Decoder, seq_lens: np.ndarray, rates: Rates) -> float:
    return decode_bytes(model, seq_lens) / rates.copy_bytes_per_s


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    device = find_device(args.device)
    dtype = torch.bfloat16
    config = few_layers(args.model, args.layers, args.experts)
    settings = EngineConfig(
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.chunk,
        max_model_len=config.max_position_embeddings,
        cache_bytes=int(args.cache_gib * 2**30),
    )
    with torch.inference_mode():
        model = random_model(config, device=device, dtype=dtype)
        try:
            share = check_logits(model, settings, args.check_length)
        except WrongOutput as error:
            print(f"refusing to report: {error}", file=sys.stderr)
            return 1
        result = {
            "schema": SCHEMA,
            "machine": describe_machine(device),
            "model": config.name,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": args.batch,
            "context": args.context,
            "chunk": args.chunk,
            "check": {"tokens": args.check_length, "error_over_budget": share},
        }
        write_json(args.json, result, final=False)
        for part in measure(
            model, settings, batch=args.batch, context=args.context, num_steps=args.steps
        ):
            result |= part
            write_json(args.json, result, final="graph" in part)
    print(f"{config.name}, {args.batch} sequences of {args.context} tokens, chunks of {args.chunk}")
    print(f"logits checked: error {share:.2f} of the budget")
    for part in ("prefill", "decode", "graph"):
        numbers = (
            f"{name} {value:.4g}" if isinstance(value, (int, float)) else f"{name} {value}"
            for name, value in result[part].items()
        )
        print(f"{part:8}", ", ".join(numbers))
    return 0


def _parser() -> Parser:
    parser = Parser("bench.layers", __doc__)
    add = parser.add_argument
    add("--model", default="gemma-4-31b", help="named configuration; default: gemma-4-31b")
    add("--layers", type=integer(), default=6, help="layers to keep, from the front; default: 6")
    add(
        "--experts",
        type=integer(),
        help="routed experts of a DeepSeek-V4 layer to keep, from the front; default: all",
    )
    add("--batch", type=integer(most=4096), default=16, help="sequences; default: 16")
    add(
        "--context",
        type=integer(most=MAX_TOKENS),
        default=8192,
        help="prompt tokens of each; default: 8192",
    )
    add(
        "--chunk",
        type=integer(most=MAX_TOKENS),
        default=8192,
        help="new tokens a step at most; default: 8192",
    )
    add("--steps", type=integer(most=10**6), default=20, help="decode steps at least; default: 20")
    add(
        "--check-length",
        type=integer(most=MAX_TOKENS),
        default=1600,
        help="prompt tokens of the check; default: 1600",
    )
    add(
        "--cache-gib",
        type=number(above=True),
        default=12.0,
        help="size of the page pool; default: 12",
    )
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    add("--json", type=output_file, metavar="FILE", help="write all numbers, as they are known")
    return parser
