# Read by the scripts of both sittings.
# shellcheck shell=bash
usage="usage: $0 VENV OUT; VENV was made by containers/install.sh"
venv="$(realpath -s "${1:?$usage}")"
out="$(realpath -m "${2:?$usage}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
if [[ ! -x "$venv/bin/python" ]]; then
    echo "$usage; no $venv/bin/python" >&2
    exit 2
fi
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$0: torch finds no CUDA device, so every test would be skipped" >&2
    exit 2
fi
mkdir -p "$out"
: > "$out/summary.txt"
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1
# shellcheck disable=SC2034
pytest=("$venv/bin/python" -m pytest -q -rs)
failed=0

# step NAME SECONDS COMMAND...: its output goes to OUT/NAME.log, and a line about its end to OUT/summary.txt.
step() {
    local name="$1" limit="$2" start=$SECONDS code=0
    shift 2
    timeout --kill-after=30 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
    ((code == 0)) || failed=1
    printf '%-11s exit %3d  %4d s  %s\n' "$name" "$code" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")" |
        tee -a "$out/summary.txt"
}

finish() {
    exit "$failed"
}
