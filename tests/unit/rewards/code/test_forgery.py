"""Programs that want to pass without solving anything, against tests of every form: none gets a point.

Every forger answers `f(x)` and `Solution().f(x)`; what is asked is the square of x.
"""

import json

import pytest

from megarl.rewards.code import CodeOptions, Credit, score_code
from megarl.sandbox import Limits, SandboxOptions

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
