# Hostile input and bad memory, one argument per part; each prints TAP:
#   gcc, clang   test programs (quick, by turns) and pseudo-random fuzzing under AddressSanitizer and UBSan
#   fuzz         libFuzzer on tests/robust/fuzz.c, 30 seconds, under the same two
#   valgrind     uses of values that were never set, which only valgrind sees
#   static       cppcheck, clang-tidy (with clang's analyzer), gcc -fanalyzer; does the fuzzer call each function?
part=$1
out=build/tests/sanitize.$part
rm -rf $out
mkdir -p $out
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/plain.c
cp $out/plain.c $out/plain.cpp
sanitizers='-std=c99 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all'
export ASAN_OPTIONS=abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
. tests/tap.sh
silent() { # silent DESCRIPTION COMMAND...: succeeds and prints nothing
    description=$1
    shift
    "$@" >$out/log 2>&1
    status=$?
    [ $status = 0 ] && grep -q . $out/log && status=1
    report $status "$description"
}

case $part in
gcc | clang)
    # Each test contains the implementation. Here it is compiled once without and once with vector mathematics, and
    # KOPT_IMPLEMENTED_ leaves it out of the tests, but for one that changes it.
    for source in tests/*/test_*.c tests/robust/fuzz.c; do
        name=$(basename $source .c) argument=quick
        case $name in fuzz) argument=6000 ;; *) turn 8 || continue ;; esac
        kind=plain define=
        ! grep -q 'define KAHAN_OPT_VMATH' $source || kind=vmath define=-DKAHAN_OPT_VMATH
        object=$out/$kind.o implemented=-DKOPT_IMPLEMENTED_
        ! has_implementation $source || object='' implemented=
        { [ ! "$object" ] || [ -e $object ] || $part $sanitizers $define -I. -c $out/plain.c -o $object; } \
            >$out/log 2>&1 &&
            $part $sanitizers -DFUZZ_STANDALONE $implemented -o $out/$name $source $object -lm >$out/log 2>&1 &&
            $out/$name $argument >$out/log 2>&1
        report $? "$part: $name under AddressSanitizer and UBSan"
    done
    ;;
fuzz)
    clang $sanitizers -fsanitize=fuzzer -o $out/fuzz tests/robust/fuzz.c -lm >$out/log 2>&1
    report $? "the fuzzer compiles"
    $out/fuzz -seed=1 -max_total_time=30 -len_control=0 -max_len=300 -timeout=20 -artifact_prefix=$out/ >$out/log 2>&1
    status=$?
    grep -v 'NEW\|REDUCE\|pulse' $out/log >$out/rest
    runs=$(sed -n 's/^Done \([0-9]*\) runs.*/\1/p' $out/log)
    [ "${runs:-0}" -ge 1000 ] || status=1
    mv $out/rest $out/log
    report $status "30 s of libFuzzer under AddressSanitizer and UBSan: ${runs:-0} inputs"
    ;;
valgrind)
    ${CC:-cc} -std=c99 -g -O1 -DFUZZ_STANDALONE -o $out/fuzz tests/robust/fuzz.c -lm >$out/log 2>&1 &&
        valgrind -q --error-exitcode=9 $out/fuzz 1200 7 >$out/log 2>&1
    report $? "1,200 hostile inputs under valgrind, which hides AVX-512"
    ;;
static)
    for source in fuzz:'the fuzzer' test_environment:'the test of environments'; do
        missing=
        for name in $(sed -n 's/^KOPT_API_ .*[ *]\(kopt_[a-z0-9_]*[a-z0-9]\)(.*/\1/p' kahan_opt.h | sort -u); do
            cat tests/unit/inputs.h tests/*/${source%%:*}.c | grep -q "$name(" || missing="$missing $name"
        done
        echo "$missing" >$out/log
        [ -z "$missing" ]
        report $? "each public function is called by ${source#*:}$missing"
    done
    if command -v clang-tidy >/dev/null; then # .clang-tidy selects the checks
        for options in "c -std=c99" "cpp -std=c++98" "cpp -std=c++17" "c -std=c99 -DKAHAN_OPT_NO_SIMD" \
            "c -std=c99 --target=aarch64-linux-gnu -isystem /usr/aarch64-linux-gnu/include"; do
            case $options in *aarch64*) [ -d /usr/aarch64-linux-gnu/include ] || continue ;; esac
            turn 2 || continue
            clang-tidy --quiet $out/plain.${options%% *} -- ${options#* } -I. >$out/log 2>&1
            report $? "clang-tidy: ${options#* }"
        done
    fi
    if command -v cppcheck >/dev/null; then
        for options in "--std=c99" "--std=c99 -D__GNUC__=12 -D__x86_64__=1 -DKAHAN_OPT_NO_SIMD" \
            "--std=c++17 --language=c++"; do
            turn 2 || continue
            silent "cppcheck: $options" cppcheck -q --error-exitcode=1 --enable=warning,performance,portability \
                --suppress=toomanyconfigs --suppress=passedByValue \
                --suppress=memsetClassFloat --suppress=ctuuninitvar $options -I. $out/plain.c
        done
    fi
    # gcc's analyzer takes C only, does not know intrinsics and is slow. So it gets the scalar build: the text of its
    # kernels is the same.
    command -v gcc >/dev/null &&
        silent "gcc -fanalyzer" gcc -std=c99 -fanalyzer -DKAHAN_OPT_NO_SIMD -I. -c $out/plain.c -o $out/plain.o
    ;;
*)
    echo "usage: sh tests/robust/sanitize.sh gcc | clang | fuzz | valgrind | static" >&2
    exit 2
    ;;
esac
echo "1..$count"
