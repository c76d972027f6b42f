#!/usr/bin/env bash
# The first session on one H100, of about 8 minutes: what needs neither engines nor Transformer Engine. From the checkout:
#   tests/gpu/session_1.sh PYTHON OUT [SECONDS]
# Nothing is downloaded. A step that fails does not keep the next ones from running; OUT/summary.txt says how each ended.
# On an H200 its tests have passed, ipc in an older form (docs/cuda.md). Expected:
#   kernels     16 passed: Triton chosen, statistics and gradients against float64, with a teacher and without
#   head        a table of times, memory and errors; nothing is expected of it but that every memory_mode runs
#   distill     a table of times with a teacher and without, at most 1.8 times as long
#   copies      a table of GB/s, every copy equal to its source
#   ipc         3 passed: bit for bit, also beside expandable segments, and over page-locked shared memory
#   layouts     3 passed on one device (6 skipped): float32, against plain torch on the host
#   training    3 passed on one device (6 skipped): the loss falls, offloading gives memory back
#   checkpoint  2 passed on one device (2 skipped)
#   delta       3 passed: gated delta nets in float32 and bfloat16
#   gpt_oss     2 passed: sinks and windows in bfloat16
set -uo pipefail
# shellcheck source=tests/gpu/session.sh
source "$(dirname "${BASH_SOURCE[0]}")/session.sh"
step kernels 120 "${pytest[@]}" tests/gpu/test_kernels.py
requires "megatron.core liger_kernel" step head 300 \
    "$python" -m megarl_lab.bench.head --device cuda --out "$out/head.json"
show 14
step distill 150 "$python" -m megarl_lab.bench.head --device cuda --teacher --out "$out/distill.json"
show 14
step copies 60 "$python" -m megarl_lab.bench.copies --device cuda --out "$out/copies.json"
show 8
step ipc 90 "${pytest[@]}" tests/gpu/test_cuda_ipc.py
step layouts 150 "${pytest[@]}" tests/gpu/test_layouts.py
step training 120 "${pytest[@]}" tests/gpu/test_training.py
step checkpoint 120 "${pytest[@]}" tests/gpu/test_checkpoint.py
step delta 120 "${pytest[@]}" tests/gpu/test_delta.py
step gpt_oss 120 "${pytest[@]}" tests/gpu/test_gpt_oss.py
finish
