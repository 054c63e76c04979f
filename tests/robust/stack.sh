# Measures how much stack the public functions use, with stack.c, for each compiler and its flags, by turns. Prints TAP
# and, as comments, the largest values of each build. WebAssembly's is in bench/wasm.sh: it has none that C sees.
out=build/tests/stack
mkdir -p $out
. tests/tap.sh
try() { # try COMPILER FLAGS... (-z now: not with the stack of the linker, which looks up memcpy at its first call)
    "$@" -std=c99 $warnings -I. -Wl,-z,now -o $out/stack tests/robust/stack.c >$out/log 2>&1 &&
        $out/stack >$out/log 2>&1
    report $? "$*"
    sed -n 's/^[a-z ]*ok [0-9]* - \([a-z0-9]*, .*\): \([0-9]*\) bytes, .*/\2 \1/p' $out/log | sed "s/^/#     /"
}
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
echo "1..$count"
[ $failed = 0 ]
