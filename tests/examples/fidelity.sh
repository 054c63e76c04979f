# `./build.sh bench fidelity quick`, the small settings of docs/evidence.md: the claims hold, the pictures and tables
# are there, and a claim that the numbers do not support makes it fail. The same for bench finetuning, scale and tasks.
# Prints TAP.
out=build/tests/fidelity
results=build/bench/fidelity_quick
rm -rf $out $results*
mkdir -p $out
. tests/tap.sh
said="$out/said $out/errors"
bench() { # bench WORD...
    ./build.sh bench ${evidence:-fidelity} "$@" >$out/said 2>$out/errors </dev/null
    status=$?
}

bench quick
[ $status = 0 ] && [ "$(grep -c '^shown: ' $out/said)" = 5 ]
report $? "the small settings: the numbers support all five claims"
sed -n 's/^shown: //p' $out/said >$out/claims
while read -r claim; do echo "# shown: $claim"; done <$out/claims

wrong=''
for name in loss stall decay moment bytes; do
    size=$(wc -c <${results}_$name.svg) || size=0
    [ "$size" -gt 5000 ] && [ "$size" -lt 60000 ] || wrong="$wrong $name"
done
python3 -c 'import sys, xml.dom.minidom as x; [x.parse(name) for name in sys.argv[1:]]' ${results}_*.svg || wrong=' XML'
[ -z "$wrong" ]
report $? "five pictures, each below 60 KB and good XML$wrong"
titles() { cat ${results}_*.svg | sed 's/<[^>]*>//g' | tr '\n' ' '; }
while read -r claim; do # a long title has two lines
    titles | grep -qF "$(echo "$claim" | cut -c 1-60)" || wrong="$wrong; $claim"
done <$out/claims
[ -z "$wrong" ]
report $? "each claim is the title of a picture$wrong"
for name in loss stall decay moment; do
    grep -q '^| NEAREST | \|^| bf16 to nearest | ' ${results}_$name.md || wrong="$wrong $name"
done
[ -z "$wrong" ]
report $? "four tables$wrong"

swap() { # swap FILE A B: the results of A under the name of B, and the reverse
    awk -F, -v OFS=, -v a="$2" -v b="$3" '
        { for (i = 1; i <= 3; i++) if ($i == a) $i = b; else if ($i == b) $i = a }
        1' ${results}_"$1".csv >$out/swapped
    ! cmp -s $out/swapped ${results}_"$1".csv && cp $out/swapped ${results}_"$1".csv
}
swap loss NEAREST 'COMPACT with 8-bit moments'
swap stall KAHAN NEAREST
swap decay KAHAN NEAREST
swap moment bf16 'bf16 to nearest'
bench quick draw
[ $status = 1 ] && [ "$(grep -c '^NOT SHOWN: ' $out/said)" = 5 ]
report $? "results that are swapped: no claim is shown, and the exit status is 1"
rm ${results}_*
bench quick draw
[ $status = 2 ] && grep -q '^fidelity: there are no results to draw' $out/errors
report $? "nothing to draw: an error says so"

evidence=finetuning results=build/bench/finetuning_quick
rm -f $results*
bench quick
[ $status = 0 ] && [ "$(grep -h '^| KAHAN, drawn | ' $results.md ${results}_*.md | wc -l)" = 4 ] &&
    grep -q '</svg>' $results.svg && grep -q '</svg>' ${results}_policy.svg && grep '^drawn: ' $out/said | sed 's/^/# /'
report $? "bench finetuning quick: residuals that are drawn show fp32's progress, others do not"
sed 's/"KAHAN, drawn"/@/; s/,KAHAN,/,"KAHAN, drawn",/; s/@/KAHAN/' $results.csv >$out/swapped
cp $out/swapped $results.csv
bench quick draw
[ $status = 1 ]
report $? "results that are swapped: the exit status is 1"

evidence=scale results=build/bench/scale
rm -f ${results}_quick*
bench quick
[ $status = 0 ] && grep -q '^| NEAREST | ' ${results}_quick.md && ! grep '^NOT SHOWN' $out/said
report $? "bench scale quick: the numbers support the claims"
grep '^sha256 of the numbers' $out/said >$out/numbers
sed -i '/,KAHAN,1,/d' ${results}_quick.csv
bench quick
[ $status = 0 ] && grep -qxF "$(cat $out/numbers)" $out/said &&
    grep -q '^scale: 34 runs are done, 2 are not' $out/errors
report $? "begun again, it makes the runs that are missing, with the same numbers"
swap quick KAHAN NEAREST
bench quick draw
[ $status = 1 ] && grep -q '^NOT SHOWN: level with fp32: KAHAN' $out/said
report $? "results that are swapped: the exit status is 1"
evidence=tasks results=build/bench/tasks
rm -f ${results}_quick*
bench quick
[ $status = 0 ] && [ "$(grep -c '^shown: ' $out/said)" = 2 ] && grep -q '^| NEAREST | ' ${results}_quick.md
report $? "bench tasks quick: both claims are shown"
swap quick KAHAN NEAREST
bench quick draw
[ $status = 1 ] && [ "$(grep -c '^NOT SHOWN: ' $out/said)" = 2 ]
report $? "bench tasks: results that are swapped: no claim is shown, and the exit status is 1"
rm ${results}_quick.csv
bench quick draw
[ $status = 2 ] && grep -q '^tasks: there are no results to draw' $out/errors
report $? "bench tasks: nothing to draw: an error says so"
echo "1..$count"
