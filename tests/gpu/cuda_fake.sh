# Checks ptx.py and cuda_fake.c with small PTX kernels, without nvcc: right ones give their values, and
# every mistake that the runtime looks for is seen. Needs Python and a compiler with _Float16. Prints TAP.
out=build/tests/cuda_fake
mkdir -p $out
compiler=${CC:-cc}
. tests/tap.sh
echo '#include <ucontext.h>
_Float16 half; __int128 wide; ucontext_t context;' >$out/probe.c
$compiler -c -o $out/probe.o $out/probe.c 2>$out/log || {
    echo "1..0 # SKIP the compiler has no _Float16, __int128 or ucontext.h"
    exit 0
}
program() { # program NAME EDIT: $out/NAME, of the kernels after an edit by sed
    sed "$2" tests/gpu/cuda_fake_test.ptx >"$out/$1.ptx" &&
        python3 tests/gpu/ptx.py "$out/$1.ptx" "$out/$1.c" &&
        $compiler -std=gnu99 -O1 -w -ffp-contract=off -Itests/gpu -c -o "$out/$1.o" "$out/$1.c" &&
        $compiler -o "$out/$1" $out/test.o "$out/$1.o" $out/fake.o -lm
}
expect() { # expect PROGRAM ARGUMENT OUTPUT DESCRIPTION: the output must contain this and no wrong value
    "$out/$1" "$2" >$out/log 2>&1
    grep -q "$3" $out/log && ! grep -q wrong $out/log
    report $? "$4"
}

for source in fake:cuda_fake test:cuda_fake_test; do
    $compiler -std=gnu99 -Wall -Wextra -Werror -O2 -c -o $out/${source%:*}.o tests/gpu/${source#*:}.c
done >$out/log 2>&1
report $? "the runtime compiles without a warning"
program right '' >$out/log 2>&1
report $? "PTX becomes C that compiles"
expect right values '^right$' "instructions have the values that NVIDIA's manual gives"
expect right count '^right$' "instructions are counted, in all and of the longest thread"
expect right streams '^right$' "work waits for a synchronization; streams are not ordered without one"
expect right captures '^right$' "captures refuse what cannot be captured; a graph reads at its replay"
expect right loads '^right$' "a kernel is loaded once, by its first launch or before it, and not in a capture; faults"
expect right errors '^right$' "the last error stays until it is asked for"
expect right store '^right$' "the last word of an allocation is inside"
expect right misaligned 'misaligned access in store' "a misaligned store"
expect right beyond 'outside of every allocation in store' "a store beyond an allocation"
expect right before 'outside of every allocation in store' "a store before an allocation"
expect right host 'outside of every allocation in store' "a store to pageable memory"
expect right freed 'freed memory in store' "a store to freed memory"
expect right shared_noise '^right$' "shared memory is full of noise"
expect right shared_beyond 'outside of shared memory' "a load beyond shared memory"
expect right local_load '^right$' "the last word of local memory is inside"
expect right local_beyond 'outside of local memory' "a load beyond local memory"
expect right divergent 'a barrier that some threads miss' "a barrier that half of the threads miss"
expect right ended "ended before its warp's barrier" "a lane that ended before a barrier of its warp"
expect right outside 'a lane outside of its mask' "a shuffle from a lane outside of the mask"
expect right loop 'a race in global memory in loop' "two threads store to one word"
expect right global_race 'a race in global memory in global_race' "two blocks add without an atomic operation"
expect right neighbour_once '^right$' "neighbours in shared memory with barriers: no race"
expect right neighbour 'a race in global memory' "two blocks store the same values to the same words"
expect right last_block '^right$' "the last block, after fences and atomic operations: no race"

# The same kernels without one line.
without() { # without NAME PATTERN KERNEL OUTPUT DESCRIPTION
    program "$1" "/$2/d" >$out/log 2>&1 || { report 1 "$1 compiles"; return; }
    expect "$1" "$3" "$4" "$5"
}
race='a race in shared memory in neighbour'
without barrier '\/\/ BARRIER' neighbour_once "$race" "a barrier is missing"
without warp '\/\/ WARP' neighbour_once "$race" "a warp's barrier is missing"
without fence_1 '\/\/ FENCE 1' last_block 'a race in global memory in last_block' "the fence before the count"
without fence_2 '\/\/ FENCE 2' last_block 'a race in global memory in last_block' "the fence after the count"

refuse() { # refuse EDIT MESSAGE DESCRIPTION: the translator must not accept this
    sed "$1" tests/gpu/cuda_fake_test.ptx >$out/refused.ptx
    ! python3 tests/gpu/ptx.py $out/refused.ptx $out/refused.c >$out/log 2>&1 && grep -q "ptx.py: .*$2" $out/log
    report $? "$3"
}
refuse 's/popc.b32/popcx.b32/' 'popcx' "an unknown instruction is an error with its text"
refuse 's/mul.rn.f32/mul.rz.f32/' 'mul.rz.f32' "so is another rounding"
refuse 's/redux.sync.add.s32 %r4/redux.sync.add.s32 %x4/' '%x4' "so is a register without a declaration"
refuse 's/\[shared_by\]/[shared_by+8]/' 'outside of a parameter' "so is an access beyond a parameter"
echo "1..$count"
