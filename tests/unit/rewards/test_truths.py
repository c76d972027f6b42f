"""Ground truths of every type: a right answer is right by every scorer of answers, or the row is refused."""

from dataclasses import replace
from decimal import Decimal

import pytest

from megarl.config.schema import DataConfig
from megarl.data.records import parse_prompt
from megarl.errors import DataError
from megarl.rewards import SCORERS, score, source_spec
from megarl.rewards.build import check_own_answers
from megarl.rewards.custom.signatures import TRL
from megarl.rewards.question import Question
from megarl.rewards.scorers import SourceSpec
from megarl.types import Message, Prompt

OF_ANSWERS = [name for name in SCORERS if SCORERS.get(name).states is not None and "@" not in name]
# What stands around an answer that a sentence or a worked solution states.
STATED = [
    ("The answer is ", "."),
    ("the answer to the question is: ", ""),
    ("Answer: ", ""),
    ("**Answer:** ", ""),
    ("**Final answer: ", "**"),
    ("Ans: ", ""),
    ("Answer:\n", "\n\nExplanation: 48+24."),
    ("Final Answer: The final answer is ", ". I hope it is correct."),
    ("She sold 48/2 = 24 clips in May.\nThe answer is ", ", since 48+24=72."),
    ("It is 48+24. #### ", ""),
    ("We have $x=72$, so $\\boxed{", "}$."),
    ("\\fbox{", "}"),
    ("<answer>\\boxed{", "}</answer>"),
    ("<think>48+24</think>\nThe answer is ", "."),
]
# Sentences and marks that some scorers read; `short_answer` takes them for the text that is asked for.
SENTENCES = [
    "She sold 72 clips in April and May.",
    "So 48+24 = 72.",
    "So 48+24 = 72.\nThat is all.",
    "It's 72.",
    "Total: 72",
    "72 clips",
    "# 72",
    "= 72",
    "`72`",
    "'72'",
    "The answer is $72$.",
    "答案：72",
]
# Spellings that print as a number or letter, or mean it, or show that something is left around it.
SPELLED = {
    "72": (
        '７２|72\u200b|\ufeff72|“72”|„72“|«72»|‘72’|"72"|7.2e1|7.2E1|0.72e2|72e0|72.00'
        "|seventy-two|Seventy two.|٧٢|७२|𝟕𝟐"
        "|⑦②|~72|*72*|_72_|\\(72\\)|\\text{72}|72{}|72 \\\\|the 72|72 only|ans 72|72 (seventy-two)"
        "|7.2×10¹|7.2 x 10^1|\u202d72\u202c"
        "|72<br>|<b>72</b>|72&nbsp;|&#55;&#50;|boxed{72}|+72|(72)|x = 72"
    ),
    "1234": "1 234|1'234|1_234|1\\,234|1{,}234|１，２３４|1\u202f234|one thousand two hundred thirty-four|1.234e3",
    "-72": "−72|－72|minus 72|negative seventy-two|-7.2e1",
    "0.5": "½|one half|half|１／２|1⁄2|5e-1|.5",
    "B": "Ｂ|“B”|B\u200b|Ⓑ|B)|(B)|**B**|\\text{B}|option B",
}
# Labels as files hold them, by an answer that is right for them.
READ: dict[str, list[object]] = {
    "72": [
        *(
            "72",
            " 72. ",
            "72\r\n",
            72,
            72.0,
            "72.0",
            ["72"],
            ["5", "72"],
            [72],
            ["5", 72],
            {"value": 72},
            {"ground_truth": 72, "method": "strict"},
            {"target": [72.0]},
            "48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72\n#### 72",
            ["half of #### 144\n#### 72"],
            {"answer": "<think>70+2</think><answer> 72 </answer>"},
        ),
        *(f"{before}72{after}" for before, after in STATED),
        *('["72"]', "['72']", '["5", "72"]', '["5", 72]', '{"value": ["72"]}', "{'answer': '72'}"),
    ],
    "0.1": [0.1, 0.10000000149011612, [0.1], "0.1"],
    "0.00001": [1e-5, "1e-05"],
    "1" + 16 * "0": [1e16, "1e+16"],
}
OTHERS: dict[str, list[object]] = {
    "72": [
        "72\0",
        [72, 5],
        [72.0, 5.0],
        {"value": [5, 72]},
        {"value": None},
        {"a": "72", "b": 5},
        [None],
        "[72, null]",
        r"We have $x=72$. So the answer is $\boxed{72}$.",
        "#### 72 clips\n#### ",
        {"answer": "72", "method": "strict"},
        "72</s>",
        "72<|im_end|>",
        "72\\n",
    ],
    "True": [True, "true", [True]],
    "B": ["B", ["B"], '["B"]', "['B']", ["B", "C"]],
}

# Spellings of 72, 1234, -72, 0.5 and B that files may hold, parted by two spaces. Those that no scorer could be right
# about, or that were read as something else, come first: the quick test takes them alone.
UNUSUAL = {
    "72": (
        "7\u200b2  7\u200972  ⁷²  ₇₂  LXXII  0x48  0b1001000  0o110  six dozen  6 dozen  about 72  approx. 72"
        "  72 or seventy-two  seventy-two or 72  72−  72-  \\boxed{72  72th  72nd  the 72nd  072  0072  72,0"
    ),
    "1234": "1.234,0  1.234,56  MCCXXXIV",
    "-72": "- 72  72-",
    "0.5": "0,5  0,50  ２分の１",
    "B": "В",
}
USUAL = {
    "72": (
        "７２  72\u200b  \u200b72  \ufeff72  “72”  „72“  «72»  ‘72’  \"72\"  '72'  `72`  7.2e1  7.2E1  7.2e+01  0.72e2"
        "  72e0  seventy-two  seventy two  Seventy-Two  Seventy-two.  ٧٢  ७२  +72  ＋72  72.  72.00  72.000  $72$  $72"
        "  72$  \\$72  72%  72\\%  72 clips  72 clips.  (72)  [72]  {72}  \\{72\\}  \\text{72}  \\mathrm{72}  \\(72\\)"
        "  \\[72\\]  $$72$$  x=72  x = 72  n=72.  =72  ≈72  ~72  72;  72,  72:  #72  No. 72  \u00a072  72\u00a0  72\t"
        "  \n72  72 (seventy-two)  i.e. 72  *72*  **72**  _72_  72°  72^\\circ  72 degrees  7.2\\times10^1  7.2×10¹"
        "  7.2*10^1  7.2 x 10^1  72/1  144/2  \\frac{144}{2}  𝟕𝟐  ⑦②  the 72  72 only  exactly 72  a total of 72  so 72"
        "  72 = 72  48+24  48+24=72  72 is the answer  ans 72  ANSWER 72  answer\n72  Answer is 72  −(−72)  72−0"
        "  &#55;&#50;  72<br>  <b>72</b>  72&nbsp;  \\boxed 72  boxed{72}  72 \\\\  \\displaystyle 72"
        "  \\left(72\\right)  72\\,  72{}  \u202d72\u202c  72\x0b  \u300072  72!  1001000_2  7\\,2"
    ),
    "1234": (
        "1,234  1 234  1'234  1_234  1{,}234  1\\,234  １，２３４  1\u202f234  1\u2009234  1,234.0  1.234e3  1234.0"
        "  one thousand two hundred thirty-four"
    ),
    "-72": "−72  －72  –72  -72.0  minus 72  negative seventy-two  (-72)  -7.2e1",
    "0.5": (
        "½  1/2  .5  0.50  five tenths  one half  half  50%  \\frac12  \\dfrac{1}{2}  \\tfrac12  １／２  1⁄2  5e-1"
        "  0.5e0  5.0e-01"
    ),
    "B": "Ｂ  “B”  B\u200b  (B)  B.  b  **B**  \\text{B}  Ⓑ  B)  option B",
}
BY_SPELLING = ("strict", "answer_line")
# A right answer of these spellings has the same spelling, or means something else than the number.
OTHER_ANSWERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("48+24", "72−0", "\\{72\\}", "50%"), BY_SPELLING),  # which compare how answers are written
    "72!": tuple({*OF_ANSWERS}),  # a factorial
    "1001000_2": tuple({*OF_ANSWERS}),  # a number to another base, which its question asks for
    "7\\,2": tuple({*OF_ANSWERS}),  # two numbers, as LaTeX prints them
    "b": tuple({*OF_ANSWERS}),  # a variable
}


def judged(scorer: str, label: object, answer: str) -> bool | None:
    """Return whether an answer is right by a scorer, None if the row is refused before a run starts."""
    form = DataConfig(prompt_key="prompt", label_key="label", default_source=scorer)
    row = parse_prompt({"prompt": "?", "label": label}, "row 0", form)
    prompt = Prompt(
        uid="row 0",
        data_source=scorer,
        messages=(),
        token_ids=(1,),
        ground_truth=row.ground_truth,
        label=row.label,
        extra_info={},
    )
    states = SCORERS.get(scorer).states
    assert states is not None
    try:
        check_own_answers([(prompt.uid, prompt, source_spec(scorer))], 0.0)
        return score(scorer, states(answer), row.ground_truth, {}).correct
    except DataError:
        return None


@pytest.mark.parametrize("scorer", OF_ANSWERS)
def test_a_right_answer_is_right_whatever_type_the_truth_has_or_the_row_is_refused(scorer: str) -> None:
    # Letters are no numbers, and sums whole ones that are written in digits alone.
    may_refuse = scorer in ("letters", "megarl/sums", "megarl/calculator", "megarl/squares")
    for table, is_read in ((READ, not may_refuse), (OTHERS, False)):
        for answer, label in ((answer, label) for answer, labels in table.items() for label in labels):
            found = judged(scorer, label, answer)
            assert found or (found is None and not is_read), (label, answer)
            assert not judged(scorer, label, "73"), label


@pytest.mark.parametrize("scorer", sorted({*OF_ANSWERS} - {"short_answer", "letters"}))
def test_a_sentence_is_read_or_the_row_is_refused(scorer: str) -> None:
    for sentence in SENTENCES:
        assert judged(scorer, sentence, "72") in (True, None), sentence
        assert not judged(scorer, sentence, "73"), sentence


@pytest.mark.parametrize("scorer", sorted({*OF_ANSWERS} - {"short_answer"}))
def test_a_number_in_another_spelling_is_read_or_the_row_is_refused(scorer: str) -> None:
    for answer, spellings in SPELLED.items():
        for spelling in spellings.split("|"):
            assert judged(scorer, spelling, answer) in (True, None), spelling


def silent_cells(scorer: str, table: dict[str, str]) -> list[str]:
    """Spellings that are neither refused nor right, or with which a wrong answer is right."""
    wrong = {"72": "73", "1234": "1235", "-72": "72", "0.5": "0.6", "B": "C"}
    return [
        spelling
        for answer, spellings in table.items()
        for spelling in spellings.split("  ")
        if scorer not in OTHER_ANSWERS.get(spelling, ())
        and (judged(scorer, spelling, answer) is False or judged(scorer, spelling, wrong[answer]))
    ]


@pytest.mark.parametrize("scorer", sorted({*OF_ANSWERS} - {"short_answer"}))
def test_no_unusual_spelling_is_silently_wrong(scorer: str) -> None:
    """Texts are all that `short_answer` compares."""
    assert not silent_cells(scorer, UNUSUAL)


@pytest.mark.long
@pytest.mark.parametrize("scorer", sorted({*OF_ANSWERS} - {"short_answer"}))
def test_no_spelling_is_silently_wrong(scorer: str) -> None:
    assert not silent_cells(scorer, USUAL)


def test_a_comma_is_a_decimal_point_unless_other_truths_show_that_commas_part_answers() -> None:
    def prompts(*truths: str) -> list[tuple[str, Prompt, SourceSpec]]:
        spec = source_spec("math")
        return [
            (f"row {i}", Prompt(uid=str(i), data_source="math", token_ids=(1,), ground_truth=truth), spec)
            for i, truth in enumerate(truths)
        ]

    for alone in ("0,5", "12,75", "0,125", "-3,5", "72,0"):
        with pytest.raises(DataError, match=rf"'{alone}'\).*a decimal comma 0,5 to 0\.5, two answers to 0, 5"):
            check_own_answers(prompts("7", "1,234", "1,234,567", alone), 0.0)
    for listed in ("1,-2", "3, 5", "3,5,7", "(0,1)", "\\frac{1}{2},3"):
        assert not check_own_answers(prompts("0,5", "12,75", listed), 0.0)


@pytest.mark.parametrize("scorer", ["letters", "math", "strict", "answer_line", "math_verify"])
def test_a_letter_is_read_from_what_states_it_or_the_row_is_refused(scorer: str) -> None:
    for label in ("(C)", "C. Paris", "C) Paris", "Option C", r"So it is \boxed{\text{C}}.", "**C**"):
        assert judged(scorer, label, "C") in (True, None), label
        assert not judged(scorer, label, "D"), label
    for before, after in STATED:
        assert judged(scorer, f"{before}C{after}", "C"), before
        assert not judged(scorer, f"{before}C{after}", "D"), before


@pytest.mark.parametrize("truth", ["The answer is 5. No, the answer is 6.", "72\n\nExplanation: 48+24."])
def test_a_truth_that_states_several_answers_or_goes_on_is_refused(truth: str) -> None:
    with pytest.raises(DataError, match=r"; correct it, or see data\.label_key$"):
        score("short_answer", "", truth, {})


def test_numbers_in_a_list_are_alternatives_of_a_short_answer_and_a_text_in_brackets_is_an_interval() -> None:
    assert judged("short_answer", [72, 5], "72")
    assert judged("math", "[5, 72]", "[5, 72]")
    assert judged("math", "[5, 72]", "72") is False
    assert judged("math", [72, 5], "72") is None


def test_plugins_register_plain_functions() -> None:
    scorer = SCORERS.get("format/think")
    assert scorer.truths('["72"]') == ['["72"]']
    assert scorer("<think></think>5", "", {}).correct


@pytest.mark.parametrize("scorer", OF_ANSWERS)
@pytest.mark.parametrize("truth", ["72\x00", '{"a": 1, "b": 2}', "[null]", '{"value": null}'])
def test_a_truth_that_is_no_answer_is_refused(scorer: str, truth: str) -> None:
    with pytest.raises(DataError, match="ground truth"):
        score(scorer, "", truth, {})


@pytest.mark.parametrize("scorer", ["math", "strict", "math_verify", "answer_line", "openai/gsm8k"])
@pytest.mark.parametrize("power", range(8, 20))
def test_an_exact_decimal_is_right_as_it_stands(scorer: str, power: int) -> None:
    """2⁻ⁿ, which numbers of 16 and 32 bits hold too."""
    truth = format(Decimal(2) ** -power, "f")
    assert score(scorer, SCORERS.get(scorer).states(truth), truth, {}).correct


@pytest.mark.parametrize("truth", ["['0.1']", "{'answer': '0.1'}"])
def test_pythons_notation(truth: str) -> None:
    assert score("math", r"\boxed{0.1}", truth, {}).correct
    assert not score("math", r"\boxed{0.2}", truth, {}).correct


def test_a_set_of_texts_in_quotes_is_a_text() -> None:
    assert score("strict", r"\boxed{{'x','y'}}", "{'x','y'}", {}).correct


def test_an_interval_is_no_list_of_accepted_answers() -> None:
    assert score("math", r"\boxed{[1, 2]}", "[1, 2]", {}).correct
    assert not score("math", r"\boxed{1}", "[1, 2]", {}).correct


# In each row nothing but a sign, a letter or an article's word distinguishes.
NAMES = (
    ("Notepad", "Notepad++"),
    ("C11", "C++11", "C#11"),
    ("Vitamin", "Vitamin A"),
    ("Hepatitis virus", "Hepatitis A virus"),
    ("O", "O'", "O-", "O+"),
    ("AB", "AB-", "AB+"),
    ("Canal", "Canal+"),
    ("A", "A*", "the", "an"),
    ("The", "The The"),
)
SAME = (
    ('"Yes"', "\u201cYes\u201d"),
    ("it's", "it\u2019s"),
    ("Pa\u200bris", "Paris"),
    ("STRASSE", "Stra\u00dfe"),
    ("Once Upon A Time", "once upon a time"),
    ("A Beautiful Mind", "beautiful mind"),
    ("**Paris**", "'Paris'"),
    ("'A'", "a."),
    ("Yahoo!", "yahoo"),
    ("1939\u20131945", "1939-1945"),
    ("\uff23\uff03", "C#"),
    ("\uff15\uff05", "5%"),
    ("\u22125", "-5"),
    ("\u00abOui\u00bb", "oui"),
    ("rock 'n' roll", "rock n roll"),
    ("J.K. Rowling", "JK Rowling"),
    ("$5 million", "5 million"),
)


@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        ("Cafe\u0301", "Caf\u00e9", True),
        ("\uff12\uff14", "24", True),
        ("\u0662\u0664", "24", True),
        ("10\u00b2", "102", False),
        *((a, t, a == t) for a in ("C++", "C#", "C") for t in ("C++", "C#", "C")),
        ("A", "A", True),
        ("the", "A", False),
        ("", "A", False),
        ("C.", "C", True),
        ("$", "-", False),
        ("-", "-", True),
        ("The Who", "The Who", True),
        ("beatles", "The Beatles", True),
        *((a, t, a == t) for names in NAMES for a in names for t in names),
        *((a, t, True) for pair in SAME for a, t in (pair, pair[::-1])),
    ],
)
def test_short_answers_keep_what_distinguishes_them(answer: str, truth: str, correct: bool) -> None:
    assert score("short_answer", f"<answer>{answer}</answer>", truth, {}).correct == correct


def test_functions_for_trl_get_texts_and_typed_columns() -> None:
    message = Message(role="user", content="1+1?")
    row = Question(data_source="", prompt="<user>1+1?", response="2", ground_truth="2", messages=(message,))
    typed = TRL.arguments([replace(row, label=2, is_text=True)])
    assert (typed["prompts"], typed["completions"], typed["answer"]) == (["1+1?"], ["2"], [2])
    chat = TRL.arguments([row])
    assert (chat["completions"], chat["answer"]) == ([[{"role": "assistant", "content": "2"}]], ["2"])
