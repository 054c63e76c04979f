# The examples do what they say. Prints TAP.
out=build/tests/examples
mkdir -p $out
warnings='-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror'
count=0
report() { # report STATUS DESCRIPTION
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; sed 's/^/# /' $out/log; fi
}

${CC:-cc} $warnings -O2 -o $out/underflow docs/examples/underflow.c >$out/log 2>&1 && $out/underflow >$out/log
report $? "underflow: learns with a loss scale and not without"
awk '$1 == "none" && $2 == 100 && $4 == 0 && $6 == $7 { found = 1 } END { exit !found }' $out/log
report $? "underflow: without, every gradient is zero and the loss stays what it was"
awk '$1 == "dynamic," && $4 == 0 && $6 > 0 && $9 < $8 / 1000 { found = 1 } END { exit !found }' $out/log
report $? "underflow: with, none is zero, some steps overflow and are skipped, the loss falls"
sed 's/^/# /' $out/log
echo "1..$count"
