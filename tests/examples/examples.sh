# Checks that the examples do what their text says. Prints TAP.
out=build/tests/examples
mkdir -p $out
warnings='-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror'
. tests/tap.sh

${CC:-cc} $warnings -O2 -o $out/underflow docs/examples/underflow.c >$out/log 2>&1 && $out/underflow >$out/log
report $? "underflow: learns with a loss scale and not without"
awk '$1 == "none" && $2 == 100 && $4 == 0 && $6 == $7 { found = 1 } END { exit !found }' $out/log
report $? "underflow: without, every gradient is zero and the loss stays what it was"
awk '$1 == "dynamic," && $4 == 0 && $6 > 0 && $9 < $8 / 1000 { found = 1 } END { exit !found }' $out/log
report $? "underflow: with, none is zero, some steps overflow and are skipped, the loss falls"
sed 's/^/# /' $out/log

${CC:-cc} $warnings -O2 -o $out/compress docs/examples/compress.c -lm >$out/log 2>&1 && $out/compress >$out/log
report $? \
    "compress: SGD with 16, 8 and 1 bit and error feedback reaches the loss of fp32, with biased signs it does not"
sed 's/^/# /' $out/log

${CC:-cc} $warnings -O2 -pthread -o $out/threads docs/examples/threads.c >$out/log 2>&1 &&
    { $out/threads && $out/threads 5; } >$out/log
report $? "threads: the step of one tensor in 1, 2 and 5 threads gives the same bits"
sed 's/^/# /' $out/log

${CC:-cc} $warnings -O2 -o $out/openmp docs/examples/openmp.c >$out/log 2>&1 && $out/openmp >$out/log
report $? "openmp: without OpenMP it runs, in one thread"
echo 'int main(void) { return 0; }' >$out/probe.c
if ${CC:-cc} -fopenmp -o $out/probe $out/probe.c 2>/dev/null; then
    ${CC:-cc} $warnings -O2 -fopenmp -o $out/openmp docs/examples/openmp.c >$out/log 2>&1 &&
        OMP_NUM_THREADS=3 $out/openmp >$out/log
    report $? "openmp: in 3 threads it gives the bits of one"
    sed 's/^/# /' $out/log
else
    skip openmp "the compiler has no OpenMP"
fi

rm -f $out/run*
CC="${CC:-cc} -DKAHAN_OPT_NO_SIMD" sh build.sh examples checkpoint.c $out/run 8 4 >$out/log 2>&1 &&
    grep -q '^batch 8, ' $out/log
report $? "build.sh examples NAME builds an example and runs it with the words after NAME"
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
