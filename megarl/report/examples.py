"""Pick example rollouts for a report, and make everything invisible in their text visible."""

import math
import re
from collections.abc import Sequence
from typing import TypeVar

from markupsafe import Markup

from megarl.record.answers import Answer
from megarl.record.metrics import RolloutRecord

# A response counts as right from this reward on: splits 0/1, -1/1 and 0/0.1 (format only)/1 rewards alike.
RIGHT_REWARD = 0.5
NUM_EXAMPLES = 3
# A token whose log-prob a hint changes by so many nats has the full colour.
FULL_GAIN = 2.0
# So has a token of a conversation that the policy found so unlikely, in nats.
FULL_SURPRISE = 4.0

# Tokens such as <|im_start|>, and tags such as <think> or </answer>.
_SPECIAL_TOKEN = re.compile(r"(<\|[^|<>\n]{1,60}\|>|</?[A-Za-z_][A-Za-z0-9_]{0,30}>)")
# C0 controls except tab and newline have pictures from U+2400 on; DEL has U+2421.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


# A response with its verdict: of training, or of a validation.
Response = TypeVar("Response", RolloutRecord, Answer)


def is_right(row: RolloutRecord | Answer) -> bool:
    return row.correct if isinstance(row, Answer) else row.reward >= RIGHT_REWARD


def pick_examples(rows: Sequence[Response], num: int = NUM_EXAMPLES) -> list[Response]:
    """Pick up to `num` right, then up to `num` wrong rows, of different prompts as far as there are enough."""
    return [row for right in (True, False) for row in _pick([r for r in rows if is_right(r) is right], num)]


def _pick(rows: Sequence[Response], num: int) -> list[Response]:
    seen: dict[str, int] = {}
    ranked = []
    for row in rows:
        seen[row.uid] = seen.get(row.uid, 0) + 1
        ranked.append((seen[row.uid], row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])[:num]]


def gain_text(tokens: Sequence[str], gains: Sequence[float], notes: Sequence[str] = ()) -> Markup:
    """Return tokens as HTML, coloured by how much a hint raises the log-prob of each.

    Tokens that become likelier have the colour for good, at full strength from `FULL_GAIN` nats on. A token's tooltip
    shows its gain and, if given, its note. A line feed still breaks the line, and is shown by a sign that can be
    coloured.
    """
    span = Markup('<span style="background: color-mix(in srgb, var(--{}) {}%, transparent)" title="{}">{}</span>')
    pieces = []
    for index, (token, gain) in enumerate(zip(tokens, gains, strict=True)):
        title = f"{gain:+.3f} nats" + (f", {notes[index]}" if notes else "")
        share = round(60 * min(abs(gain) / FULL_GAIN, 1))
        pieces.append(
            span.format(
                "good" if gain > 0 else "bad", share, title, token.translate(_CONTROL_PICTURES).replace("\n", "↵\n")
            )
        )
    return Markup("").join(pieces)


def surprise_text(tokens: Sequence[str], logprobs: Sequence[float]) -> Markup:
    """Return tokens as HTML, the stronger coloured the less likely the engine found them; tooltips show log-probs."""
    span = Markup('<span style="background: color-mix(in srgb, var(--series-0) {}%, transparent)" title="{}">{}</span>')
    pieces = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        share = round(60 * min(-logprob / FULL_SURPRISE, 1))
        title = f"log-prob {logprob:.3f}, probability {math.exp(logprob):.1%}"
        pieces.append(span.format(share, title, token.translate(_CONTROL_PICTURES).replace("\n", "↵\n")))
    return Markup("").join(pieces)


def visible_text(text: str) -> Markup:
    """Escape text for HTML, with special tokens marked and control characters replaced by visible symbols such as ␛."""
    # re.split with one group alternates plain text and matches.
    pieces = enumerate(_SPECIAL_TOKEN.split(text.translate(_CONTROL_PICTURES)))
    marked = Markup('<span class="token">{}</span>')
    return Markup("").join(marked.format(piece) if index % 2 else Markup.escape(piece) for index, piece in pieces)
