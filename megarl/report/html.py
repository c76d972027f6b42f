"""Make HTML pages in which texts stay texts, and which run nothing and load nothing should one ever become more."""

import base64
import hashlib
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
