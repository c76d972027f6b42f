#!/usr/bin/env bash
# The second sitting on one H100, of about 25 minutes: engines and whole runs. From the checkout:
#   tests/gpu/sitting_2.sh VENV OUT
# Nothing is downloaded. A step that fails does not keep the next ones from running; OUT/summary.txt says how each ended.
# On an H200 its tests have passed, but for the trainer of invariance, which was skipped (docs/cuda.md); the longest, run,
# took 165 s beside others. Expected:
#   engine      2 passed: sleep, sync and wake in the ledger's order; graphs, a cold start of less than 300 s, and every
#               token of an update in flight has the log-prob of the version that it names
#   invariance  2 passed with FlashAttention installed: the same bits alone and in a batch, in engine and trainer
#   layouts     3 passed on one device (6 skipped): float32, against plain torch on the host
#   run         1 passed on one device (2 skipped): colocated and offloaded, weights by CUDA IPC, every sync compared
set -uo pipefail
# shellcheck source=tests/gpu/sitting.sh
source "$(dirname "${BASH_SOURCE[0]}")/sitting.sh"
step engine 900 "${pytest[@]}" tests/gpu/test_engine.py
step invariance 600 "${pytest[@]}" tests/gpu/test_invariance.py
step layouts 300 "${pytest[@]}" tests/gpu/test_layouts.py
step run 700 "${pytest[@]}" tests/gpu/test_run.py
finish
