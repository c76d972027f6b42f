"""Read what a shell script does without running it: the words of the commands that it would start.

tree-sitter splits a script into statements (`syntax`), `interpreter` follows them as bash would, and `worlds` repeats
that for both outcomes of every condition that only the machine, or the day, decides. A text that cannot be known is a
hole (`holes`): it takes part in everything like other text, and is listed where it reaches a result.
"""
