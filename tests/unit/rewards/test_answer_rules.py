r"""Rules of spelling and notation: what each accepts, and what looks the same and is another answer.

Boxed answers are judged by `math`, in both orders. What is equal is worked out by hand.
"""

import pytest

from megarl.errors import DataError
from megarl.rewards import score

# Rule: gold, right answers, wrong answers.
MATH: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "numbers side by side are no sum and no product": [
        ("42", ["42"], ["20 22", "20~22", r"20\,22", r"\text{20}\text{22}", "$20$ $22$", "4 2", "6 7", "42 1", "1 42"]),
        ("8", ["8"], [r"5 \quad 3"]),
        ("9", ["9"], [r"4 \text{ } 5"]),
        (r"\frac{5}{7}", [r"\frac57", r"\frac 5 7"], [r"\frac{2 3}{7}"]),
        ("32", ["2^5", "2^ 5"], ["2^{2 3}"]),
        ("2x", ["2 x", r"x \cdot 2"], ["x 2", "x2", "1 2x"]),
        (r"\sqrt{2}", [r"1\sqrt{2}"], [r"\sqrt{2} 1", r"\sqrt{2 0}"]),
        ("10", [r"\binom{5}{2}"], [r"\binom{5}{2} 1", "1 0", "5 2"]),
        ("(1,5)", ["(1 , 5)"], ["(1,2 3)", "(1 5)"]),
        ("x>5", ["x > 5"], ["x>2 3"]),
        (r"5 \text{ cm}", ["5 cm"], [r"2 3 \text{ cm}"]),
        ("2.5", ["2.50"], ["2. 5", "2 .5", "2 5"]),
        (r"\begin{pmatrix}5\\1\end{pmatrix}", [], [r"\begin{pmatrix}2 3\\1\end{pmatrix}"]),
        ("3", [r"\log_2 8", r"\log_{2} 8"], [r"\log_2 8 1"]),
        (r"\log_5 2", [r"\log_{5} 2"], [r"\log_{2 3} 2"]),
        (r"\sqrt[5]{2}", [r"\sqrt [5]{2}"], [r"\sqrt[2 3]{2}"]),
        ("5", [], [r"2\thinspace 3", r"2\enspace 3", r"2\hspace{1em}3", r"2\hskip 1em 3"]),
        ("5 cm", [r"5\thinspace\text{cm}", r"5\hspace{2pt}\text{cm}"], []),
        ("B", ["(B)", "B."], ["1 B", "1B", "B 2", "2(B)"]),
    ],
    "a root without braces is of the whole number outside of LaTeX": [
        ("3", [], ["√13", "sqrt13", "sqrt 13"]),
        (r"\sqrt{13}", ["√13", "sqrt13", "sqrt(13)", "√(13)"], []),
        (r"2\sqrt{x}", ["2√x"], [r"\sqrt{2x}"]),
        (r"\sqrt[3]{2}", ["∛2"], ["3√2"]),
    ],
    "factors in brackets are multiplied": [
        ("6", ["(2)(3)", "2(3)", r"2 \cdot 3"], ["2 3"]),
        ("5", [], ["(2)(3)", "2(3)"]),
        ("40", [r"\binom{5}{2}\binom{4}{1}", r"4\binom{5}{2}"], []),
        ("14", [], [r"\binom{5}{2}\binom{4}{1}", r"4\binom{5}{2}"]),
    ],
    "a mixed fraction is a number and a proper fraction": [
        (
            r"\frac{7}{2}",
            ["3½", "3 ½", r"3\frac12", "3 1/2", r"3\ \frac{1}{2}"],
            ["3 5/2", r"1 3\frac12", "½3", r"\frac12 3"],
        ),
        (r"x+\frac{3}{2}", [r"x+1\frac{1}{2}", "x + 1 1/2"], [r"x+1 \cdot \frac{1}{2}"]),
        (r"\frac{7}{2}\pi", [r"3\frac{1}{2}\pi"], [r"\frac{3}{2}\pi"]),
        ("3", [], [r"1 \frac{2}{1}", "1 2/1"]),
        (r"-\frac{7}{2}", ["-3½"], [r"-\frac{5}{2}"]),
    ],
    "thousands have one kind of mark": [
        (
            "1234567",
            ["1'234'567", "1’234’567", "1 234 567", "12,34,567", "1_234_567", "1.234.567", "1,234,567"],
            [
                "12'34'567",
                "12 34 567",
                "123,4567",
                "1,23,4567",
                "1.234567",
                r"1 \quad 234 \quad 567",
                "1,234 567",
                "12, 34, 567",
            ],
        ),
        (r"1234567\pi", [r"1 234 567\pi"], [r"1 234 56\pi"]),
        ("3.5", [], ["3,5", "3'5"]),
        ("12, 34, 567", ["567, 12, 34"], ["1234567"]),
    ],
    "a bar, dots or brackets repeat digits": [
        (
            r"\frac{1}{3}",
            [r"0.\overline{3}", r".\overline{3}", r"0.\bar{3}", r"0.\dot{3}", "0.(3)", r"0.\overline3", r"0.333\ldots"],
            [
                r"0.\overline{4}",
                r"0.\overline{3}5",
                r"\overline{3}",
                r"1 0.\overline{3}",
                r"0.3",
                r"0.3\ldots",
                r"0.\overline{3",
            ],
        ),
        (r"\frac{1}{6}", [r"0.1\overline{6}", r"0.1\dot{6}"], [r"0.\overline{16}", "0.1(6)"]),
        (r"\frac{1}{7}", [r"0.\overline{142857}", r"0.\dot{1}4285\dot{7}"], [r"0.14"]),
        (r"\frac{\pi}{3}", [r"0.\overline{3}\pi"], [r"0.\overline{3}"]),
        ("1", [r"0.\overline{9}"], ["0.9999"]),
        (r"\overline{AB}", [r"\overline{AB}"], [r"\overline{AC}", "AB"]),
    ],
    "an upright letter after a number, root or π is a unit": [
        (
            r"5\sqrt{3}",
            [r"5\sqrt{3} \text{ m}", r"5\sqrt{3}\,\mathrm{m}", r"5\sqrt{3}\text{ s}"],
            [r"5\sqrt{3} m", r"5\sqrt{3}\text{ x}"],
        ),
        (r"5\pi \text{ m}", [r"5\pi", r"5\pi\text{ meters}"], [r"5\pi \text{ s}", r"5\pi \text{ g}"]),
        (r"\frac{\pi}{2}", [r"\frac{\pi}{2} \text{ g}"], [r"\frac{\pi}{2} g"]),
    ],
    "colours, underlining, Markdown and invisible characters change nothing": [
        (
            "73",
            [
                *(r"\textcolor{red}{73}", r"{\color{red}73}", r"\colorbox{red}{73}", r"\underline{73}", r"\boxed{73}"),
                *("**73**", "***73***", "_73_", "`73`", "“73”", "\u200b73", "\ufeff73"),
            ],
            [
                r"\textcolor{73}{74}",
                r"\underline{74}",
                "**73",
                "73**",
                "**73** or **74**",
                "~~73~~",
                r"\cancel{73}",
            ],
        ),
        ("343", ["7**3"], ["73", "7*3"]),
        ("2022", ["{20}{22}", "20{}22"], ["20 22"]),
    ],
    "dots are dots, and their list has an order": [
        (
            r"1,2,\dots,n",
            [r"1,2,\ldots,n", "1, 2, ..., n", r"1,2,\cdots,n", "1,2,…,n"],
            ["1,2,n", r"1,2,\ldots,m", r"n,2,\ldots,1"],
        ),
        ("1,2,3", ["3,2,1"], [r"1,2,\ldots", r"1,2,3,\ldots"]),
        ("7", [], [r"7\dots", "7…"]),
    ],
    "ratios are equal up to a factor": [
        ("1:2:3", ["2:4:6", "1 : 2 : 3", r"\frac{1}{2}:1:\frac{3}{2}"], ["1:2:4", "3:2:1", "1:2", "0:0:0", "2:4:6:8"]),
        ("1:2", ["2:4", r"1 \text{ to } 2"], ["2:1", "0:0", "1 2"]),
        ("0:1", ["0:2"], ["1:0"]),
        (r"1:\sqrt{3}", [r"\sqrt{3}:3"], ["1:3"]),
        ("2:15", ["2:15"], ["4:30"]),  # these may be times
    ],
    "times of day": [
        (
            "7:00 PM",
            [r"7 \text{ p.m.}", "7pm", "19:00", "7:00 p.m."],
            ["7:00", r"7 \text{ a.m.}", "8 pm", "7:0 0 PM", "7:00 1 PM", "7"],
        ),
        (r"12:30 \text{ a.m.}", ["0:30"], ["12:30", r"12:30 \text{ p.m.}"]),
    ],
    "degrees belong to the function's argument": [
        (r"\frac{\sqrt{3}}{2}", ["sin 60°", r"\sin 60^\circ", r"\sin(60°)"], [r"\sin 60", r"\cos 60°", "60°"]),
        (r"\frac{3}{4}", [r"\sin^{2} 60°"], [r"\sin 60°"]),
    ],
    "each ± of a list is two values": [
        ("0, 1, -1, 2, -2", [r"0,\pm1,\pm2"], [r"\pm1,\pm2", r"0,\pm1,\pm3", "0,1,2"]),
        (r"\{-1,0,1\}", [r"\{0,\pm1\}"], [r"(0, \pm 1)", r"\{\pm 1\}"]),
        (r"x=0, x=\pm 1", ["0, 1, -1"], ["0, 1"]),
    ],
    "a column may be written as a vector": [
        (
            r"\begin{pmatrix}1\\2\\3\end{pmatrix}",
            ["⟨1,2,3⟩", r"\langle 1,2,3\rangle"],
            ["⟨1,2,4⟩", "⟨3,2,1⟩", "1,2,3", r"\{1,2,3\}"],
        ),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", [], ["⟨1,2,3,4⟩"]),
    ],
    "a value may stand before its name, and words do not deny it": [
        ("5", ["x = 5", "5 = x", r"\text{answer} = 5"], [r"\text{not} = 5", "wrong = 5", "5 = wrong", "5 = 6"]),
        ("0", ["x = 0"], ["0 no", "0 or", "0 not"]),
    ],
    "more signs of Unicode and commands are those of LaTeX": [
        ("0.005", ["5‰"], ["5"]),
        ("₹500", ["500", "500 rupees"], ["$500"]),
        ("3:2", ["3∶2"], ["2∶3"]),
        (r"\lfloor x\rfloor", ["⌊x⌋"], ["⌈x⌉", "x"]),
        (r"\Delta", ["Δ"], ["δ"]),
        (r"\frac{1}{2}", [r"\nicefrac{1}{2}", r"\sfrac12"], [r"\nicefrac{2}{1}"]),
        ("10", [r"\binom52", r"\dbinom{5}{2}"], [r"\binom25"]),
        (r"\ln 2", [r"\log_e 2", r"\log_{e}2"], [r"\log_2 e"]),
        (r"\mathbb{R}", ["ℝ", r"\text{all real numbers}"], [r"\text{all integers}"]),
    ],
    "a limit that names the variable leaves it its name": [
        (r"\sum_{i=1}^n i", [r"\sum_{k=1}^n k"], [r"\sum_{n=1}^n n"]),
        (r"\int_0^n x\,dx", [r"\int_0^n y\,dy"], [r"\int_0^n n\,dn"]),
        (r"\lim_{x\to a} f(x)", [r"\lim_{y\to a} f(y)"], [r"\lim_{a\to a} f(a)"]),
        (r"\bigcup_{k=1}^n A_k", [r"\bigcup_{j=1}^n A_j"], [r"\bigcup_{n=1}^n A_n"]),
    ],
    "bound variables have no names": [
        (r"\sum_{i=1}^n i", [r"\sum_{k=1}^{n} k"], [r"\sum_{k=1}^n i", r"\sum_{k=0}^n k", r"\sum_{k=1}^m k"]),
        (r"\sum_{i=0}^{\infty} x^i", [r"\sum_{n=0}^\infty x^n"], [r"\sum_{x=0}^\infty x^x", r"\sum_{n=0}^\infty y^n"]),
        (
            r"\sum_{i=1}^n\sum_{j=1}^m a_{ij}",
            [r"\sum_{j=1}^n\sum_{i=1}^m a_{ji}"],
            [r"\sum_{k=1}^n\sum_{l=1}^m a_{lk}"],
        ),
        (r"\sum_{i=1}^n i+k", [r"\sum_{j=1}^n j+k"], [r"\sum_{k=1}^n k+i"]),
        (r"\int_0^x e^{-t} dt", [r"\int_0^x e^{-u}\,du"], [r"\int_0^t e^{-x} dx", r"\int_0^x e^{-u} dt"]),
        (r"\{x | x>0\}", [r"\{t | t>0\}", r"\{t : t > 0\}", r"(0,\infty)"], [r"\{t | x>0\}", r"\{t | t>1\}", "t<0"]),
        (r"\{x : x^2>a\}", [r"\{t : t^2>a\}"], [r"\{a : a^2>x\}"]),
        ("f(x)=x^2+a", ["f(t)=t^2+a"], ["f(a)=a^2+a", "f(t)=x^2+a", "g(x)=x^2+a"]),
        ("P(A)=0.5", ["P(A)=1/2"], ["P(B)=0.5"]),
        (r"n\pi, n\in\mathbb{Z}", [r"k\pi, k \in \mathbb{Z}"], [r"k\pi, k\in\mathbb{N}", r"2k\pi, k\in\mathbb{Z}"]),
    ],
    "words are read as they stand": [
        ("no", [r"\text{No}"], ["n o", "yes"]),
        (r"\frac{2}{9}", [], [r"\frac{2}{9} or", r"not \frac{2}{9}"]),
        (r"\{1,2\}", [r"\{1 or 2\}"], [r"\{1,2 or \}", r"\{or 1,2\}"]),
        ("2017", [], ["2023-01-05", "2$017"]),
        ("x_1", ["x₁"], ["x₂", "x 1"]),
    ],
}

# Texts that state 18, B and 42, or seem to.
GSM8K = {
    "right": (
        "18 | $18.00 | 18 apples | 18 red apples | 18 apples and 2 pears | 18 miles per hour | "
        "18 years old | x = 18 | 18 muffins each | **18** | \\boxed{18} | １８ | \u200b18 | €18 | 18% | "
        "18 (dollars) | = 18 | 18 people | +18 | ₹18 | 18 geese | 18 sheep"
    ),
    "wrong": (
        "18½ | 18 and a half | 18 plus 2 | 1,8 | 18 minus 1 | 18 over 2 | 18! | 18² | 18 squared | "
        "18K | 18 mil | 18 x | 18 dozen muffins | 18 hundred | 18 (or 19) | 18; 19 | 18 is wrong | "
        "18 wrong | 18 no, 19 | 18? | 18 = 19 | 18 > 17 | 18 hours and 30 minutes | "
        "18 feet 6 inches | 18 dollars and 50 cents | 18 apples maybe | 18 tenths | 18.000.000 | "
        "1 8 | not 18 | 18 pairs of shoes | 18 apples or 19 | 18_8 | 18 blue | ~~18~~ | 18 1 | "
        "0 18 | ~18 | ** ~18** | ~$18"
    ),
}
CHOICE = {
    "right": (
        r"B | (B) | B. | b | \text{B} | **B** | [B] | B. Paris | (B) 12 | B) vitamin D | "
        r"\textbf{(B)}\ 12 | Option B | The answer is B | B is correct | B, not D | Ｂ | "
        r"\textcolor{red}{B} | B because D is wrong | B) No | B: Paris | “B” | `B` | B. No, since A is less"
    ),
    "wrong": (
        "B C D | B or D | B is wrong | B, D | B and D | B/D | BD | not B | B isn't | B? No | "
        r"B incorrect | B (wrong) | B \quad D | B → D | B unless D | b or d | b, c | (b) (d) | B2 | "
        "B_1 | B' | B^c | !B | -B | B is not it | B, none | B. D | B) wrong | B: wrong | B. not | "
        r"B hundred | B 7 | both B and D | D, not B | ~~B~~ | \neg B | either B or D | Β | "
        "B) no, D | B. false, C | B. Wrong: C"
    ),
}
LAST_NUMBER = {
    "right": ("so 42 | makes $42$ | it is 42 apples | x = 42 | makes **42** | 6*7 = 42 | 6 and 7 make 42."),
    "wrong": (
        "makes 42½ | 41 or 42 | 2^42 | 1/42 | x_42 | 42² | not 42 | -42 | 5 - 42 | 20 42 | "
        "42 hundred | 1,42 | 42 000 | 42!"
    ),
}


def test_an_invisible_character_parts_the_numbers_of_an_answer() -> None:
    """As a ground truth it is refused."""
    assert not score("math", "\\boxed{7\u200b3}", "73", {}).correct
    with pytest.raises(DataError, match="no space within a number"):
        score("math", "\\boxed{73}", "7\u200b3", {})


@pytest.mark.parametrize("rule", MATH)
def test_rules_of_answers(rule: str) -> None:
    wrong = []
    for gold, equal, different in MATH[rule]:
        for answers, expected in ((equal, True), (different, False)):
            for answer in answers:
                for said, true in ((answer, gold), (gold, answer)):
                    if score("math", rf"\boxed{{{said}}}", true, {}).correct is not expected:
                        wrong.append((said, true))
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "form", "gold", "table"),
    [
        ("openai/gsm8k", "so\n#### %s", "18", GSM8K),
        ("gpqa", r"\boxed{%s}", "B", CHOICE),
        ("gpqa", "Answer: %s", "B", CHOICE),
        ("math/last_number", "%s", "42", LAST_NUMBER),
    ],
)
def test_rules_of_other_scorers(source: str, form: str, gold: str, table: dict[str, str]) -> None:
    wrong = [
        text
        for name, texts in table.items()
        for text in texts.split(" | ")
        if score(source, form.replace("%s", text), gold, {}).correct is not (name == "right")
    ]
    assert wrong == []


def test_a_mixed_number_after_the_mark_has_its_value() -> None:
    for text in ("3½", "3 1/2", "3.5", "7/2"):
        assert score("openai/gsm8k", f"#### {text}", "3.5", {}).correct
        assert not score("openai/gsm8k", f"#### {text}", "3", {}).correct


@pytest.mark.parametrize(
    "source", ["math", "math500", "hiyouga/geometry3k", "numina_olympiads", "strict", "math/last_number"]
)
def test_no_scorer_adds_neighbours(source: str) -> None:
    cases = [("42", "20 22"), ("8", r"5 \quad 3"), ("9", r"4 \text{ } 5"), ("5/7", r"\frac{2 3}{7}"), ("32", "2^{2 3}")]
    assert [case for case in cases if score(source, rf"\boxed{{{case[1]}}}", case[0], {}).correct] == []
    for version in range(5):
        found = [score(f"luffy/{version}", rf"</think>\boxed{{{answer}}}", gold, {}).correct for gold, answer in cases]
        assert not any(found)


def test_math_verify_adds_no_neighbours_without_a_box() -> None:
    for text in ("It is $20 22$.", r"It is \(20 22\).", r"So \[40 \quad 2\]", r"the final answer is $\frac{20 22}{1}$"):
        assert not score("math_verify", text, "42", {}).correct
    assert score("math_verify", "It is $42$.", "42", {}).correct


def test_signs_of_numbers_are_no_punctuation_of_short_answers() -> None:
    for gold, answer, right in [
        ("-5", "5", False), ("-5", "-5", True), ("3.5", "35", False), ("3.5", "3.5.", True), ("42", "4,2", False),
        ("2,718", "2718", True), ("2718", "27.18", False), ("50", "50%", False), ("U.S.", "US", True),
    ]:  # fmt: skip
        assert score("short_answer", f"<answer>{answer}</answer>", gold, {}).correct is right
