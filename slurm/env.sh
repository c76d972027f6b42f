# The scripts of this directory source this file on the first node of a job; what it exports reaches all nodes.
# Adapt it to the cluster; a comment says what each setting is for.
# shellcheck shell=bash

# --- Software: a virtual environment on storage that all nodes share, made as docs/slurm.md says.
# With environment modules: load compiler, CUDA and NCCL here, as in
#   module purge; module load cuda/13.0 nccl
# In a container made from containers/, MEGARL_VENV is set to the environment inside.
MEGARL_VENV="${MEGARL_VENV:-$PWD/.venv}"
# Its packages, as containers/install.sh writes them: dry runs, plans and `megarl slurm submit` read this line, and check
# settings for them.
# shellcheck disable=SC2034
MEGARL_TARGET="${MEGARL_TARGET:-$MEGARL_VENV/packages.txt}"
if [[ ! -x "$MEGARL_VENV/bin/megarl" ]]; then
    echo "env.sh: no $MEGARL_VENV/bin/megarl; make it as docs/slurm.md says, or set MEGARL_VENV" >&2
    exit 2
fi
export PATH="$MEGARL_VENV/bin:$PATH"

# --- srun: further arguments, quoted as in a shell, for the srun that starts Ray on all nodes. They follow megarl's own,
# in every component of a heterogeneous job. With pyxis, slurm/container.sh prints those that start a container.
export MEGARL_SRUN_ARGS="${MEGARL_SRUN_ARGS:-}"

# --- Threads: ranks and engines compute on their devices, and get one CPU thread each; more would compete with those of
# others. The driver computes advantages of all rows; its sums depend on this number, so it is the same on all hosts.
export MEGARL_WORKER_THREADS="${MEGARL_WORKER_THREADS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# Output appears in the log at once, not when a buffer is full.
export PYTHONUNBUFFERED=1

# --- Name lookup: torch's stores look up the hosts of all ranks at once; a lost DNS answer costs 5 s by default.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:3}"

# --- Networks. Each node takes the interface on its route to the first node. To name one yourself, the same on all
# nodes: export NCCL_SOCKET_IFNAME==ib0 GLOO_SOCKET_IFNAME=ib0 (= means this name, not what begins with it).
# If nodes also have other InfiniBand devices, name those to use, as in: export NCCL_IB_HCA=mlx5
# AWS's EFA and HPE's Slingshot need NCCL's plugin aws-ofi-nccl, loaded here; neither has been tried.
# InfiniBand and copies to GPUs lock memory: as much as the node allows. Slurm hands the limit on to all nodes.
ulimit -l "$(ulimit -H -l)"
# A collective that cannot go on ends its process instead of waiting for ever; megarl then says who is missing.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# Number of recent collectives per rank that are recorded, and written out when one times out.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
# megarl sets CUDA_DEVICE_MAX_CONNECTIONS for trainer ranks alone; exported here, engines would get it too.

# --- Ray: `megarl slurm run` sets what Ray needs. TMPDIR holds its session directory, which must be local, with a
# short path (socket paths have at most 107 characters). Compiled kernels of Triton, Inductor and vLLM lie there too, in
# megarl-cache-UID, unless TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and VLLM_CACHE_ROOT name other directories.
export TMPDIR="${MEGARL_TMPDIR:-/tmp}"
