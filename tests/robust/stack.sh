# Measures how much stack the public functions use, with stack.c, for each compiler and its flags, by turns, and
# compares it with the limits there and with the table of docs/vendoring.md. Prints TAP and, as comments, the largest
# values of each build. `table`: prints that table instead, from all builds. WebAssembly's is in bench/wasm.sh: it has
# none that C sees.
out=build/tests/stack
mkdir -p $out
[ "${1:-}" != table ] || KOPT_ALL=yes
. tests/tap.sh
try() { # try COMPILER FLAGS... (-z now: not with the stack of the linker, which looks up memcpy at its first call)
    "$@" -std=c99 $warnings -I. -Wl,-z,now -o $out/stack tests/robust/stack.c >$out/log 2>&1 &&
        $out/stack >$out/log 2>&1
    report $? "$*"
    sed -n 's/^[a-z ]*ok [0-9]* - \([a-z0-9]*, .*\): \([0-9]*\) bytes, .*/\2 \1/p' $out/log | sed "s/^/#     /"
    case $* in clang*-O0*) group=clang ;; *) group=all ;; esac
    case $* in *NO_SIMD*) isa=none ;; *) isa='\1' ;; esac
    sed -n "s/^[a-z ]*ok [0-9]* - \([a-z0-9]*\), \(.*\): \([0-9]*\) bytes, at most \([0-9]*\)$/$group,\2,$isa,\3,\4/p" \
        $out/log >$out/measured
    cat $out/measured >>$out/all
    agree >$out/log
    [ ! -s $out/log ]
    report $? "... and docs/vendoring.md has its limits, and figures that are not lower"
}
agree() { # what of the last build is not in the table: another limit, or more than 5 % above its figure
    sed -n '/^<!-- figures: stack -->$/,/^<!-- end -->$/p' docs/vendoring.md | tr -d ',' |
        awk -F '[ ]*[|][ ]*' -v measured=$out/measured '
            BEGIN {
                split("all clang", levels, " ")
                split("all else,moments in 8 bits,vector mathematics", classes, ",")
                while ((getline line <measured) > 0) {
                    split(line, f, ",")
                    key = f[1] "," f[2]
                    bytes[key "," f[3]] = f[4]
                    limit[key "," f[3]] = f[5]
                }
            }
            /^[|]/ && ++line_of_table > 2 {
                key = levels[int(rows / 3) + 1] "," classes[rows % 3 + 1]
                rows++
                check("avx512", $4, $3)
                check("avx2", $5, $3)
                check("sse2", $6, $3)
                check("scalar", $8, $7)
                check("none", $10, $9)
            }
            function check(isa, figure, bound) {
                at = key "," isa
                if (!(at in bytes)) return
                if (bytes[at] > 1.05 * figure || limit[at] != bound)
                    print at ": " bytes[at] " of " limit[at] ", the page has " figure " of " bound
            }
            END { if (rows != 6) print rows + 0 " rows instead of 6" }'
}
table() {
    awk -F, '
        function number(x) { return x < 1000 ? x : int(x / 1000) sprintf(",%03d", x % 1000) }
        { at = $1 "," $2 "," $3; limit[at] = $5; if ($4 > most[at]) most[at] = $4 }
        function row(level, class, words,    at) {
            at = level "," class ","
            printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", words, number(limit[at "avx2"]),
                number(most[at "avx512"]), number(most[at "avx2"]), number(most[at "sse2"]),
                number(limit[at "scalar"]), number(most[at "scalar"]), number(limit[at "none"]), number(most[at "none"])
        }
        function rows(level, words) {
            row(level, "all else", words "all but the next two")
            row(level, "moments in 8 bits", "... steps and states with 8-bit moments")
            row(level, "vector mathematics", "... functions and rules of `KAHAN_OPT_VMATH`")
        }
        END {
            print "| | limit | AVX-512 | AVX2 | SSE2 | limit | their scalar code | limit | without vectors |"
            print "|---|---|---|---|---|---|---|---|---|"
            rows("all", "")
            rows("clang", "clang `-O0`: ")
        }' $out/all
}
: >$out/all
run() {
    for tool in gcc clang; do
        if ! command -v $tool >/dev/null; then
            missing "no $tool"
            continue
        fi
        for level in -O0 -O1 -O2 -O3 -Os; do
            for simd in '' -DKAHAN_OPT_NO_SIMD; do
                for vmath in '' -DKAHAN_OPT_VMATH; do ! turn 8 || try $tool $level $simd $vmath; done
            done
        done
    done
}
if [ "${1:-}" = table ]; then
    run >$out/said
    table
    exit
fi
run
echo "1..$count"
[ $failed = 0 ]
