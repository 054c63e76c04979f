# exhaustive.sh REFERENCE COMMAND...: COMMAND makes all 2^32 conversions to bf16 and fp16 on an emulated machine. Their
# hash must be that of the integer reference, which REFERENCE computes on this machine. Both are builds of
# test_convert.c. Prints TAP.
expected=$("$1" reference)
shift
actual=$("$@" hash)
if [ -n "$actual" ] && [ "$actual" = "$expected" ]; then printf 'ok'; else printf 'not ok'; fi
echo " 1 - all 2^32 fp32 to bf16 and fp16: hash $actual, reference $expected"
echo "1..1"
