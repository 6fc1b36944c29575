"""DeepSeek-V4's chat format: strings and hashes that vLLM 0.33's encoder gave for these messages."""

import hashlib
import json

import pytest

from quire.models.chat import find_chat
from quire.models.chat_deepseek_v4 import BOS, EOS, OFFICIAL, PREVIEW, DeepseekV4Chat

SYSTEM = {"role": "system", "content": "S"}


def user(content):
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A1", "reasoning_content": "R1"}
CHAT = [user("Q1"), ANSWER, user("Q2")]
SCHEMA = SYSTEM | {"response_format": {"type": "object"}}


@pytest.mark.parametrize(
    ("messages", "settings", "text"),
    [
        ([user("Hi")], {}, "<｜User｜>Hi<｜Assistant｜></think>"),
        ([user("Hi")], {"thinking": True}, "<｜User｜>Hi<｜Assistant｜><think>"),
        ([user("Hi")], {"enable_thinking": True, "reasoning_effort": "low"}, "<｜User｜>Hi<｜Assistant｜><think>"),
        ([user("Hi")], {"add_generation_prompt": False}, "<｜User｜>Hi"),
        ([SYSTEM, user("Hi")], {}, "S<｜User｜>Hi<｜Assistant｜></think>"),
        (CHAT, {}, f"<｜User｜>Q1<｜Assistant｜></think>A1{EOS}<｜User｜>Q2<｜Assistant｜></think>"),
        (CHAT, {"thinking": True}, f"<｜User｜>Q1<｜Assistant｜></think>A1{EOS}<｜User｜>Q2<｜Assistant｜><think>"),
        (CHAT, {"thinking": True, "drop_thinking": False},
         f"<｜User｜>Q1<｜Assistant｜><think>R1</think>A1{EOS}<｜User｜>Q2<｜Assistant｜><think>"),
        ([user("a"), user([{"type": "text", "text": "b"}])], {}, "<｜User｜>a\n\nb<｜Assistant｜></think>"),
        ([user("Q"), ANSWER, SYSTEM], {}, f"<｜User｜>Q<｜Assistant｜></think>A1{EOS}S<｜Assistant｜></think>"),
        ([SCHEMA, user("x")], {},
         "S\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
         '{"type": "object"}<｜User｜>x<｜Assistant｜></think>'),
    ],
)  # fmt: skip
def test_strings(messages, settings, text):
    assert DeepseekV4Chat().render(messages, **settings) == BOS + text


CALLS = [
    {"id": "a", "function": {"name": "f", "arguments": "{}"}},
    {"id": "b", "function": {"name": "g", "arguments": {"k": [1, "é"]}}},
]
TOOL_TURN = [
    SYSTEM,
    user("Q"),
    {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": CALLS},
    {"role": "tool", "content": "B", "tool_call_id": "b"},
    {"role": "tool", "content": "A", "tool_call_id": "a"},
    user("go on"),
]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_tools():
    chat = DeepseekV4Chat()
    kept = chat.render(TOOL_TURN, thinking=True, drop_thinking=False)
    assert digest(kept) == "adb3eaa7411b886d"
    assert digest(chat.render(TOOL_TURN, thinking=True)) == "540242b0d832180c"
    late = [*TOOL_TURN[:3], {"role": "assistant", "content": "wait"}, *TOOL_TURN[3:]]
    assert "<tool_result>A</tool_result>\n\n<tool_result>B" in chat.render(late)
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    text = chat.render([user("x")], tools=tools)
    block, question = text.removeprefix(f"{BOS}\n\n").split("<｜User｜>")
    assert digest(block) == "e7cf95ad8199cfcc" and question == "x<｜Assistant｜></think>"
    assert "<think>R</think>" in chat.render(TOOL_TURN, tools=tools, thinking=True)


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([{"role": "developer", "content": "x"}], {}, "messages: expected a role in .*'developer'"),
        ([user("x") | {"task": "title"}], {}, "messages: expected a role in .* and no task, got"),
        ([user("x")], {"reasoning_effort": "some"}, r"reasoning_effort: expected one of .*'some'"),
        (["x"], {}, "messages: expected a list of dicts with a role and a content, got"),
        ([{"content": "x"}], {}, "messages: expected a list of dicts .*'role'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], {}, "messages: expected a list .*JSON"),
    ],
)  # fmt: skip
def test_refusals(messages, settings, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV4Chat().render(messages, **settings)


@pytest.mark.parametrize(
    ("keys", "module", "efforts"),
    [
        ({}, None, PREVIEW),
        ({"dspark_block_size": 5}, None, OFFICIAL),
        ({}, "REASONING_EFFORT_PROMPTS = {}", OFFICIAL),
        ({"dspark_block_size": 5}, "REASONING_EFFORT_MAX = ''", PREVIEW),
    ],
)
def test_format_of_a_directory(tmp_path, keys, module, efforts):
    """A template comes first; without one the model_type says that this format is meant."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"} | keys))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    if module is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(module)
    text = find_chat(tmp_path).render([user("x")], thinking=True, reasoning_effort="max")
    assert text == f"{BOS}{efforts['max']}<｜User｜>x<｜Assistant｜><think>"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert find_chat(tmp_path).render([user("x")]) == "jinja"
