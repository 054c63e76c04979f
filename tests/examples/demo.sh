# The demo refuses bad input with one line, and succeeds on the default file. Prints TAP.
out=build/tests/demo
mkdir -p $out
. tests/tap.sh
refused() { # refused DESCRIPTION ARGUMENT: one line on stderr, exit code not 0
    $out/quick "$2" >/dev/null 2>$out/log
    status=$?
    [ $status != 0 ] && [ "$(wc -l <$out/log)" = 1 ]
    report $? "$1 is refused in one line"
}
# Does each curve of a picture end at the validation loss of its arm in a table, within the second decimal? The scale is
# that of the labels at the left.
ends() { # ends SVG TABLE
    awk -F '[<>]' '
        function number(text, name) { sub(".*" name "=\"", "", text); return text + 0 }
        NR == FNR {
            for (i = 2; i <= NF; i++) if ($i ~ /text-anchor="end"/) { # the first label and the last one
                y1 = number($i, " y") - 5
                v1 = $(i + 1)
                if (!labels++) { y0 = y1; v0 = v1 }
            }
            if (/^<polyline/) { n = split($2, point, /[", ]+/); y = point[n - 1] }
            if (match($0, />[a-z0-9_]+, [0-9]+ bytes</)) {
                name = substr($0, RSTART + 1, RLENGTH)
                sub(/,.*/, "", name)
                end[name] = v0 + (y - y0) * (v1 - v0) / (y1 - y0)
            }
            next
        }
        FNR == 1 { FS = " "; $0 = $0 }
        $1 in end && $2 + 0 > 0 {
            arms++
            if (end[$1] - $3 > 0.006 || $3 - end[$1] > 0.006) print $1 " ends at " end[$1] ", the table has " $3
        }
        END { if (arms != 5) print arms + 0 " arms instead of 5" }' "$1" "$2" >$out/log
    [ ! -s $out/log ]
}
ends docs/loss.svg README.md
report $? "README.md: each curve of its picture ends where its table says"
full() { # what README.md shows: a minute
    ./build.sh demo >$out/run 2>&1
    status=$?
    cp $out/run $out/log
    report $status "the demo on the header itself: Kahan and exact match fp32, nearest does not"
    sed 's/^/# /' $out/log | grep -v '^# *$' | head -40
    awk '$1 ~ /^(fp32|kahan|exact|nearest)$/ && NF == 6 && $2 + 0 > 0 { minus[$1] = $4; loss[$1] = $3; rows++ }
        function near(arm) { return minus[arm] <= 0.01 && minus[arm] >= -0.01 && loss[arm] - loss["fp32"] <= 0.0101 }
        END { exit !(rows == 4 && near("kahan") && near("exact") && minus["nearest"] >= 0.1) }' $out/log
    report $? "its table says so, too: Kahan and exact within 0.01, nearest worse by at least 0.1"
    sed -n '/^<!-- figures: demo -->$/,/^<!-- end -->$/p' README.md >$out/quoted
    awk 'function check(what, x) { # the values that README.md quotes, then those of this run
            if (NR == FNR) quoted[what] = x
            else if (!(what in quoted) || x - quoted[what] > 0.1 || quoted[what] - x > 0.1) print what, x, quoted[what]
            numbers++
        }
        $1 ~ /^(fp32|nearest|stochastic|kahan|exact)$/ && $2 + 0 > 0 && NF >= 5 {
            for (i = 2; i <= 5; i++) check($1 " " i, $i)
        }
        $1 == "PASS:" {
            sub(/kahan ends/, "kahan")
            for (i = 1; i < NF; i++) if ($i ~ /^(kahan|exact|nearest)$/) check("PASS " $i, $(i + 1) + 0)
        }
        END { if (numbers != 46) print numbers + 0, "numbers instead of 46" }' $out/quoted $out/log >$out/differences
    cat $out/differences >>$out/log
    test ! -s $out/differences
    report $? "README.md quotes what this run prints, within 0.1"
    grep -q 'instruction set ' $out/log
    report $? "it names the instruction set"
    [ "$(head -1 build/demo/loss.csv)" = arm,step,train_loss,val_loss,arrived ]
    report $? "loss.csv has its columns"
    for arm in fp32 nearest stochastic kahan exact; do
        grep -q "^$arm," build/demo/loss.csv
        report $? "loss.csv has the arm $arm"
    done
    grep -q '</svg>' build/demo/loss.svg
    report $? "loss.svg is complete"
    awk -F '[ ,]+' 'NR == FNR { if ($2 == 10000) last[$1] = $4; next }
        $1 in last && $2 + 0 > 0 { arms++; if (sprintf("%.4f", last[$1]) != $3) print $1, last[$1], $3 }
        END { if (arms != 5) print arms + 0 " arms instead of 5" }' build/demo/loss.csv $out/run >$out/log
    test ! -s $out/log
    report $? "loss.csv ends at the validation losses of the table"
    ends build/demo/loss.svg $out/run
    report $? "... and so does loss.svg"
    grep -q '</svg>' build/demo/arrived.svg &&
        awk -F, '$1 == "fp32" && $5 != 1 { print } $1 == "nearest" && $2 == 10000 && $5 > 0.05 { print }
            $1 ~ /^(stochastic|kahan|exact)$/ && ($5 < 0.5 || $5 > 1.5) { print }
            END { if (NR != 101) print NR, "lines instead of 101" }' build/demo/loss.csv >$out/log
    [ $? = 0 ] && [ ! -s $out/log ]
    report $? "the updates arrive with stochastic, kahan and exact, and with nearest no more at the end"
}
! turn 4 || full

# --precision, with fewer steps and a loss scale that grows sooner: fp32, mixed precision and pure 16 bit in one table
sed -e 's/STEPS = 10000/STEPS = 300/' -e 's/SCALE_GROWS = 2000/SCALE_GROWS = 40/' \
    -e 's,"../../kahan_opt.h","kahan_opt.h",' docs/examples/demo.c >$out/quick.c
${CC:-cc} -std=c99 -O3 -I. -o $out/quick $out/quick.c -lm >$out/log 2>&1
report $? "a short demo compiles"
: >$out/empty
printf 'tiny' >$out/tiny
refused "a missing file" $out/missing
refused "a directory" $out
refused "an empty file" $out/empty
refused "a tiny file" $out/tiny

cp kahan_opt.h $out # it writes to build/demo in the current folder
(cd $out && ./quick --precision all) >$out/log 2>&1
report $? "--precision all: mixed precision and pure 16 bit match fp32"
sed 's/^/# /' $out/log | grep -A 6 '^# arm'
for row in fp32:16.0 amp_bf16:16.0 amp_fp16:16.0 bf16:10.0 fp16:10.0; do
    awk -v arm=${row%:*} -v bytes=${row#*:} '$1 == arm && $5 == bytes { found = 1 } END { exit !found }' $out/log
    report $? "--precision all: ${row%:*} is in the table with ${row#*:} bytes per parameter"
    [ "$(grep -c "^${row%:*}," $out/build/demo/loss.csv)" = 20 ]
    report $? "--precision all: loss.csv has the arm ${row%:*}"
done
grep -q 'overflowed fp16: amp_fp16 [1-9][0-9]* fp16 [1-9][0-9]*$' $out/log
report $? "--precision all: the loss scale of the fp16 arms grows, overflows, and falls"
(cd $out && ./quick --precision amp_bf16) >$out/log 2>&1
[ $? = 0 ] && [ "$(cut -d, -f1 $out/build/demo/loss.csv | sort -u | tr '\n' ' ')" = 'amp_bf16 arm fp32 ' ]
report $? "--precision amp_bf16: compared with fp32"
# --rule, with 1000 steps
sed -e 's/STEPS = 10000/STEPS = 1000/' -e 's,"../../kahan_opt.h","kahan_opt.h",' docs/examples/demo.c >$out/rule.c
${CC:-cc} -std=c99 -O3 -I. -o $out/rule $out/rule.c -lm >$out/log 2>&1 &&
    (cd $out && ./rule --rule adam_atan2) >$out/log 2>&1
report $? "--rule adam_atan2: within 0.02 of AdamW"
sed 's/^/# /' $out/log | grep -A 4 '^# arm'
[ "$(cut -d, -f1 $out/build/demo/loss.csv | sort -u | tr '\n' ' ')" = 'adam_atan2 arm bf16 fp32 ' ]
report $? "--rule adam_atan2: compared with fp32 and bf16"
for arguments in '--rule' '--rule adam' '--fp16 --rule adam_atan2' '--precision' '--precision fp8' \
    '--fp16 --precision all'; do
    $out/quick $arguments >/dev/null 2>$out/log
    [ $? = 2 ] && grep -q '^usage' $out/log
    report $? "refused: $arguments"
done
echo "1..$count"
