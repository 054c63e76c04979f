"""The freeze: tests/repo/interface.list has all that a program may rely on: names and values of enumerators and macros,
types of functions, fields of structs with their offsets (x86-64), the golden lines, and the checkpoints that every
version reads. `freeze.py` compares it with the header and its companion (TAP); `freeze.py update` renews it, but only
if docs/CHANGELOG.md has changed, too, since the last time."""
import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap

FIXTURE, CHANGES = "tests/repo/interface.list", "docs/CHANGELOG.md"
HEADERS = ["kahan_opt.h", "kahan_opt_cuda.cuh"]
KEPT = ["tests/bits/golden.txt", "tests/unit/save_v1.h"]


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def preprocessed(header):
    """What the compiler sees of the header's own lines."""
    text = subprocess.run(["gcc", "-std=c99", "-E", "-I.", "-DKAHAN_OPT_VMATH", "-x", "c", header], check=True,
                          capture_output=True, text=True).stdout
    own, lines = False, []
    for line in text.split("\n"):
        marker = re.match(r'# \d+ "(.*?)"', line)
        if marker:
            own = os.path.basename(marker[1]) == os.path.basename(header)
        elif own and not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines)


def declarations(text):
    """Each declaration at file scope, on one line, without attributes and without the bodies of functions."""
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", text)
    text = re.sub(r"\b(?:extern|static|inline|__inline__|__inline)\b", "", text)
    depth, begin = 0, 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth == 0 and (c == ";" or c == "}" and re.match(r"[^{]*\)\s*\{", text[begin:i])):
            yield re.sub(r"\s*([(),;{}*])\s*", r"\1", " ".join(text[begin:i + 1].split("{")[0].split())
                         if c == "}" else " ".join(text[begin:i + 1].split()))
            begin = i + 1


def interface(header):
    """The lines of the fixture, without those about other files."""
    lines, values, offsets = [], [], []
    for line in declarations(preprocessed(header)):
        struct = re.match(r"typedef struct (\w+)\{(.*)\}(\w+);$", line)
        enum = re.match(r"typedef enum \w+\{(.*)\}(\w+);$", line)
        function = re.match(r"(.*?)\b(kopt_\w*[a-z0-9])(\(.*\));?$", line)
        if struct and not struct[3].endswith("_"):
            offsets.append((struct[3], struct[2]))
        elif enum:
            values += re.findall(r"\bK\w+", enum[1])
        elif function and "typedef" not in line:
            lines.append("function %s %s%s" % (function[1].strip(), function[2], function[3].replace(",", ", ")))
        elif "typedef" in line and not re.search(r"_;$", line):
            lines.append("type " + line)
    program = ["#include <stddef.h>", "#include <stdio.h>", "#define KAHAN_OPT_VMATH",
               '#include "%s"' % os.path.abspath(header), "int main(void) {"]
    program += ['printf("value %s = %%ld\\n", (long)%s);' % (name, name)
                for name in values if not re.match(r".*_$", name)]
    for name, fields in offsets:
        program.append('printf("struct %s: %%u bytes\\n", (unsigned)sizeof(%s));' % (name, name))
        for field in fields.split(";"):
            callback = re.match(r"(.*)\(\*(\w+)\)(\(.*\))$", field)
            kind, names = (callback[1] + "(*)" + callback[3], [callback[2]]) if callback else (None, field.split(","))
            for k, one in enumerate(names if field else []):
                word = one if callback else re.search(r"(\w+)((?:\[[^\]]+\])*)$", one)[1]
                if not callback:
                    first = re.match(r"(.*?)\**\w+(?:\[[^\]]+\])*$", names[0])[1].strip()
                    kind = first + "*" * one.count("*") + "".join(re.findall(r"\[[^\]]+\]", one))
                program.append('printf("field %s.%s: %s at %%u\\n", (unsigned)offsetof(%s, %s));'
                               % (name, word, kind, name, word))
    with open(header) as file:
        macros = re.findall(r"^[ \t]*#[ \t]*define (KOPT_[A-Z0-9_]*[A-Z0-9])(?:\(([^)]*)\)|\b)", file.read(), re.M)
    lines += ["macro %s(%s)" % macro if macro[1] else "macro " + macro[0] for macro in dict.fromkeys(macros)]
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/print.c", "w") as file:
            file.write("\n".join(program + ["return 0; }", ""]))
        subprocess.run(["gcc", "-std=c99", "-I.", "-o", folder + "/print", folder + "/print.c"], check=True)
        lines += subprocess.run([folder + "/print"], check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
    return lines


def stated():
    """The fixture: what CHANGES was when it was made, and its lines."""
    if not os.path.exists(FIXTURE):
        return "", []
    with open(FIXTURE) as file:
        first, *lines = file.read().replace("\n    ", " ").split("\n")[:-1]
    return first.split()[-1], lines


def may_become(lines, changes):
    """May the fixture have these lines, if CHANGES has this digest?"""
    changes_then, before = stated()
    return lines == before or changes != changes_then


def update(lines):
    """Writes the fixture. False: the lines are others, but CHANGES is what it was."""
    changes = digest(CHANGES)
    if not may_become(lines, changes):
        return False
    if lines != stated()[1]:
        with open(FIXTURE, "w") as file:
            for line in ["docs/CHANGELOG.md as of this file: " + changes] + lines:
                file.write(textwrap.fill(line, 120, subsequent_indent="    ", break_long_words=False) + "\n")
    return True


def main(arguments):
    parts = {header: interface(header) for header in HEADERS}
    lines = sum(parts.values(), []) + ["file %s %s" % (path, digest(path)) for path in KEPT]
    if arguments == ["update"]:
        if not update(lines):
            sys.exit("freeze.py: the interface has changed: say so in %s first" % CHANGES)
        return
    differences = list(difflib.unified_diff(stated()[1], lines, FIXTURE, " and ".join(HEADERS), lineterm="", n=0))
    print("%sok 1 - the interface is that of %s" % ("not " if differences else "", FIXTURE))
    for line in differences:
        print("# " + line)
    if differences:
        print("# If this is meant, add a line to %s, then: python3 tests/repo/freeze.py update" % CHANGES)
    faults = {"kahan_opt.h": [("uint32_t step; ", "uint64_t step; "), ("KOPT_EXACT = 4", "KOPT_EXACT = 5"),
                              ("uint64_t stuck;", "uint64_t held;"), ("kopt_version(void)", "kopt_version(int of)"),
                              ("#define KOPT_STATE_BYTES(n, bytes)", "#define KOPT_STATE_BYTES(n)")],
              "kahan_opt_cuda.cuh": [("uint32_t skipped; ", "uint64_t skipped; "), ("*found_inf;", "*found;"),
                                     ("kopt_cuda_plan_steps(", "kopt_cuda_plan_step_counts("),
                                     ("use_ptx(const char *ptx, size_t", "use_ptx(const char *ptx, int"),
                                     ("const kopt_tensor *tensors;\n    size_t count;",
                                      "size_t count;\n    const kopt_tensor *tensors;")]}
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for header in HEADERS:
            with open(header) as file:
                text = file.read()
            for old, new in faults[header]:
                with open(os.path.join(folder, header), "w") as file:
                    file.write(text.replace(old, new))
                if old not in text or interface(os.path.join(folder, header)) == parts[header]:
                    missed.append(old)
            os.remove(os.path.join(folder, header))  # the companion includes the right one
    print("%sok 2 - it sees a type, a value, a name, an argument, a macro and an order that move%s"
          % ("not " if missed else "", "".join("\n# not seen: " + old for old in missed)))
    others = may_become(lines + ["another"], stated()[0]) or not may_become(lines + ["another"], "another digest")
    print("%sok 3 - the fixture is renewed only beside a line of %s\n1..3" % ("not " if others else "", CHANGES))
    sys.exit(bool(differences or missed or others))


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    main(sys.argv[1:])
