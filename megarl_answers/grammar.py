"""Tell by grammar whether a number is stated as an answer: by the word or sign that governs it, its clause, and what
follows it.
"""

import re
from collections.abc import Mapping

from megarl_answers.numerals import spelled_number
from megarl_answers.words import CHANGING, is_noun

CONTEXT_CHARS = 120
# In the clause of a number: a verb that is denied, with no other verb up to the number; or doubt.
_FINITE = r"(?:is|are|was|were|equals?|has|have|gives?|leaves?|makes?|gets?|totals?)\b(?!\s+(?:not|never)\b|n't)"
DENIED = re.compile(
    rf"(?:\b(?:is|are|was|were|do|does|did|can|could|will|would|should|must|has|have|had|be)\s+(?:not|never)\b|n't\b"
    rf"|\bcannot\b|\b(?:it|that|this|they)\s+never\b|\bneither\b|\bexcept\b)(?:\s+\w+)?(?:(?!\b{_FINITE}).)*$"
    r"|\b(?:not|n't|never|cannot)\s+(?:think|believe|agree|mean|say|know|convinced|certain)\b"
    r"|\b(?:doubt|deny|lie|wrong(?:ly)?|incorrect(?:ly)?|false(?:ly)?|mistake(?:n(?:ly)?)?|impossible|maybe|perhaps|possibly|suppose|assum(?:e|ing)|unsure|not\s+sure|might\s+think)\b",
    re.IGNORECASE,
)
# Up to the last of the marks that begin a clause, and up to the last that ends a sentence.
_TO_CLAUSE = re.compile(
    r"(?s:.*)(?:[.;!?](?:\s|$)|\n|[:,=]|⇒|∴|→|\\(?:implies|Rightarrow|therefore)\b"
    r"|\b(?:so|thus|hence|therefore|then|because|since)\b)",
    re.IGNORECASE,
)
_TO_SENTENCE = re.compile(r"(?s:.*)(?:[.!?]\s|\n)")
_GOVERNOR = re.compile(r"(?:\\?[A-Za-z']+|[^\sA-Za-z])$")
_MEANINGS: Mapping[str, str] = {
    "sign": r"= : ≈ ≡ → ⇒ ⟹ ∴ \simeq \approx \equiv \Rightarrow \rightarrow \Longrightarrow \longrightarrow "
    r"\implies \to \therefore \quad \qquad",
    # After these a number may stand alone; after other verbs and nouns it counts something: `Juan picked 15 oranges`.
    "state": "is are was were be equals equal becomes become remains get gets got getting obtain obtains find "
    "finds found have has had having give gives giving gave make makes making made leave leaves leaving "
    "yield yields yielding reach reaches reached total totals mean means conclude answer result sum value score "
    "scored scores need needs cost costs pay pays paid earns earned spent us worth altogether it's that's which",
    "conclude": "so hence that thus therefore",
    # Prepositions that a quantity may follow: sold for $15, in 15 days.
    "quantity": "for in at with by into on after",
    # These may stand between a number and the word that governs it, as may wrappers of LaTeX.
    "within": "exactly precisely only just also still now another additional each all simply then finally "
    r"definitely indeed actually approximately about roughly around \text \textbf \textit \textrm \mathbf \mathrm "
    r"\mathit \mathsf \boldsymbol",
    # Other prepositions, conjunctions and articles, of which languages have few, and adverbs that deny.
    "closed": "a an the about above across against along among around as before behind below beneath beside besides "
    "between beyond despite during except following from inside less like minus near of off onto opposite "
    "outside over past per plus since than through throughout till times to toward towards under unlike "
    "until upon versus via vs within without and or nor but if unless whether while because although "
    "though when where once seems looks appears not never hardly barely scarcely almost nearly even "
    "seldom rarely isn't wasn't aren't",
}
_WORDS = {meaning: frozenset(words.split()) for meaning, words in _MEANINGS.items()}
_ENDS_NOUN = CHANGING | _WORDS["closed"]
_AROUND = " \t\n$€£({[*_~`\"'+#>-\\"
_SIGNS = frozenset("→⇒⟹∴—–,.;!?}")
_CURRENCY = re.compile(r"(?<!\$)[$€£]\s*\{?\s*$")
_TOTAL_OF = re.compile(r"\b(?:an?\s+(?:[a-z]+\s+){1,3}|(?:total|sum|average|maximum|minimum)\s+)of$", re.IGNORECASE)
_COMES_TO = re.compile(
    r"\b(?:rounds|rounded|rounding|comes?|came|adds?|sums?|reduces?|simplif(?:y|ies)|amounts?|equal|equates?"
    r"|evaluates?|leads?|bring(?:s|ing)?|works?|boils?|increase[sd]?|decrease[sd]?|drop(?:s|ped)?|grows?|grew|rises?"
    r"|rose|falls?|fell|changes?)\b[a-z\s]{0,20}\bto$|\b(?:leaves?|leaving|left|ends?\s+up)\b[a-z\s]{0,20}\bwith$|\bresult(?:s|ing)?\s+in$"
    r"|\bnot\b[^.;]{0,20}\bbut$|\b(?:he|she|they)\s+(?:\w+\s+)?\w+$",
    re.IGNORECASE,
)
# These make what follows a trial, or what others say.
_SUPPOSED = re.compile(
    r"\b(?:if|unless|whether|suppos\w+|assum\w+|let|try|trying|guess\w*|imagine|pretend|check\w*|test\w*|ignor\w+|forget"
    r"|replac\w+|reject\w*|discard\w*|rul(?:e|ed|ing)\s+out|exclud\w+|eliminat\w+|initially|at\s+first|used\s+to)\b"
    r"|(?<!\bI )(?<!\bI'd )(?<!\bwe )\b(?:thinks?|thought|says?|said|claim(?:s|ed)?|believe[sd]?|hope[sd]?"
    r"|expect(?:s|ed)?|predict(?:s|ed)?)\b|^\W*(?:(?:nobody|no\s?one|none|nothing|neither|others?|some(?:one|body)"
    r"|(?:add|subtract|multipl|divid)\w*\b(?!.*\b(?:gives?|leaves?|yields?|get|makes?)\b))\b|(?:is|was|are|can|could|may|might|should|would)\s+(?:it|that|this|the|he|she|they|we|x|n)\b)"
    r"|\b(?:mistake|bound|candidate|possibility|error|typo|misprint)s?\b",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<![\w)\\])\\?[a-zA-Z]\d?\s*=\W*$")
_FOR_NAME = re.compile(
    r"\b(?:if|when|for|let|suppose|assume|try|checking|testing|guess|put|set|setting|take|taking|with|at|where|whether"
    r"|unless|substitut\w+|plug\w*)\s+\W*$",
    re.IGNORECASE,
)
# The whole sentence is about what is not the case.
_UNREAL = re.compile(
    r"^\W*(?:(?:should|were|had)\b|if\b[^,]*\b(?:were|was|had)\b.*\bwould\b|without\b.*\bwould\b)", re.IGNORECASE
)
_CONTRAST = re.compile(
    r"[^.!?\n]*(?:\b(?:but|although|though|however|yet|no\s+longer|error|mistake|misprint|contradicts)\b|\?)"
    r"|,\s*(?:then|if|unless|provided|assuming|I\s+(?:guess|think|suppose))\b|\s*(?:too\b|short\s+of|off\b|away\s+from|at\s+best|and\s+counting|below|above)",
    re.IGNORECASE,
)
# A number that begins a clause ends it, or is said to be the answer, or counts something.
_ALONE = re.compile(
    r"[\s$*_)}\]\\\"'`]*(?:$|\n|[.,;:!(=~—–]|it\s+is\b"
    r"|(?:is|was|are|must\s+be|will\s+be)\s+(?:(?:therefore|indeed|the|our|my|final|only)\s+)*(?:what\s+we\b|correct|right|answer|result|solution|total|sum|value)\b"
    r"|(?:is|was|are)\s+the\s+[a-z]+est\b|as\s+(?:the|our|my)\b|o'clock\b|(?:remains?|remain(?:ing)?|left)\b|of\s+(?:them|these|those|his|her|their|the)\b)"
)
_COUNTED = re.compile(r"[\s$*_)}\]\\~,-]*(?:text|mathrm)?[\s{~]*((?:[^\W\d_][\w'./^-]*,?\s*){0,6})")
_PREDICATE = re.compile(r"(?:an?|the|any|every|one|to\s+an?|this|that|no)\b")
_SPELLED = re.compile(r"([a-zA-Z-]+)\s*\(\s*$")


def is_stated(before: str, number: str, after: str) -> bool:
    """Return whether a number is stated as an answer by the word or sign that governs it, and by what follows it."""
    if (words := at_end(_SPELLED, before, 40)) and spelled_number(words[1]) == (number, ""):
        before = before[: words.start()]
    head, word = _governor(before[-CONTEXT_CHARS:])
    if _is_trial(before) or _CONTRAST.match(after):
        return False
    begins = word in _SIGNS or word in _WORDS["conclude"] or not word[-1].isalpha()
    is_quantity = at_end(_CURRENCY, before, 10) is not None or _counts(after, begins=begins)
    if word == "=":
        name = at_end(_NAMED, head, 20)
        return is_quantity or name is None or not _FOR_NAME.search(head[: name.start()])
    if word in _WORDS["state"] or word in _WORDS["sign"] or (begins and _ALONE.match(after)):
        return True
    if _COMES_TO.search(head):
        return True
    if word == "of":
        return _TOTAL_OF.search(head) is not None
    return is_quantity and (word in _WORDS["quantity"] or word not in _WORDS["closed"])


def _governor(head: str) -> tuple[str, str]:
    """Return a text up to the word or sign that governs the number after it, and this word, "." at the start."""
    while True:
        head = head.rstrip(_AROUND)
        match = _GOVERNOR.search(head[-40:])
        if match is None:
            return head, "."
        word = match[0] if match[0][0] == "\\" else match[0].lower()
        if word not in _WORDS["within"]:
            return head, word
        head = head.removesuffix(match[0]).rstrip()
        head = head.removesuffix(" an") if word == "additional" else head


def at_end(pattern: re.Pattern[str], text: str, num_chars: int) -> re.Match[str] | None:
    """Search for a pattern that ends with a text, and is not longer than `num_chars`, which is faster than anywhere."""
    return pattern.search(text, max(0, len(text) - num_chars))


def follows_equals(text: str) -> bool:
    """Return whether a text ends with an equals sign, after which a clause begins."""
    return text[-20:].rstrip(_AROUND).endswith("=")


def is_supposed(text: str) -> bool:
    """Return whether what a text goes on to state is a condition, a trial, others' word or denied."""
    return _is_trial(text) or DENIED.search(clause_of(text)) is not None


def _is_trial(text: str) -> bool:
    text = text[-4 * CONTEXT_CHARS :]
    sentence = text[found.end() :] if (found := _TO_SENTENCE.match(text)) else text
    if _UNREAL.match(sentence):
        return True
    return not follows_equals(text) and _SUPPOSED.search(clause_of(sentence)) is not None


def clause_of(text: str) -> str:
    """Return the clause that a text ends with."""
    text = text[-CONTEXT_CHARS:]
    return text[found.end() :] if (found := _TO_CLAUSE.match(text)) else text


def _counts(after: str, *, begins: bool) -> bool:
    """Return whether a number counts what is named after it: a unit or a noun in the plural.

    begins: it begins a clause, so that a word in -s may be a verb.
    """
    if re.match(r"[\s}]*(?:\\?[%€£°]|/|of\s+(?:the|them|these|those|his|her|their)\b)", after):
        return True
    match = _COUNTED.match(after)
    words = match[1].replace(",", " ").split() if match else []
    for index, word in enumerate(words):
        if word.casefold() in _ENDS_NOUN:
            return False
        if is_noun(word.rstrip(".")):
            return not begins or index > 0 or not _PREDICATE.match(" ".join(words[1:]))
        if word.endswith("."):
            return False
    return False
