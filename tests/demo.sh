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
echo "1..$count"
