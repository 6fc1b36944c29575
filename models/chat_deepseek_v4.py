"""The text format of DeepSeek-V4's chats, whose checkpoints have a Python module for a template.

That module is never run. A system message is its text alone; the header of an answer, and whether
it thinks, are written behind the message before it::

    BOS [effort] system <｜User｜>question<｜Assistant｜><think>reasoning</think>answer EOS

Source: ``encoding/README.md`` of DeepSeek-V4; vLLM 0.33 ``deepseek_v4_encoding``, which writes a
header after a last system message too. Not supported: developer, latest_reminder, task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config.fields import shown

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
ROLES = ("system", "user", "assistant", "tool")
_MODULE = "encoding/encoding_dsv4.py"

_THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
PREVIEW = {None: "", "high": "", "max": _THOROUGH}
OFFICIAL = {None: "", "low": "", "high": _THOROUGH, "max": _EXHAUSTIVE}

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), \
you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls \
or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


class DeepseekV4Chat:
    """Texts of chats, as `quire.models.chat.ChatTemplate` renders them.

    Args:
        efforts: what each ``reasoning_effort`` puts at the start, `PREVIEW` or `OFFICIAL`.
    """

    def __init__(self, efforts: Mapping[str | None, str] = OFFICIAL) -> None:
        self._efforts = efforts

    @classmethod
    def of_directory(cls, path: Path, config: Mapping[str, Any]) -> DeepseekV4Chat:
        """The format of a checkpoint: of the preview models, or of those from 0731 on."""
        official = "dspark_block_size" in config
        if (path / _MODULE).is_file():
            text = (path / _MODULE).read_text(encoding="utf-8", errors="replace")
            official = "REASONING_EFFORT_PROMPTS" in text
        return cls(OFFICIAL if official else PREVIEW)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool = False,
        enable_thinking: bool = False,
        reasoning_effort: str | None = None,
        drop_thinking: bool = True,
    ) -> str:
        """Text of a chat, special tokens spelled out.

        Args:
            messages: the earliest first; roles are system, user, assistant and tool. An assistant's
                may have ``reasoning_content`` and ``tool_calls``, a system's ``tools`` and
                ``response_format``.
            tools: JSON schemas of functions, for the first system message.
            thinking, enable_thinking: either = the answer starts with its reasoning.
            reasoning_effort: "high" or "max", and "low" from 0731 on; of thinking only.
            drop_thinking: leave out the reasoning of answers before the last question, but in chats
                with tools.

        Raises:
            ValueError: messages, tools or an effort that the format does not have.
        """
        thinks = thinking or enable_thinking
        if reasoning_effort not in self._efforts:
            raise ValueError(
                f"reasoning_effort: expected one of {list(self._efforts)}, got "
                f"{shown(reasoning_effort)}"
            )
        try:
            turns = _turns(messages, tools)
            last = max((i for i, m in enumerate(turns) if m["role"] == "user"), default=-1)
            keeps = not drop_thinking or any(m.get("tools") for m in turns)
            text = BOS + (self._efforts[reasoning_effort] if thinks else "")
            for i, turn in enumerate(turns):
                shows = thinks and (keeps or i >= last)
                text += _text_of(turn, shows)
                is_last = i + 1 == len(turns)
                opens = add_generation_prompt if is_last else turns[i + 1]["role"] == "assistant"
                if turn["role"] != "assistant" and opens:
                    text += ASSISTANT + ("<think>" if shows else "</think>")
        except (TypeError, AttributeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                "messages: expected a list of dicts with a role and a content, got "
                f"{shown(messages)}: {type(error).__name__}: {error}"
            ) from error
        return text


def _turns(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages with the tools in a system message, and neighbouring questions as one."""
    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if tools:
        if not any(message["role"] == "system" for message in given):
            given.insert(0, {"role": "system"})
        next(m for m in given if m["role"] == "system")["tools"] = list(tools)
    turns: list[dict[str, Any]] = []
    calls: list[Any] = []  # ids of the latest
    for message in given:
        role = message["role"]
        if role not in ROLES or "task" in message:
            raise ValueError(
                f"messages: expected a role in {ROLES} and no task, got {shown(message)}"
            )
        if role not in ("user", "tool"):
            turns.append(message)
            calls = [call.get("id") for call in message.get("tool_calls", ())] or calls
            continue
        if not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "parts": [], "calls": calls})
        turns[-1]["parts"].append(message)
    return turns


def _text_of(turn: Mapping[str, Any], thinks: bool) -> str:
    if turn["role"] == "user":
        return USER + "\n\n".join(map(_content, _in_order(turn["parts"], turn["calls"])))
    text = _content(turn)
    if turn["role"] == "assistant":
        if thinks:
            text = turn.get("reasoning_content", turn.get("reasoning", "")) + "</think>" + text
        return text + _calls(turn.get("tool_calls", ())) + EOS
    if tools := turn.get("tools"):
        schemas = "\n".join(_json(tool.get("function", tool)) for tool in tools)
        text += "\n\n" + _TOOLS.replace("{schemas}", schemas)
    if schema := turn.get("response_format"):
        text += (
            "\n\n## Response Format:\n\n"
            f"You MUST strictly adhere to the following schema to reply:\n{_json(schema)}"
        )
    return text


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "\n\n".join(part["text"] for part in content)
    return f"<tool_result>{content}</tool_result>" if message["role"] == "tool" else content


def _in_order(parts: list[dict[str, Any]], calls: list[Any]) -> list[dict[str, Any]]:
    """Results of tools in the order of their calls; other parts keep their places."""

    def place(part: Mapping[str, Any]) -> int:
        call = part.get("tool_call_id")
        return calls.index(call) if call in calls else 0

    results = iter(sorted((part for part in parts if part["role"] == "tool"), key=place))
    return [next(results) if part["role"] == "tool" else part for part in parts]


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    invokes = []
    for call in calls:
        function = call.get("function", call)
        given = function.get("arguments", {})
        given = json.loads(given) if isinstance(given, str) else given
        parameters = "\n".join(
            f'<｜DSML｜parameter name="{name}" string="{"true" if is_text else "false"}">'
            f"{value if is_text else _json(value)}</｜DSML｜parameter>"
            for name, value in given.items()
            for is_text in [isinstance(value, str)]
        )
        invokes.append(
            f'<｜DSML｜invoke name="{function["name"]}">\n{parameters}\n</｜DSML｜invoke>'
        )
    lines = "\n".join(invokes)
    return f"\n\n<｜DSML｜tool_calls>\n{lines}\n</｜DSML｜tool_calls>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
