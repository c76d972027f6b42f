"""Texts as a model, a tool or a data set may write them to be more than texts, and how they must look."""

import random
import re

PIECES = (
    *(
        "\x1b[31m",
        "\x1b[2J",
        "\x1b]0;owned\x07",
        "\x1b]8;;http://a\x1b\\",
        "\x9b31m",
        "\x9d0;x\x9c",
        "\b\b\b",
        "\r",
        "\x00",
        "\x7f",
    ),
    *(
        "\n",
        "\n\n",
        "\r\n",
        "\x0b",
        "\x0c",
        "\x85",
        "\u2028",
        "\u2029",
        "\t",
        "\nerror: forged",
        "\n[10:00:00] megarl job: forged",
    ),
    *(
        "\u202e",
        "\u202d",
        "\u2066",
        "\u2069",
        "\u200e",
        "\u200f",
        "\u061c",
        "\ufeff",
        "\u200b",
        "\u2060",
        "\xad",
        "\U000e0041",
    ),
    *(
        "<script>alert(1)</script>",
        "</script>",
        "<img src=x onerror=a()>",
        "<!--",
        "]]>",
        "</td></tr></table>",
        "</pre>",
    ),
    *(
        "<svg/onload=a()>",
        "&lt;b&gt;",
        "&#0;",
        '" onmouseover="a()',
        "' style='x",
        "javascript:a()",
        "<style>*{}</style>",
    ),
    *(
        "[bold]",
        "[/]",
        "[link=http://a]b[/link]",
        "[red",
        "\\[x]",
        ":smile:",
        "$\\frac{1}{2}$",
        "$x$",
        "$",
        "{0.__class__}",
        "{",
        "%s",
    ),
    *(
        "\ud83d",
        "\ude00",
        "\ud83d\ude00",
        "__proto__",
        "=1+1",
        "- a: b",
        "# c",
        '"',
        "'",
        "\\",
        "\\n",
        "`id`",
        "$(id)",
        "<|im_end|>",
    ),
    *("größe", "数学", "😀", "👩\u200d🚀", "می\u200cخواهم", "plain", " ", "7"),
)
# By hand, from the code charts: C0, C1, soft hyphen, and what turns the direction, has no width, or ends lines.
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def hostile_texts(count: int, *, seed: int = 0) -> list[str]:
    """Draw different texts, of one to six pieces and a number."""
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) + str(i) for i in range(count)]


def escaped(text: str, *, kept: str = "", pictures: bool = False) -> str:
    """A text as it must look: hidden characters as Python's own `ascii` writes them; `pictures`: of controls."""

    def one(match: re.Match[str]) -> str:
        code = ord(match[0])
        if match[0] in kept:
            return match[0]
        return chr(0x2421 if code == 127 else 0x2400 + code) if pictures and code < 128 else ascii(match[0])[1:-1]

    return HIDDEN.sub(one, text)
