# The programs of docs/guide.md that need no library: Adam by hand on the task of the others.
set -eu
cd "$(dirname "$0")/../../.."
mkdir -p build/examples
${CC:-cc} -O2 -o build/examples/step1 docs/examples/steps/step1.c -lm
build/examples/step1
