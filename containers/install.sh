#!/usr/bin/env bash
# Make a virtual environment with all that megarl needs on NVIDIA GPUs, megarl itself left out:
#   containers/install.sh DIRECTORY
# PYTHON names the Python to use (python3.12). CUDA_HOME is the CUDA toolkit, 13.0 (/usr/local/cuda). No GPU is needed.
# APEX=1, DEEPEP=1 and FLASH_ATTN_3=1 also build these; the files of requirements/ say what for. No one has run the last
# two yet.
set -euo pipefail
venv="$(realpath -m "${1:?install.sh: expected the directory of the environment}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
if [[ ! -x "$CUDA_HOME/bin/nvcc" ]]; then
    echo "install.sh: no $CUDA_HOME/bin/nvcc; install the CUDA toolkit 13.0, and name its directory by CUDA_HOME" >&2
    exit 2
fi

"${PYTHON:-python3.12}" -m venv "$venv"
# ninja, which runs the compilers, is one of the packages.
export PATH="$venv/bin:$CUDA_HOME/bin:$PATH"
install=(python -m pip install --no-deps --no-input --no-cache-dir --disable-pip-version-check)
"${install[@]}" --only-binary :all: -r requirements/cuda.txt

# Transformer Engine includes the headers of cuDNN and NCCL, which lie in their wheels and not where compilers look.
packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
for library in cudnn nccl; do
    if [[ ! -d "$packages/nvidia/$library/include" ]]; then
        echo "install.sh: no $packages/nvidia/$library/include; its wheel in requirements/cuda.txt has no headers" >&2
        exit 1
    fi
    CPATH="$packages/nvidia/$library/include${CPATH:+:$CPATH}"
done
export CPATH
# Compiled here: its setup would otherwise look for a wheel elsewhere, of which nothing pins the contents.
NVTE_PYTORCH_FORCE_BUILD=TRUE "${install[@]}" --no-build-isolation -r requirements/cuda-source.txt
if [[ "${APEX:-0}" == 1 ]]; then
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "${install[@]}" --no-build-isolation -r requirements/apex.txt
fi
if [[ "${DEEPEP:-0}" == 1 ]]; then
    if [[ "$packages" == *arch* ]]; then
        echo "install.sh: torch takes the 'arch' in $packages for an option of nvcc when it links DeepEP; choose another directory" >&2
        exit 2
    fi
    # CUDA 13 has the headers of its C++ library, which NVSHMEM's include, in a directory of their own.
    CPATH="$CUDA_HOME/include/cccl:$CPATH" TORCH_CUDA_ARCH_LIST=9.0 \
        "${install[@]}" --no-build-isolation -r requirements/deepep.txt
fi
if [[ "${FLASH_ATTN_3:-0}" == 1 ]]; then
    FLASH_ATTENTION_FORCE_BUILD=TRUE "${install[@]}" --no-build-isolation -r requirements/flash-attn-3.txt
    # Megatron imports it from the package, Transformer Engine from beside it. It must not be loaded twice: it registers
    # torch's operations.
    interface="$packages/flash_attn_3/flash_attn_interface.py"
    if [[ ! -e "$interface" ]]; then
        printf '%s\n' 'import sys' '' 'import flash_attn_interface' '' \
            'sys.modules[__name__] = flash_attn_interface' >"$interface"
    fi
fi
# For cluster.target: a login node that has another environment checks settings for these packages.
python -m pip list --format=freeze --disable-pip-version-check >"$venv/packages.txt"
# And for these devices, if this machine has some; a line by hand does as well.
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader,nounits |
        sort -u | sed 's/^/# device: /' >>"$venv/packages.txt"
fi
