#!/bin/sh
# Two versions of kahan_opt.h beside each other: see bench/compare.c.
set -eu
usage() {
    cat <<'TEXT'
usage: bench/compare.sh OLD.h NEW.h [N...] [OPTION...]     the time of a step, N weights (default 8192 and 64), in cache
       ... --compile      the user time of compiling each header, gcc and clang: three minutes
       ... --text         the size of .text
       ... --count        instructions of a step of NEON, each weight (qemu-aarch64, aarch64-linux-gnu-gcc): two minutes
       --cc COMPILER      what compiles both headers (default: CC or cc)
       --flags FLAGS      ... and how (default: -O2)
       --isa NAME         one instruction set: scalar, sse2, avx2, avx512, neon, simd128 (default: each that is usable)
       --only TEXT        the lines that contain it, e.g. 'AdamW bf16'
TEXT
}
wrong() { # wrong WHAT: in words, and then the usage
    { echo "compare.sh: $1" && usage; } >&2
    exit 2
}
cc=${CC:-cc} flags=-O2 isa= only= what=steps old= new= lengths=
while [ $# -gt 0 ]; do
    case $1 in
    --cc | --flags | --isa | --only)
        [ $# -gt 1 ] || wrong "\`$1\` needs a value"
        case $1 in --cc) cc=$2 ;; --flags) flags=$2 ;; --isa) isa=$2 ;; --only) only=$2 ;; esac
        shift
        ;;
    --compile) what=compile ;;
    --text) what=text ;;
    --count) what=count ;;
    -h | --help) usage && exit ;;
    -*) wrong "it does not know \`$1\`" ;;
    *)
        if [ -z "$old" ]; then old=$1; elif [ -z "$new" ]; then new=$1; else
            case $1 in *[!0-9]* | '') wrong "\`$1\` is no number of weights" ;; esac
            lengths="$lengths $1"
        fi
        ;;
    esac
    shift
done
[ -n "$new" ] || wrong "it needs two headers"
for header in "$old" "$new"; do [ -f "$header" ] || wrong "there is no file \`$header\`"; done
source=$(dirname "$0")/compare.c
out=$(dirname "$0")/../build/bench/compare
mkdir -p "$out/old" "$out/new"
cp "$old" "$out/old/kahan_opt.h"
cp "$new" "$out/new/kahan_opt.h"
for side in old new; do
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >"$out/$side/implementation.c"
done
${CC:-cc} -std=c99 -O2 -o "$out/compare" "$source" -ldl

table_line() { # table_line NAME OLD NEW
    awk -v name="$1" -v old="$2" -v new="$3" 'BEGIN {printf "%-28s %9s %9s %8.3f\n", name, old, new, new / old}'
}
least() { awk -v side="$1" '$1 == side && (n++ == 0 || $2 < least) {least = $2} END {print least}' "$out/times"; }

# In turns, five times each; the least.
compile_time() {
    printf '%-28s %9s %9s %8s\n' 'user time to compile, s' old new new/old
    for compiler in gcc clang; do
        command -v $compiler >/dev/null 2>&1 || { echo "no $compiler"; continue; }
        for options in -O2 '-Ofast -march=native'; do
            for round in 1 2 3 4 5; do
                for side in old new; do
                    file=$out/$side/implementation
                    echo "$side $("$out/compare" --cpu "$compiler" -std=c99 $options -c -o "$file.o" "$file.c")"
                done
            done >"$out/times"
            table_line "$compiler $options" "$(least old)" "$(least new)"
        done
    done
}

text_size() {
    printf '%-28s %9s %9s %8s\n' '.text, bytes' old new new/old
    for side in old new; do
        $cc -std=c99 $flags -c -o "$out/$side/implementation.o" "$out/$side/implementation.c"
        size -A "$out/$side/implementation.o" | awk '/^\.text/ {n += $2} END {print n}' >"$out/$side/size"
    done
    table_line "$cc $flags" "$(cat "$out/old/size")" "$(cat "$out/new/size")"
}

instructions() { # instructions PROGRAM INDEX N STEPS
    qemu-aarch64 "$one_by_one" -d nochain,exec -D /dev/stdout "$1" "$2" "$3" "$4" | wc -l
}
# In the second step, what 4096 weights take more than 2048: without what a call takes.
count_instructions() {
    for tool in qemu-aarch64 aarch64-linux-gnu-gcc; do
        command -v $tool >/dev/null 2>&1 || wrong "it needs $tool"
    done
    one_by_one=-singlestep
    if qemu-aarch64 -help | grep -q one-insn-per-tb; then one_by_one=-one-insn-per-tb; fi
    for side in old new; do
        aarch64-linux-gnu-gcc -std=c99 $flags -static -DCOUNT "-DHEADER=\"$side/kahan_opt.h\"" -I"$out" \
            -o "$out/$side/count" "$source"
    done
    printf '%-62s %8s %8s %8s\n' 'neon: instructions for each weight' old new new/old
    for index in $(seq 0 999); do
        status=0
        name=$(qemu-aarch64 "$out/old/count" "$index" 64 0) || status=$?
        [ $status != 2 ] || break
        case $name in *"$only"*) ;; *) continue ;; esac
        [ $status = 0 ] || continue
        for side in old new; do
            program=$out/$side/count
            echo $(($(instructions "$program" "$index" 4096 2) - $(instructions "$program" "$index" 4096 1) -
                $(instructions "$program" "$index" 2048 2) + $(instructions "$program" "$index" 2048 1)))
        done | paste -d ' ' - - | awk -v name="$name" '{
            printf "%-62s %8.1f %8.1f %8.3f\n", name, $1 / 2048, $2 / 2048, $2 / $1}'
    done
}

case $what in
compile) compile_time ;;
count) count_instructions ;;
text) text_size ;;
steps)
    for side in old new; do
        $cc -std=c99 $flags -fPIC -shared -fvisibility=hidden "-DHEADER=\"$side/kahan_opt.h\"" -I"$out" \
            -o "$out/$side.so" "$source"
    done
    exec "$out/compare" "$out/old.so" "$out/new.so" "$isa" "$only" ${lengths:-8192 64}
    ;;
esac
