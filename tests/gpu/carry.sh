#!/usr/bin/env bash
# Carry an environment and this checkout to a machine without a network, in files of at most 56 MiB each:
#   tests/gpu/carry.sh pack VENV PARTS     VENV was made by containers/install.sh; it must get the same path there
#   tests/gpu/carry.sh unpack PARTS        there; makes VENV, and ./megarl with the checkout
set -euo pipefail
usage() {
    echo "carry.sh: expected 'pack VENV PARTS' or 'unpack PARTS'" >&2
    exit 2
}
case "${1:-}" in
pack)
    [[ $# -eq 3 && -x "$2/bin/python" ]] || usage
    venv="$(realpath -s "$2")"
    mkdir -p "$3"
    # A virtual environment names its own path, so it keeps it.
    tar --create --absolute-names "$venv" | split --bytes=56M --suffix-length=4 - "$3/venv.tar."
    git -C "$(dirname "${BASH_SOURCE[0]}")/../.." archive --prefix=megarl/ HEAD |
        split --bytes=56M --suffix-length=4 - "$3/megarl.tar."
    (cd "$3" && sha256sum -- *.tar.* > sha256)
    ;;
unpack)
    [[ $# -eq 2 && -f "$2/sha256" ]] || usage
    (cd "$2" && sha256sum --quiet --check sha256)
    cat "$2"/venv.tar.* | tar --extract --absolute-names
    cat "$2"/megarl.tar.* | tar --extract
    ;;
*) usage ;;
esac
