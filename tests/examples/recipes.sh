# Checks the trainers of docs/places.md. Each has a diff, in docs/recipes or, of llm.c, in the page: with its `-` lines
# it is the loop as it was, with its `+` lines the loop with this library. Both are compiled with recipes.c, which has
# the data and the rest of the network, and trained. Prints TAP. `sh tests/examples/recipes.sh table` prints the tables
# of the page instead, and `sh tests/examples/recipes.sh times` what the loops take on this machine.
# A new trainer is a file of docs/recipes, a PROJECT of recipes.c and a line `trainer` below.
page=docs/places.md
out=build/tests/recipes
rm -rf $out
mkdir -p $out
CC=${CC:-cc}
# clang warns of a float for a field of an optimizer, which is exact
for_clang=-Wno-double-promotion
. tests/tap.sh
case $($CC --version 2>/dev/null) in *clang*) warnings="$warnings $for_clang" ;; esac
exec 3>&1
mode=${1:-}
[ -z "$mode" ] || exec >/dev/null # then only tables are printed, to 3
LIMIT=6 # lines that a recipe may add or change, or the page says how many

# NAME.diff or NAME.c: the files without their notes, and the blocks behind `<!-- test: recipe NAME -->`
for file in docs/recipes/*; do sed '/^#/d' "$file" >"$out/$(basename "$file")"; done
awk -v out=$out '
    /^<!-- test: recipe [a-z_]+ -->$/ { name = $4; next }
    inside && /^```$/ { inside = 0; name = ""; close(file); next }
    inside { print >file }
    /^```/ && name != "" { inside = 1; file = out "/" name "." substr($0, 4); printf "" >file }' $page
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/kahan_opt.c
$CC -std=c99 -O1 -DKAHAN_OPT_NO_SIMD -I. -c -o $out/kahan_opt.o $out/kahan_opt.c >$out/log 2>&1
report $? "the implementation compiles"

compile() { # compile NAME KIND FLAG...: $out/NAME_KIND.c with the rest of the network
    name=$1 kind=$2
    shift 2
    $CC -std=c99 $warnings -O2 -ffp-contract=off "$@" -DKOPT_IMPLEMENTED_ "-DLOOP=\"../../$out/${name}_$kind.c\"" \
        -I. -o "$out/${name}_$kind" tests/examples/recipes.c $out/kahan_opt.o -lm >$out/log 2>&1
}
warns_nothing() { # warns_nothing NAME KIND FLAG...: the same by clang, if it is there
    name=$1 kind=$2
    shift 2
    command -v clang >/dev/null || return 0
    clang -std=c99 $warnings $for_clang "$@" -DKOPT_IMPLEMENTED_ "-DLOOP=\"../../$out/${name}_$kind.c\"" -I. \
        -fsyntax-only tests/examples/recipes.c >$out/log 2>&1
}
run() { # run PROGRAM ARM: sets loss, and held: the bytes for each weight
    set -- $($out/$1 $2 $steps 2>$out/log) 'no loss' 0
    loss=$1 held=$2
}
holds() { # holds EXPRESSION: of numbers, for awk
    echo "this does not hold: $1" >$out/log
    awk "BEGIN { exit !($1) }"
}
losses='' bytes=''
row() { echo "| $(echo "$*" | sed 's/ / | /g') |"; }

# times: a row of what a weight takes in the loop before and after, in ns, and the factor, for each of two sets of flags
times='' longer=''
time_it() {
    set --
    for flags in -O2 '-O3 -march=native -fno-math-errno'; do
        for kind in before after; do
            after=0
            [ $kind = before ] || after=1
            $CC -std=c99 -w $flags -ffp-contract=off -DWIDE -DAFTER=$after $project -DKOPT_IMPLEMENTED_ \
                "-DLOOP=\"../../$out/${name}_$kind.c\"" -I. -o $out/timed \
                tests/examples/recipes.c "$out/$flags.o" -lm || exit 1
            set -- "$@" $($out/timed plain 300)
        done
    done
    times="$times$(row $title $1 $2 $(awk "BEGIN { printf \"%.2f\", $2 / $1 }") $3 $4 \
        $(awk "BEGIN { printf \"%.2f\", $4 / $3 }"))
"
}
for flags in -O2 '-O3 -march=native -fno-math-errno'; do
    [ "$mode" != times ] || $CC -w $flags -I. -c -o "$out/$flags.o" $out/kahan_opt.c || exit 1
done

# trainer NAME TITLE RATE STEPS FP32 VIEW GRADIENT
# FP32: by how much the weights may differ from those of the loop after 100 steps of the library in fp32, or - if the
# loop calls no step. VIEW: the bytes that a forward pass saves that reads bf16. GRADIENT: those of a gradient that
# could be bf16.
trainer() {
    name=$1 title=$2 rate=$3 steps=$4 fp32=$5 view=$6 gradient=$7
    project="-DPROJECT=$(echo $name | tr a-z A-Z) -DRATE=$rate"
    sed '/^+/d; s/^[ -]//' $out/$name.diff >$out/${name}_before.c 2>$out/log
    sed '/^-/d; s/^[ +]//' $out/$name.diff >$out/${name}_after.c 2>$out/log
    [ -s $out/log ] || grep '^[^ +-]' $out/$name.diff >$out/log
    [ ! -s $out/log ]
    report $? "$title: there is a diff"
    grep '^+' $out/$name.diff 2>$out/errors |
        grep -v -x -e '+#define KAHAN_OPT_IMPLEMENTATION' -e '+#include "kahan_opt.h"' -e + >$out/log
    lines=$(grep -c . $out/log)
    [ "$lines" -gt 0 ]
    report $? "... that adds or changes $lines lines"
    [ "$lines" -le $LIMIT ] || longer="${longer:+$longer, }$title: $lines"
    if [ "$mode" = times ]; then
        time_it
        return
    fi
    compile $name before $project -DAFTER=0 && warns_nothing $name before $project -DAFTER=0
    report $? "... before it, the loop compiles without a warning"
    compile $name after $project -DAFTER=1 && warns_nothing $name after $project -DAFTER=1
    report $? "... after it, too"

    run ${name}_before plain
    before=$loss before_bytes=$held
    run ${name}_after plain
    kahan=$loss kahan_bytes=$held
    run ${name}_after stochastic
    stochastic=$loss stochastic_bytes=$held
    run ${name}_after nearest
    nearest=$loss nearest_bytes=$held
    holds "$kahan >= 0.99 * $before && $kahan <= 1.01 * $before"
    report $? "... Kahan ends within 1 % of the loop as it was"
    holds "$stochastic <= 1.05 * $before"
    report $? "... stochastic rounding at most 5 % above it"
    holds "$nearest >= 1.3 * $before"
    report $? "... rounding to nearest at least 30 % above it"

    library='' moments=''
    if [ $fp32 != - ]; then
        holds "$nearest_bytes == $stochastic_bytes && $stochastic_bytes == $kahan_bytes - 2"
        report $? "... these two take 2 bytes less than Kahan"
        $out/${name}_before plain 100 $out/weights 2>$out/log >$out/said &&
            difference=$($out/${name}_after f32 100 =$out/weights 2>$out/log) && holds "$difference <= $fp32"
        report $? "... the library in fp32: after 100 steps no weight differs by more than $fp32"
        run ${name}_after f32
        library=$loss
        run ${name}_before rounded
        holds "$loss >= 0.999 * $before && $loss <= 1.001 * $before"
        report $? "... rounding its last weights to bf16 changes the error by at most 0.1 %"
        run ${name}_after moments
        moments=$held
        holds "$loss >= 0.99 * $before && $loss <= 1.01 * $before"
        report $? "... fp32 weights with 16-bit moments end within 1 %, too"
        [ $name != darknet ] || moments='' # it has none in the library
    fi
    losses="$losses$(row $title $before ${library:--} $kahan $stochastic $nearest)
"
    pure=$((kahan_bytes - view)) half=$((kahan_bytes - view - gradient / 2))
    [ $gradient != 0 ] || half=-
    bytes="$bytes$(row $title $before_bytes ${moments:--} $kahan_bytes $pure $((pure - 2)) $half)
"
}
trainer llmc llm.c 3e-4f 8000 1e-6 4 4
trainer genann genann 1e-3 4000 - 0 0
trainer kann kann 1e-3f 8000 - 4 4
trainer darknet darknet 1e-2f 8000 0 4 0
trainer tinyengine tinyengine 2e-3f 8000 - 0 0
trainer aifes AIfES 5e-4f 8000 1e-6 4 4
trainer ggml ggml 5e-4f 8000 1e-5 4 4

if [ "$mode" = times ]; then
    echo '| trainer | as it is | recipe | factor | as it is | recipe | factor |' >&3
    echo '|---|---|---|---|---|---|---|' >&3
    printf %s "$times" >&3
    exit
fi

# kann's rule by the fields of an optimizer, which has its eps elsewhere
cp $out/kann_fields.c $out/kann_fields_after.c 2>$out/log
steps=8000
compile kann_fields after -DPROJECT=KANN_FIELDS -DAFTER=1 -DRATE=1e-3f
report $? "kann by the fields of an optimizer: compiles without a warning"
run kann_before plain
before=$loss
for arm in f32 plain; do
    run kann_fields_after $arm
    holds "$loss >= 0.95 * $before && $loss <= 1.05 * $before"
    report $? "... $arm: ends within 5 % of the loop as it was"
done

tables() {
    echo '| trainer | as it is, fp32 | library, fp32 | bf16, Kahan | bf16, stochastic | bf16, nearest |'
    echo '|---|---|---|---|---|---|'
    printf %s "$losses"
    echo
    echo '| trainer | as it is | fp32 weights, bf16 moments | the recipe | no fp32 copy | stochastic | bf16 gradients |'
    echo '|---|---|---|---|---|---|---|'
    printf %s "$bytes"
}
[ "$mode" != table ] || { tables >&3; exit; }
grep -q -F "at most six lines ($longer)" $page
report $? "the page names the recipes of more than $LIMIT lines: $longer"
tables | sed '1,/^$/d' >$out/tables # the bytes; the losses are judged above
grep -v -x -F -f $page $out/tables >$out/log 2>&1
[ ! -s $out/log ] && [ "$(grep -c . $out/tables)" = 9 ]
report $? "the bytes of the page are those of \`sh tests/examples/recipes.sh table\`"
echo "1..$count"
