#!/bin/sh
# bench/calls.sh [HEADER]: instructions of kopt_step_begin and kopt_step_run at step 1,000, by callgrind: AVX2, gcc -O2.
# A count does not drift as a time does. What one call costs beside its arithmetic is what small tensors pay.
set -eu
here=$(dirname "$0")
case ${1:-} in -*) echo "usage: bench/calls.sh [HEADER]" >&2; exit 2 ;; esac
header=${1:-$here/../kahan_opt.h}
[ -f "$header" ] && [ $# -le 1 ] || { echo "usage: bench/calls.sh [HEADER]" >&2 && exit 2; }
out=$here/../build/bench/calls
rm -rf "$out"
mkdir -p "$out"
command -v valgrind >/dev/null 2>&1 || { echo "calls.sh: it needs valgrind: ./build.sh setup" >&2 && exit 2; }
cp "$header" "$out/kahan_opt.h"
gcc -std=c99 -O2 '-DHEADER="calls/kahan_opt.h"' -I"$out/.." -o "$out/calls" "$here/calls.c"
valgrind --tool=callgrind --callgrind-out-file="$out/count" "$out/calls" >"$out/log" 2>&1 ||
    { cat "$out/log" >&2 && exit 2; }
awk '
    /^desc: Trigger: Client Request: / {sub(/.*Request: /, ""); name = $0}
    /^totals: / && name != "" {count[name] = $2; name = ""}
    function of(rule, what) {return count[rule " " what] - count["nothing"]}
    function limit(what, n, most) {printf "%-42s %6d of at most %5d: %s\n", what, n, most, n <= most ? "ok" : "OVER"}
    END {
        limit("kopt_step_begin, AdamW bf16 kahan", of("AdamW-bf16-kahan", "begin"), 545)
        limit("kopt_step_run of 32, AdamW bf16 kahan", of("AdamW-bf16-kahan", 32), 1660)
        printf "\n%-24s %9s %9s %9s %9s %9s\n", "instructions", "begin", "run of 1", "32", "64", "256"
        rules = split("AdamW-bf16-kahan AdamW-bf16-stochastic AdamW-fp32 momentum-bf16-kahan", rule, " ")
        for (i = 1; i <= rules; i++) {
            name = rule[i]
            gsub("-", " ", name)
            printf "%-24s %9d %9d %9d %9d %9d\n", name, of(rule[i], "begin"), of(rule[i], 1), of(rule[i], 32),
                of(rule[i], 64), of(rule[i], 256)
        }
    }' "$out"/count.*
