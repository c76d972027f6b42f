"""Gather the names that answers to LeetCode and its kind use without importing them."""

from typing import Any

_IMPORTS = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, os, random, re
import statistics, string, sys, time, typing
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
"""


def _usual_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(_IMPORTS, names)
    # `pow` of the module `math` takes no modulus.
    for name in ("__builtins__", "pow"):
        del names[name]
    return names


USUAL: dict[str, Any] = _usual_names()
