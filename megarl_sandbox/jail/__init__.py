"""Run the inner side of the sandbox, in a Python interpreter without packages, so only the standard library is
imported.

A launcher (`launch.py`), started once, forks a keeper process per program. Under namespaces the keeper enters new ones
(`namespaces.py`) and forks their process 1, which builds a root directory (`root.py`); under Landlock (`landlock.py`)
it stays where it is. Either forks a child per task (`tasks.py`, `program.py`). Only that child gives up its rights
(`rights.py`, `syscalls.py`) and runs code of the program. Test code gets a child of its own (`testing.py`), in which
`remote.py` stands for the program that `serve.py` serves; values cross as data (`values.py`, `channel.py`).
Forking a small interpreter is much cheaper than starting one; Python seeds `random` afresh in each fork.
"""
