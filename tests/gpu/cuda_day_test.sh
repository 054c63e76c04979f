# Rehearses cuda_day.sh without a GPU: every item runs and is in the table; an item that fails, hangs or crashes
# makes the part fail, and the items after it still run. Needs nvcc and Python. Prints TAP.
out=$PWD/build/tests/cuda_day
rm -rf "$out"
mkdir -p "$out"
. tests/tap.sh
day() { # day PART OPTION...: rehearses it, with a table of its own
    rm -f "$out/cuda-day.csv"
    OUT=$out sh tests/gpu/cuda_day.sh --rehearse --part "$@" >"$out/log" 2>&1
    status=$?
}
verdict() { # verdict ITEM: in the table
    sed -n "s/^[0123],$1,item,[0-9]*,tests,\([a-z]*\),.*/\1/p" "$out/cuda-day.csv"
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

day 1 --beside HEAD
[ $status = 0 ] && verdicts pass build tests 'state blocks' 'golden hashes' bench 'bench beside another commit' peers
report $? "part 1: its items pass"
rows 97 '^1,bench,.* | bits,1,equal,pass,$' && rows 16 '^1,bench,.* | large | share of copy,' && rows 500 '^1,bench,' &&
    rows 10 '^1,bench,AdamW bf16 KAHAN | .* | eager,' && rows 1 '^1,bench,prologue | no tensor | graph of 20,'
report $? "... the bench checks the bits of each mode and list, and times it"
rows 79 '^1,bench beside another commit,.* | this/other,[0-9.e+-]*,1,,$'
report $? "... beside the kernels of another commit"
rows 2 '^1,peers,.*times as fast as torch.*,\(pass\|miss\),$' && rows 20 '^1,peers,'
report $? "... PyTorch is measured where there is one"
[ "$(head -n 1 "$out/cuda-day.csv")" = part,item,name,value,unit,verdict,seconds ] &&
    rows 1 '^# part 1: GPU .*date .*nvcc ' &&
    awk -F, '!/^#/ && NF != 7 { exit 1 }' "$out/cuda-day.csv"
report $? "... the table has seven columns, and the machine and date in a comment"
day 2
[ $status = 0 ] && verdicts pass 'sanitizer memcheck' 'sanitizer racecheck' 'sanitizer synccheck' \
    'sanitizer initcheck' 'counters AdamW bf16 KAHAN' 'counters StableAdamW bf16 KAHAN' 'counters Adan bf16 KAHAN'
report $? "part 2: sanitizers and counters pass"
rows 16 '^2,counters .*,kopt_cuda_adam_ | sm__inst_executed.sum,1234,inst,,$' && ! grep -q prologue "$out/cuda-day.csv"
report $? "... counters of the kernels that process elements are in the table"
day 3
[ $status = 0 ] && verdicts pass 'every number' 'more than 2^32 elements'
report $? "part 3: its items pass"
rows 9 '^3,every.*,4096,numbers,pass,$' && rows 2 '^3,more.*,elements,pass,$'
report $? "... every number and large arrays are in the table"
clocks='1755..1980 MHz; memory 2619 MHz; 61 C; held back: 0x1+0x4'
rows 1 "^3,more.*,clocks,$clocks,,,$" && rows 1 "^3,every.*,clocks,$clocks,,,$"
report $? "... beside the clocks of the GPU, and what held them back"
day 0
[ $status = 0 ] && verdicts pass build 'tests of 20 lists' 'copy and three modes' && ! rows 1 'GPT-2' &&
    rows 3 '^0,copy.* | large | share of copy,'
report $? "part 0: a build, twenty lists, the copy and three modes"

# One program of the build after another is exchanged: the build is the same, so it stays.
work=build/cuda-day-rehearsal
cp "$work/day" "$work/gpu_plain" "$out"
broken() { # broken NAME LINE...: the program `day`, where its first argument is NAME; NAME 10: `gpu_plain`
    program=day
    [ "$1" != 10 ] || program=gpu_plain
    { printf '#!/bin/sh\nif [ "$1" = %s ]; then\n' "$1" && shift &&
        printf '%s\n' "$@" 'fi' "exec '$out/$program' \"\$@\""; } >"$out/new"
    chmod +x "$out/new" && mv "$out/new" "$work/$program"
}
others_pass() { verdicts fail "$1" && shift && verdicts pass build "$@"; }
broken numbers 'echo "not ok 1 - a number"' 'exit 1'
day 3
[ $status = 1 ] && grep -q '^FAILED: every number$' "$out/log" && grep -q 'not ok 1 - a number' "$out/log" &&
    others_pass 'every number' 'more than 2^32 elements'
report $? "an item that fails: the part fails and says what, the other items run"
broken large 'exec sleep 1000'
CUDA_DAY_LIMIT=4
export CUDA_DAY_LIMIT
day 3
[ $status = 1 ] && grep -q '^fail more than.*cut off after 4 s' "$out/log" &&
    others_pass 'more than 2^32 elements' 'every number'
report $? "an item that hangs: it is cut off at its limit, the other items run"
broken 10 'echo "========= COMPUTE-SANITIZER"' 'echo "ok 1"' 'exec sleep 1000'
day 2
[ $status = 1 ] && grep -q '^skip sanitizer memcheck.*cut off after 4 s; before: 1 tests' "$out/log" &&
    grep -q '^NOT RUN: .*sanitizer memcheck' "$out/log" && verdicts pass 'counters AdamW bf16 KAHAN'
report $? "a sanitizer that takes too long is no pass, and the part says so"
broken 10 'echo "========= Invalid __global__ read of size 4 bytes"' 'exec sleep 1000'
day 2
[ $status = 1 ] && verdicts fail 'sanitizer memcheck' && verdicts pass build 'counters AdamW bf16 KAHAN'
report $? "... and a failure if it found something before"
unset CUDA_DAY_LIMIT
broken large 'kill -SEGV $$'
day 3
[ $status = 1 ] && others_pass 'more than 2^32 elements' 'every number'
report $? "an item that crashes is a failure"
broken large 'echo "1..0 # SKIP no usable CUDA device (code 100)"' 'exit 77'
day 3
[ $status = 1 ] && others_pass 'more than 2^32 elements' 'every number'
report $? "... and so is a GPU that cannot be used"
broken large 'echo "ok 1 # SKIP too little memory"' 'echo 1..1' 'exit 0'
day 3
[ $status = 0 ] && grep -q '^pass more than.*(1 skipped)' "$out/log"
report $? "an item that leaves a part out says so"
broken large 'echo "a | large | share of copy,.5,1,miss" >>"$CUDA_ROWS"' 'echo "ok 1"' 'echo 1..1' 'exit 0'
day 3
[ $status = 0 ] && grep -q '^goals missed: 1 ' "$out/log" && rows 1 '^3,more.*,.5,1,miss,$'
report $? "a goal that is missed is no failure, but said"
rm "$out/cuda-day.csv"
sed "s/[*]H100[*]/*H300*/; s|^cd .*|cd '$PWD'|" tests/gpu/cuda_day.sh >"$out/other.sh"
OUT=$out sh "$out/other.sh" --rehearse --part 3 >"$out/log" 2>&1
[ $? = 0 ] && ! grep -q '^goals missed' "$out/log" && rows 1 '^3,more.*,.5,1,,$'
report $? "... and on another GPU than that of the goals it is not judged"
broken large 'echo "1..0 # SKIP no reason"' 'exit 0'
day 3
[ $status = 1 ] && grep -q '^NOT RUN: more than 2^32 elements$' "$out/log" && verdicts pass 'every number'
report $? "an item that is left out fails the part"
sed 's/^deadline=.*/deadline=$((started - 1)) build_limit=9/; s/^\[ -z "$rehearse" \] || deadline.*//' \
    tests/gpu/cuda_day.sh >"$out/late.sh"
sed -i "s|^cd .*|cd '$PWD'|" "$out/late.sh"
OUT=$out sh "$out/late.sh" --rehearse --part 3 >"$out/log" 2>&1
[ $? = 1 ] && grep -q '^NOT RUN: more than 2^32 elements, every number$' "$out/log"
report $? "a part whose time is over before its items fails"
mkdir -p "$out/hangs"
printf '#!/bin/sh\n[ "$1" = --version ] && exec nvcc "$@"\nexec sleep 1000\n' >"$out/hangs/slow"
chmod +x "$out/hangs/slow"
OUT=$out NVCC=$out/hangs/slow CC=$out/hangs/slow CUDA_DAY_BUILD_LIMIT=2 sh tests/gpu/cuda_day.sh --rehearse --part 3 \
    >"$out/log" 2>&1
[ $? = 1 ] && grep -q '^FAILED: build' "$out/log" && grep -q '^NOT RUN: more than' "$out/log"
report $? "a compiler that hangs is cut off, and the part fails"
rm -rf "$work"
(PATH=/usr/bin:/bin NVCC=false sh tests/gpu/cuda_day.sh --part 1) >"$out/log" 2>&1
[ $? = 1 ] && grep -q 'finds no GPU\|no nvcc' "$out/log"
report $? "without a GPU nothing runs, and the status is 1"
echo "1..$count"
