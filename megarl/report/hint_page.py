"""Show hints and their effect as text and as HTML: hinted prompts, tables, and answers coloured by log-prob gain."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.host.unicode import visible
from megarl.record.text_table import align
from megarl.report.html import FULL_GAIN, gain_text, render_html, visible_text
from megarl.report.template import STYLE

# Answers of each verdict that a terminal shows; the page shows all.
NUM_SHOWN = 2
# Green and red of 24-bit terminals.
_BETTER, _WORSE = (0, 158, 115), (213, 94, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedExample:
    """A hinted prompt as the model reads it: what stands before the hint, the hint, and what follows it."""

    title: str
    before: str
    hint: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedToken:
    """A token of an answer, with its log-probs without a hint, with its own, and with another prompt's."""

    text: str
    old: float
    hinted: float
    shuffled: float | None

    @property
    def gain(self) -> float:
        return self.hinted - self.old


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedAnswer:
    """An answer, its question and the verifier's verdict."""

    title: str
    question: str
    is_right: bool
    tokens: tuple[HintedToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts; the first row names the columns."""

    title: str
    note: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintReport:
    """All that an inspection of hints found."""

    title: str
    details: str
    tables: tuple[Table, ...]
    examples: tuple[HintedExample, ...]
    answers: tuple[HintedAnswer, ...]


def to_text(report: HintReport, *, with_colors: bool) -> str:
    """Write a report for a terminal. Without colours, hints are enclosed in ⟦ ⟧, and tokens are followed by gains."""
    lines = [visible(report.title), visible(report.details)]
    for table in report.tables:
        lines += ["", table.title, *align(table.rows)]
    for example in report.examples:
        before, hint, after = (visible(t, keep_lines=True) for t in (example.before, example.hint, example.after))
        hint = f"\x1b[7m{hint}\x1b[0m" if with_colors else f"⟦{hint}⟧"
        lines += ["", visible(example.title), f"{before}{hint}{after}"]
    for verdict, answer in (
        (verdict, answer)
        for verdict, is_right in (("right", True), ("wrong", False))
        for answer in [a for a in report.answers if a.is_right is is_right][:NUM_SHOWN]
    ):
        lines += ["", f"{visible(answer.title)}, {verdict}: {visible(answer.question, keep_lines=True)}"]
        lines.append("".join(_terminal_token(token, with_colors=with_colors) for token in answer.tokens))
    return "\n".join(lines)


def _terminal_token(token: HintedToken, *, with_colors: bool) -> str:
    text = visible(token.text, keep_lines=True)
    if not with_colors:
        return f"{text}({token.gain:+.1f})" if abs(token.gain) >= 0.05 else text
    strength = min(abs(token.gain) / FULL_GAIN, 1.0)
    # Mixed with a dark background, so that white text can be read on it.
    red, green, blue = (round(30 + strength * (part - 30)) for part in (_BETTER if token.gain > 0 else _WORSE))
    shown = text.replace("\n", "↵\n")
    return f"\x1b[38;2;255;255;255;48;2;{red};{green};{blue}m{shown}\x1b[0m"


def to_html(report: HintReport) -> str:
    """Write a report as one self-contained HTML page, with answers coloured by gain; a token's tooltip has its
    log-probs.
    """
    answers = {}
    for answer in report.answers:
        notes = []
        for token in answer.tokens:
            others = "" if token.shuffled is None else f", another prompt's hint {token.shuffled - token.old:+.3f}"
            notes.append(f"log-prob {token.old:.3f} → {token.hinted:.3f}{others}")
        texts, gains = [token.text for token in answer.tokens], [token.gain for token in answer.tokens]
        answers[id(answer)] = gain_text(texts, gains, notes)
    return render_html(
        _PAGE,
        title=report.title,
        style=STYLE + _STYLE,
        report=report,
        full=FULL_GAIN,
        visible=visible_text,
        tokens=answers,
        key=id,
    )


def answer_tokens(
    texts: Sequence[str], old: Sequence[float], hinted: Sequence[float], shuffled: Sequence[float] | None
) -> tuple[HintedToken, ...]:
    """Join the texts and log-probs of an answer's tokens."""
    others = shuffled if shuffled is not None else [None] * len(texts)
    return tuple(
        HintedToken(text=text, old=a, hinted=b, shuffled=c)
        for text, a, b, c in zip(texts, old, hinted, others, strict=True)
    )


_STYLE = """
.hint { background: rgba(0, 114, 178, 0.25); border-radius: 4px; }
.examples.wide { grid-template-columns: 1fr; }
.legend span { padding: 1px 8px; border-radius: 3px; }
"""

_PAGE = """\
<body><main>
<header><h1>{{ report.title }}</h1><p class="details">{{ report.details }}</p></header>
{% for table in report.tables %}
<h2>{{ table.title }}</h2>
<div class="scroll"><table>
{% for row in table.rows %}
{% set tag = "th" if loop.first else "td" %}
<tr>{% for cell in row %}
<{{ tag }}{% if not loop.first %} class="number"{% endif %}>{{ cell }}</{{ tag }}>
{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="note">{{ table.note }}</p>
{% endfor %}
{% if report.answers %}
<h2>Answers, token by token</h2>
<p class="note legend">
<span style="background: color-mix(in srgb, var(--good) 60%, transparent)">likelier with the hint</span>
<span style="background: color-mix(in srgb, var(--bad) 60%, transparent)">less likely</span>
Full colour from {{ full }} nats on; point at a token for its numbers.</p>
<div class="examples wide">
{% for answer in report.answers %}
<article{% if answer.is_right %} class="right"{% endif %}>
<p><span class="verdict">{{ "right" if answer.is_right else "wrong" }}</span>
<span class="details">{{ answer.title }}</span></p>
<pre>{{ visible(answer.question) }}</pre>
<pre>{{ tokens[key(answer)] }}</pre>
</article>
{% endfor %}
</div>
{% endif %}
<h2>Prompts with their hints</h2>
<div class="examples wide">
{% for example in report.examples %}
{% set hint = visible(example.hint) %}
<figure><p class="details">{{ example.title }}</p>
<pre>{{ visible(example.before) }}<span class="hint">{{ hint }}</span>{{ visible(example.after) }}</pre>
</figure>
{% endfor %}
</div>
</main></body>
</html>
"""
