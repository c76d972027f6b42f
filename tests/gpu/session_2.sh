#!/usr/bin/env bash
# The second session on one H100, of about 12 minutes: Transformer Engine, engines and whole runs. From the checkout:
#   tests/gpu/session_2.sh PYTHON OUT [SECONDS]
# Nothing is downloaded. A step that fails does not keep the next ones from running, and one whose packages are missing is
# skipped; OUT/summary.txt says how each ended. On an H200 its tests have passed, but for the trainer of invariance, which
# was skipped (docs/cuda.md); the longest, run, took 165 s beside others. Expected:
#   doctor      no MISSING; kernels: actor.fp8: blockwise
#   parity      6 passed: Transformer Engine's layers at most twice as far from float32 as transformers' bfloat16; those
#               with gated delta nets passed with Transformer Engine's unfused attention
#   lora        2 passed, never run: adapters on Transformer Engine's layers
#   forest      30 passed and 6 skipped: attention over rows that share prefixes; of models on Transformer Engine's layers
#               no case has passed so far (docs/cuda.md)
#   engine      2 passed: sleep, sync and wake in the ledger's order; graphs, a cold start of less than 300 s, and every
#               token of an update in flight has the log-prob of the version that it names
#   run         3 passed on one device (2 skipped), those with adapters and shared prefixes never run: colocated
#               and offloaded, weights by CUDA IPC, every sync compared
#   invariance  2 passed with FlashAttention installed: the same bits alone and in a batch, in engine and trainer
set -uo pipefail
# shellcheck source=tests/gpu/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"
requires "vllm ray" step doctor 60 "$(dirname "$python")/megarl" doctor
requires transformer_engine step parity 150 "${pytest[@]}" tests/gpu/test_parity.py
requires transformer_engine step lora 120 "${pytest[@]}" tests/gpu/test_lora.py
step forest 300 "${pytest[@]}" tests/gpu/test_forest.py
requires vllm step engine 360 "${pytest[@]}" tests/gpu/test_engine.py
requires "vllm ray" step run 300 "${pytest[@]}" tests/gpu/test_run.py
requires vllm step invariance 240 "${pytest[@]}" tests/gpu/test_invariance.py
finish
