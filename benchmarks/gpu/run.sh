#!/usr/bin/env bash
# The gpu tests and the tables of Ito et al. on an NVIDIA GPU, with a limit of
# 16 GiB (or $1). Results go to benchmarks/results; less than 12 minutes.
#
#   bash benchmarks/gpu/run.sh [16GiB]
#
# PYTHON names the interpreter; it needs CuPy and this package's requirements.
set -uo pipefail
cd "$(dirname "$0")/../.."
limit=${1:-16GiB}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p benchmarks/results
status=0

"$python" - <<'PYTHON' || exit 1
from chainer_hybridmem import compat
import sys
if not compat.cuda_available():
    sys.exit('No CUDA GPU that CuPy can use: nothing to measure here.')
import cupy
properties = cupy.cuda.runtime.getDeviceProperties(0)
print('GPU', properties['name'].decode(), 'CuPy', cupy.__version__)
PYTHON

echo '== tests that need a GPU'
timeout 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests \
    2>&1 | tee benchmarks/results/gpu_tests.txt || status=1
echo '== methods'
timeout 320 "$python" benchmarks/gpu/methods_on_gpu.py --memory-limit "$limit" \
    2>&1 | tee benchmarks/results/gpu_methods.txt || status=1
echo '== arena'
timeout 240 "$python" benchmarks/gpu/arena_on_gpu.py \
    2>&1 | tee benchmarks/results/gpu_arena.txt || status=1
exit $status
