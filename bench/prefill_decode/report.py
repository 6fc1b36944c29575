"""The numbers of a run under stable keys. ``--json`` writes the dictionary::

    schema               int, raised when a key changes its meaning or goes
    machine              device, threads, driver, python, torch, triton, commit
    model                name, source, parameters, weight_bytes, dtype
    engine               impl, kv_cache_dtype, retention, num_pages, max_num_seqs,
                         max_num_batched_tokens, describe
    workload             title, group_name, requests, prompt_tokens, output_tokens
    check                requests, of_requests, tokens, exact_tokens, largest_bound
    rates                copy_bytes_per_s, copy_bytes, matmul_flops_per_s, matmul_size
    cached, uncached     with prefix caching on, and off (null with --no-baseline), each:
      seconds, cpu_seconds, steps, preemptions, output_tokens_per_s
      prefill, decode    steps with a chunk of more than one token, and the others:
                         steps, tokens, seconds, tokens_per_s, over_floor
      ttft_ms, itl_ms    p50, p99
      hit                tokens, prompt_tokens, rate, limited_by {reason: requests}
      pages              peak_in_use, peak_cached, in_use, cached, total
      allocator          us_per_step, share_of_step, hashing_us_per_request
      idle_us_per_step   device with nothing to do between two steps, by CUDA events;
                         on a CPU, which is host and device, by its clock
      split              CPU time of the engine's thread:
                         outside_model {worst, p95, overall}, the share of a step that is not the
                         model's arithmetic (forward passes, sampling, waiting for them); cpu_s;
                         parts {schedule, allocator, draft, tensors, model, sample, wait, deliver}:
                         cpu_s, share, decode_us, prefill_us (medians of steps), worst_us (in the
                         step with the largest share outside)
      groups             list of {group, requests, hit_rate, ttft_p50_ms}, by workload.group_name
    comparison           speedup, cpu_speedup, ttft_speedup (p50), identical_requests,
                         identical_tokens, output_tokens; or null
    speculation          kind, draft_tokens, drafts, accepted, tokens_per_step (of one decoding
                         request, 1 without drafts: the acceptance length), steps, steps_without,
                         cpu_speedup, hit_tokens, hit_tokens_without, identical_requests,
                         identical_tokens, output_tokens; or null
    tiers                with --host-cache: host_gib; counters {name: count}; moved {to_host,
                         to_device: bytes}; without, of the same prompts without it, as cached;
                         comparison, of cached against it; or null
    ranks                with --tensor-parallel-size: size; memory of a rank, in words; capacity,
                         tokens of a rank's pool by those of one that has all of the model, in as
                         many bytes; run, of the same prompts with caching on, as cached;
                         comparison, of it against cached; or null

A number that does not exist (no step of a kind, no second token) is null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire.models.engine.config import EngineConfig
from quire.models.engine.memory import weight_bytes
from quire.models.engine.report import PARTS, StepReport, outside_model
from quire.models.families.decoder import Decoder

from ..common.floors import Rates, decode_bytes, prefill_flops
from ..common.results import describe_machine
from ..common.workload import Workload
from .build import BenchModel
from .drive import WorkloadRun
from .verify import Check

SCHEMA = 3


def about(
    built: BenchModel, settings: EngineConfig, workload: Workload, run: WorkloadRun, check: Check
) -> dict[str, Any]:
    """Everything but measured numbers: schema, machine, model, engine, workload and check."""
    model = built.model
    return {
        "schema": SCHEMA,
        "machine": describe_machine(model.device),
        "model": {
            "name": model.config.name,
            "source": built.source,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weight_bytes": weight_bytes(model),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "engine": {
            "impl": settings.impl or ("triton" if model.device.type == "cuda" else "torch"),
            "kv_cache_dtype": settings.kv_cache_dtype,
            "retention": settings.retention,
            "num_pages": run.num_pages,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "describe": run.describe,
        },
        "workload": {
            "title": workload.title,
            "group_name": workload.group_name,
            "requests": workload.num_requests,
            "prompt_tokens": sum(map(len, run.prompts.values())),
            "output_tokens": sum(t.max_tokens for session in workload.sessions for t in session),
        },
        "check": {
            "requests": check.num_requests,
            "of_requests": workload.num_requests,
            "tokens": check.num_tokens,
            "exact_tokens": check.num_exact,
            "largest_bound": check.largest_bound,
        },
    }


def metrics(
    run: WorkloadRun, model: Decoder, rates: Rates, *, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """Numbers of one run over pages of this dtype; the keys are in the file's docstring."""
    outputs, num_steps = run.outputs.values(), len(run.steps)
    allocator = sum(step.allocator for step in run.steps)
    hit = sum(o.num_cached_tokens for o in outputs)
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    prefills = [step for step in run.steps if step.num_prefills]
    decodes = [step for step in run.steps if not step.num_prefills]
    flops = sum(prefill_flops(model.config, s.q_lens, s.seq_lens) for s in prefills)
    read = sum(decode_bytes(model, s.seq_lens, kv_cache_dtype) for s in decodes)
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "steps": num_steps,
        "preemptions": sum(step.num_preempted for step in run.steps),
        "output_tokens_per_s": sum(len(o.token_ids) for o in outputs) / run.seconds,
        "prefill": _phase(prefills, flops / rates.matmul_flops_per_s),
        "decode": _phase(decodes, read / rates.copy_bytes_per_s),
        "ttft_ms": _percentiles(o.ttft for o in outputs),
        "itl_ms": _percentiles(gap for o in outputs for gap in o.itl),
        "hit": {
            "tokens": hit,
            "prompt_tokens": prompt,
            "rate": hit / prompt,
            "limited_by": dict(Counter(o.limited_by for o in outputs).most_common()),
        },
        "pages": {
            "peak_in_use": run.peak_pages_in_use,
            "peak_cached": run.peak_pages_cached,
            "in_use": run.stats["pages_in_use"],
            "cached": run.num_pages - 1 - run.stats["free_pages"],
            "total": run.num_pages - 1,
        },
        "allocator": {
            "us_per_step": 1e6 * allocator / num_steps,
            "share_of_step": allocator / sum(step.total for step in run.steps),
            "hashing_us_per_request": 1e6 * run.hashing / len(outputs),
        },
        "idle_us_per_step": 1e6 * sum(step.idle for step in run.steps) / num_steps,
        "split": split(run.steps),
        "groups": _groups(run),
    }


def split(steps: Sequence[StepReport]) -> dict[str, Any]:
    """CPU time of the engine's thread by part; see the file's docstring."""
    cpu = np.array([step.cpu for step in steps])  # [steps, parts]
    outside, seconds = outside_model(cpu), cpu.sum(axis=0)
    is_decode = np.array([step.num_prefills == 0 for step in steps])
    decode, prefill = (
        np.median(rows, axis=0) if len(rows) else None for rows in (cpu[is_decode], cpu[~is_decode])
    )
    worst = cpu[outside.argmax()]
    return {
        "outside_model": {
            "worst": float(outside.max()),
            "p95": float(np.quantile(outside, 0.95)),
            "overall": float(outside_model(seconds)),
        },
        "cpu_s": float(seconds.sum()),
        "parts": {
            part: {
                "cpu_s": float(seconds[i]),
                "share": float(seconds[i] / seconds.sum()),
                "decode_us": None if decode is None else 1e6 * float(decode[i]),
                "prefill_us": None if prefill is None else 1e6 * float(prefill[i]),
                "worst_us": 1e6 * float(worst[i]),
            }
            for i, part in enumerate(PARTS)
        },
    }


def comparison(run: WorkloadRun, other: WorkloadRun) -> dict[str, Any]:
    """Compare a run with another one of the same prompts; tokens position by position."""
    pairs = [(o.token_ids, other.outputs[key].token_ids) for key, o in run.outputs.items()]
    ttft, before = (_percentiles(o.ttft for o in r.outputs.values())["p50"] for r in (run, other))
    return {
        "speedup": other.seconds / run.seconds,
        "cpu_speedup": other.cpu_seconds / run.cpu_seconds,
        "ttft_speedup": before / ttft,
        "identical_requests": sum(a == b for a, b in pairs),
        "identical_tokens": sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True)),
        "output_tokens": sum(len(a) for a, _ in pairs),
    }


def speculation(
    kind: str, draft_tokens: int, run: WorkloadRun, plain: WorkloadRun
) -> dict[str, Any]:
    """Drafts of ``run``, compared with the same prompts without drafts in ``plain``."""
    outputs, same = run.outputs.values(), comparison(run, plain)
    kept = ("cpu_speedup", "identical_requests", "identical_tokens", "output_tokens")
    # Tokens of one step have one time; the first token comes from a prompt's last chunk.
    steps = sum(len(set(o.token_times)) - 1 for o in outputs)
    decoded = sum(len(o.token_ids) - 1 for o in outputs)
    return {
        "kind": kind,
        "draft_tokens": draft_tokens,
        "drafts": sum(o.num_drafts for o in outputs),
        "accepted": sum(o.num_accepted for o in outputs),
        "tokens_per_step": decoded / steps if steps else None,
        "steps": len(run.steps),
        "steps_without": len(plain.steps),
        "hit_tokens": sum(o.num_cached_tokens for o in outputs),
        "hit_tokens_without": sum(o.num_cached_tokens for o in plain.outputs.values()),
        **{key: same[key] for key in kept},
    }


def tiers(run: WorkloadRun) -> dict[str, Any]:
    counts = {
        name.removeprefix("tier_").removesuffix("/host"): count
        for name, count in run.stats.items()
        if name.startswith("tier_")
    }
    return {"counters": counts, "moved": run.moved}


def _phase(steps: list[StepReport], floor_seconds: float) -> dict[str, Any]:
    seconds, tokens = sum(step.total for step in steps), sum(step.num_tokens for step in steps)
    return {
        "steps": len(steps),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if steps else None,
        "over_floor": seconds / floor_seconds if steps else None,
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, float | None]:
    values = list(seconds)
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}


def _groups(run: WorkloadRun) -> list[dict[str, Any]]:
    rows = []
    for group in sorted(set(run.groups.values())):
        members = [output for key, output in run.outputs.items() if run.groups[key] == group]
        prompt = sum(len(o.prompt_token_ids) for o in members)
        row = {"group": group, "requests": len(members)}
        row["hit_rate"] = sum(o.num_cached_tokens for o in members) / prompt
        rows.append(row | {"ttft_p50_ms": _percentiles(o.ttft for o in members)["p50"]})
    return rows
