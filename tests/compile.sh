# The header compiles without a warning in every language and compiler here, the quick start of its first lines
# compiles as shown, and nothing leaks from it. Prints TAP.
out=build/tests/compile
mkdir -p $out
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual -Werror'
count=0
report() { # report STATUS DESCRIPTION
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; sed 's/^/# /' $out/log; fi
}

printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/plain.c
printf '#define KAHAN_OPT_STATIC\n#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/static.c
printf '#include "kahan_opt.h"\n#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n#include "kahan_opt.h"\n' >$out/twice.c
printf '#define KAHAN_OPT_NO_SIMD\n#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/no_simd.c
for source in plain static twice no_simd; do
    for compiler in "gcc -std=c99 -Wmissing-prototypes" "gcc -std=c11 -O0" "clang -std=c99 -Wmissing-prototypes" \
        "g++ -x c++ -std=c++98 -Wno-long-long" "g++ -x c++ -std=c++17 -Wold-style-cast -Wzero-as-null-pointer-constant" \
        "clang++ -x c++ -std=c++17" "tcc"; do
        command -v ${compiler%% *} >/dev/null || continue
        flags=$warnings
        [ "$compiler" = tcc ] && flags=-Wall
        case "$compiler" in *-O*) ;; *) flags="$flags -O2" ;; esac
        $compiler $flags -I. -c $out/$source.c -o $out/$source.o >$out/log 2>&1
        report $? "$source: ${compiler}"
    done
done

# The quick start: the indented lines from "enum" to the closing brace of train().
{
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n#include <stddef.h>\n'
    printf 'void train(const float *initial_weights, int steps);\n'
    sed -n '/^       enum { N/,/^       }$/p' kahan_opt.h
} >$out/quick_start.c
grep -q 'kopt_optimizer_step' $out/quick_start.c
report $? "the quick start is where it should be"
${CC:-cc} -std=c99 $warnings -I. -O2 -c $out/quick_start.c -o $out/quick_start.o >$out/log 2>&1
report $? "the quick start compiles as shown"
[ "$(sed -n '1,40p' kahan_opt.h | grep -c 'kopt_optimizer_step')" -ge 1 ]
report $? "the quick start is in the first 40 lines"

${CC:-cc} -O2 -I. -c $out/plain.c -o $out/plain.o && nm -g --defined-only $out/plain.o | awk '{print $3}' >$out/log
! grep -v '^_*kopt_' $out/log >/dev/null
report $? "every exported symbol begins with kopt_"
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' | ${CC:-cc} -I. -dM -E - | awk '{print $2}' | sed 's/(.*//' | sort >$out/with
printf '#include <stddef.h>\n#include <stdint.h>\n#if defined(__x86_64__)\n#include <immintrin.h>\n#elif defined(__aarch64__)\n#include <arm_neon.h>\n#endif\n' |
    ${CC:-cc} -dM -E - | awk '{print $2}' | sed 's/(.*//' | sort >$out/without
comm -23 $out/with $out/without | grep -v '^KOPT_\|^KAHAN_OPT_' >$out/log
! grep . $out/log >/dev/null
report $? "every macro that stays begins with KOPT_ or KAHAN_OPT_"
for source in plain no_simd; do
    for compiler in "gcc -Os" "gcc -O2" "gcc -O3" "clang -O2" "clang -O3"; do
        command -v ${compiler%% *} >/dev/null || continue
        $compiler -fno-stack-protector -I. -c $out/$source.c -o $out/needs.o 2>$out/log && nm -u $out/needs.o | grep -v _GLOBAL_OFFSET_TABLE_ >$out/log
        ! grep . $out/log >/dev/null
        report $? "$source, $compiler: no function of any library is called"
    done
done
echo "1..$count"
