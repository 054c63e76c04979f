"""Prints the sizes and offsets of all structs, as CC (default cc) lays them out, for bindings that are written by hand.

    python3 docs/examples/languages/sizes.py kahan_opt.h"""
import os
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
sys.dont_write_bytecode = True
import bindings  # noqa: E402

PRINT = '''
#include <stdio.h>
#include <string.h>
int main(void) {
    const kopt_layout_row *row;
    for (row = kopt_layout; row->name; row++) {
        if (strstr(row->name, "sizeof ")) printf("%6d         %s\\n", (int)row->a, row->name);
        if (strstr(row->name, ": ")) printf("%6d + %-6d%s\\n", (int)row->a, (int)row->b, row->name);
    }
    return 0;
}
'''


def main(path):
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(os.path.join(folder, "kahan_opt"))
        bindings.write(bindings.Header(path), path, folder)
        source, program = os.path.join(folder, "kahan_opt.c"), os.path.join(folder, "sizes")
        with open(source, "a", encoding="utf-8") as f:
            f.write(PRINT)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.check_call(compiler + ["-I" + os.path.dirname(os.path.abspath(path)), "-o", program, source])
        subprocess.check_call([program])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "kahan_opt.h")
