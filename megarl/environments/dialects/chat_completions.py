"""Implement OpenAI's chat completions, the format in which `Chat` reads and answers."""

import json
from collections.abc import Iterator

from megarl.environments.chat import Chat
from megarl.environments.dialects.base import Dialect, Json


class ChatCompletions(Dialect):
    """OpenAI's chat completions. Thoughts are part of an answer's text."""

    path, id_prefix, has_thoughts = "chat/completions", "chatcmpl-", False

    def read(self, body: Json, chat: Chat) -> Json:
        return body

    def write(self, completion: Json, body: Json, chat: Chat) -> Json:
        return completion

    def events(self, written: Json, body: Json) -> Iterator[str]:
        head = {key: written[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        parts: list[dict[str, object]] = []
        for choice in written["choices"]:
            delta = dict(choice["message"])
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
            index = choice["index"]
            parts.append({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
            parts.append({"choices": [{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            parts.append({"choices": [], "usage": written["usage"]})
        for part in parts:
            yield f"data: {json.dumps(head | part)}\n\n"
        yield "data: [DONE]\n\n"
