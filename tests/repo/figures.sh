# `./build.sh figures` copies the output of programs into the documents, but not that of a program that fails. Runs in a
# copy of the project whose programs only print. Prints TAP.
out=build/tests/figures
rm -rf $out
mkdir -p $out/copy/docs/examples $out/copy/bench
cp build.sh $out/copy
cp bench/run.sh $out/copy/bench
cp docs/figures.sh $out/copy/docs
. tests/tap.sh
said="$out/differences $out/errors"
document() { # document NAME LINE...: prints a block of these lines, with text around it
    printf 'before\n<!-- figures: %s -->\n' "$1"
    shift
    printf '%s\n' "$@" '<!-- end -->' after '<!-- end -->'
}
holds() { diff - "$out/copy/$1" >$out/differences; } # holds FILE: does it equal stdin?
printer() { # printer SOURCE PLOTS EXIT LINE...: writes a program that prints the lines and writes `new` to each plot
    source=$out/copy/$1
    printf '#include <stdio.h>\nint main(void) {\n    FILE *plot;\n' >"$source"
    for plot in $2; do
        printf '    plot = fopen("%s", "w");\n    fputs("new", plot);\n    fclose(plot);\n' "$plot" >>"$source"
    done
    code=$3
    shift 3
    printf '    puts("%s");\n' "$@" >>"$source"
    printf '    return %s;\n}\n' "$code" >>"$source"
}
readme() { # readme KAHAN FP32 LINE...: prints a sentence with these losses, and the demo's block
    echo "The loss is **$1 beside fp32's $2**."
    shift 2
    document demo "$@"
}
demo() { # demo EXIT: writes a demo that exits with this status
    printer docs/examples/demo.c 'build/demo/loss.svg build/demo/arrived.svg' "$1" 'about: 1.2345' '' \
        'arm      trained     loss   minus fp32   bytes   seconds' \
        'fp32      1.8051   1.9951      +0.0000    16.0       3.3' \
        'kahan     1.8049   1.9949      -0.0002    10.0      13.3' \
        'nearest   2.4124   2.5124      +0.5171     8.0       3.3' '' \
        'Text 9.8765' 'PASS: kahan -0.0002 (0.01), nearest +0.5171.'
    readme 1.1 2.2 'old 1.1' 'old 2.2' >$out/copy/README.md
}
figures() { # figures ARGUMENT...
    : >$out/differences
    /bin/sh $out/copy/build.sh figures "$@" >$out/said 2>$out/errors </dev/null
    status=$?
}

printer bench/theorem1.c build/bench/theorem1.svg 0 'Title'
demo 0
figures
plots=$(cd $out/copy/docs && cat loss.svg arrived.svg theorem1.svg)
[ $status = 0 ] && [ "$plots" = newnewnew ]
report $? "the plots of the demo and of theorem1"
readme 1.99 2.00 '' \
    '    arm      trained     loss   minus fp32   bytes' \
    '    fp32        1.81     2.00         0.00    16.0' \
    '    kahan       1.80     1.99         0.00    10.0' \
    '    nearest     2.41     2.51        +0.52     8.0' '' \
    '    PASS: kahan 0.00 (0.01), nearest +0.52.' '' | holds README.md
report $? "the demo's table, rounded, without seconds, its verdict, and its losses, in place of the old ones"

demo 1
figures
[ $status = 1 ] && grep -q '^PASS' $out/errors && grep -q '^figures: the demo fails' $out/errors
report $? "a demo that fails: an error says so"
readme 1.1 2.2 'old 1.1' 'old 2.2' | holds README.md
report $? "... and README.md stays as it is"
demo 0
document another old >$out/copy/README.md
figures
[ $status = 1 ] && grep -q '^figures: README.md has no block `demo`' $out/errors
report $? "a missing block: an error says so"
document another old | holds README.md
report $? "... and the document stays as it is"

table='\n\n|---|\n| a |'
printer bench/cliffs.c build/bench/cliffs.csv 0 "AdamW on avx2, in cache: x:$table 1 |\n" \
    "Every rule on avx2, in cache: x:$table 2 |\n" "AdamW on sse2, in cache: x:$table 3 |\n" \
    "AdamW on scalar, in cache: x:$table 4 |\n" "AdamW on avx2, DRAM: x:$table 5 |\n" \
    "SGD on avx2, DRAM: x:$table 6 |\n"
printer bench/bench.c build/bench/cost.svg 0 'a table'
document 'cliffs in cache' old >$out/copy/docs/benchmarks.md
figures bench
[ $status = 0 ] && [ "$(cat $out/copy/docs/cost.svg)" = new ]
report $? "bench: the plot of sizes"
document 'cliffs in cache' '' 'AdamW on avx2, in cache: x:' '' '|---|' '| a | 1 |' '' | holds docs/benchmarks.md
report $? "bench: the table of AdamW on the best instruction set in cache"
echo "1..$count"
