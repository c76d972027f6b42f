#!/usr/bin/env bash
# Print the options of srun and sbatch with which pyxis starts a container that can call srun, scontrol and scancel:
#   MEGARL_SRUN_ARGS="$(slurm/container.sh IMAGE [MOUNT ...])"
# The image itself has no Slurm, whose commands must be of the cluster's release: all that they consist of is mounted
# into the container, most of it where it is on this host, so run this where Slurm is installed as on the nodes. IMAGE is
# a squashfs file with its whole path. MOUNT is what else the run reads and writes, as in /shared or /data:/data:ro.
set -euo pipefail
image="${1:?container.sh: expected the image, a squashfs file; see the comment at the top of this script}"
shift
mounts=("$@")
# These options go through word splitting of shells, and commas separate mounts.
for path in "$image" "$@"; do
    if [[ "$path" == *[[:space:][:cntrl:],\'\"\\*?\$\`]* ]]; then
        printf 'container.sh: got %q, expected a path without spaces, commas, quotes and characters of patterns\n' "$path" >&2
        exit 2
    fi
done
for name in srun scontrol scancel; do
    if ! program="$(command -v "$name")"; then
        echo "container.sh: no $name here; run it on a login node, or load Slurm's module first" >&2
        exit 2
    fi
    # Where the PATH of any image has it.
    mounts+=("$program:/usr/local/bin/$name")
    # Their library, where it is not among the plugins.
    while read -r library; do mounts+=("$library"); done < <(ldd "$program" 2>&1 | grep -oE '/[^ ]*/libslurm[^ ]*' || true)
done

settings="$(scontrol show config)"
setting() { sed -n "s/^$1 *= //p" <<<"$settings"; }
IFS=: read -ra plugins <<<"$(setting PluginDir)"
configuration="$(dirname "$(setting SLURM_CONF)")"
mounts+=("$configuration" "${plugins[@]}")
# pyxis is a plugin of srun; its files may lie elsewhere, and be links in the configuration.
for file in "$configuration"/plugstack.conf "$configuration"/plugstack.conf.d/*; do
    [[ -f "$file" ]] || continue
    real="$(readlink -f "$file")"
    [[ "$real" == "$configuration"/* ]] || mounts+=("$real")
    while read -r plugin; do mounts+=("$(dirname "$plugin")"); done < <(grep -oE '/[^ ]+\.so' "$real" || true)
done
case "$(setting AuthType)" in
auth/munge)
    socket="$(setting AuthInfo | sed -n 's/.*socket=\([^,]*\).*/\1/p')"
    mounts+=("$(dirname "${socket:-/run/munge/munge.socket.2}")")
    ;;
auth/slurm) mounts+=(/run/slurm) ;;
esac
# The users that Slurm's configuration names; and, by which containers of one host reach each other, Ray's sockets and
# shared memory, of which a container's own may be small.
mounts+=(/etc/passwd /etc/group "${MEGARL_TMPDIR:-/tmp}" /dev/shm)

mapfile -t mounts < <(printf '%s\n' "${mounts[@]}" | sort -u)
list="$(IFS=, && echo "${mounts[*]}")"
echo "--container-image=$image --container-mounts=$list --no-container-remap-root"
