# Sourced by the scripts of this directory, on the first node of a job; what it exports reaches all of them.
# Adapt it to the cluster; each setting says what it is for.
# shellcheck shell=bash

# --- software: a virtual environment on storage that all nodes share, made by `make install`.
# Environment modules: load compiler, CUDA and NCCL first, as in
#   module purge; module load cuda/13.0 nccl
# A container through enroot and pyxis: build it once with `make install` inside, then give sbatch
#   --container-image=/shared/megarl.sqsh --container-mounts=/shared:/shared --no-container-remap-root
# and srun inherits it; remove the next lines then.
MEGARL_VENV="${MEGARL_VENV:-$PWD/.venv}"
if [[ ! -x "$MEGARL_VENV/bin/megarl" ]]; then
    echo "env.sh: no $MEGARL_VENV/bin/megarl; run make install there, or set MEGARL_VENV" >&2
    exit 2
fi
export PATH="$MEGARL_VENV/bin:$PATH"

# --- threads: a rank computes on its device; more threads of its own would only compete with the other ranks.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Output appears in the log when it is printed, not when a buffer is full.
export PYTHONUNBUFFERED=1

# --- names: torch's stores look up those of all ranks' addresses at once, and a lost answer costs 5 s by default.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:3}"

# --- NCCL. The interface of the host network carries the rendezvous; ^ means all but these.
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker0,virbr0}"
# Name the InfiniBand devices if nodes have other ones too, as in: export NCCL_IB_HCA=mlx5
# A collective that cannot go on ends the process instead of waiting for ever; megarl then says who is missing.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# What every rank was doing in its last collectives, written when one times out.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
# Megatron overlaps communication with computation on one queue.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# --- Ray: what it needs is set by `megarl slurm run`. Its session directory must be local and short (socket paths
# have at most 107 characters).
export TMPDIR="${MEGARL_TMPDIR:-/tmp}"
