"""Implement Anthropic's messages."""

import itertools
import json
from collections.abc import Iterator

from megarl.environments.chat import Chat
from megarl.environments.chat_requests import RequestError
from megarl.environments.dialects.base import Dialect, Json, content_of, text_of

# Claude Code begins its instructions with this line, which changes with every request.
_CHANGING = "x-anthropic-billing-header"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


class Messages(Dialect):
    """Anthropic's messages: thoughts, texts and calls of tools are blocks. Blocks of thoughts may be left out later."""

    path, count_path, id_prefix = "messages", "messages/count_tokens", "msg_"

    def read(self, body: Json, chat: Chat) -> Json:
        if not isinstance(messages := body.get("messages"), list):
            raise RequestError("messages is missing, expected the whole conversation so far")
        system = body.get("system")
        if isinstance(system, list):
            system = [part for part in system if not str(part.get("text")).startswith(_CHANGING)]
        asked: list[dict[str, object]] = []
        if text := text_of(system, "system"):
            asked.append({"role": "system", "content": text})
        known = chat.translated.find(messages)
        new = enumerate(messages[len(known) :], len(known))
        parts = [*known, *(_messages_of(message, f"messages[{i}]") for i, message in new)]
        asked += itertools.chain.from_iterable(parts)
        # Images as they are sent are large.
        if all(isinstance(each["content"], str) for each in asked):
            chat.translated.keep(messages, parts)
        read: dict[str, object] = {"messages": asked, "model": body.get("model", "policy")}
        # Tools without a schema are those that Anthropic's servers run.
        tools = [tool for tool in body.get("tools") or () if "input_schema" in tool]
        if tools:
            read["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool.get("description", ""),
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in tools
            ]
        output = body.get("output_config") or {}
        return read | {
            "max_tokens": body.get("max_tokens"),
            "stop": body.get("stop_sequences"),
            "response_format": body.get("output_format") or output.get("format"),
            "tool_choice": (body.get("tool_choice") or {}).get("type", "auto"),
        }

    def write(self, completion: Json, body: Json, chat: Chat) -> Json:
        [choice], usage = completion["choices"], completion["usage"]
        message, reason = choice["message"], _STOP_REASONS[choice["finish_reason"]]
        blocks: list[Json] = []
        if thought := message.get("reasoning"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": completion["id"]})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return {
            "id": completion["id"],
            "type": "message",
            "role": "assistant",
            "model": completion["model"],
            "content": blocks or [{"type": "text", "text": ""}],
            "stop_reason": reason if (stop := choice.get("stop_reason")) is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
        }

    def events(self, written: Json, body: Json) -> Iterator[str]:
        head = {
            **written,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**written["usage"], "output_tokens": 0},
        }
        parts: list[dict[str, object]] = [{"type": "message_start", "message": head}]
        for index, block in enumerate(written["content"]):
            if block["type"] == "tool_use":
                start = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            elif block["type"] == "thinking":
                start = {**block, "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            else:
                start, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            parts.append({"type": "content_block_start", "index": index, "content_block": start})
            parts += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            parts.append({"type": "content_block_stop", "index": index})
        end = {key: written[key] for key in ("stop_reason", "stop_sequence")}
        parts.append({"type": "message_delta", "delta": end, "usage": written["usage"]})
        parts.append({"type": "message_stop"})
        for part in parts:
            yield f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"

    def error(self, status: int, message: str) -> Json:
        return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": message}}


def _messages_of(message: object, place: str) -> list[dict[str, object]]:
    """Return a message as chat completions have it: results of tools are messages of their own, before its text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{place} is {str(message)[:80]}, expected an object with the role user or assistant")
    role, content = message["role"], message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestError(f"{place}.content is {str(content)[:80]}, expected a text or a list of blocks")
    results: list[dict[str, object]] = []
    calls: list[dict[str, object]] = []
    texts: list[object] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            said = content_of(block.get("content"), f"{place}.content of the result {block.get('tool_use_id')}")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    own: dict[str, object] = {"role": role, "content": content_of(texts, f"{place}.content")}
    if calls:
        own["tool_calls"] = calls
    return [*results, *([own] if texts or not results else [])]
