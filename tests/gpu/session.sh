# Read by the scripts of both sessions.
# shellcheck shell=bash
usage="usage: $0 PYTHON OUT [SECONDS]; PYTHON has megarl's requirements (containers/install.sh), SECONDS is the most it takes"
python="$(command -v "${1:?$usage}")"
out="$(realpath -m "${2:?$usage}")"
budget="${3:-840}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
if [[ -z "$python" ]]; then
    echo "$usage; no $1" >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$0: torch finds no CUDA device, so every test would be skipped" >&2
    exit 2
fi
mkdir -p "$out"
: > "$out/summary.txt"
: > "$out/tables.txt"
: > "$out/log.txt"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# shellcheck disable=SC2034
pytest=("$python" -m pytest -q -rs -p no:cacheprovider)
failed=0
log_began=0

# step NAME SECONDS COMMAND...: its output goes to OUT/log.txt, and a line about its end to OUT/summary.txt.
step() {
    local name="$1" limit="$2" start=$SECONDS code=0 left=$((budget - SECONDS))
    shift 2
    if ((left < 20)); then
        failed=1
        note "$name" "not run: $budget s are over"
        return
    fi
    echo "=== $name" >> "$out/log.txt"
    log_began=$(stat --format=%s "$out/log.txt")
    timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >> "$out/log.txt" 2>&1 || code=$?
    ((code == 0)) || failed=1
    note "$name" "$(printf 'exit %3d  %4d s  %s' "$code" $((SECONDS - start)) "$(tail -n 1 "$out/log.txt")")"
}

# requires MODULES step NAME ...: the step, unless the environment lacks one of the modules.
requires() {
    local missing
    missing="$("$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1].split() if find_spec(name) is None))' "$1")"
    shift
    if [[ -n "$missing" ]]; then
        note "$2" "skipped: the environment has no $missing"
    else
        "$@"
    fi
}

# show LINES: the last lines of the step before, printed again at the end.
show() {
    tail --bytes=+$((log_began + 1)) "$out/log.txt" | tail -n "$1" >> "$out/tables.txt"
}

note() {
    printf '%-11s %s\n' "$1" "$2" | tee -a "$out/summary.txt"
}

finish() {
    printf '\n%s\n\n%s\n' "$(cat "$out/tables.txt")" "$(cat "$out/summary.txt")"
    exit "$failed"
}
