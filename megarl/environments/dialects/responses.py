"""Implement OpenAI's responses."""

import json
from collections.abc import Iterator
from typing import Any

from megarl.environments.chat import Chat
from megarl.environments.chat_requests import RequestError
from megarl.environments.dialects.base import Dialect, Json, content_of, text_of

_TEXTS = ("input_text", "output_text", "text")
_CALLS, _RESULTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
# A tool that takes any text takes it as this argument.
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses(Dialect):
    """OpenAI's responses: thoughts, texts and calls of tools are items; a request may go on from an earlier one."""

    path, count_path, id_prefix = "responses", "responses/input_tokens", "resp_"

    def read(self, body: Json, chat: Chat) -> Json:
        for name in ("background", "conversation", "prompt"):
            if body.get(name):
                raise RequestError(f"{name} is {body[name]!r}, expected it to be left out")
        instructions = text_of(body.get("instructions"), "instructions")
        asked = [{"role": "system", "content": instructions}] if instructions else []
        read: dict[str, object] = {"messages": [*asked, *_history(body, chat)], "model": body.get("model", "policy")}
        functions = []
        for name, (_, tool) in _tools(body).items():
            schema = tool.get("parameters") if tool["type"] == "function" else _FREE_TEXT
            function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
            functions.append({"type": "function", "function": function})
        if functions:
            read["tools"] = functions
        choice, form = body.get("tool_choice"), (body.get("text") or {}).get("format") or {"type": "text"}
        return read | {
            "max_tokens": body.get("max_output_tokens"),
            "response_format": form,
            "top_logprobs": body.get("top_logprobs"),
            "tool_choice": choice,
        }

    def write(self, completion: Json, body: Json, chat: Chat) -> Json:
        [choice], usage, name = completion["choices"], completion["usage"], completion["id"]
        message, own = choice["message"], name.removeprefix(self.id_prefix)
        if body.get("store", True) is not False:
            chat.stored[name] = bool(text_of(body.get("instructions"), "instructions"))
        tools = _tools(body)
        items: list[Json] = []
        if thought := message.get("reasoning"):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": content})
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        if message["content"] or not message.get("tool_calls"):
            content = [{"type": "output_text", "text": message["content"], "annotations": []}]
            text = {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": status, "content": content}
            items.append(text)
        for i, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            space, tool = tools.get(function["name"], ("", {}))
            item = {"id": f"fc_{own}_{i}", "call_id": call["id"], "status": "completed"}
            item |= {"name": tool.get("name", function["name"]), **({"namespace": space} if space else {})}
            given = json.loads(function["arguments"]) if tool.get("type") == "custom" else {}
            if given.keys() == {"input"} and isinstance(given["input"], str):
                items.append({**item, "type": "custom_tool_call", **given})
            else:
                items.append({**item, "type": "function_call", "arguments": function["arguments"]})
        asked = {key: body.get(key) for key in ("instructions", "previous_response_id", "metadata")}
        return asked | {
            "id": name,
            "object": "response",
            "created_at": completion["created"],
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "model": completion["model"],
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "temperature": None,
            "top_p": None,
            "text": {"format": {"type": "text"}},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def events(self, written: Json, body: Json) -> Iterator[str]:
        for number, (name, part) in enumerate(_events(written)):
            yield f"event: {name}\ndata: {json.dumps({'type': name, 'sequence_number': number, **part})}\n\n"

    def count(self, num_tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _events(written: Json) -> Iterator[tuple[str, Json]]:
    """Yield the type and the fields of each event of a streamed response."""
    begun = {**written, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(written["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        kind = item["type"]
        empty: Json = {"content": [], "arguments": "", "input": "", "status": "in_progress"}
        start = {**item, **{key: value for key, value in empty.items() if key in item}}
        yield "response.output_item.added", {"output_index": index, "item": start}
        if kind == "message":
            [part] = item["content"]
            at = {**place, "content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        elif kind == "reasoning":
            at, text = {**place, "content_index": 0}, item["content"][0]["text"]
            yield "response.reasoning_text.delta", {**at, "delta": text}
            yield "response.reasoning_text.done", {**at, "text": text}
        else:
            name, field = {
                "function_call": ("function_call_arguments", "arguments"),
                "custom_tool_call": ("custom_tool_call_input", "input"),
            }[kind]
            yield f"response.{name}.delta", {**place, "delta": item[field]}
            yield f"response.{name}.done", {**place, "name": item["name"], field: item[field]}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{written['status']}", {"response": written}


def _in_space(space: object, name: object) -> str:
    """Return the name by which the policy knows a tool of a namespace, as Codex writes it."""
    return f"{space}__{name}".replace("____", "__") if space else str(name)


def _tools(body: Json) -> dict[str, tuple[str, Json]]:
    """Return a request's tools with their namespaces, by the names that the policy reads.

    Other kinds are those that OpenAI's servers run.
    """
    found: dict[str, tuple[str, Json]] = {}
    for given in body.get("tools") or ():
        is_space = given.get("type") == "namespace"
        space = str(given.get("name")) if is_space else ""
        for tool in given.get("tools") or () if is_space else (given,):
            if tool.get("type") in ("function", "custom"):
                found[_in_space(space, tool.get("name"))] = space, tool
    return found


def _history(body: Json, chat: Chat) -> list[Any]:
    """Return the messages of a request as chat completions have them, without its instructions; earlier ones as read.

    A turn of the policy is one message, of however many items.
    """
    found: list[Any] = []
    if before := body.get("previous_response_id"):
        if before not in chat.stored:
            raise RequestError(f"previous_response_id is {before!r}, expected a response of this conversation")
        found += chat.before(before)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise RequestError(f"input is {str(given)[:80]}, expected a text or a list of items")
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else str(item)[:80]
        is_own = kind in _CALLS or kind == "reasoning" or (kind == "message" and item.get("role") == "assistant")
        if is_own:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                found.append(turn)
            if kind == "message":
                turn["content"] = f"{turn['content']}{text_of(item.get('content'), f'input[{i}].content', _TEXTS)}"
            elif kind in _CALLS:
                given = item.get("arguments") if kind == _CALLS[0] else json.dumps({"input": item.get("input")})
                name = _in_space(item.get("namespace"), item.get("name"))
                call = {"id": item.get("call_id"), "function": {"name": name, "arguments": given}}
                turn.setdefault("tool_calls", []).append(call)
            continue
        turn = None
        if kind == "message":
            said = content_of(item.get("content"), f"input[{i}].content", _TEXTS)
            found.append({"role": item.get("role"), "content": said})
        elif kind in _RESULTS:
            said = content_of(item.get("output"), f"input[{i}].output", _TEXTS)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        else:
            raise RequestError(f"input[{i}] is {kind!r}, expected a message, a call, the result of one, or a thought")
    return found
