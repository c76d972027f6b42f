"""Know the marks that reasoning models put around their thoughts, and find what follows the thoughts."""

import re

_NAME = r"(?:[a-z]+[:_])?(?:think(?:ing)?|thoughts?|reasoning)(?::[a-z]+)?"
# Marks that are not tags, in order: Mistral, Kimi, Cohere, Open Thoughts, Gemma (twice), gpt-oss, Apertus, PLaMo.
_PAIRS = {
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel>thought": "<channel|>",
    "<unused94>": "<unused95>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
_PARTNERS = {mark.casefold(): other for pair in _PAIRS.items() for mark, other in (pair, pair[::-1])}
# Patterns, to be used without regard to case.
OPENING = "|".join([rf"<{_NAME}>", *map(re.escape, _PAIRS)])
CLOSING = "|".join([rf"</{_NAME}>", *map(re.escape, _PAIRS.values())])
_CLOSING = re.compile(CLOSING, re.IGNORECASE)


def partner(mark: str) -> str:
    """Return the mark that closes the thought which a mark opens, or opens the one that it closes."""
    if known := _PARTNERS.get(mark.casefold()):
        return known
    return f"<{mark[2:]}" if mark.startswith("</") else f"</{mark[1:]}"


def after_thoughts(text: str) -> str:
    """Return what follows the last thought of a text, the text itself if it closes none."""
    # Most texts have none of these; one character is found far sooner than two.
    begin = 0 if ("[" in text and "[/" in text) or "◁" in text else text.find("<")
    if begin < 0:
        return text
    end = 0
    for found in _CLOSING.finditer(text, begin):
        end = found.end()
    return text[end:]
