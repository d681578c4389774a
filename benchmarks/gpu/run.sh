#!/usr/bin/env bash
# What a GPU is asked, the most valuable figures first: does cuDNN compute what it must,
# and how fast; a loop with the same bits in half the memory, exactness, speeds with a
# limit of 16 GiB beside PyTorch's own ways, a program of small functions, the arena,
# the gpu tests, PyTorch compiled, and a larger batch. No network is used; fourteen
# minutes in all.
#
#   bash benchmarks/gpu/run.sh [--memory-limit 16GiB] [--seconds 840] [--scale 1.0]
#                              [--insize 64] [--patience 1] [--steps 'cudnn ...']
#
# Rows are saved as they are measured, to benchmarks/results/gpu_*.json, where steps that
# are left out keep what an earlier run has saved; a second folder
# may be named by RESULTS_COPY. gpu.md there sums up, gpu_run.txt is the log. PYTHON
# names the interpreter: it needs CuPy, NumPy, SciPy and numba. What else is lacking is
# installed from the folder .gpu-wheels (`make gpu-wheels`) for this run only.
# --scale, --insize (of the pictures of cudnn and smoke) and --patience (times every
# step's limit) are for rehearsals.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

limit=16GiB seconds=840 scale=1.0 insize= patience=1
steps='cudnn smoke exactness methods torch small arena tests torch_compile large'
while [ $# -gt 0 ]; do
    case $1 in
        --memory-limit) limit=$2 ;;
        --seconds) seconds=$2 ;;
        --scale) scale=$2 ;;
        --insize) insize=$2 ;;
        --patience) patience=$2 ;;
        --steps) steps=$2 ;;
        *) sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | grep '^#' >&2; exit 2 ;;
    esac
    shift 2 || exit 2
done

python=${PYTHON:-python3}
results=$PWD/benchmarks/results
run=$(mktemp -d)
warming=
trap '[ -z "$warming" ] || kill "$warming" 2>/dev/null; rm -rf "$run"' EXIT
export PYTHONPATH="$PWD:$run/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$run/numba} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
mkdir -p "$results" ${RESULTS_COPY:+"$RESULTS_COPY"}
for name in $steps; do rm -f "$results/gpu_$name.json"; done
rm -f "$results"/gpu_run.txt "$results"/gpu.md
touch "$results/gpu_run.txt"
status=0

# Every line with its second, to the log and the screen.
log() {
    while IFS= read -r line; do
        printf '[%3d s] %s\n' "$SECONDS" "$line"
    done | tee -a "$results/gpu_run.txt"
}

# What is no row: log, summary, the tests' words.
publish() {
    "$python" -m benchmarks run gpu.summarize "$run/steps.tsv" >/dev/null || status=1
    [ -z "${RESULTS_COPY:-}" ] ||
        cp "$results/gpu.md" "$results/gpu_run.txt" "$RESULTS_COPY/" || status=1
}

# step NAME SECONDS COMMAND...: within its time and what is left of all.
step() {
    local name=$1 allowed=$(($2 * patience)) left=$((seconds - SECONDS)) code began=$SECONDS said
    shift 2
    case " $steps " in *" $name "*) ;; *) return ;; esac
    [ "$allowed" -le "$left" ] || allowed=$left
    if [ "$allowed" -lt 5 ]; then
        code=- said='left out: no time'
    else
        echo "== $name, at most $allowed s" | log
        timeout -k 5 "$allowed" "$@" 2>&1 | log
        code=${PIPESTATUS[0]}
        said=failed
        [ "$code" -ne 0 ] || said=done
        [ "$code" -eq 0 ] || [ $((SECONDS - began)) -lt "$allowed" ] || said='out of time'
    fi
    [ "$said" = done ] || status=1
    echo "== $name: $said after $((SECONDS - began)) s" | log
    printf '%s\t%s\t%s\t%s\n' "$name" "$said" "$code" "$((SECONDS - began))" \
        >>"$run/steps.tsv"
    publish
}

echo "== at most $seconds s, limit $limit, steps: $steps" | log
if [ -d .gpu-wheels ]; then
    # A copy may have the git folder of another commit.
    export BENCHMARK_COMMIT=${BENCHMARK_COMMIT:-$(head -1 .gpu-wheels/commit.txt)}
    timeout 60 "$python" -m benchmarks run gpu.install_wheels .gpu-wheels "$run/site" \
        2>&1 | log
fi
timeout 60 "$python" -m benchmarks run gpu.look 2>&1 | log
if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    printf 'look\tfailed\t1\t%s\n' "$SECONDS" >>"$run/steps.tsv"
    publish
    exit 1
fi
timeout 200 "$python" -m benchmarks run gpu.warm >"$run/warm.txt" 2>&1 &
warming=$!

run_one='-m benchmarks run'
sized=(--scale "$scale" ${insize:+--insize "$insize"})
scaled=(--memory-limit "$limit" --scale "$scale")
step cudnn 170 "$python" $run_one gpu.cudnn_on_gpu "${sized[@]}"
step smoke 75 "$python" $run_one gpu.smoke "${sized[@]}"
step exactness 60 "$python" $run_one gpu.exactness_on_gpu
sed 's/^/warm: /' "$run/warm.txt" | log
step methods 240 "$python" $run_one gpu.methods_on_gpu "${scaled[@]}"
step torch 90 "$python" $run_one gpu.torch_on_gpu "${scaled[@]}"
step small 60 "$python" $run_one gpu.small_on_gpu
step arena 60 "$python" $run_one gpu.arena_on_gpu --batchsize 64 --scale "$scale"
# Files with gpu tests, the whole path first.
mapfile -t files < <(ls tests/session_tests/test_cuda.py; grep -rlE 'mark\.gpu' tests \
    --include='test_*.py' | grep -v session_tests/test_cuda.py | sort)
tests() {
    local code=0 test=("$python" -m pytest -v --tb=short -p no:cacheprovider)
    test+=(--continue-on-collection-errors)
    if "$python" -c 'import xdist' 2>/dev/null; then
        "${test[@]}" -p xdist -n 8 --dist worksteal -m 'gpu and not alone' "$@" || code=$?
        "${test[@]}" -m 'gpu and alone' "$@" || code=$?
    else
        "${test[@]}" -m gpu "$@" || code=$?
    fi
    return $code
}
export -f tests
export python OMP_NUM_THREADS=1
step tests 200 bash -c "
    set -o pipefail
    tests ${files[*]} 2>&1 | tee '$run/gpu_tests.txt'"
step torch_compile 150 "$python" $run_one gpu.torch_on_gpu "${scaled[@]}" \
    --cases compile --result gpu_torch_compile
step large 120 "$python" $run_one gpu.methods_on_gpu "${scaled[@]}" \
    --result gpu_large --arch resnet50:640 --planners hybrid
echo "== the end after $SECONDS s" | log
publish
exit $status
