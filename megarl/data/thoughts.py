"""Join answers that begin with a thought to prompts that already open or close one."""

import re

from megarl.data.harmony import read_channels, split_channels
from megarl_answers.thoughts import CLOSING, OPENING, partner

_BEGINNING = re.compile(rf"\s*({OPENING})", re.IGNORECASE)
_MARK = re.compile(f"{OPENING}|{CLOSING}", re.IGNORECASE)
_TWICE = re.compile(rf"({OPENING})\s*\1", re.IGNORECASE)
_OPENED = re.compile(rf"({OPENING})(\s*)\Z", re.IGNORECASE)
_CLOSED = re.compile(rf"({CLOSING})\s*\Z", re.IGNORECASE)


def marks_in(text: str) -> tuple[str, ...]:
    """Return the different marks of thoughts in a text, in their order; the first is empty if words precede them."""
    if not any(map(text.__contains__, "<[◁")):
        return ()
    marks = tuple(dict.fromkeys([mark[0] for mark in _MARK.finditer(text)]))
    return ("", *marks) if marks and not text.lstrip().startswith(marks[0]) else marks


def has_thought(text: str) -> bool:
    """Return whether a text opens or closes a thought anywhere."""
    return _MARK.search(text) is not None


def opens_twice(text: str) -> bool:
    """Return whether a text opens a thought within one that it has just opened."""
    return _TWICE.search(text) is not None


def split_thought(answer: str) -> tuple[str, str]:
    """Return the thought with which an answer begins, which its prompt may have opened, and the rest, without marks; of
    channels, the thoughts and what is shown.

    >>> split_thought("<think>2 and 2</think>\\n4"), split_thought("2 and 2</think>4"), split_thought("4")
    (('2 and 2', '4'), ('2 and 2', '4'), ('', '4'))
    """
    if read_channels(answer):
        return split_channels(answer)
    begun = _BEGINNING.match(answer)
    closing = re.escape(partner(begun[1])) if begun else CLOSING
    start = begun.end() if begun else 0
    found = re.compile(closing, re.IGNORECASE).search(answer, start)
    if found is None or (not begun and _MARK.search(answer[: found.start()])):
        return (answer[start:].strip(), "") if begun else ("", answer)
    return answer[start : found.start()].strip(), answer[found.end() :].lstrip()


def unended_thought(answer: str, prompt: str, begun: str = "") -> str:
    """Return the mark that an answer lacks: the end of the thought that a prompt opens, "" if the answer begins with a
    thought or ends it.

    begun: the beginning of the answer, with which the prompt ends; a thought that goes on in it has to be ended first.
    """
    opened = _OPENED.search(prompt[-200:])
    # Templates open thoughts right before an answer.
    marks = [mark[0] for mark in _MARK.finditer(prompt[-len(begun) - 20 :])] if begun and not opened else []
    if marks and _BEGINNING.match(marks[-1]):
        following, mark = _MARK.search(answer), partner(marks[-1])
        return "" if following and following[0].lower() == mark.lower() else mark
    mark = partner(opened[1]) if opened else ""
    has_end = opened and re.search(rf"\A\s*{re.escape(opened[1])}|{re.escape(mark)}", answer, re.IGNORECASE)
    return "" if has_end else mark


def after_prompt(answer: str, prompt: str) -> str | None:
    """Return what of an answer follows a prompt, so that a thought is opened and closed only once.

    None if the answer would think after the prompt has closed the thought.
    """
    # Templates end prompts with at most an empty thought.
    end = prompt[-200:]
    if opened := _OPENED.search(end):
        found = re.match(rf"\s*{re.escape(opened[1])}", answer, re.IGNORECASE)
        if found is None:
            return answer
        rest, spaces = answer[found.end() :], opened[2]
        return rest.removeprefix(spaces) if not spaces or rest.startswith(spaces) else rest.lstrip()
    if closed := _CLOSED.search(end):
        opening, closing = re.escape(partner(closed[1])), re.escape(closed[1])
        empty = re.match(rf"\s*(?:{opening}\s*)?{closing}\s*", answer, re.IGNORECASE)
        rest = answer[empty.end() :] if empty else answer
        marks = re.search(f"{opening}|({closing})", rest, re.IGNORECASE)
        thinks = marks is not None and (marks[1] or not rest[: marks.start()].strip())
        return None if thinks else rest
    return answer
