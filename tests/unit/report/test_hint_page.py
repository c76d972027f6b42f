"""What an inspection of hints shows, in terminals and on the page."""

from dataclasses import replace

from megarl.report.hint_page import HintedAnswer, HintedExample, HintReport, Table, answer_tokens, to_html, to_text

TOKENS = answer_tokens(["1+1", "=<2>\n", "."], [-1.0, -0.5, -3.0], [-0.4, -3.5, -3.0], [-1.5, -0.5, -3.0])
RIGHT = HintedAnswer(title="q:0/0", question="1+1=?", is_right=True, tokens=TOKENS)
REPORT = HintReport(
    title="Hints of <run>",
    details="a.parquet",
    tables=(Table(title="Coverage", note="Prompts & hints.", rows=(("source", "placed"), ("q", "10"))),),
    examples=(HintedExample(title="q:0", before="user\n", hint="<b>", after="1+1=?"),),
    answers=(RIGHT, *(replace(RIGHT, title=f"q:0/{i}", is_right=False) for i in range(1, 5))),
)


def test_terminal_without_colors() -> None:
    text = to_text(REPORT, with_colors=False)
    assert "\nsource  placed\nq           10\n" in text
    assert "user\n⟦<b>⟧1+1=?" in text
    # Gains too small to show are left out.
    assert "q:0/0, right: 1+1=?\n1+1(+0.6)=<2>\n(-3.0).\n" in text
    assert text.count(", wrong: ") == 2
    assert "\x1b" not in text


def test_terminal_with_colors() -> None:
    """0.6 of 2 nats are three tenths of green over a dark ground; 3 nats are full orange."""
    text = to_text(REPORT, with_colors=True)
    assert "user\n\x1b[7m<b>\x1b[0m1+1=?" in text
    green = f"{round(30 - 0.3 * 30)};{round(30 + 0.3 * 128)};{round(30 + 0.3 * 85)}"
    assert f"48;2;{green}m1+1\x1b[0m" in text
    assert "48;2;213;94;0m=<2>↵\n\x1b[0m" in text


def test_page() -> None:
    page = to_html(REPORT)
    assert "<title>Hints of &lt;run&gt;</title>" in page
    assert "<th>source</th>" in page
    assert '<td class="number">10</td>' in page
    assert '<span class="hint"><span class="token">&lt;b&gt;</span></span>1+1=?' in page
    title = "+0.600 nats, log-prob -1.000 → -0.400, another prompt&#39;s hint -0.500"
    assert f'var(--good) 18%, transparent)" title="{title}">1+1</span>' in page
    assert "var(--bad) 60%, transparent)" in page
    assert "=&lt;2&gt;↵\n</span>" in page
    assert page.count("<article") == 5
    # Nothing is fetched.
    assert "http:" not in page
    assert "https:" not in page
