"""Show text of models as HTML: coloured by token, and with everything invisible in it made visible."""

import re
from collections.abc import Sequence

from markupsafe import Markup

from megarl.report.html import shown

# A token whose log-prob a hint changes by this many nats has the full colour.
FULL_GAIN = 2.0

# Tokens such as <|im_start|>, and tags such as <think> or </answer>.
_SPECIAL_TOKEN = re.compile(r"(<\|[^|<>\n]{1,60}\|>|</?[A-Za-z_][A-Za-z0-9_]{0,30}>)")


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
        pieces.append(span.format("good" if gain > 0 else "bad", share, title, shown(token).replace("\n", "↵\n")))
    return Markup("").join(pieces)


def visible_text(text: str) -> Markup:
    """Escape text for HTML, with special tokens marked and everything hidden in it `shown`."""
    # re.split with one group alternates plain text and matches.
    pieces = enumerate(_SPECIAL_TOKEN.split(shown(text)))
    marked = Markup('<span class="token">{}</span>')
    return Markup("").join(marked.format(piece) if index % 2 else Markup.escape(piece) for index, piece in pieces)
