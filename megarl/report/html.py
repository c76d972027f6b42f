"""Make HTML pages in which texts stay texts, also marked ones, and which run nothing and load nothing should one ever
become more.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megarl.host.unicode import Shown

# C0 controls have pictures from U+2400 on, and DEL has U+2421; lines and tabs stay.
_SHOWN = Shown({code: chr(0x2400 + code) for code in range(32)} | {127: "␡", ord("\n"): "\n", ord("\t"): "\t"})

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
"""


def shown(text: str) -> str:
    """Return a text in which controls are pictures such as ␛, and everything else that is hidden an escape."""
    return text if text.isascii() and text.isprintable() else text.translate(_SHOWN)


def render_html(body: str, *, title: str, style: str, **values: Any) -> str:
    """Render a page from the Jinja template of its body. All values are escaped and `shown`, except `Markup`.

    The page's policy allows the one style sheet `style`, and no script, connection, frame, form or other file.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        # Attributes, because figures and coloured tokens have their styles there.
        f"default-src 'none'; style-src-elem 'sha256-{digest}'; style-src-attr 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else shown(str(value)),
    )
    page = environment.from_string(_HEAD + body)
    return page.render(title=title, style=Markup(style), policy=Markup(policy), **values)


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
