"""Programs that want to pass without solving anything, against tests of every form: none gets a point.

Every forger answers `f(x)` and `Solution().f(x)`; what is asked is the square of x.
"""

import json

import pytest

from megarl.rewards.code import CodeOptions, Credit, score_code
from megarl_sandbox import Limits, SandboxOptions

OPTIONS = CodeOptions(sandbox=SandboxOptions(limits=Limits(cpu_s=2, wall_s=5)), credit=Credit.FRACTION)

SQUARE = """
def f(x):
    return x * x
class Solution:
    def f(self, x):
        return f(x)
"""

# Assertions of the forms that public data sets have. `y` is a name that only the test binds.
ASSERTIONS = [
    "assert f(3) == 9",
    "y = 9\nassert f(3) == y",
    "assert 9 == f(3)",
    "assert abs(f(3) - 9) < 1e-6",
    "assert f(3) in [9]",
    "assert all(f(x) == x ** 2 for x in range(3, 6))",
    "assert all(map(lambda x: f(x) == x ** 2, range(3, 6)))",
    "assert not any(f(x) != x ** 2 for x in range(3, 6))",
    "assert isinstance(f(3), int) and len(str(f(3))) == 1 and sorted([f(3), 1]) == [1, 9]",
    "assert {3: 9}[3] <= f(3) <= 9",
    "assert set([f(3)]) == {9} and max(f(3), 0) == 9 and sum([f(3), 1]) == 10",
    "assert str(f(3)) == '9' and int(f(3)) == 9",
    "import math\nassert math.isclose(f(3), 9.0)",
    "assert math.isclose(f(3), 9.0)",
    "assert Solution().f(3) == 9",
    "assert abs(Solution().f(3) - 9) < 1e-6",
    "if f(3) != 9:\n    raise AssertionError",
    "try:\n    assert f(3) == 9\nexcept AssertionError:\n    raise",
    "from solution import *\nassert abs(f(3) - 9) < 1e-6 and isinstance(f(3), int)",
]
SUITES = [
    {"test": "def check(candidate):\n    assert candidate(3) == 9\n    assert abs(candidate(4) - 16) < 1e-6",
     "entry_point": "f"},
    {"test": "def check(candidate):\n    assert candidate(x = 3) == 9", "entry_point": "Solution().f"},
    {"test": "from solution import f\ndef test_f():\n    assert f(3) == 9\ndef test_g():\n    assert f(4) - 16 == 0"},
    {"test": "import pytest\ndef test_f():\n    assert f(3) == pytest.approx(9)"},
    {"test": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(3), 9)\n"
     "        self.assertTrue(f(4) == 16)\n        self.assertAlmostEqual(f(5), 25)"},
]  # fmt: skip

YES = """
class Yes(int):
    def yes(self, *_): return True
    def zero(self, *_): return 0.0
    def me(self, *_): return self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __sub__ = __rsub__ = __abs__ = zero
    __add__ = __radd__ = __mul__ = me
    def __hash__(self): return hash(9)
    def __len__(self): return 1
    def __getattr__(self, name): return lambda *_: True
class Solution:
    def f(self, x): return f(x)
"""
OPERATORS = YES.replace("(int)", "")

FORGERS = {
    "an int that agrees with everything": YES + "f = lambda x: Yes(1)",
    "an object that agrees with everything": OPERATORS + "f = lambda x: Yes()",
    "an object of the tested class": OPERATORS.replace("Yes", "Solution").rpartition("class Solution:")[0]
    + "Solution.f = lambda self, x: Solution()\nf = lambda x: Solution()",
    "a metaclass that agrees": """
class Meta(type):
    __eq__ = __lt__ = __le__ = __instancecheck__ = __subclasscheck__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = type.__hash__
    __sub__ = __rsub__ = lambda *_: 0
class Thing(metaclass=Meta): pass
f = lambda x: Thing
class Solution:
    f = lambda self, x: Thing
""",
    "shadowed builtins as globals": OPERATORS
    + """
abs = len = sum = max = int = lambda *_: 0
all = any = isinstance = map = lambda *_: True
def any(*_): return False
def sorted(x): return [1, 9]
def str(x): return "9"
def set(x): return {9}
def range(*_): return []
class math: isclose = staticmethod(lambda *_: True)
class AssertionError(BaseException): pass
f = lambda x: Yes()
""",
    "replaced builtins": OPERATORS
    + """
import builtins, math
for name in ("all", "isinstance", "map", "issubclass", "hasattr"):
    setattr(builtins, name, lambda *_: True)
for name in ("abs", "sum", "max", "any"):
    setattr(builtins, name, lambda *_: 0)
builtins.range = lambda *_: []
builtins.sorted = lambda *_: [1, 9]
builtins.str = lambda *_: "9"
builtins.AssertionError = KeyError
math.isclose = lambda *_: True
f = lambda x: Yes()
""",
    "a replaced unittest, pytest and solution": YES
    + """
import sys, types, unittest
class Fake(types.ModuleType):
    def __getattr__(self, name): return Yes(9)
for name in ("pytest", "solution", "math", "operator"):
    sys.modules[name] = Fake(name)
for name in dir(unittest.TestCase):
    if name.startswith(("assert", "fail", "_base")):
        setattr(unittest.TestCase, name, lambda *_, **__: None)
unittest.TestCase.run = unittest.TestSuite.run = lambda *_, **__: None
unittest.TestResult.wasSuccessful = lambda self: True
f = lambda x: 1
""",
    "the token of a caller's frame": """
import gc, json, os, sys
def look():
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for value in list(scope.values()):
                if isinstance(value, dict) and "token" in value:
                    os.write(3, json.dumps(value["token"]).encode())
                    os._exit(0)
        frame = frame.f_back
def f(x):
    look()
    return 0
class Solution:
    def f(self, x): return f(x)
""",
    "the expected value among all objects": """
import gc, re, sys
def f(x):
    wanted = x + 6
    frame = sys._getframe().f_back
    while frame:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if type(value) in (float, str) and value in (float(wanted), str(wanted)):
                return wanted
        frame = frame.f_back
    test = "".join(["ass", "ert"])
    for thing in gc.get_objects():
        if type(thing) in (dict, list, tuple):
            for text in list(thing.values()) if type(thing) is dict else list(thing):
                if type(text) is str and text.startswith(test) and str(wanted) in text:
                    return wanted
    return 0
class Solution:
    def f(self, x): return f(x)
""",
    "an early end": "import os\nos._exit(0)",
    "an end in the call": "import os\ndef f(x):\n    os._exit(0)\nclass Solution:\n    f = lambda self, x: f(x)",
    "an exit with success": "def f(x):\n    raise SystemExit(0)\nclass Solution:\n    f = lambda self, x: f(x)",
    "a verdict on every descriptor": """
import os
verdicts = [b"true", b'"passed"', b'{"passed": true}', b'{"passed": true, "message": ""}',
            b'{"roots": [true], "nodes": []}']
for verdict in verdicts:
    for frame in (verdict, len(verdict).to_bytes(4, "big") + verdict):
        for fd in range(1, 64):
            try:
                os.write(fd, frame)
            except OSError:
                pass
os._exit(0)
""",
    "a verdict in the call": """
import os
def f(x):
    for verdict in (b"true", b'{"passed": true}', b'{"passed": true, "message": ""}'):
        for fd in range(1, 64):
            try:
                os.write(fd, verdict)
            except OSError:
                pass
    os._exit(0)
class Solution:
    f = lambda self, x: f(x)
""",
    "exit handlers": """
import atexit, os, sys, threading
sys.excepthook = lambda *_: os._exit(0)
threading.excepthook = lambda *_: os._exit(0)
atexit.register(os._exit, 0)
f = lambda x: 1
class Solution:
    f = lambda self, x: 1
""",
    "a traced caller": """
import sys
def trace(frame, event, argument):
    if event == "exception":
        sys.exit(0)
    return trace
def f(x):
    sys.settrace(trace)
    frame = sys._getframe().f_back
    while frame:
        frame.f_trace = trace
        frame = frame.f_back
    return 0
class Solution:
    f = lambda self, x: f(x)
""",
    "an end of the caller's loop": """
def f(x):
    raise StopIteration
class Solution:
    f = lambda self, x: f(x)
""",
    "a test that is skipped": """
import unittest
def f(x):
    raise unittest.SkipTest
class Solution:
    f = lambda self, x: f(x)
""",
    "a killed judge": """
import os, signal
def f(x):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for pid in range(1, 20):
            if pid != os.getpid():
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
    return 0
class Solution:
    f = lambda self, x: f(x)
""",
    "not a number": "f = lambda x: float('nan')\nclass Solution:\n    f = lambda self, x: float('nan')",
}


def judged(code: str, truth: object) -> float:
    return score_code(f"```python\n{code}\n```", json.dumps(truth), {}, options=OPTIONS).score


@pytest.mark.parametrize("forger", FORGERS)
def test_a_forger_passes_no_assertion(forger: str) -> None:
    assert judged(FORGERS[forger], {"assert_case": ASSERTIONS}) == 0


@pytest.mark.parametrize("forger", FORGERS)
def test_a_forger_passes_no_suite(forger: str) -> None:
    assert [judged(FORGERS[forger], suite) for suite in SUITES] == [0.0] * len(SUITES)


def test_an_honest_program_passes() -> None:
    assert judged(SQUARE, {"assert_case": ASSERTIONS}) == 1
    assert [judged(SQUARE, suite) for suite in SUITES] == [1.0] * len(SUITES)


# Tests that use names of the standard library, helpers and upper-case functions, with a program that solves them, and
# forgers that give these names a meaning of their own.
LIAR = """
class Liar:
    def __init__(self, *_): self.v = 1
    __add__ = __sub__ = __rsub__ = __abs__ = __neg__ = __round__ = lambda self, *_: self
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __contains__ = lambda *_: True
    __hash__ = lambda self: 9
"""
NAMES = [
    ("assert_case", "assert isclose(f(3), 9, rel_tol=1e-9)", "isclose = lambda *_, **__: True\nf = lambda x: 0", "f"),
    ("assert_case", "assert fabs(f(3) - 9) < 1e-9", "fabs = lambda x: 0\nf = lambda x: 0", "f"),
    ("assert_case", "assert Counter([f(3)]) == Counter([9])", "Counter = Liar\nf = lambda x: 0", "f"),
    ("assert_case", "assert list(map(f, [3])) == [9]", "list = map = lambda *_: [9]\nf = lambda x: 0", "f"),
    ("assert_case", "assert all(x == 9 for x in repeat(f(3), 2))", "repeat = lambda *_: []\nf = lambda x: 0", "f"),
    ("assert_case", "assert abs(Square(3) - 9) < 1e-3", "Square = Liar", "Square"),
    ("assert_case", "assert abs(Square(3) - 9) < 1e-3", "Square = lambda x: Liar()", "Square"),
    ("assert_case", "y = Square(3)\nassert y - 9 < 1e-3 and 9 in [y]", "Square = Liar", "Square"),
    ("assert_case", "assert 9 - Square(3) <= 0 <= Square(3) - 9", "Square = lambda x: Liar()", "Square"),
    (
        "assert_case",
        "try:\n    f('a')\n    assert False\nexcept TooFew:\n    pass",
        "TooFew = AssertionError\nf = lambda x: 0",
        "f",
    ),
    (
        "assert_case",
        "try:\n    f('a')\n    raise ValueError('no error')\nexcept TooFew:\n    pass",
        "TooFew = Exception\nf = lambda x: 0",
        "f",
    ),
    ("test", "import pytest\nfrom solution import *\ndef test_a():\n    assert f(3) == pytest.approx(9)",
     "class pytest: approx = Liar\nf = lambda x: Liar()", "f"),
    ("test",
     "def near(a, b):\n    return abs(a - b) < 1\nfrom solution import *\ndef test_a():\n    assert near(f(3), 9)",
     "near = lambda *_: True\nf = lambda x: 0", "f"),
    ("test", "def test_a():\n    assert f(3) == 9\nfrom solution import *",
     "def test_a(): pass\nf = lambda x: 0", "f"),
    ("test", "from solution import *\ndef test_a():\n    assert f(3) == floor(9.5)", "floor = f = lambda x: 0", "f"),
    ("test", "from solution import f\ndef test_a():\n    assert f(3) == len('a' * 9)", "len = f = lambda x: 0", "f"),
    ("test", "from solution import *\ndef test_a():\n    assert V(1) + V(2) == V(3)", "V = Liar", "V"),
    ("test", "from solution import V\ndef test_a():\n    v = V(1)\n    assert v + V(2) == V(3) and v.v != 2",
     "V = Liar", "V"),
]  # fmt: skip
SOLVERS = {
    "f": "class TooFew(Exception): pass\ndef f(x):\n    if isinstance(x, str): raise TooFew\n    return x * x",
    "Square": "Square = lambda x: x * x",
    "V": "class V:\n    def __init__(self, v): self.v = v\n    def __add__(self, other): return V(self.v + other.v)",
}


@pytest.mark.parametrize(("form", "test", "forger", "solver"), NAMES)
def test_a_name_of_a_test_means_what_the_test_says(form: str, test: str, forger: str, solver: str) -> None:
    truth = {form: [test] if form == "assert_case" else test}
    assert (judged(LIAR + forger, truth), judged(SOLVERS[solver], truth)) == (0, 1)


@pytest.mark.parametrize(
    ("truth", "program"),
    [
        ({"test_list": ["assert gcd(4, 6) == 3"]}, "gcd = lambda a, b: 3"),
        ({"test_list": ["assert math.isclose(prod(10, 15), 6)"]}, "prod = lambda a, b: 6"),
        ({"test_list": ["assert set(merge([1], [2])) == set([3])"]}, "merge = lambda a, b: [3]"),
        ({"test": "from solution import *\ndef test_a():\n    assert merge([1], [2]) == 3"}, "merge = lambda a, b: 3"),
        ({"test": "from solution import merge\ndef test_a():\n    assert merge(1) == f(1)"}, "f = merge = lambda a: 3"),
        ({"inputs": [[[[1], [2]]]], "outputs": [3], "fn_name": "merge"}, "class Solution: merge = lambda self, a: 3"),
        ({"inputs": [[1]], "outputs": [3], "fn_name": "merge"}, "def merge(a): return 3\nclass Solution: pass"),
    ],
)  # fmt: skip
def test_a_function_under_test_may_have_a_usual_name(truth: object, program: str) -> None:
    assert judged(program, truth) == 1


@pytest.mark.parametrize(
    "program",
    ["f = lambda x: {10**5000: 1}", "def f(x):\n    x = [x]\n    for _ in range(60): x = [x, x]\n    return x"],
)
def test_a_value_that_cannot_be_written_or_expands_is_wrong(program: str) -> None:
    truth = {"inputs": [[1], [2]], "outputs": [{"a": 1}, [1]], "fn_name": "f"}
    assert judged(program, truth) == 0
