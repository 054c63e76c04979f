# Rehearses tests/cuda_day.sh without a GPU: every item runs and is in the table; an item that fails, hangs or crashes
# makes the part fail, and the items after it still run. Needs nvcc and Python. Prints TAP.
out=$PWD/build/tests/cuda_day
rm -rf "$out"
mkdir -p "$out"
count=0
report() { # report STATUS DESCRIPTION: what the part said is in $out/said
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else
        echo "not ok $count - $2"
        head -n 40 "$out/said" | cut -c 1-150 | sed 's/^/# /'
    fi
}
day() { # day PART: rehearses it, with a table of its own
    rm -f "$out/cuda-day.csv"
    OUT=$out sh tests/cuda_day.sh --rehearse --part "$1" >"$out/said" 2>&1
    status=$?
}
verdict() { # verdict ITEM: in the table
    sed -n "s/^[123],$1,item,[0-9]*,tests,\([a-z]*\),.*/\1/p" "$out/cuda-day.csv"
}
verdicts() { # verdicts WORD ITEM...: have all these items this verdict?
    word=$1
    shift
    for name; do [ "$(verdict "$name")" = "$word" ] || return 1; done
}
rows() { # rows COUNT PATTERN: so many rows at least
    [ "$(grep -c "$2" "$out/cuda-day.csv")" -ge "$1" ]
}

# A stand-in for torch, so that bench/cuda_peers.py runs: its times are made up.
mkdir -p "$out/python/torch"
cat >"$out/python/torch/__init__.py" <<'TEXT'
float32, bfloat16 = "fp32", "bf16"
class Tensor:
    def __getattr__(self, name):
        return lambda *arguments: self
    def __mul__(self, other):
        return self
def randn(n, device):
    return Tensor()
def randn_like(other):
    return Tensor()
class optim:
    class AdamW:
        def __init__(self, parameters, lr, weight_decay, fused, capturable=False):
            pass
        def step(self):
            pass
class Context:
    def __init__(self, *arguments):
        pass
    def __enter__(self):
        return self
    def __exit__(self, *what):
        return None
    def wait_stream(self, other):
        pass
    def replay(self):
        pass
class Event:
    def __init__(self, enable_timing):
        pass
    def record(self):
        pass
    def synchronize(self):
        pass
    def elapsed_time(self, end):
        return 20.0
class cuda:
    class OutOfMemoryError(Exception):
        pass
    Event, Stream, CUDAGraph, stream, graph = Event, Context, Context, Context, Context
    current_stream = staticmethod(lambda: Context())
    empty_cache = staticmethod(lambda: None)
    is_available = staticmethod(lambda: True)
TEXT
PYTHONPATH=$out/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

day 1
[ $status = 0 ] && verdicts pass build tests 'state blocks' 'golden hashes' bench peers &&
    verdicts skip 'tests without VMATH'
report $? "part 1: its items pass"
rows 17 '^1,bench,.* | bits,1,equal,pass,$' && rows 16 '^1,bench,.* | large | share of copy,' && rows 500 '^1,bench,' &&
    rows 10 '^1,bench,AdamW bf16 KAHAN | .* | eager,' && rows 1 '^1,bench,prologue | no tensor | graph of 20,'
report $? "... the bench checks the bits of each mode and times it"
rows 2 '^1,peers,.*times as fast as torch.*,\(pass\|miss\),$' && rows 20 '^1,peers,'
report $? "... PyTorch is measured where there is one"
[ "$(head -n 1 "$out/cuda-day.csv")" = part,item,name,value,unit,verdict,seconds ] &&
    rows 1 '^# part 1: GPU .*date .*nvcc ' &&
    awk -F, '!/^#/ && NF != 7 { exit 1 }' "$out/cuda-day.csv"
report $? "... the table has seven columns, and the machine and date in a comment"
day 2
[ $status = 0 ] && verdicts pass 'sanitizer memcheck' 'sanitizer racecheck' 'sanitizer synccheck' \
    'sanitizer initcheck' 'counters AdamW bf16 KAHAN' 'counters StableAdamW bf16 KAHAN' \
    'counters smooth Lion bf16 KAHAN'
report $? "part 2: sanitizers and counters pass"
rows 16 '^2,counters .*,kopt_cuda_adam_ | sm__inst_executed.sum,1234,inst,,$' && ! grep -q prologue "$out/cuda-day.csv"
report $? "... counters of the kernels that process elements are in the table"
day 3
[ $status = 0 ] && verdicts pass 'conversions of every number' 'maps of every number' 'more than 2^31 elements' \
    'functions of every number'
report $? "part 3: its items pass"
rows 6 '^3,conv.*,4096,numbers,pass,$' && rows 40 '^3,maps.*,4096,numbers,pass,$' &&
    rows 5 '^3,func.*,4096,numbers,pass,$' && rows 3 '^3,more.*,elements,pass,$'
report $? "... conversions, maps, functions and large arrays are in the table"
awk '!/^#/ && NF != 2 { exit 1 } !/^#/ { n++ } END { exit n != 51 }' tests/cuda_day.txt >"$out/said"
report $? "the table of hashes has all 51 lines"

# One program of the build after another is exchanged: the build is the same, so it stays.
work=build/cuda-day-rehearsal
cp "$work/day" "$work/gpu_vmath" "$out"
broken() { # broken NAME LINE...: the program `day`, where its first argument is NAME; NAME 20: `gpu_vmath`
    program=day
    [ "$1" != 20 ] || program=gpu_vmath
    { printf '#!/bin/sh\nif [ "$1" = %s ]; then\n' "$1" && shift &&
        printf '%s\n' "$@" 'fi' "exec '$out/$program' \"\$@\""; } >"$out/new"
    chmod +x "$out/new" && mv "$out/new" "$work/$program"
}
others_pass() { verdicts fail "$1" && shift && verdicts pass build "$@"; }
rest="conversions of every number"
broken maps 'echo "not ok 1 - a hash"' 'exit 1'
day 3
[ $status = 1 ] && grep -q '^FAILED: maps of every number$' "$out/said" && grep -q 'not ok 1 - a hash' "$out/said" &&
    others_pass 'maps of every number' "$rest" 'more than 2^31 elements' 'functions of every number'
report $? "an item that fails: the part fails and says what, the other items run"
broken convert 'exec sleep 1000'
CUDA_DAY_LIMIT=2
export CUDA_DAY_LIMIT
day 3
[ $status = 1 ] && grep -q '^fail conversions.*cut off after 2 s' "$out/said" &&
    others_pass "$rest" 'maps of every number' 'more than 2^31 elements' 'functions of every number'
report $? "an item that hangs: it is cut off at its limit, the other items run"
broken 20 'echo "========= COMPUTE-SANITIZER"' 'echo "ok 1"' 'exec sleep 1000'
day 2
[ $status = 0 ] && grep -q '^skip sanitizer memcheck.*cut off after 2 s; before: 1 tests' "$out/said" &&
    verdicts pass 'counters AdamW bf16 KAHAN'
report $? "a sanitizer that takes too long is left out, and says so"
broken 20 'echo "========= Invalid __global__ read of size 4 bytes"' 'exec sleep 1000'
day 2
[ $status = 1 ] && others_pass 'sanitizer memcheck' 'counters AdamW bf16 KAHAN'
report $? "... but not if it found something before"
unset CUDA_DAY_LIMIT
broken large 'kill -SEGV $$'
day 3
[ $status = 1 ] && others_pass 'more than 2^31 elements' "$rest" 'maps of every number' 'functions of every number'
report $? "an item that crashes is a failure"
broken large 'echo "1..0 # SKIP no usable CUDA device (code 100)"' 'exit 77'
day 3
[ $status = 1 ] && others_pass 'more than 2^31 elements' "$rest"
report $? "... and so is a GPU that cannot be used"
broken large 'echo "ok 1 # SKIP too little memory"' 'echo 1..1' 'exit 0'
day 3
[ $status = 0 ] && grep -q '^pass more than.*(1 skipped)' "$out/said"
report $? "an item that leaves a part out says so"
mv "$out/day" "$out/gpu_vmath" "$work"
cp "$work/stubs/nvidia-smi" "$out/smi"
(PATH=/usr/bin:/bin NVCC=false sh tests/cuda_day.sh --part 1) >"$out/said" 2>&1
[ $? = 1 ] && grep -q 'finds no GPU\|no nvcc' "$out/said"
report $? "without a GPU nothing runs, and the status is 1"
echo "1..$count"
