# build.sh refuses an unknown word before it does anything: it prints the word and the usage on stderr and exits with
# status 2. It runs in a folder of any name. This test uses a copy of the project: otherwise a mistake could run all
# tests from within this one. Prints TAP.
out=build/tests/usage
rm -rf $out
copy="$out/a b's"
mkdir -p "$copy/bench" "$copy/docs/examples" "$copy/tests/unit" "$copy/tests/bits" "$copy/tests/repo" "$copy/tests/gpu"
cp build.sh "$copy"
cp docs/figures.sh "$copy/docs"
cp bench/*.sh "$copy/bench"
cp tests/*.sh "$copy/tests"
cp tests/gpu/cuda_day.sh "$copy/tests/gpu"
. tests/tap.sh
said="$out/said $out/errors"
ask() { # ask ARGUMENT...
    CC=false /bin/sh "$copy/build.sh" "$@" >$out/said 2>$out/errors </dev/null
    status=$?
}
refused() { # refused WORDS ARGUMENT...: is refused, with these words in the first line
    words=$1
    shift
    ask "$@"
    [ $status = 2 ] && [ ! -s $out/said ] && [ ! -e "$copy/build" ] &&
        [ "$(head -n 1 $out/errors)" = "build.sh: $words" ] && grep -q '^usage: ./build.sh demo' $out/errors
    report $? "./build.sh $*: $words"
}
refused 'there is no command `nonsense`' nonsense
refused 'there is no command `--test`' --test
refused '`test` does not know `--noskip`' test --noskip
refused '`test` does not know `now`' test --no-skip now
refused '`bench` does not know `--size`' bench --size
refused '`bench` does not know `theorem2`' bench theorem2
refused '`bench` does not know `1e6`' bench flags 1e6
refused '`bench` does not know `--gib`' bench --peers --gib 1
refused '`bench cliffs` does not know `avx`' bench cliffs quick avx
refused '`bench` does not know `quick`' bench quick
refused '`bench fidelity` does not know `slow`' bench fidelity slow
refused '`demo` does not know `--bf16`' demo --bf16
refused '`demo` does not know `--all`' demo --precision all --all
refused 'there is no example `nonsense`' examples nonsense
refused '`cuda` does not know `--bench`' cuda --bench
refused '`cuda` does not know `more`' cuda bench more
refused '`figures` does not know `demo`' figures demo
refused '`figures` does not know `--bench`' figures bench --bench
refused '`web` does not know `deploy`' web deploy
refused '`setup` does not know `everything`' setup everything
refused '`python` does not know `gpu`' python gpu
refused '`bench torch` does not know `fast`' bench torch fast
refused '`bench wasm` does not know `fast`' bench wasm fast
wrong_compare() { # wrong_compare WORDS ARGUMENT...: bench/compare.sh prints these words and its own usage
    words=$1
    shift
    ask bench compare "$@"
    [ $status = 2 ] && [ ! -s $out/said ] && [ ! -e "$copy/build" ] &&
        [ "$(head -n 1 $out/errors)" = "compare.sh: $words" ] && grep -q '^usage: bench/compare.sh OLD.h' $out/errors
    report $? "./build.sh bench compare $*: $words"
}
wrong_compare 'it needs two headers'
wrong_compare 'it needs two headers' build.sh
wrong_compare 'it does not know `--cold`' build.sh build.sh --cold
wrong_compare '`64k` is no number of weights' build.sh build.sh 64k
wrong_compare '`--isa` needs a value' build.sh build.sh --isa
wrong_compare 'there is no file `missing.h`' build.sh missing.h
for words in more '--part 4' '--part' '--rehearse now'; do
    ask cuda day $words
    [ $status = 2 ] && [ ! -s $out/said ] && [ ! -e "$copy/build" ] &&
        grep -q '^usage: cuda_day.sh' $out/errors
    report $? "./build.sh cuda day $words: the usage"
done
for words in missing.h 'build.sh build.sh' --help; do
    ask bench calls $words
    [ $status = 2 ] && [ ! -s $out/said ] && [ ! -e "$copy/build" ] &&
        [ "$(head -n 1 $out/errors)" = 'usage: bench/calls.sh [HEADER]' ]
    report $? "./build.sh bench calls $words: the usage"
done
for words in 'demo --precision all FILE' 'bench --sizes --gb 0.5' 'bench atan2 100' 'bench flags' 'cuda' \
    'bench compare build.sh build.sh 64 --isa avx2' 'bench cliffs quick avx2 --markdown' figures \
    'figures bench'; do
    ask $words # it fails later, as there is no compiler
    [ $status != 2 ] && [ -d "$copy/build" ] && ! grep -q '^usage' $out/errors
    report $? "./build.sh $words is understood"
    rm -rf "$copy/build"
done
ask
[ $status = 2 ] && [ "$(head -n 1 $out/errors | cut -c 1-6)" = usage: ]
report $? "without a command: the usage"
for words in help --help -h; do
    ask $words
    [ $status = 0 ] && [ ! -s $out/errors ] && [ "$(head -n 1 $out/said | cut -c 1-6)" = usage: ]
    report $? "./build.sh $words: prints the usage on stdout and succeeds"
done

# A header of one line and a test of one line: builds and parts pass words on unchanged, whatever is in them.
echo 'enum { ONE = 1 };' >"$copy/kahan_opt.h"
echo 'int main(void) { return 0; }' >"$copy/tests/bits/probe.c"
for name in bits/golden bits/selftest repo/setup repo/usage repo/figures; do
    printf 'echo "ok 1 - $*"\necho 1..1\n' >"$copy/tests/$name.sh"
done
try() { # try LINE...: `test --fast` where tests/unit/test_one.c prints this TAP, with a CC of three words
    { printf '#include <stdio.h>\n#include "../../kahan_opt.h"\nint main(void) {\n'
        printf '    puts(%s);\n' "$@"
        printf '    return 0;\n}\n'; } >"$copy/tests/unit/test_one.c"
    CC="env ${CC:-cc} -DTWO=2" /bin/sh "$copy/build.sh" test --fast >$out/said 2>$out/errors </dev/null
    status=$?
}
try nowhere
[ $status != 0 ] && grep -q nowhere $out/errors && ! grep -qv '^building\|^SKIPPED' $out/said
report $? "./build.sh test --fast in a folder \`a b's\`: a compiler error is shown and ends it"
try '"not ok 1"' '"1..1"'
[ $status != 0 ] && grep -q FAIL $out/said $out/errors && ! grep -q 'left out by --fast' $out/said
report $? "... a test that fails is a failure"
try '"ok 1"' '"1..1"' '"###" + TWO'
[ $status = 0 ] && [ ! -s $out/errors ] && grep -q 'parts skipped$' $out/said
report $? "... otherwise it succeeds"
[ "$(cd "$copy" && build/tests/golden.t | head -n 1)" = 'ok 1 - build/tests/probe.native build/tests/probe.ofast' ]
report $? "... a part has its arguments"
sed -n '/^quote() (/,/^)/p; /^script() (/,/^)/p; /^part() (/,/^)/p' tests/run.sh >"$copy/words.sh"
echo 'part words printf "<%s>" "$@"' >>"$copy/words.sh"
(cd "$copy" && sh -eu words.sh "it's 'quoted'" '' '$HOME `pwd` \' "two
lines" '*' && build/tests/words.t) >$out/said
[ "$(cat $out/said)" = "<it's 'quoted'><><\$HOME \`pwd\` \\><two
lines><*>" ]
report $? "... quotes, spaces, dollars, stars, an empty word and a line end reach a part as they are"
echo "1..$count"
