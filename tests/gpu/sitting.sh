#!/usr/bin/env bash
# One sitting on a GPU, of at most 8 minutes; the next goes on where it stopped. From the checkout:
#   tests/gpu/sitting.sh BLOCK PYTHON OUT [SECONDS]
# BLOCK: A, parity with Transformer Engine; B, speed; C, whole runs: in the order in which docs claim. OUT/BLOCK.md and
# OUT/BLOCK.json have a line for each step; OUT/BLOCK.json is also what a later sitting goes on from. SITTING_DRY=1 takes
# small shapes on CPUs.
set -euo pipefail
usage="usage: $0 A|B|C PYTHON OUT [SECONDS]"
block="${1:?$usage}"
python="$(command -v "${2:?$usage}")"
out="$(realpath -m "${3:?$usage}")"
budget="${4:-480}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ "$block" == [ABC] ]] || { echo "$usage; got $block" >&2; exit 2; }
dry="${SITTING_DRY:-}"
if [[ -z "$dry" ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$0: torch finds no CUDA device; SITTING_DRY=1 takes CPUs" >&2
    exit 2
fi
mkdir -p "$out"
device=cuda threads=8
# Engines on CPUs have no more threads than cores.
[[ -z "$dry" ]] || device=cpu threads=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
pytest=("$python" -m pytest -q -rs -p no:cacheprovider)
code=0

# step NAME SECONDS COMMAND...: unless an earlier sitting has done it; its last line goes to the tables.
step() {
    local name="$1" limit="$2" left=$((budget - SECONDS)) began=$SECONDS exit=0
    shift 2
    if "$python" -m tests.gpu.tables "$out/$block.json" "done" "$name"; then return; fi
    if ((left < 15)); then
        echo "$name: for the next sitting"
        code=3
        return
    fi
    timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >"$out/$block-$name.log" 2>&1 || exit=$?
    ((exit == 0)) || code=1
    # What was cut off by the end of the sitting is done again.
    if ((exit == 124 && limit > left)); then
        code=3
        return
    fi
    "$python" -m tests.gpu.tables "$out/$block.json" add "$name" "$exit" $((SECONDS - began)) "$out/$block-$name.log"
}

# on GPU... -- DRY...: the command for this sitting.
on() {
    chosen=()
    local seen=""
    for word in "$@"; do
        if [[ "$word" == -- && -z "$seen" ]]; then
            seen=1
        elif [[ -n "$seen" && -n "$dry" || -z "$seen" && -z "$dry" ]]; then
            chosen+=("$word")
        fi
    done
}

engine=tests/distributed/test_transformer_engine.py
case "$block" in
A)
    on "${pytest[@]}" tests/gpu/test_lora.py -- "${pytest[@]}" "$engine" -k "adapters_equal and qwen2" -m "not long"
    step lora 150 "${chosen[@]}"
    on "${pytest[@]}" tests/gpu/test_forest.py -- "${pytest[@]}" "$engine" -k "trees" -m "not long"
    step forests 300 "${chosen[@]}"
    on "${pytest[@]}" tests/gpu/test_parity.py -- "${pytest[@]}" "$engine" -k "same_parameters" -m "not long"
    step families 150 "${chosen[@]}"
    ;;
B)
    on "$python" -m megarl_lab.bench.head --device cuda --out "$out/head.json" -- \
        "$python" -m megarl_lab.bench.head --device cpu --tp 1 --vocab 2048 --rows 256 --hidden 32 --rounds 2 \
        --out "$out/head.json" --contenders recompute keep
    step head 300 "${chosen[@]}"
    on "$python" -m megarl_lab.bench.copies --device cuda --out "$out/copies.json" -- \
        "$python" -m megarl_lab.bench.copies --device cpu --mib 1 --repeats 2 --out "$out/copies.json"
    step copies 60 "${chosen[@]}"
    on "$python" -m megarl_lab.bench.speed --device cuda --out "$out/speed.json" -- \
        "$python" -m megarl_lab.bench.speed --device cpu --hidden 128 --ffn 128 --heads 4 --layers 2 --dtype float32 \
        --row-tokens 256 --rows 2 --samples 4 --reply-tokens 16 --rounds 2 --out "$out/speed.json"
    step speed 300 "${chosen[@]}"
    ;;
C)
    on "${pytest[@]}" tests/gpu/test_run.py -k "colocated or lora or forest" -- \
        "${pytest[@]}" tests/e2e/test_adapter_sync.py tests/e2e/test_train.py -k "whole_runs or files_of_a_run" -m "not gpu"
    step runs 400 "${chosen[@]}"
    ;;
esac
echo "$block on $device: $out/$block.md"
exit "$code"
