# The demo refuses bad input in one line and, on the default file, ends with success. Prints TAP.
out=build/tests/demo
mkdir -p $out
count=0
report() {
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; sed 's/^/# /' $out/log; fi
}
refused() { # refused DESCRIPTION ARGUMENT: one line on stderr, exit code not 0
    build/demo/demo "$2" >/dev/null 2>$out/log
    status=$?
    [ $status != 0 ] && [ "$(wc -l <$out/log)" = 1 ]
    report $? "$1 is refused in one line"
}
./build.sh demo >$out/log 2>&1
report $? "the demo on the header itself: Kahan and exact match fp32, nearest does not"
sed 's/^/# /' $out/log | grep -v '^# *$' | head -40
grep -q 'loss and tanh by builtin' $out/log
report $? "it says who computes loss and tanh"
[ "$(head -1 build/demo/loss.csv)" = arm,step,train_loss,val_loss ]
report $? "loss.csv has its columns"
for arm in fp32 nearest stochastic kahan exact; do
    grep -q "^$arm," build/demo/loss.csv
    report $? "loss.csv has the arm $arm"
done
grep -q '</svg>' build/demo/loss.svg
report $? "loss.svg is complete"
: >$out/empty
printf 'tiny' >$out/tiny
refused "a missing file" $out/missing
refused "a directory" $out
refused "an empty file" $out/empty
refused "a tiny file" $out/tiny

# --precision, with fewer steps and a loss scale that grows sooner: fp32, mixed precision and pure 16 bit in one table
sed -e 's/STEPS = 10000/STEPS = 300/' -e 's/SCALE_GROWS = 2000/SCALE_GROWS = 40/' \
    -e 's,"../../kahan_opt.h","kahan_opt.h",' docs/examples/demo.c >$out/quick.c
${CC:-cc} -std=c99 -O3 -I. -o $out/quick $out/quick.c -lm >$out/log 2>&1
report $? "a short demo compiles"
cp kahan_opt.h $out # it writes to build/demo below the directory it runs in
(cd $out && ./quick --precision all) >$out/log 2>&1
report $? "--precision all: mixed precision and pure 16 bit match fp32"
sed 's/^/# /' $out/log | grep -A 6 '^# arm'
for row in fp32:16.0 amp_bf16:16.0 amp_fp16:16.0 bf16:10.0 fp16:10.0; do
    awk -v arm=${row%:*} -v bytes=${row#*:} '$1 == arm && $5 == bytes { found = 1 } END { exit !found }' $out/log
    report $? "--precision all: ${row%:*} is in the table with ${row#*:} bytes per parameter"
    [ "$(grep -c "^${row%:*}," $out/build/demo/loss.csv)" = 50 ]
    report $? "--precision all: loss.csv has the arm ${row%:*}"
done
grep -q 'overflowed fp16: amp_fp16 [1-9][0-9]* fp16 [1-9][0-9]*$' $out/log
report $? "--precision all: the loss scale of the fp16 arms grows, overflows, and falls"
(cd $out && ./quick --precision amp_bf16) >$out/log 2>&1
[ $? = 0 ] && [ "$(cut -d, -f1 $out/build/demo/loss.csv | sort -u | tr '\n' ' ')" = 'amp_bf16 arm fp32 ' ]
report $? "--precision amp_bf16: that one beside fp32"
# --rule, with 1000 steps
sed -e 's/STEPS = 10000/STEPS = 1000/' -e 's,"../../kahan_opt.h","kahan_opt.h",' docs/examples/demo.c >$out/rule.c
${CC:-cc} -std=c99 -O3 -I. -o $out/rule $out/rule.c -lm >$out/log 2>&1 &&
    (cd $out && ./rule --rule adam_atan2) >$out/log 2>&1
report $? "--rule adam_atan2: within 0.02 of AdamW"
sed 's/^/# /' $out/log | grep -A 4 '^# arm'
[ "$(cut -d, -f1 $out/build/demo/loss.csv | sort -u | tr '\n' ' ')" = 'adam_atan2 arm bf16 fp32 ' ]
report $? "--rule adam_atan2: beside fp32 and bf16"
for arguments in '--rule' '--rule adam' '--fp16 --rule adam_atan2' '--precision' '--precision fp8' \
    '--fp16 --precision all'; do
    $out/quick $arguments >/dev/null 2>$out/log
    [ $? = 2 ] && grep -q '^usage' $out/log
    report $? "refused: $arguments"
done
echo "1..$count"
