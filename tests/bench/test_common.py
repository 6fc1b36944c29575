"""Workloads and floors, counted by hand, of every family."""

from itertools import takewhile

import numpy as np
import pytest
import torch

from quire.bench.common import floors
from quire.bench.common.rows import Rows
from quire.bench.common.workload import NUM_TURNS, chat_workload, expand, trace_workload
from quire.bench.prefill_decode.build import build_model
from quire.models.tokenizer import ByteTokenizer

CPU = torch.device("cpu")
NAMES = ("gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.fixture(scope="module", params=NAMES)
def built(request):
    return build_model(request.param, device=CPU)


@pytest.mark.parametrize(
    ("limit", "ratio"),
    [(None, 1), (1, 1), (4, 1), (5, 1), (100, 1), (4, 4), (None, 4), (None, 128)],
)
def test_visible_pairs(limit, ratio):
    q_lens, seq_lens = np.array([1, 300, 17, 3, 1]), np.array([1, 300, 140, 10, 515])
    expected = sum(
        min((p + 1) // ratio, limit or 10**9)
        for q, s in zip(q_lens, seq_lens, strict=True)
        for p in range(s - q, s)
    )
    assert Rows(limit, ratio, 1, 1).pairs(q_lens, seq_lens) == expected


def test_prefill_counts_the_matrices_that_a_token_passes(built):
    """By the configuration; floors add up the weights of a model."""
    config, q_lens, seq_lens = built.model.config, np.array([5, 30]), np.array([11, 30])
    matrices = pairs = 0
    for layer in range(config.num_kv_owners):
        shape = config.attention(layer)
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        columns = 2 * q_size + (1 if shape.k_eq_v else 2) * kv_size + 3 * config.mlp_size(layer)
        columns += 3 * config.per_layer_input_size  # gate, projection, and its part of a shared one
        if config.moe is not None:
            columns += config.moe.num_experts + 3 * config.moe.top_k * config.moe.intermediate_size
        matrices += config.hidden_size * columns
        for new, length in zip(q_lens, seq_lens, strict=True):
            for p in range(length - new, length):
                pairs += min(p + 1, shape.sliding_window or p + 1) * q_size
    expected = 2 * int(q_lens.sum()) * matrices + 4 * pairs
    assert floors.prefill_flops(config, q_lens, seq_lens) == expected


def test_decode_reads_rows_of_tables_and_chosen_experts(built):
    model, config = built.model, built.model.config
    batch = np.array([100, 9, 40])
    expected = 0
    for layer in range(config.num_layers):
        shape = config.attention(layer)
        for length in batch:
            seen = min(length, shape.sliding_window or length)
            expected += 4 * 2 * shape.num_kv_heads * shape.head_dim * seen
    for name, weight in model.named_parameters():
        share = 1.0
        if "experts" in name:
            # Each of the tokens leaves an expert out with this probability.
            share -= (1 - config.moe.top_k / config.moe.num_experts) ** len(batch)
        if name == "embed_tokens_per_layer.weight":
            share = len(batch) / len(weight)
        if name == "embed_tokens.weight" and model.lm_head is not None:
            share = len(batch) / len(weight)
        expected += 4 * share * weight.numel()
    assert floors.decode_bytes(model, batch) == pytest.approx(expected, abs=100)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "latent", "key"), [("auto", 4 * 32, 4 * 16), ("fp8", 584, 16 + 4)]
)
def test_rows_that_deepseek_v4_reads(kv_cache_dtype, latent, key):
    """The token at position 99 sees 16 raw rows, 4 or all of 25 entries, or all of 12; the first
    token sees one raw row."""
    model = build_model("deepseek-v4-tiny", device=CPU).model
    one, last = np.array([1]), np.array([100])
    rows, scored = 6 * 15 + 2 * 4 + 2 * 12, 2 * 25
    read = [floors.decode_bytes(model, length, kv_cache_dtype) for length in (one, last)]
    assert read[1] - read[0] == rows * latent + scored * key
    flops = [floors.prefill_flops(model.config, one, length) for length in (one, last)]
    assert flops[1] - flops[0] == rows * 4 * 4 * 32 + scored * 2 * 16 * 16


def test_floors_of_deepseek_v4():
    """One sequence of one token: its share of experts, a row a layer; operations twice the matrices
    and what it attends to.
    """
    model = build_model("deepseek-v4-tiny", device=CPU).model
    config, one = model.config, np.array([1])
    layers = 6
    experts = sum(w.numel() for n, w in model.layers.named_parameters() if ".experts." in n)
    weights = {n: w for n, w in model.named_parameters() if not n.startswith(("mtp.", "embed_"))}
    rest = tables = 0
    for name, weight in weights.items():
        if "tid2eid" in name:
            tables += weight[0].numel() * weight.element_size()
        elif ".experts." not in name:
            rest += weight.numel() * weight.element_size()
    want = experts // 4 * 4 + rest + tables + 4 * config.hidden_size + layers * config.head_dim * 4
    assert floors.decode_bytes(model, one) == want
    fewer = layers * (config.head_dim * 4 - 584)
    assert floors.decode_bytes(model, one, "fp8") == want - fewer
    assert floors.prefill_flops(config, one, one) > 2 * experts // 4


ENCODE = ByteTokenizer().encode
LINE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'


def tokens(workload):
    return [[turn.token_ids.tolist() for turn in session] for session in workload.sessions]


def shared(a, b):
    """Length of the common prefix of two lists."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_chats_share_system_prompts_and_nothing_else():
    sessions = tokens(chat_workload(ENCODE, bos_token_id=2))
    assert sessions == tokens(chat_workload(ENCODE, bos_token_id=2))
    assert sessions != tokens(chat_workload(ENCODE, bos_token_id=2, seed=1))
    assert all(len(session) == NUM_TURNS for session in sessions)
    first_turns = [session[0] for session in sessions]
    assert all(prompt[0] == 2 and 2 not in prompt[1:] for prompt in first_turns)
    assert shared(first_turns[0], first_turns[3]) >= 448  # the same system prompt
    assert shared(first_turns[0], first_turns[1]) < 100
    assert len({tuple(turn) for session in sessions for turn in session}) == 8 * NUM_TURNS


def test_expansion_is_fixed_and_fewer_tokens_are_a_prefix():
    whole = expand(41, 512, low=3, high=259)
    assert whole.dtype == np.int32 and whole.min() >= 3 and whole.max() < 259
    assert expand(41, 30, low=3, high=259).tolist() == whole[:30].tolist()
    assert expand(41, 4, low=3, high=259).tolist() == [153, 197, 212, 214]  # on every machine
    assert expand(42, 30, low=3, high=259).tolist() != whole[:30].tolist()
    assert expand(41, 30, low=3, high=259, seed=1).tolist() != whole[:30].tolist()


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.05, 0.001])
def test_scaled_traces_share_the_same_blocks(tmp_path, scale):
    path = tmp_path / "t.jsonl"
    rows = [(9, 1300, 40, [1, 2, 3]), (2, 1200, 40, [1, 2, 4]), (5, 600, 40, [5, 2])]
    path.write_text("".join(LINE % row for row in rows))
    workload = trace_workload(path, vocab_size=50_000, scale=scale)
    early, middle, late = (session[0].token_ids.tolist() for session in workload.sessions)
    block = max(1, round(512 * scale))  # timestamps give the order: 2, 5, 9
    assert shared(early, late) == 2 * block and shared(early, middle) == 0
    assert len(late) == 2 * block + max(1, round(276 * block / 512))
    assert middle[block:] == early[block : block + len(middle) - block]  # an id alone decides
    assert workload.sessions[0][0].max_tokens == max(1, round(40 * scale))
    assert [session[0].group for session in workload.sessions] == [1, 2, 4]
    with pytest.raises(ValueError, match="scale: expected at most 1 with a trace, got 2"):
        trace_workload(path, vocab_size=259, scale=2)
