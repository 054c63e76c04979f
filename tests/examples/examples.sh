# Checks that the examples do what their text says. Prints TAP.
out=build/tests/examples
mkdir -p $out
warnings='-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror'
scalar="$warnings -O2 -DKAHAN_OPT_NO_SIMD" # compiles in a fifth of the time; the bits are the same
. tests/tap.sh

${CC:-cc} $warnings -O2 -o $out/underflow docs/examples/underflow.c >$out/log 2>&1 && $out/underflow >$out/log
report $? "underflow: learns with a loss scale and not without"
awk '$1 == "none" && $2 == 100 && $4 == 0 && $6 == $7 { found = 1 } END { exit !found }' $out/log
report $? "underflow: without, every gradient is zero and the loss stays what it was"
awk '$1 == "dynamic," && $4 == 0 && $6 > 0 && $9 < $8 / 1000 { found = 1 } END { exit !found }' $out/log
report $? "underflow: with, none is zero, some steps overflow and are skipped, the loss falls"
sed 's/^/# /' $out/log

${CC:-cc} $scalar -o $out/memory docs/examples/memory.c >$out/log 2>&1 && $out/memory >$out/log &&
    sed -n '/^| AdamW | released/,/^$/p' docs/faq.md | sed '$d' | diff - $out/log >$out/difference
report $? "memory: docs/faq.md has the table that it prints"
$out/memory 7b >$out/log 2>&1
[ $? = 2 ] && grep -q '^usage' $out/log
report $? "memory: refuses what is not a number"

${CC:-cc} $scalar -o $out/tasks docs/examples/tasks.c >$out/log 2>&1 && $out/tasks >$out/log &&
    [ "$(grep -c ': done$' $out/log)" = 7 ]
report $? "tasks: the listings of docs/guide.md run"
sed 's/^/# /' $out/log

${CC:-cc} $warnings -O2 -o $out/compress docs/examples/compress.c -lm >$out/log 2>&1 && $out/compress >$out/log
report $? \
    "compress: SGD with 16, 8 and 1 bit and error feedback reaches the loss of fp32, with biased signs it does not"
sed 's/^/# /' $out/log

${CC:-cc} $warnings -O2 -pthread -o $out/threads docs/examples/threads.c >$out/log 2>&1 &&
    { $out/threads && $out/threads 5; } >$out/log
report $? "threads: the step of one tensor in 1, 2 and 5 threads gives the same bits"
sed 's/^/# /' $out/log

${CC:-cc} $scalar -o $out/openmp docs/examples/openmp.c >$out/log 2>&1 && $out/openmp >$out/log
report $? "openmp: without OpenMP it runs, in one thread"
echo 'int main(void) { return 0; }' >$out/probe.c
if ${CC:-cc} -fopenmp -o $out/probe $out/probe.c 2>/dev/null; then
    ${CC:-cc} $scalar -fopenmp -o $out/openmp docs/examples/openmp.c >$out/log 2>&1 &&
        OMP_NUM_THREADS=3 $out/openmp >$out/log
    report $? "openmp: in 3 threads it gives the bits of one"
    sed 's/^/# /' $out/log
else
    skip openmp "the compiler has no OpenMP"
fi

sh build.sh examples clients >$out/log 2>&1 && [ "$(grep -c '^step .00: ' $out/log)" = 4 ] &&
    grep -q '^the bits are the same' $out/log
report $? "clients: 1 and 3 threads, and a client that loads what the other saved: the same bits"
sed 's/^/# /' $out/log

sh build.sh examples languages >$out/log 2>&1
report $? "languages: those whose compilers are here find the sizes and offsets of the header, and print the same bits"
sed 's/^/# /' $out/log
${CC:-cc} -fsyntax-only -Wall -Wextra -Wpedantic -Wstrict-prototypes -Wmissing-prototypes -Werror -I. \
    build/examples/languages/kahan_opt.c >$out/log 2>&1
report $? "languages: bindings.py writes C without warnings"
sed 's/^/# /' $out/log
version=$(sed -n 's/^#define KOPT_VERSION \([0-9]*\).*/\1/p' kahan_opt.h)
[ "$(grep -il "version.* $version[,;]" docs/examples/languages/[Tt]rain.* | wc -l)" = 3 ] # Go reads the header
report $? "languages: also where a compiler is missing, the program is for this version"
if command -v luajit >/dev/null; then
    sed 's/reserved_\[7\]/reserved_[8]/' docs/examples/languages/train.lua >$out/wrong.lua
    ! luajit $out/wrong.lua build/examples/languages/libkahan_opt.so >$out/log 2>&1 &&
        grep -q 'other sizes of structs' $out/log
    report $? "languages: a binding with a wrong size refuses to go on"
    sed 's/lr, max_lr, weight_decay,/lr, weight_decay, max_lr,/' docs/examples/languages/train.lua >$out/wrong.lua
    ! luajit $out/wrong.lua build/examples/languages/libkahan_opt.so >$out/log 2>&1 &&
        grep -q 'kopt_optimizer.weight_decay: double is elsewhere' $out/log
    report $? "languages: so does one with a wrong offset"
fi
if command -v cmake >/dev/null && command -v pkg-config >/dev/null; then
    CFLAGS=-DKAHAN_OPT_NO_SIMD sh build.sh examples cmake >$out/log 2>&1 &&
        [ "$(grep -c "version $version, weight -0.000999451" $out/log)" = 3 ] &&
        grep -q "pkg-config: .* $((version / 10000)).$((version / 100 % 100)).$((version % 100))\$" $out/log
    report $? "cmake: FetchContent, find_package and pkg-config find this version, and its step"
    sed 's/^/# /' $out/log
    rm -rf $out/shared $out/prefix $out/libraries
    CFLAGS=-DKAHAN_OPT_NO_SIMD cmake -S docs/examples/cmake -B $out/shared -DBUILD_SHARED_LIBS=ON \
        "-DCMAKE_INSTALL_PREFIX=$PWD/$out/prefix" "-DCMAKE_INSTALL_LIBDIR=$PWD/$out/libraries" >$out/log 2>&1 &&
        cmake --build $out/shared >>$out/log 2>&1 && cmake --install $out/shared >>$out/log 2>&1 &&
        ${CC:-cc} -o $out/shared/app docs/examples/cmake/app/main.c \
            $(PKG_CONFIG_PATH=$out/libraries/pkgconfig pkg-config --cflags --libs kahan_opt) >>$out/log 2>&1 &&
        LD_LIBRARY_PATH=$out/libraries $out/shared/app >>$out/log 2>&1
    report $? "cmake: a shared library in a folder outside the prefix"
    sed 's/^/# /' $out/log
    grep -q "libkahan_opt\.so\.$((version / 10000))\.$((version / 100 % 100))\.$((version % 100))" $out/shared/app
    report $? "cmake: the program asks for the library of its version"
    cmp LICENSE $out/prefix/share/licenses/kahan_opt/LICENSE &&
        cmp kahan_opt_cuda.cuh $out/prefix/include/kahan_opt_cuda.cuh
    report $? "cmake: the CUDA companion and the licence are installed, too"
else
    skip cmake "no cmake or pkg-config"
fi
python3 docs/examples/languages/sizes.py kahan_opt.h >$out/log 2>&1 &&
    grep -q '^ *[0-9]*  *sizeof kopt_tensor$' $out/log && grep -q '^ *4 + 4  *kopt_optimizer.rule: kopt_rule$' $out/log
report $? "sizes.py prints sizes and offsets"

rm -f $out/run*
CC="${CC:-cc} -DKAHAN_OPT_NO_SIMD" sh build.sh examples checkpoint.c $out/run 8 4 >$out/log 2>&1 &&
    grep -q '^batch 8, ' $out/log
report $? "build.sh examples NAME builds an example and runs it with the words after NAME"

${CC:-cc} $scalar -o $out/inspect docs/examples/inspect.c >$out/log 2>&1 && $out/inspect $out/run >$out/log &&
    grep -q 'optimizer  AdamW, step 2,' $out/log && grep -q 'rounding   Kahan, its residual stochastic$' $out/log &&
    grep -q 'tensor 2    id 1, 16 weights in bf16, ' $out/log &&
    grep -q 'whole: 4 tensors, 97 weights, 1220 bytes, the right checksum; all weights are finite' $out/log
report $? "inspect: a whole checkpoint, in words, after 516 bytes of the program's own"
flip() { # flip BYTE BIT: of a copy of the checkpoint
    cp $out/run $out/flipped
    byte=$(od -An -tu1 -j "$1" -N 1 $out/run)
    printf "\\$(printf %o $((byte ^ 1 << $2)))" | dd of=$out/flipped bs=1 seek="$1" conv=notrunc 2>/dev/null
    $out/inspect $out/flipped >$out/log
}
wrong=''
for place in '558 3 42, in the header' '698 0 182, in tensor 1' '1408 7 892, in tensor 2' '1718 5 1202, in tensor 4' \
    '1733 2 1217, in the checksum itself'; do
    read -r byte bit where <<TEXT
$place
TEXT
    flip "$byte" "$bit"
    [ $? = 1 ] && grep -q "one flipped bit would explain it: bit $bit of byte $where\$" $out/log || wrong="$wrong $byte"
done
[ -z "$wrong" ]
report $? "inspect: the place of a flipped bit$wrong"
flip 521 1
[ $? = 1 ] && grep -q 'DAMAGED or CUT OFF within its head' $out/log
report $? "inspect: a flipped bit in what says how the checkpoint is to be read"
head -c 1608 $out/run >$out/cut
$out/inspect $out/run $out/cut kahan_opt.h >$out/log
[ $? = 1 ] && grep -q 'CUT OFF: 1092 of 1220 bytes are there, of which tensor 3 of 4 is the last' $out/log
report $? "inspect: a checkpoint that was cut off"
! $out/inspect $out/missing 2>$out/log && grep -q 'missing: No such file' $out/log &&
    ! $out/inspect build.sh >$out/log && grep -q 'no checkpoint of kopt_save() in' $out/log
report $? "inspect: no file, no checkpoint"

sh build.sh examples firmware -DEPOCHS=1 -DBY_WEIGHT >$out/log 2>&1 &&
    grep -q '^the same lines on [1-5] machine' $out/log
report $? "build.sh examples NAME runs a folder's run.sh with the words after NAME"
sh build.sh examples >$out/list 2>$out/log
for file in docs/examples/*; do
    name=${file##*/}
    case $name in README.md | __pycache__ | python) continue ;; esac # python: a package
    [ ! -d $file ] || [ -f $file/run.sh ] || echo "the folder $name has no run.sh"
    grep -q "^  ${name%.*}  *[A-Za-z].*\.\$" $out/list || echo "build.sh examples does not list $name with a sentence"
    line=$(grep -F "[$name]($name)" docs/examples/README.md)
    case $line in
    *"\`./build.sh examples ${name%.*}\`"* | *"\`./build.sh examples ${name%.*} "*) ;;
    '') echo "docs/examples/README.md does not name $name" ;;
    *) echo "docs/examples/README.md does not say ./build.sh examples ${name%.*}" ;;
    esac
done >>$out/log 2>&1
[ ! -s $out/log ]
report $? "build.sh examples and docs/examples/README.md name every example"

for program in bench atan2 theorem1; do # they only have to compile here
    ${CC:-cc} -std=c99 -O1 -Wall -Wextra -c -o $out/bench_$program.o bench/$program.c >$out/log 2>&1
    report $? "bench/$program.c compiles"
done
echo "1..$count"
