# selftest.c finds nothing wrong in the builds that users make, and says what is wrong in broken ones. Prints TAP.
#     sh tests/bits/selftest.sh           all
#     sh tests/bits/selftest.sh OBJECT    only tables and pages, and the selftest with the implementation in OBJECT
#     sh tests/bits/selftest.sh table     prints what the table of tests/bits/selftest.c must be
#     sh tests/bits/selftest.sh flags     prints the table of flags of docs/same-bits.md
#     sh tests/bits/selftest.sh flags -f  only the builds of that table with -f
out=build/tests/selftest
rm -rf $out
mkdir -p $out
CC=${CC:-cc}
. tests/tap.sh

# The flags that were tried: the rows of a table of docs/same-bits.md, MACHINES COMPILERS RESULT FLAGS... Each compiler
# builds the selftest for each machine with each FLAGS, at -O2 unless they say otherwise; a # begins a line before the
# source instead. The selftest must find nothing wrong; where RESULT says "in one file", also with the implementation in
# another file, without the flags. A build whose RESULT is "does not" must fail.
flags() { # flags DO: calls DO with each row
    $1 x86-64 'gcc clang-19' 'survived: barriers' -Ofast -ffast-math -funsafe-math-optimizations \
        '-fassociative-math -fno-signed-zeros -fno-trapping-math' -freciprocal-math -ffinite-math-only \
        -fno-signed-zeros -fno-trapping-math -fno-math-errno -fcx-limited-range -ffp-contract=off \
        '-O3 -ffp-contract=fast -mfma'
    $1 x86-64 clang-19 'the same' -ffp-model=fast -fapprox-func -fno-honor-nans -fno-honor-infinities
    $1 mips gcc 'the same' '-O3 -ffp-contract=fast -mips32r2 -mfp64 -mmadd4'
    $1 x86-64 'gcc clang-19' 'survived: divisions and roots are instructions' '-Ofast -mrecip' '-Ofast -mrecip=all'
    $1 aarch64 clang-19 'the same' '-Ofast -mrecip=all'
    $1 aarch64 gcc 'the same' '-Ofast -mlow-precision-div' '-Ofast -mlow-precision-sqrt' \
        '-Ofast -mlow-precision-recip-sqrt'
    $1 ppc64le gcc 'the same' '-Ofast -mrecip -mrecip-precision'
    $1 'x86-64 arm' gcc 'survived: constants are bits, so beta2 does not become 0.999f' -fsingle-precision-constant
    $1 x86-64 gcc 'survived: the library sets the precision of x87, too, and results pass through memory' \
        -mfpmath=387 -mfpmath=both -mpc32
    $1 x86-64 clang-19 'the same' -ffp-eval-method=extended
    $1 i386 gcc 'the same' -mno-sse '-msse -mno-sse2' '-msse2 -mfpmath=sse' -mpc32 -mpc64 -ffloat-store \
        '-std=c99 -fexcess-precision=standard' -mno-fp-ret-in-387
    $1 i386 clang-19 'the same' -mno-sse '-msse -mno-sse2'
    $1 x86-64 'gcc clang-19' 'survived: without `_mm256_blendv_epi8`, which gcc 12 breaks' -funsigned-char
    $1 'aarch64 arm' gcc survived -fsigned-char
    $1 x86-64 'gcc clang-19' survived -frounding-math -ftrapping-math -fwrapv -ftrapv -fno-strict-aliasing \
        -fshort-wchar -fno-builtin -ftrivial-auto-var-init=pattern -fstack-protector-all -finstrument-functions \
        -O0 -O1 -O3 -Og -Os -Oz -ffreestanding '-ffunction-sections -fdata-sections -fvisibility=hidden'
    $1 x86-64 gcc survived -fsignaling-nans -fallow-store-data-races -fprofile-generate -flto
    $1 x86-64 clang-19 survived -ffp-model=strict -ffp-eval-method=double -fdenormal-fp-math=positive-zero \
        -fdenormal-fp-math=preserve-sign -mdaz-ftz '-flto -fuse-ld=lld'
    $1 x86-64 'gcc clang-19' 'survived: nothing depends on them' -mlong-double-64 -mms-bitfields
    $1 arm gcc 'the same' -mfp16-format=alternative
    $1 mips gcc 'the same' '-mips32r2 -mfp64'
    $1 ppc64le gcc 'the same' '-Ofast -mfriz'
    $1 riscv64 gcc 'the same' -mno-fdiv
    $1 x86-64 'gcc clang-19' survived -mavx2 -mavx512f -march=native -march=x86-64-v3 -march=x86-64-v4 \
        '-march=native -mprefer-vector-width=512' -mno-vzeroupper
    $1 aarch64 'gcc clang-19' survived -march=armv8-a+crc
    $1 wasm32 clang-19 survived -msimd128 '-msimd128 -mrelaxed-simd'
    packed='survived, also in one file of several: public structs have no padding. gcc warns of private ones'
    $1 x86-64 'gcc g++ clang-19' "$packed" -fpack-struct -fpack-struct=1 '#pragma pack(1)'
    $1 i386 'gcc clang-19' 'the same, also in one file of several' -malign-double
    $1 x86-64 'gcc clang-19' 'survived in all files. In one of several the optimizer is refused: `KOPT_ERROR_VERSION`' \
        -fshort-enums
    $1 x86-64 'gcc clang-19' 'survived: the floats of SSE remain' -msoft-float
    $1 i386 clang-19 survived -msoft-float
    $1 i386 gcc 'does not link: there is no library for it' -msoft-float
    $1 'x86-64 aarch64' 'gcc clang-19' 'does not compile: there are no registers for floats' -mgeneral-regs-only
    $1 x86-64 'gcc clang-19' 'does not compile either' -mno-sse
}
commas() { echo "$1" | sed 's/-19//; s/  */, /g'; }
row() { # row MACHINES COMPILERS RESULT FLAGS...: as the page has it
    columns="$(commas "$2") | $(commas "$1") | $3" all=
    shift 3
    for flag; do all="$all, \`$flag\`"; done
    echo "| ${all#, } |" $columns '|'
}
table_of_flags() { printf '%s\n' '| flags | compilers | for | result |' '|---|---|---|---|' && flags row; }
if [ "$*" = flags ]; then
    table_of_flags
    exit
fi

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

emulator=
well() { # well PROGRAM: exit status 0, and no FAILED
    $emulator $out/$1 >$out/log 2>&1 && grep -q '^All is well' $out/log && ! grep -q FAILED $out/log
}
good() { # good NAME COMPILER FLAG...: well
    name=$1
    shift
    "$@" -o $out/$name tests/bits/selftest.c >$out/log 2>&1 && well $name
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

# The implementation in a file of its own.
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/implementation.c

works() { # works MACHINE COMPILER FLAGS: sets cc and emulator; is there what the build and the run need?
    emulator= cc=$2 target=$1-linux-gnu feature=
    case $1 in
    x86-64) ;;
    i386) cc="$2 -m32" ;;
    wasm32) cc="$2 --target=wasm32-wasi --sysroot=/usr" emulator='node --no-warnings tests/bits/wasi.js' ;;
    *)
        case $1 in arm) target=arm-linux-gnueabihf ;; ppc64le) target=powerpc64le-linux-gnu ;; esac
        emulator=qemu-$1 cc="$2 --target=$target -static"
        [ $2 != gcc ] || cc="$target-gcc -static"
        ;;
    esac
    case $3 in *avx512* | *x86-64-v4) feature=avx512vl ;; *avx2 | *fma | *x86-64-v3) feature=avx2 ;; esac
    [ -n "$emulator" ] || [ "$(uname -m)" = x86_64 ] && grep -q "$feature" /proc/cpuinfo &&
        echo 'int main(void) { return 0; }' | $cc -x c -o $out/empty - && $emulator $out/empty
}
build() { # build MACHINE COMPILER RESULT FLAGS
    what="$1, $2: $4" options=$4
    if ! works "$1" "$2" "$4" >$out/log 2>&1; then skip "$what" "no $cc, $emulator $feature"; return; fi
    case $4 in
    -fpack-struct) options="$4 -Wno-address-of-packed-member" ;;
    '#'*) echo "$4" >$out/line.h && options="-include $out/line.h -Wno-pragma-pack" ;;
    esac
    options="-Wno-deprecated-ofast -DKAHAN_OPT_VMATH -O2 $options"
    $cc $options -o $out/flags tests/bits/selftest.c >$out/log 2>&1
    built=$?
    case $3 in
    'does not '*) [ $built != 0 ] ;;
    *) [ $built = 0 ] && ! grep -qv '^lto-wrapper: ' $out/log && well flags ;; # a flag may be ignored
    esac
    report $? "$what"
    case $3 in *'in one file'*) ;; *) return ;; esac
    $cc -O1 -DKAHAN_OPT_NO_SIMD -DKAHAN_OPT_VMATH -I. -c -o $out/flags.o $out/implementation.c >$out/log 2>&1 &&
        $cc $options -DSELFTEST_LINK -o $out/flags tests/bits/selftest.c $out/flags.o >$out/log 2>&1 && well flags
    report $? "$what, in one file of two"
}
only=
builds() { # builds MACHINES COMPILERS RESULT FLAGS...: those whose turn it is, or those with the flag $only
    machines=$1 compilers=$2 result=$3
    shift 3
    for machine in $machines; do
        for compiler in $compilers; do
            for words; do
                if [ -n "$only" ]; then echo " $words " | grep -q -F -e " $only "; else turn 16; fi || continue
                build $machine $compiler "$result" "$words"
            done
        done
    done
    emulator=
}
if [ "${1:-}" = flags ]; then
    only=$2
    flags builds
    echo "1..$count"
    exit
fi

# The page has this table, and no page names a flag that it lacks, but for those that other pages name for another
# reason than bits: flags of nvcc, and of machines whose builds are tests/bits/matrix.sh's or none.
elsewhere='-fmad -ftz -fno-threadsafe-statics -march -mbulk-memory -mdouble=64 -mfloat-abi=hard -mfpu=fpv4-sp-d16
-mrvv-vector-bits -msve-vector-bits=N'
table_of_flags >$out/table
sed -n '/^| flags | compilers | for/,/^$/p' docs/same-bits.md | grep . | diff - $out/table >$out/log
report $? "docs/same-bits.md has the table that \`sh tests/bits/selftest.sh flags\` prints"
words() { shift 3 && printf '%s\n' $*; }
tried=" -O2 $(flags words | tr '\n' ' ')"
for page in README.md docs/*.md; do
    known=$tried
    [ $page = docs/same-bits.md ] || known=$tried$(echo $elsewhere)' '
    sed '/^```/,/^```/d; /^| architecture/,/^$/d' $page | # without blocks and the table of tests/bits/matrix.sh
        grep -oE '(^|[^[:alnum:]_-])-[fmO][[:alnum:]=+.-]*[[:alnum:]=]' | sed 's/^[^-]//' | sort -u >$out/named
    while read -r flag; do
        case $flag in *=N | *=) flag=${flag%N} ;; *) flag="$flag " ;; esac # any value, or this one
        case $known in *" $flag"*) ;; *) echo "$page: no build has $flag" ;; esac
    done <$out/named
done >$out/log
[ ! -s $out/log ]
report $? "every flag on a page is tried"

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
says '^note: enums are not int here' '^FAILED: kopt_optimizer or kopt_tensor is laid out otherwise in the .*version'
good packed $linked -fpack-struct
sed 's/^#define KOPT_VERSION .*/#define KOPT_VERSION 99999/; s/KOPT_VERSION != [0-9]*/0/' kahan_opt.h >$out/kahan_opt.h
mkdir -p $out/tests/bits
cp tests/bits/selftest.c tests/bits/probe.c tests/bits/begun.h $out/tests/bits
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
    mistake "one instruction set that selects the wrong way" '_mm256_blendv\(.*\)no, \(.*\)yes,' \
        '_mm256_blendv\1yes, \2no,'
    says '^FAILED: .*(avx2; the caller rounds to nearest)$'
    ! grep -q '(scalar;\|(sse2;' $out/log
    report $? "... and nothing is wrong with the others"
fi
flags builds
echo "1..$count"
