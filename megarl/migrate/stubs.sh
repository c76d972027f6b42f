# What a launch script meets in place of every program while it is read (BASH_ENV): functions that record how they are
# called. `recorder` says which outcome each place has (_M_FLIP), and from which numbers unknown outputs count (_M_BASE).
trap '' PIPE
_m_event() { printf '%s\0' "$#" "$@" >> "$_M_DIR/$BASHPID"; }
# LINE TEXT: name a place by what does not depend on the numbers that stand for unknown texts, in REPLY.
_m_key() { REPLY=$1.${2//[^[:alpha:]._-]/_}; REPLY=${REPLY:0:200}; }
# KEY STATUS: return the status, or the other one where that is tried; the opposite after twenty rounds of a loop.
_m_decide() {
    local key=$1 status=$2 rounds=
    case $_M_FLIP in *"|$key|"*) status=$((!status)) ;; esac
    printf x >> "$_M_DIR/rounds.$key"
    IFS= read -r rounds < "$_M_DIR/rounds.$key" || :
    if ((${#rounds} > 20)); then status=$((!status)); fi
    return "$status"
}
# SOURCE LINE WORD...: a program. Its output is a number that stands for what is not known.
_m_run() {
    local source=$1 line=$2 key REPLY
    _m_key "$2" "$3"
    key=$REPLY
    shift 2
    _m_event run "$source" "$line" "$key" "$@"
    if ((BASH_SUBSHELL)); then
        _m_event out "$source" "$line" "out.$key" "$@"
        _m_decide "out.$key" 0 || {
            _m_event out "$source" "$line" "silent.$key" "$@"
            _m_decide "silent.$key" 0
            return
        }
    fi
    printf '%s\n' "$((_M_BASE + line))"
    _m_decide "$key" 0
}
# STATUS SOURCE LINE TEXT VALUE...: a condition, as it came out.
_m_condition() {
    local status=$1 source=$2 line=$3 text=$4 key REPLY
    _m_key "$3.if" "$4"
    key=$REPLY
    shift 4
    _m_event if "$source" "$line" "$key" "$text" "$@"
    _m_decide "$key" "$status"
}
_m_if() { local status=$?; _m_condition "$status" "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "$@"; }
_m_case() { _m_event case "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "" "$@"; }
_m_path() {
    case $1 in
        */bash | */sh) shift; bash "$@" ;;
        *.sh) if [[ -f $1 ]]; then bash "$@"; else
                printf '%s: line %s: %s: No such file or directory\n' "$0" "${BASH_LINENO[1]}" "$1" >&2
                _m_run "${BASH_SOURCE[2]-}" "${BASH_LINENO[1]}" "$@"; fi ;;
        *) _m_run "${BASH_SOURCE[2]-}" "${BASH_LINENO[1]}" "$@" ;;
    esac
}
command_not_found_handle() { _m_run "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "$@"; }
test() { local s=0; builtin test "$@" || s=$?; _m_condition "$s" "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "[ $* ]" "$@"; }
[() {
    local s=0
    builtin [ "$@" || s=$?
    _m_condition "$s" "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "[ $*" "$@"
}
exit() { local s=$?; _m_event exit "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" "" "${1-$s}"; builtin exit "${1-$s}"; }
exec() {
    while [[ ${1-} == -[cl] ]]; do shift; done
    if [[ ${1-} == -a ]]; then shift 2; fi
    if (($#)); then "$@"; builtin exit; fi
}
bash() { "$_M_BASH" "$@"; }
sh() { bash "$@"; }
kill() { _m_run "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" kill "$@"; }
nohup() { "$@"; }
env() (
    while (($#)); do
        case $1 in -u) shift 2 ;; -*) shift ;; *=*) export "$1"; shift ;; *) break ;; esac
    done
    "$@"
)
ulimit() { :; }
cd() {
    local to=${*: -1} up
    builtin cd "$@" 2> /dev/null && return
    # A directory that is not here: as if it were.
    case $to in /*) ;; -*) to=$OLDPWD ;; *) to=$PWD/$to ;; esac
    OLDPWD=$PWD PWD=$(_m_absolute "$to")
}
pwd() { printf '%s\n' "$PWD"; }
_m_absolute() {
    local part path=/ IFS=/
    local - ; set -f
    for part in $1; do
        case $part in '' | .) ;; ..) path=${path%/*}; path=${path:-/} ;; *) path=${path%/}/$part ;; esac
    done
    printf '%s\n' "$path"
}
realpath() { local p=${*: -1}; case $p in /*) ;; *) p=$PWD/$p ;; esac; _m_absolute "$p"; }
readlink() { realpath "$@"; }
basename() {
    while [[ ${1-} == -- ]]; do shift; done
    local a=${1%/}
    a=${a##*/}
    printf '%s\n' "${a%"${2-}"}"
}
dirname() {
    while [[ ${1-} == -- ]]; do shift; done
    local to=${1%/*}
    case $1 in */*) printf '%s\n' "${to:-/}" ;; *) echo . ;; esac
}
seq() {
    local i from=1 to=$1 by=1
    if (($# == 2)); then to=$2 from=$1; fi
    if (($# == 3)); then to=$3 by=$2 from=$1; fi
    for ((i = from; i <= to && i < from + 100; i += by)); do printf '%s\n' "$i"; done
}
cat() {
    local text
    if (($#)) && [[ $1 != - ]]; then _m_run "${BASH_SOURCE[1]-}" "${BASH_LINENO[0]}" cat "$@"; return; fi
    IFS= read -rd '' text || :
    printf '%s' "$text"
}
tee() { cat; }
# A command that a variable names gets its stub before it is called.
_m_named() {
    [[ $1 != *_M_* && $1 =~ ^\"?\$\{?[A-Za-z_][A-Za-z_0-9]*\}?[A-Za-z0-9_./-]*\"?$ ]] || return 0
    eval "set -- $1"
    if [[ ${1-} =~ ^[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]+$ && $(type -t "$1") != function ]]; then
        eval "function $1 { _m_path $1 \"\$@\"; }"
    fi
}
set -T
trap '_m_named "${BASH_COMMAND%% *}"' DEBUG
