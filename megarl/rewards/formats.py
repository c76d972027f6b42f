"""Whether a response has the form that was asked for, whatever it answers."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megarl.registry import Registry
from megarl.rewards.registry import SCORERS, Scorer, reward_of
from megarl.types import Reward

FormatCheck = Callable[[str], bool]

FORMATS: Registry[FormatCheck] = Registry("response format", key="format")

_TAG = re.compile(r"</?(?:think|answer)>")
_THINK = ("<think>", "</think>")
_ANSWER = ("<answer>", "</answer>")


def has_format(response: str, *, tags: tuple[str, ...], ends_well: FormatCheck, opened: bool = False) -> bool:
    """Whether a response starts with the first of `tags`, has exactly these, in this order, and then `ends_well`.

    `ends_well` is asked about what follows `</think>`. `opened`: the prompt ends with the first tag, which the
    response must then not repeat.
    """
    text = (tags[0] if opened else "") + response.strip()
    if not text.startswith(tags[0]) or tuple(_TAG.findall(text)) != tags:
        return False
    return ends_well(text.rpartition("</think>")[2].strip())


def _has_box(text: str) -> bool:
    return "}" in text.partition(r"\boxed{")[2]


def _is_answer(text: str) -> bool:
    before, _, content = text.partition("<answer>")
    return not before and content.endswith("</answer>") and content.removesuffix("</answer>").strip() != ""


_FORMATS: Mapping[str, tuple[tuple[str, ...], FormatCheck]] = {
    "think": (_THINK, bool),
    "think_boxed": (_THINK, _has_box),
    "think_answer": (_THINK + _ANSWER, _is_answer),
}


def score_format(response: str, ground_truth: str, extra_info: Mapping[str, Any], *, check: FormatCheck) -> Reward:
    """1 if the response has the format, else 0; the ground truth plays no part."""
    well_formed = check(response)
    return reward_of(well_formed, parse_failed=not well_formed)


for _name, (_tags, _ends_well) in _FORMATS.items():
    FORMATS.register(_name)(partial(has_format, tags=_tags, ends_well=_ends_well))
    FORMATS.register(f"{_name}/opened")(partial(has_format, tags=_tags, ends_well=_ends_well, opened=True))
for _name in FORMATS:
    _scorer: Scorer = partial(score_format, check=FORMATS.get(_name))
    SCORERS.register(f"format/{_name}")(_scorer)
