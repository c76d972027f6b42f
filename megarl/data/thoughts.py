"""Join answers that begin with a thought to prompts that already open or close one."""

import re

from megarl.errors import DataError

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


def after_prompt(answer: str, prompt: str, where: str) -> str:
    """Return what of an answer follows a prompt, so that a thought is opened and closed only once.

    Raises DataError, which names `where`, if the answer would think after the prompt has closed the thought, or has
    none to go on with one that the prompt has opened.
    """
    problem = f"{where}: the answer is {answer[:80]!r}, but the chat template's prompt ends with {prompt[-20:]!r}"
    # Templates end prompts with at most an empty thought.
    end = prompt[-200:]
    if opened := _OPENED.search(end):
        found = re.match(rf"\s*<{re.escape(opened[1])}>", answer, re.IGNORECASE)
        if found is None and not re.search(rf"</{re.escape(opened[1])}>", answer, re.IGNORECASE):
            raise DataError(
                f"{problem}, so that the answer would be trained as a thought that never ends; begin it with "
                f"</{opened[1]}> or with a thought that ends, or let the template open none, with an argument in "
                "data.chat_template such as enable_thinking=false"
            )
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
        if thinks:
            raise DataError(
                f"{problem}, a thought that is closed already; remove the thought from the answer, or let the template "
                "open one, with an argument in data.chat_template such as enable_thinking=true"
            )
        return rest
    return answer
