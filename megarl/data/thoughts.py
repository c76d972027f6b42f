"""Join answers that begin with a thought to prompts that already open or close one."""

import re

# The names that reasoning models give their thoughts.
_NAME = r"(?:[a-z]+:)?(?:think(?:ing)?|thoughts?|reasoning)"
_BEGINNING = re.compile(rf"\s*<({_NAME})>", re.IGNORECASE)
_MARK = re.compile(rf"</?{_NAME}>", re.IGNORECASE)
_TWICE = re.compile(rf"<({_NAME})>\s*<\1>", re.IGNORECASE)
_OPENED = re.compile(rf"<({_NAME})>(\s*)\Z", re.IGNORECASE)
_CLOSED = re.compile(rf"</({_NAME})>\s*\Z", re.IGNORECASE)


def begins_thought(text: str) -> bool:
    """Return whether a text begins with the opening of a thought."""
    return _BEGINNING.match(text) is not None


def has_thought(text: str) -> bool:
    """Return whether a text opens or closes a thought anywhere."""
    return _MARK.search(text) is not None


def opens_twice(text: str) -> bool:
    """Return whether a text opens a thought within one that it has just opened."""
    return _TWICE.search(text) is not None


def unended_thought(answer: str, prompt: str) -> str:
    """Return the name of the thought that a prompt opens, if the answer neither begins with a thought nor ends it."""
    opened = _OPENED.search(prompt[-200:])
    name = opened[1] if opened else ""
    has_end = re.search(rf"\A\s*<{re.escape(name)}>|</{re.escape(name)}>", answer, re.IGNORECASE)
    return "" if has_end else name


def after_prompt(answer: str, prompt: str) -> str | None:
    """Return what of an answer follows a prompt, so that a thought is opened and closed only once.

    None if the answer would think after the prompt has closed the thought.
    """
    # Templates end prompts with at most an empty thought.
    end = prompt[-200:]
    if opened := _OPENED.search(end):
        found = re.match(rf"\s*<{re.escape(opened[1])}>", answer, re.IGNORECASE)
        if found is None:
            return answer
        rest, spaces = answer[found.end() :], opened[2]
        return rest.removeprefix(spaces) if not spaces or rest.startswith(spaces) else rest.lstrip()
    if closed := _CLOSED.search(end):
        name = re.escape(closed[1])
        empty = re.match(rf"\s*(?:<{name}>\s*)?</{name}>\s*", answer, re.IGNORECASE)
        rest = answer[empty.end() :] if empty else answer
        marks = re.search(rf"<(/?){name}>", rest, re.IGNORECASE)
        thinks = marks is not None and (marks[1] or not rest[: marks.start()].strip())
        return None if thinks else rest
    return answer
