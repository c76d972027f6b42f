"""Run the inner side of the sandbox, in a Python interpreter without packages, so only the standard library is
imported.

A launcher (`launch.py`), started once, forks a keeper process per program. The keeper enters new namespaces
(`namespaces.py`) and forks their process 1 (`tasks.py`), which builds a root directory (`root.py`) and forks a child
per task. Only that child (`program.py`) gives up its rights (`rights.py`, `syscalls.py`) and runs code of the program.
Forking a small interpreter is much cheaper than starting one; Python seeds `random` afresh in each fork.
"""
