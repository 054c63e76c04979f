"""SASS instructions for each element: those of ptxas, weighted by how often the PTX that they come from was executed.

    python3 tests/gpu/sass.py PROFILE SASS [LIMITS]

SASS is what `nvdisasm -gp -c` prints of a cubin that `ptxas -lineinfo` made: it names the line of the PTX file of each
instruction. PROFILE is what tests/gpu/cuda_budget.c writes to the file that PTX_PROFILE names: for each mode a line
`mode N NAME` and lines FIRST LAST COUNT, how often the basic block of these lines ran, all threads together. A basic
block of the SASS ran as often as most of its instructions say. Not counted: the slow paths of division and root, which
ordinary numbers do not take. LIMITS has lines `LIMIT NAME`; a mode above its limit is an error. Prints TAP.
"""
import bisect
import re
import sys

LINE = re.compile(r'^\s*//## File "\.nv_debug_ptx_txt", line (\d+)')
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
LABEL = re.compile(r"^(\.L_\w+):")


def blocks_of(path):
    """The basic blocks of all functions: each the PTX lines of its instructions."""
    blocks, block, line, cold, called = [], [], 0, False, False
    with open(path, encoding="utf-8") as file:
        for text in file:
            if match := LINE.match(text):
                line = int(match[1])
            elif text.startswith("\t.section") or LABEL.match(text):
                if not cold and not called:
                    blocks.append(block)
                block, cold = [], False  # a label may be reached from elsewhere
                called = called and not text.startswith("\t.section")
            elif text.startswith("$"):  # the slow paths themselves, to the end of the section
                called = True
            elif (match := INSTRUCTION.match(text)) and match[1] != "NOP":
                block.append(line)
                if match[1].startswith("CALL"):  # a slow path: also what follows it up to the next label
                    cold = True
                elif match[1].split(".")[0] in ("BRA", "EXIT", "RET", "BRX"):
                    if not cold and not called:
                        blocks.append(block)
                    block = []
    return [block for block in blocks if block]


def profiles_of(path):
    """Of each mode: name, elements, sorted (first line, last line, count)."""
    modes = []
    with open(path, encoding="utf-8") as file:
        for text in file:
            if text.startswith("mode "):
                _, n, name = text.rstrip("\n").split(" ", 2)
                modes.append((name, int(n), []))
            else:
                modes[-1][2].append(tuple(map(int, text.split())))
    for mode in modes:
        mode[2].sort()
    return modes


def per_element(blocks, n, profile):
    starts = [first for first, _, _ in profile]
    total = 0
    for lines in blocks:
        counts = []
        for line in lines:
            at = bisect.bisect_right(starts, line) - 1
            counts.append(profile[at][2] if at >= 0 and line <= profile[at][1] else 0)
        counts.sort()
        total += len(counts) * counts[len(counts) // 2]
    return total / n


def main(arguments):
    limits = {}
    if len(arguments) > 2:
        with open(arguments[2], encoding="utf-8") as file:
            for text in file:
                if text.strip() and text[0] != "#":
                    limit, name = text.strip().split(None, 1)
                    limits[name] = float(limit)
    blocks, count, failed = blocks_of(arguments[1]), 0, 0
    for name, n, profile in profiles_of(arguments[0]):
        count += 1
        value = per_element(blocks, n, profile)
        good = 1 < value <= limits.get(name, value)
        failed += not good
        print(f"{'ok' if good else 'not ok'} {count} - {name}: {value:.1f}"
              + (f"; the limit is {limits[name]:g}" if name in limits else ""))
    for name in limits.keys() - {name for name, _, _ in profiles_of(arguments[0])}:
        count, failed = count + 1, failed + 1
        print(f"not ok {count} - no mode {name}")
    print(f"1..{count}")
    return failed != 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
