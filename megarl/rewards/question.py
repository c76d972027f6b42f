"""Define what a scorer or a user's function is asked about one response, and what becomes of the question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.types import Message, Reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A response to judge, with its prompt, ground truth and further data. Each is a key of its own.

    messages: the chat that the prompt was made of, if it is known. group: the same for all responses to one prompt.
    response_ids: the response's tokens, if a function asks for them. label, is_text: those of the prompt.
    """

    data_source: str
    prompt: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    group: str = ""
    response_ids: tuple[int, ...] = ()
    label: object = None
    is_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of asking one scorer or function about one response.

    outcome: `correct` or `wrong`; `parse_failed` if no answer could be read; `abstained` if a function returned None
    for the response; `timed_out`, `crashed` (the worker process died) or `failed` (an exception), for which `reason`
    says why in one line, and `output` what the function printed, with the traceback.
    """

    reward: Reward | None
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    output: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Verdict":
        return cls(**{**fields, "reward": None if fields["reward"] is None else Reward.from_json(fields["reward"])})
