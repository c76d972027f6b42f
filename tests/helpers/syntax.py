"""Parses each source once for all tests that read them."""

import ast
import functools


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, as `ast.walk` yields them."""
    return tuple(ast.walk(ast.parse(source)))
