# The day when there is a GPU: four parts, each of which builds what it needs and ends in its time (90 s; 8 minutes).
# Needs nvcc, a C compiler and `timeout`, no network. docs/gpu.md says what each part does and what is in the table.
#
# usage: cuda_day.sh [--part 0 | 1 | 2 | 3] [--beside COMMIT] [--rehearse]
#     --beside     part 1 also times each list beside the kernels of this commit, in turns
#     --rehearse   the same items without a GPU, on few numbers: the programs run with the runtime of cuda_fake.c,
#                  or with the objects in the folder KOPT_CUDA_FAKE; the tools are stubs
# An item that fails, or that was not run to its end, fails the day: the exit status is 1.
# Environment: OUT (folder of cuda-day.csv and the logs; default build), CUDA_DAY_LIMIT (seconds of any item at most),
# CUDA_DAY_BUILD_LIMIT (of each compiler)
#
# Only lists of words are unquoted: CC and NVCC, flags, objects.
# shellcheck disable=SC2086
set -u
cd "$(dirname "$0")/../.." || exit
CC=${CC:-cc} NVCC=${NVCC:-nvcc}

part=1 rehearse='' beside=''
wrong() {
    printf 'cuda_day.sh: %s\nusage: cuda_day.sh [--part 0 | 1 | 2 | 3] [--beside COMMIT] [--rehearse]\n' "$1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --part)
        case ${2:-} in 0 | 1 | 2 | 3) part=$2 ;; *) wrong "\`--part\` is 0, 1, 2 or 3" ;; esac
        shift
        ;;
    --beside)
        beside=$(git rev-parse -q --verify "${2:-}^{commit}") || wrong "\`--beside\` is a commit"
        shift
        ;;
    --rehearse) rehearse=yes ;;
    *) wrong "it does not know \`$1\`" ;;
    esac
    shift
done
have() { command -v "$1" >/dev/null 2>&1; }
for folder in "$(dirname "$(command -v $NVCC || echo /usr/local/cuda/bin/nvcc)")" /opt/nvidia/nsight-compute/*; do
    PATH=$PATH:$folder # of compute-sanitizer and ncu
done
export PATH
have timeout || { echo "cuda_day.sh: this needs timeout (coreutils)" >&2; exit 1; }

work=build/cuda-day
[ -z "$rehearse" ] || work=build/cuda-day-rehearsal
results=${OUT:-build}
[ -z "$rehearse" ] || results=${OUT:-$work}
mkdir -p "$work" "$results"
csv=$results/cuda-day.csv log=$results/cuda-day-$part.log
: >"$log"
now() { date +%s; }
started=$(now)
deadline=$((started + 490)) build_limit=240 # three parts in 25 minutes
[ $part != 0 ] || deadline=$((started + 90)) build_limit=60
[ -z "$rehearse" ] || deadline=$((started + 3000)) build_limit=1800 # a busy machine, whose times mean nothing
build_limit=${CUDA_DAY_BUILD_LIMIT:-$build_limit}

# Numbers of lists, bits of numbers, elements: of the day, and of the rehearsal.
lists=150 short=30 sanitized_lists=10 bits=32 many=4294967313 bench=134217728 profiled=67108864
[ -z "$rehearse" ] || lists=20 short=300 sanitized_lists=10 bits=12 many=20017 bench=4096 profiled=4096

# ---- Stubs of the rehearsal: they run the program and say what the tools would say ---------------------------------

stub() { # stub NAME: the text of the script is on stdin
    { echo '#!/bin/sh' && cat; } >"$work/stubs/$1"
    chmod +x "$work/stubs/$1"
}
if [ -n "$rehearse" ]; then
    mkdir -p "$work/stubs"
    stub nvidia-smi <<'TEXT'
case "$*" in
*compute_cap*) echo 9.0 ;;
*clocks*) printf '%s\n' '1980, 2619, 35, 0x0000000000000001' '1755, 2619, 61, 0x0000000000000004' ;;
*) echo 'No GPU, as an H100 (rehearsal), 0.0' ;;
esac
TEXT
    stub compute-sanitizer <<'TEXT'
tool=$2
while case $1 in --*) : ;; *) false ;; esac; do shift 2; done
[ $tool = memcheck ] || set -- "$(dirname "$1")/golden" # shorter
"$@"
status=$?
echo '========= ERROR SUMMARY: 0 errors'
exit $status
TEXT
    stub ncu <<'TEXT'
while case $1 in --csv) shift ;; --*) shift 2 ;; *) break ;; esac do :; done
"$@" || exit
echo '==PROF== Disconnected'
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","kopt_cuda_prologue_kernel_(int)","sm__inst_executed.sum","inst","12"'
echo '"1","kopt_cuda_adam_(int, int)","sm__inst_executed.sum","inst","1,234"'
echo '"1","kopt_cuda_adam_(int, int)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","91.5"'
TEXT
    PATH=$PWD/$work/stubs:$PATH
    export PATH
fi

# ---- Items: each runs under a time limit of its own, and the next one runs whatever became of it ---------------------

passed=0 failed='' skipped='' missed=0
line() { # line ITEM NAME VALUE UNIT VERDICT SECONDS
    echo "$part,$1,$2,$3,$4,$5,$6" >>"$csv"
}
say() { # say VERDICT ITEM SECONDS TEXT
    printf '%-4s %-34s %4d s  %s\n' "$1" "$2" "$3" "$4"
    line "$2" item "$(grep -c '^ok' "$work/item.log")" tests "$1" "$3"
    case $1 in
    pass) passed=$((passed + 1)) ;;
    fail) failed="$failed, $2" ;;
    skip) skipped="$skipped, $2" ;;
    esac
}
skip() { # skip ITEM REASON
    : >"$work/item.log"
    say skip "$1" 0 "$2"
}

# The clocks of the GPU twice a second, and why they are held back, while an item runs.
sample() {
    nvidia-smi -lms 500 --query-gpu=clocks.sm,clocks.mem,temperature.gpu,clocks_throttle_reasons.active \
        --format=csv,noheader,nounits >"$work/clocks" 2>/dev/null &
    sampler=$!
}
clocks() { # LEAST..MOST MHz of the multiprocessors, of the memory, degrees, reasons: 0x4 is power, 0x1 an idle GPU
    kill $sampler 2>/dev/null
    wait $sampler 2>/dev/null
    awk -F ', *' '$4 ~ /^0x/ {
            sub(/^0x0*/, "", $4)
            if (!seen || $1 < least) least = $1
            if (!seen || $1 > most) most = $1
            if (!seen || $2 < memory) memory = $2
            if (!seen++ || $3 > hottest) hottest = $3
            if ($4 != "" && !($4 in known)) { known[$4]; reasons = reasons "+0x" $4 }
        }
        END {
            reasons = reasons == "" ? "none" : substr(reasons, 2)
            if (seen) print least ".." most " MHz; memory " memory " MHz; " hottest " C; held back: " reasons
        }' "$work/clocks"
}

# item NAME LIMIT COMMAND...: "1..0 # SKIP" and "SKIPPED:" are a skip, but a GPU that programs cannot use is a failure.
# With `soft`, being cut off is a skip, too, if a sanitizer has found nothing until then. A skip fails the day.
soft='' unbuilt=''
item() {
    name=$1 limit=$2
    shift 2
    [ -z "$rehearse" ] || limit=$((6 * limit)) # a busy machine
    [ -z "$unbuilt" ] || { skip "$name" "the build failed"; return; }
    left=$((deadline - $(now)))
    [ "$limit" -le $left ] || limit=$left
    [ "$limit" -le "${CUDA_DAY_LIMIT:-$limit}" ] || limit=$CUDA_DAY_LIMIT
    [ "$limit" -gt 0 ] || { skip "$name" "no time is left"; return; }
    rm -f "$work/rows"
    begun=$(now)
    sample
    CUDA_ROWS=$work/rows timeout -k 5 "$limit" "$@" >"$work/item.log" 2>&1 </dev/null
    status=$?
    seconds=$(($(now) - begun)) clocks=$(clocks)
    { printf '\n---- %s: %s\n' "$name" "$*" && cat "$work/item.log"; } >>"$log"
    verdict=pass
    text="$(grep -c '^ok' "$work/item.log") tests"
    if [ -s "$work/rows" ]; then
        case $gpu in *H100*) ;; *) sed -i 's/,miss$/,/' "$work/rows" ;; esac # the goals are those of an H100
        line "$name" clocks "${clocks:-unknown}" '' '' ''
        awk -v part="$part" -v item="$name" '{ print part "," item "," $0 "," }' "$work/rows" >>"$csv"
        text="$text, $(grep -c . "$work/rows") rows"
        missed=$((missed + $(grep -c ',miss$' "$work/rows")))
    fi
    if [ $status = 124 ] || [ $status = 137 ]; then
        verdict=fail text="cut off after $limit s; before: $text"
        [ -z "$soft" ] || grep '^=========' "$work/item.log" | grep -qv 'COMPUTE-SANITIZER\|SUMMARY: 0' || verdict=skip
    elif [ $status != 0 ]; then
        verdict=fail text="status $status, $text"
    elif grep -q '^1\.\.0 # SKIP\|^SKIPPED:' "$work/item.log"; then
        verdict=skip
    fi
    [ $verdict != skip ] || [ $status != 0 ] || text=$(grep -m 1 'SKIP' "$work/item.log" || echo "$text")
    if grep -q '^not ok\|^Bail out!\|no usable CUDA device' "$work/item.log" || grep -qs ',fail$' "$work/rows"; then
        verdict=fail
    fi
    [ $verdict != pass ] || ! grep -q '^ok.*# SKIP' "$work/item.log" || # a part of the item
        text="$text ($(grep -c '^ok.*# SKIP' "$work/item.log") skipped)"
    say $verdict "$name" $seconds "$text"
    [ $verdict != fail ] || {
        {
            grep '^not ok\|^Bail out!\|no usable\|^=====\|^#\|WRONG\|rror' "$work/item.log" ||
                tail -n 5 "$work/item.log"
        } | head -n 8 | cut -c 1-150 | sed 's/^/         /'
    }
}

# ---- What the parts need: objects for this GPU, and programs that are linked with them -------------------------------

smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
[ -n "$rehearse" ] || have "$NVCC" || { echo "cuda_day.sh: there is no nvcc" >&2; exit 1; }
gpu=$(smi name,driver_version | tr ',' ';')
[ -n "$gpu" ] || { echo "cuda_day.sh: nvidia-smi finds no GPU (--rehearse does without)" >&2; exit 1; }
capability=$(smi compute_cap | tr -d . | grep '^[0-9][0-9]*$')
compiler=$($NVCC --version 2>/dev/null | sed -n 's/^Cuda compilation tools, //p')
[ -s "$csv" ] || echo 'part,item,name,value,unit,verdict,seconds' >"$csv"
printf '# part %s: GPU %s; compute capability %s; date %s; nvcc %s; commit %s\n' $part "$gpu" "$capability" \
    "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(echo "$compiler" | tr ',' ';')" \
    "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" | tee -a "$csv"

# An object of a source that includes kahan_opt_cuda.cuh, for this GPU. -arch=native takes a default without a warning
# that fails where nvcc cannot ask the driver, so the GPU's own number comes first.
limited() { timeout -k 5 "$build_limit" "$@"; } # limited COMPILER...
object() { # object NAME FLAG...
    name=$1
    shift
    printf '#define KAHAN_OPT_CUDA_IMPLEMENTATION\n#include "kahan_opt_cuda.cuh"\n' >"$work/$name.cu"
    set -- limited $NVCC -O3 -Xcompiler -fno-threadsafe-statics "$@" -c -o "$work/$name.o" "$work/$name.cu"
    if [ -n "$capability" ] && "$@" "-arch=sm_$capability" >"$work/$name.nvcc" 2>&1; then return; fi
    "$@" -arch=native >>"$work/$name.nvcc" 2>&1
}

# The object without KAHAN_OPT_VMATH, the PTX in it as C, and the runtime.
fake_objects() {
    fake=$work/fake
    printf '#define KAHAN_OPT_CUDA_IMPLEMENTATION\n#include "kahan_opt_cuda.cuh"\n' >"$fake/plain.cu"
    limited $NVCC -I. -O3 -gencode arch=compute_75,code=compute_75 -Xcompiler -fno-threadsafe-statics,-fPIC \
        --keep --keep-dir "$fake" -c -o "$fake/plain.o" "$fake/plain.cu" &&
        python3 tests/gpu/ptx.py "$fake/plain.ptx" "$fake/kernels_1.c" "$fake/kernels_2.c" || return
    set -- limited $CC -std=gnu99 -w -O0 -fPIC -ffp-contract=off -Itests/gpu -c # -O1 takes a minute more than it gains
    "$@" -o "$fake/kernels_1.o" "$fake/kernels_1.c" &
    kernels=$!
    "$@" -o "$fake/kernels_2.o" "$fake/kernels_2.c" && "$@" -O2 -o "$fake/cuda_fake.o" tests/gpu/cuda_fake.c &&
        "$@" -o "$fake/events.o" tests/gpu/cuda_day_fake.c
    status=$?
    wait $kernels && return $status
}

program() { # program NAME SOURCE FLAG...: without linking, so that all compile at once
    name=$1 source=$2
    shift 2
    limited $CC -std=c99 $optimize -I"$cuda/include" "$@" -c -o "$work/$name.c.o" "$source" >"$work/$name.cc" 2>&1
}
link() { # link NAME OBJECT...
    name=$1
    shift
    if [ -n "$rehearse" ]; then set -- "$@" -ldl -lm -lpthread; else
        set -- "$@" "-L$cuda/lib64" "-L$cuda/lib" -lcudart_static -ldl -lrt -lpthread -lm
    fi
    limited $CC -o "$work/$name" "$work/$name.c.o" "$@" >>"$work/$name.cc" 2>&1
}

sources='kahan_opt.h kahan_opt_cuda.cuh tests/gpu/cuda.c tests/gpu/cuda_state.c tests/gpu/cuda_day.c
    tests/gpu/cuda_golden.c tests/gpu/cuda_device.h tests/bits/probe.c tests/bits/begun.h
    tests/unit/inputs.h tests/unit/reference.h tests/unit/tap.h bench/cuda.c'
[ -z "$rehearse" ] || sources="$sources $(ls tests/gpu/ptx.py tests/gpu/cuda_fake.* 2>/dev/null)"
stamp="$(cat $sources | cksum) $beside $gpu $compiler $CC ${KOPT_CUDA_FAKE:-}"

# Everything at once, as many processes as there are programs, each within its time. The logs are $work/*.nvcc and
# $work/*.cc. Part 0 needs one object and two programs.
compile() {
    cuda=$(dirname "$(dirname "$(command -v $NVCC)")")
    cuda=$(readlink -f "$cuda")
    rm -f "$work"/stamp* "$work"/*.o
    jobs='' programs='gpu_plain bench' vmath_programs=''
    plain=$work/plain.o vmath=$work/vmath.o optimize=-O2
    [ $part = 0 ] || programs='gpu_plain state golden day bench' vmath_programs='gpu_vmath day_vmath bench_vmath'
    # kahan_opt.h is compiled once for all programs
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >"$work/header.c"
    if [ -n "$rehearse" ]; then
        optimize=-O0
        plain="${KOPT_CUDA_FAKE:-$work/fake}/*.o" vmath_programs='' # one object is enough for a rehearsal
        mkdir -p "$work/fake"
        [ -n "${KOPT_CUDA_FAKE:-}" ] || { fake_objects >"$work/fake.nvcc" 2>&1 & jobs="$jobs $!"; }
    else
        object plain -I. & jobs="$jobs $!"
    fi
    # bench/cuda.c and its kernels as a shared library: of the other commit, or in a rehearsal once more the same
    if [ -n "$beside" ]; then
        other=$work/other_commit
        mkdir -p "$other/bench" "$other/tests/gpu"
        for file in kahan_opt.h kahan_opt_cuda.cuh; do
            if [ -n "$rehearse" ]; then cp $file "$other"; else git show "$beside:$file" >"$other/$file"; fi
        done
        cp bench/cuda.c "$other/bench" && cp tests/gpu/cuda_device.h "$other/tests/gpu"
        program other "$other/bench/cuda.c" -fPIC & jobs="$jobs $!"
        [ -n "$rehearse" ] || { object other_kernels "-I$other" -Xcompiler -fPIC & jobs="$jobs $!"; }
    fi
    if [ -n "$vmath_programs" ]; then
        object vmath -I. -DKAHAN_OPT_VMATH & jobs="$jobs $!"
        program header_vmath "$work/header.c" -I. -O1 -DKAHAN_OPT_VMATH & jobs="$jobs $!"
    fi
    if [ -n "$vmath_programs" ] && have python3; then
        CC=$CC NVCC=$NVCC limited python3 docs/examples/python/backend.py "$work/python" cuda >"$work/python.cc" 2>&1 &
        jobs="$jobs $!"
    fi
    program header "$work/header.c" -I. -O1 & jobs="$jobs $!"
    for name in $programs $vmath_programs; do
        flags=-DKOPT_IMPLEMENTED_
        case $name in *vmath) flags="$flags -DKAHAN_OPT_VMATH" ;; esac
        case $name in
        gpu*) source=tests/gpu/cuda.c ;;
        bench*) source=bench/cuda.c ;;
        day*) source=tests/gpu/cuda_day.c ;;
        *) source=tests/gpu/cuda_$name.c ;;
        esac
        program $name $source $flags & jobs="$jobs $!"
    done
    for job in $jobs; do wait "$job"; done
    bad=
    for name in $programs; do link $name "$work/header.c.o" $plain || bad=yes; done
    if [ -n "$beside" ]; then
        kernels=$plain
        [ -n "$rehearse" ] || kernels=$work/other_kernels.o
        link other -shared $kernels || bad=yes
    fi
    for name in $vmath_programs; do link $name "$work/header_vmath.c.o" $vmath || bad=yes; done
    [ -z "$bad" ] || { cat "$work"/*.nvcc "$work"/*.cc; return 1; }
    echo "$stamp" >"$work/stamp$part"
    [ $part = 0 ] || for name in 0 1 2 3; do echo "$stamp" >"$work/stamp$name"; done
}

built() {
    : >"$work/item.log"
    begun=$(now)
    if [ "$(cat "$work/stamp$part" 2>/dev/null)" = "$stamp" ]; then say pass build 0 "as before" && return; fi
    compile >"$work/item.log" 2>&1
    status=$?
    seconds=$(($(now) - begun))
    { printf '\n---- build\n' && cat "$work/item.log"; } >>"$log"
    if [ $status = 0 ]; then say pass build $seconds ""; else
        unbuilt=yes
        say fail build $seconds "the compiler says:"
        grep -m 8 'rror\|undefined' "$work/item.log" | cut -c 1-150 | sed 's/^/         /'
    fi
    line build time $seconds s "" $seconds
}

# ---- The parts -------------------------------------------------------------------------------------------------------

# The lines of the probe, made on the GPU, beside those of every other machine.
cat >"$work/golden.sh" <<'TEXT'
"$1" >"$2"
status=$?
[ $status != 77 ] || { cat "$2" && exit 77; }
wrong=$(diff "$2" tests/bits/golden.txt | grep -c '^>')
echo "$(grep -c . tests/bits/golden.txt) lines, $wrong differ from tests/bits/golden.txt"
diff "$2" tests/bits/golden.txt | grep '^[<>]' | head -n 6 | sed 's/^/# /'
[ "$wrong" = 0 ] && echo "ok 1 - golden hashes" || echo "not ok 1 - golden hashes"
exit $status
TEXT

part_0() {
    item 'tests of 20 lists' $short "$work/gpu_plain" 20
    item 'copy and three modes' 30 "$work/bench" quick $bench
}

part_1() {
    [ -n "$rehearse" ] || item 'tests with VMATH' 70 "$work/gpu_vmath" $lists
    item 'tests' 70 "$work/gpu_plain" $lists
    item 'state blocks' 30 "$work/state" $lists
    item 'golden hashes' 40 sh "$work/golden.sh" "$work/golden" "$work/golden.txt"
    item 'bench' 170 "$work/bench" $bench
    cp "$work/rows" "$work/bench.rows" 2>/dev/null
    [ -z "$beside" ] || item 'bench beside another commit' 60 "$work/bench" beside "$work/other" $bench
    [ -n "$rehearse" ] || item 'bench with VMATH' 40 "$work/bench_vmath" $bench
    if ! have python3; then
        skip 'Python package' 'no python3'
        skip 'peers' 'no python3'
        return
    fi
    PYTHONPATH=$work/python${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    # without a GPU: tests/gpu/cuda_torch.sh
    [ -n "$rehearse" ] || item 'Python package' 60 python3 tests/gpu/cuda_torch.py "$work/python"
    item 'peers' 90 python3 bench/cuda_peers.py "$work/bench.rows"
}

part_2() {
    "$work/bench" modes >"$work/modes" 2>/dev/null # the most important ones first
    while read -r mode; do
        if ! have ncu || ! have python3; then
            skip "counters $mode" 'no ncu or python3'
        else
            item "counters $mode" 20 python3 tests/gpu/cuda_ncu.py "$work/bench" "$mode" $profiled
        fi
    done <"$work/modes"
    for tool in memcheck:90 racecheck:80 synccheck:60 initcheck:60; do
        if ! have compute-sanitizer; then
            skip "sanitizer ${tool%:*}" 'no compute-sanitizer'
            continue
        fi
        soft=yes
        item "sanitizer ${tool%:*}" "${tool#*:}" compute-sanitizer --tool "${tool%:*}" --report-api-errors no \
            --error-exitcode 9 "$work/gpu_plain" $sanitized_lists
        soft=
    done
}

part_3() {
    item 'more than 2^32 elements' 90 "$work/day" large $many
    item 'every number' 250 "$work/day" numbers $bits
    [ -n "$rehearse" ] || item 'every number with VMATH' 100 "$work/day_vmath" numbers $bits
}

built
part_$part
echo
echo "part $part: $passed passed, $(($(now) - started)) s, table $csv, log $log"
[ $missed = 0 ] || {
    echo "goals missed: $missed (times and shares; not a failure)"
    grep "^$part,.*,miss," "$csv" | tail -n $missed | awk -F, '{ printf "    %s: %s %s\n", $3, $4, $5 }'
}
[ -z "$skipped" ] || echo "NOT RUN: ${skipped#, }"
[ -z "$failed" ] || echo "FAILED: ${failed#, }"
[ -z "$failed$skipped" ]
