# selftest.c finds nothing wrong in the builds that users make, and says what is wrong in broken ones. Prints TAP.
#     sh tests/bits/selftest.sh           all
#     sh tests/bits/selftest.sh OBJECT    only its table, with the implementation in OBJECT
#     sh tests/bits/selftest.sh table     prints what the table of tests/bits/selftest.c must be
out=build/tests/selftest
rm -rf $out
mkdir -p $out
CC=${CC:-cc}
. tests/tap.sh

# The table: golden.txt, which NumPy computes. Nine numbers per line.
sed '/^all /d; s/.* //; s/.*/0x&u,/' tests/bits/golden.txt | paste -d ' ' - - - - - - - - - |
    sed 's/ *$//; s/^/    /' | sed '$s/,$//' >$out/golden
if [ "${1:-}" = table ]; then
    cat $out/golden
    exit
fi
sed -n "/^static const uint32_t golden\[\] = {/,/^};/p" tests/bits/selftest.c | sed '1d;$d' >$out/golden.there
diff $out/golden.there $out/golden >$out/log
report $? "its table is what it must be"

good() { # good NAME COMPILER FLAG...: exit status 0, and no FAILED
    name=$1
    shift
    "$@" -o $out/$name tests/bits/selftest.c >$out/log 2>&1 && $out/$name >$out/log 2>&1 &&
        grep -q '^All is well' $out/log && ! grep -q 'FAILED' $out/log
    report $? "all is well: $(echo "$*" | sed 's/ -W[a-z-]*//g')"
}
sometimes() { ! turn 3 || good "$@"; }
says() { # says WORDS...: the last program printed each of these, in one line
    for words; do
        grep -q -e "$words" $out/log
        report $? "... says: $words"
    done
}
compared() { sed -n 's/^\([0-9]*\) comparisons$/\1/p' $out/log; }

if [ $# = 1 ]; then
    good object $CC -O1 -DSELFTEST_LINK "$1"
    echo "1..$count"
    exit
fi
good o2 $CC -std=c99 $cxx_warnings -Wmissing-prototypes -O2
full=$(compared)
[ "${full:-0}" -gt 1000 ]
report $? "... after more than a thousand comparisons"
good ofast $CC -Ofast
case $(uname -m) in x86_64 | i?86) says 'note: .* crtfastmath\|^      (crtfastmath' 'subnormals flushed$' ;; esac
sometimes vmath $CC -O1 -DKAHAN_OPT_VMATH
sometimes debug $CC -O0 -DKAHAN_OPT_NO_SIMD
if command -v clang >/dev/null; then sometimes clang clang -std=c99 $cxx_warnings -O2; else missing "no clang"; fi
if command -v clang >/dev/null; then sometimes clang_ofast clang -Ofast -DKAHAN_OPT_NO_SIMD; else missing "no clang"; fi
if command -v g++ >/dev/null; then sometimes cxx g++ -std=c++98 -x c++ $cxx_warnings -O1; else missing "no g++"; fi
if command -v tcc >/dev/null; then sometimes tcc tcc; else missing "no tcc"; fi
# The implementation in a file of its own, with the same struct layout and with a different one.
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/implementation.c
$CC -O1 -DKAHAN_OPT_NO_SIMD -I. -c -o $out/implementation.o $out/implementation.c >$out/log 2>&1
good link $CC -O1 -DKAHAN_OPT_NO_SIMD -DSELFTEST_LINK $out/implementation.o

bad() { # bad DESCRIPTION COMPILER FLAG... SOURCE: exit status 1
    description=$1
    shift
    "$@" -o $out/bad >$out/log 2>&1 && { $out/bad >$out/log 2>&1; [ $? = 1 ]; } && ! grep -q '^All is well' $out/log
    report $? "$description is found"
}
linked="$CC -O1 -DKAHAN_OPT_NO_SIMD -DSELFTEST_LINK $out/implementation.o"
bad "-fshort-enums in one file of two" $linked -fshort-enums tests/bits/selftest.c
says '^note: enums are not int here' '^FAILED: kopt_optimizer or kopt_step is laid out otherwise'
good packed $linked -fpack-struct=1
if $linked -fpack-struct -o $out/bad tests/bits/selftest.c >$out/log 2>&1; then
    good packed $linked -fpack-struct # clang
else
    says kopt_refuses_fpack_struct_
fi
sed 's/^#define KOPT_VERSION .*/#define KOPT_VERSION 99999/; s/KOPT_VERSION != [0-9]*/0/' kahan_opt.h >$out/kahan_opt.h
mkdir -p $out/tests/bits
cp tests/bits/selftest.c tests/bits/probe.c $out/tests/bits
bad "a header of another version" $linked $out/tests/bits/selftest.c
says '^FAILED: the implementation is of version'
# Copies of the header with one mistake each. The replaced text must exist, or nothing is tested.
mistake() { # mistake DESCRIPTION PATTERN REPLACEMENT FLAG...
    description=$1 pattern=$2 replacement=$3
    shift 3
    sed "s/$pattern/$replacement/" kahan_opt.h >$out/kahan_opt.h
    ! cmp kahan_opt.h $out/kahan_opt.h >$out/log
    report $? "the header has: $pattern"
    bad "$description" $CC -O1 "$@" $out/tests/bits/selftest.c
    says 'your compiler flags' 'report this'
}
numbers='got [0-9a-f]\{8\}, want [0-9a-f]\{8\} ([a-z0-9]*; the caller rounds to nearest)$'
mistake "another constant of the cipher" 0xD2511F53u 0xD2511F51u -DKAHAN_OPT_NO_SIMD
says "^FAILED: random bits: other bits than promised: random: $numbers"
mistake "a tie of fp16 that goes down" '((x >> shift) & 1u)) >> shift;' '0) >> shift;' -DKAHAN_OPT_NO_SIMD
says "^FAILED: fp32 numbers rounded to 16 bits: .*narrow: $numbers"
if [ "$(uname -m)" = x86_64 ]; then
    mistake "the caller's environment as it is" 'KOPT_LDMXCSR_(sse);' ';' -DKAHAN_OPT_NO_SIMD
    says '^FAILED: .*; the caller rounds to down)$' '^FAILED: .*; the caller rounds to zero and flushes)$'
    ! grep -q 'rounds to nearest)$' $out/log
    report $? "... and nothing is wrong in the default one"
    mistake "an environment that is not restored" 'KOPT_LDMXCSR_(e->control);' ';' -DKAHAN_OPT_NO_SIMD
    says "^FAILED: a call has changed the caller's floating-point environment"
fi
if grep -q avx2 /proc/cpuinfo 2>/dev/null && [ "$(uname -m)" = x86_64 ]; then
    mistake "one instruction set that selects the wrong way" '_mm256_blendv_epi8(no, yes, m)' \
        '_mm256_blendv_epi8(yes, no, m)'
    says '^FAILED: .*(avx2; the caller rounds to nearest)$'
    ! grep -q '(scalar;\|(sse2;' $out/log
    report $? "... and nothing is wrong with the others"
fi
echo "1..$count"
