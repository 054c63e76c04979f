# mutants.sh [cuda] all | share K/N | turn: makes mutants of the header (mutants.py) and runs the tests on each until
# one fails. turn: one of 24 shares, the next one with each commit. Prints TAP. A mutant that survives is a
# failure, unless tests/robust/mutants.txt says why it may. So is a mutant of that list that a test kills.
# cuda: of kahan_opt_cuda.cuh (tests/gpu/cuda_mutants.sh). JOBS: how many run at a time. `mutants.sh show N` prints
# mutant N, and the program that kills it.
set -u
out=build/mutants kind='' listed=tests/robust/mutants.txt
if [ "${1:-}" = cuda ]; then
    out=build/mutants_cuda kind=cuda listed=tests/gpu/cuda_mutants.txt
    shift
fi
export out

run() { # run PROGRAM: its tests, on the mutant of KOPT_MUTANT
    case $1 in
    probe)
        for isa in $($out/probe isas); do
            (ulimit -t 20; $out/probe $isa) | cmp -s - tests/bits/golden.txt || return 1
        done
        ;;
    fuzz) (ulimit -t 60; $out/fuzz 6000) ;; # seconds of a processor
    *) (ulimit -t 60; $out/$1 quick) ;;
    esac
}

one() { # one N: prints "N PROGRAM", the first program that fails, or "N -"
    KOPT_MUTANT=$1
    export KOPT_MUTANT
    for program in $(cat $out/order); do
        grep -qx $1 $out/$program.reached || continue
        run $program >$out/log.$1 2>&1 || { echo "$1 $program"; rm $out/log.$1; return; }
    done
    echo "$1 -"
    rm -f $out/log.$1
}

compile() { # compile NAME: makes a program, or an object of the implementation
    unset=-ftrivial-auto-var-init # a variable that a mutant does not set has a fixed value
    pattern=pattern
    [ $1 != probe ] || pattern=zero # the pattern may be a NaN, which vectors leave to scalar code
    set -- $1 gcc -std=c99 -O1 -w
    ! gcc $unset=$pattern -E -x c /dev/null >/dev/null 2>&1 || set -- "$@" $unset=$pattern
    name=$1 source=$(echo $out/tests/*/$1.c)
    shift
    case $name in
    plain) "$@" -c -o $out/plain.o $out/plain.c; return ;;
    vmath) "$@" -DKAHAN_OPT_VMATH -c -o $out/vmath.o $out/plain.c; return ;;
    probe) ;;
    test_tools | test_no_simd) # whole structs, or gcc initializes fields that a mutant does not set (slow: not for all)
        source=$out/tests/unit/test_tools.c
        set -- "$@" -fno-tree-sra
        [ $name = test_tools ] || set -- "$@" -DKAHAN_OPT_NO_SIMD
        ;;
    *)
        object=plain
        ! grep -q 'define KAHAN_OPT_VMATH' $source || object=vmath
        has_implementation $source || set -- "$@" -DKOPT_IMPLEMENTED_ $out/$object.o
        ;;
    esac
    "$@" -DFUZZ_STANDALONE -o $out/$name $source -lm
}

build() { # builds all programs once
    rm -rf $out
    mkdir -p $out
    python3 tests/robust/mutants.py kahan_opt.h $out $listed || exit 1
    cp -r tests $out
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/plain.c
    printf '%s\n' plain vmath >$out/objects
    for source in tests/*/test_*.c fuzz.c; do # without the two slowest, which find nothing that the others miss
        case $source in */test_random.c | */test_rules.c) ;; *) basename $source .c ;; esac
    done >$out/programs
    printf '%s\n' probe test_no_simd >>$out/programs
    for names in objects programs; do
        xargs -P ${JOBS:-2} -n 1 sh tests/robust/mutants.sh compile <$out/$names || exit 1
    done
}

order() { # sorts the programs by run time and records what each reaches; each must pass without a mutant
    while read -r program; do
        : >$out/$program.reached.all
        begin=$(date +%s%N)
        KOPT_REACHED=$out/$program.reached.all run $program >$out/log 2>&1 ||
            { echo "not ok 1 - $program fails without a mutant"; grep -v '^ok' $out/log | head -n 20; exit 1; }
        echo "$(($(date +%s%N) - begin)) $program"
        sort -u $out/$program.reached.all >$out/$program.reached
    done <$out/programs | sort -n >$out/costs
    grep -q '^not ok' $out/costs && { cat $out/costs; exit 1; }
    sed 's/.* //' $out/costs >$out/order
}

[ -z "$kind" ] || . tests/gpu/cuda_mutants.sh
case "${1:-all}" in
compile) . tests/tap.sh && compile $2; exit ;;
one) one $2; exit ;;
show) sed -n "$2p" $out/mutants; one $2; exit ;;
all) k=1 n=1 ;;
share) k=${2%/*} n=${2#*/} ;;
turn)
    . tests/tap.sh
    n=24
    k=$((commit % n + 1))
    [ -z "${KOPT_ALL:-}" ] || k=1 n=1
    ;;
*) echo "usage: ./build.sh mutants [cuda] [all | share K/N | turn]" >&2; exit 2 ;;
esac
if [ "$(uname -m)" != x86_64 ] || ! command -v gcc >/dev/null || ! command -v python3 >/dev/null; then
    echo "1..0 # SKIP mutants need x86-64, gcc and python3"
    exit
fi
build
order
awk -v k=$k -v n=$n 'NR % n == k - 1 { print $1 }' $out/mutants |
    xargs -P ${JOBS:-2} -n 1 sh tests/robust/mutants.sh $kind one >$out/results ||
    { echo "not ok 1 - stopped after $(wc -l <$out/results) mutants"; echo 1..1; exit 1; }
if ! grep -q avx512bw /proc/cpuinfo; then # mutants that only AVX-512 reaches are not tested here
    sort -u $out/*.reached | awk 'NR == FNR { reached[$1]; next } $1 in reached' - $out/results >$out/here
    mv $out/here $out/results
fi
awk -F '\t' -v share="$k of $n" -v list=$listed -v show="mutants.sh ${kind:+$kind }show" '
    FILENAME ~ /listed$/ { listed[$0]; next }
    FILENAME ~ /mutants$/ { name[$1] = $2; next }
    {
        split($0, result, " ")
        what = name[result[1]]
        all++
        lives = result[2] == "-"
        if (lives && what in listed) may++
        else if (lives) print "not ok " (++count) " - lives: " what " (sh tests/robust/" show " " result[1] ")"
        else if (what in listed) print "not ok " (++count) " - in " list ", but " result[2] " kills it: " what
        killed += !lives
    }
    END {
        verdict = count || !all ? "not ok " : "ok "
        print verdict (++count) " - share " share ": " all + 0 " mutants, " killed + 0 " killed, " may + 0 " listed"
        print "1.." count
    }' $out/listed $out/mutants $out/results | tee $out/tap
! grep -q '^not ok' $out/tap
