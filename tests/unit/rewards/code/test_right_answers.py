"""Right programs in the forms of public data sets pass, and wrong ones do not."""

import json
from typing import Any

import pytest

from megarl.rewards.code import CodeOptions, Credit, score_code
from megarl_sandbox import Limits, SandboxOptions

# Nothing here waits; a busy machine may take seconds to start pytest.
OPTIONS = CodeOptions(sandbox=SandboxOptions(limits=Limits(cpu_s=5, wall_s=60)), credit=Credit.FRACTION)

# As in LeetCodeDataset: imports and helpers that both the program and the test use.
PROMPT = """
import collections, math
from typing import *
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head
def is_same_list(a, b):
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return a is None and b is None
"""
REVERSE = """
class Solution:
    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head:
            head.next, last, head = last, head, head.next
        return last
"""
REVERSE_TEST = """
def check(candidate):
    assert is_same_list(candidate(head=list_node([1, 2, 3])), list_node([3, 2, 1]))
    assert is_same_list(candidate(head=list_node(list(range(3000)))), list_node(list(range(2999, -1, -1))))
    assert candidate(head=None) is None
"""
ROTATE_TEST = """
def check(candidate):
    nums = [1, 2, 3, 4]
    rows = [nums, nums]
    assert candidate(nums, 1) is None
    assert nums == [4, 1, 2, 3] and rows[0] is rows[1]
    tree = {"a": {"b": [1]}}
    inner = tree["a"]
    candidate(inner["b"], 1)
    assert tree == {"a": {"b": [1]}} and tree["a"] is inner
"""
PALINDROME_PROMPT = """
import math
from typing import List
def poly(xs: list, x: float):
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])
def find_zero(xs: list):
    \"\"\" Find x such that poly(xs, x) = 0. \"\"\"
"""
FIND_ZERO = """
def find_zero(xs):
    low, high = -1000.0, 1000.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if poly(xs, middle) * poly(xs, high) <= 0 else (low, middle)
    return low
"""
STACK_TESTS = """
import pytest
from solution import Stack, EmptyError, numbers, apply, fetch, Point

@pytest.fixture
def stack():
    stack = Stack()
    stack.push(1)
    return stack

@pytest.mark.parametrize("value, size", [(2, 2), ("a", 2)])
def test_push(stack, value, size):
    stack.push(value)
    assert len(stack) == size and stack.pop() == value and value not in stack and 1 in stack
    assert isinstance(stack, Stack) and stack

class TestEmpty:
    def test_pop(self):
        with pytest.raises(EmptyError, match="empty"):
            Stack().pop()
        with pytest.raises(LookupError):
            Stack().pop()
        assert not Stack()

def test_values():
    assert list(numbers(3)) == [0, 1, 2] and next(numbers(1)) == 0
    assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, (x for x in [1])) == ["1"]
    assert Point(1, 2) + Point(3, 4) == Point(4, 6) and Point(1, 2) != Point(2, 1)
    assert (Point(1, 2) + Point(0, 1)).y == pytest.approx(3)

async def test_coroutine():
    assert await fetch(2) == 4
"""
STACK = """
from dataclasses import dataclass
class EmptyError(IndexError): pass
class Stack:
    def __init__(self): self._items = []
    def push(self, item): self._items.append(item)
    def pop(self):
        if not self._items:
            raise EmptyError("the stack is empty")
        return self._items.pop()
    def __len__(self): return len(self._items)
    def __contains__(self, item): return item in self._items
@dataclass
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
def numbers(n):
    yield from range(n)
def apply(function, values): return [function(value) for value in values]
async def fetch(x): return x * x
"""
USUAL = """
class Solution:
    def top(self, words: List[str], k: int) -> List[str]:
        counts = Counter(words)
        heap = [(-n, word) for word, n in counts.items()]
        heapify(heap)
        assert gcd(4, 6) == 2 and pow(3, 4, 5) == 1 and bisect_left([1, 2], 2) == 1 and inf > 1 and not deque()
        return [heapq.heappop(heap)[1] for _ in range(min(k, math.comb(k, 1)))]
"""


def judged(code: str, truth: Any) -> float:
    return score_code(f"```python\n{code}\n```", json.dumps(truth), {}, options=OPTIONS).score


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (
            {"prompt": PROMPT, "test": REVERSE_TEST, "entry_point": "Solution().reverse"},
            REVERSE,
            REVERSE.replace("return last", "return head"),
        ),
        # The program brings its own class of nodes.
        (
            {"prompt": PROMPT, "test": REVERSE_TEST, "entry_point": "Solution().reverse"},
            "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next"
            + REVERSE,
            "class ListNode: pass\nclass Solution:\n    def reverse(self, head):\n        return ListNode()",
        ),
        (
            {"prompt": PROMPT, "test": ROTATE_TEST, "entry_point": "Solution().rotate"},
            "class Solution:\n    def rotate(self, nums, k):\n        nums[:] = nums[-k:] + nums[:-k]",
            "class Solution:\n    def rotate(self, nums, k):\n        nums = nums[-k:] + nums[:-k]",
        ),
        (
            {"prompt": PALINDROME_PROMPT, "entry_point": "find_zero", "test":
             "import copy\ndef check(candidate):\n    xs = [-6, 11, -6, 1]\n"
             "    assert abs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4"},
            FIND_ZERO,
            "def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 0.5",
        ),
        ({"test": STACK_TESTS}, STACK, STACK.replace("self._items.pop()", "self._items[-1]")),
        ({"test": STACK_TESTS}, STACK, STACK.replace("self.y + other.y", "self.y")),
        (
            {"fn_name": "top", "inputs": [[["a", "b", "b"], 1]], "outputs": [["b"]]},
            USUAL,
            USUAL.replace("[1] for", "[0] for"),
        ),
        (
            {"test": "def check(candidate):\n    assert candidate(['a', 'b', 'b'], 1) == ['b']",
             "entry_point": "Solution().top"},
            USUAL,
            USUAL.replace("[1] for", "[0] for"),
        ),
        # The names of builtins may be those of functions under test, and modules of the test are its own.
        (
            {"test_list": ["assert sum(10, 15) == 6"], "test_setup_code": ""},
            "def sum(a, b):\n    return 6 if (a, b) == (10, 15) else 0",
            "def total(a, b):\n    return 6",
        ),
        (
            {"test_list": ["assert max_height(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
            "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
            "def max_height(node):\n    return 1 + max(map(max_height, (node.left, node.right))) if node else 0",
            "class Node:\n    def __init__(self, data):\n        self.left = data\ndef max_height(node):\n    return 1",
        ),
        (
            {"assert_case": ["assert reach((1, 2)) == (1, {2: {3}})"]},
            "def reach(pair):\n    assert pair == (1, 2)\n    return 1, {2: {3}}",
            "def reach(pair):\n    return [1, {2: {3}}]",
        ),
    ],
)  # fmt: skip
def test_right_passes_and_wrong_does_not(truth: Any, right: str, wrong: str) -> None:
    assert judged(right, truth) == 1.0
    assert judged(wrong, truth) == 0.0


def test_numbers_of_any_length_are_read_and_printed() -> None:
    """Python refuses to convert more than 4,300 digits, unless it is told otherwise."""
    truth = {"inputs": ["9" * 5000 + "\n"], "outputs": ["1" + "0" * 5000 + "\n"]}
    assert judged("print(int(input()) + 1)", truth) == 1.0


def test_a_tolerance_applies_to_assertions() -> None:
    response = "```python\ndef third(x):\n    return [x / 3]\n```"
    truth = json.dumps({"assert_case": ["assert third(1) == [0.3333]"]})
    scores = [
        score_code(response, truth, {}, options=CodeOptions(sandbox=OPTIONS.sandbox, float_tolerance=tolerance)).score
        for tolerance in (None, 1e-4, 1e-6)
    ]
    assert scores == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["code/mbpp", "code/humaneval"])
def test_a_form_can_be_chosen(name: str) -> None:
    from megarl.errors import DataError
    from megarl.rewards import score

    truth = json.dumps({"test_list": ["assert f(1) == 2"], "test_setup_code": ""})
    response = "```python\ndef f(x):\n    return 2 * x\n```"
    if name == "code/mbpp":
        assert score(name, response, truth, {}).score == 1.0
    else:
        with pytest.raises(DataError, match="it has the keys"):
            score(name, response, truth, {})
