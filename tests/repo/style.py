"""Signs and doors: can a reader find things in kahan_opt.h, by its contents, banners and names? Prints TAP: a line for
each check, and what is wrong as comments. The last line is about the checks themselves: each sees a fault that is put
into what it reads. `style.py [N...]` runs some of them, without the last."""
import bisect
import glob
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True  # no tests/repo/__pycache__
import api

MAKER = "K_"  # the macro of the kernels that makes kopt_<name>_<isa>_ of a name
ISAS = ("scalar", "sse2", "avx2", "avx512", "neon", "simd128", "cuda")
PROPER = ("SSE2", "AVX2", "AVX-512", "NEON", "SLEEF", "CUDA")  # capitals that are no banner's, but a name's
STRETCH = 400  # lines without a banner
LIBC = ("memcpy", "memset")  # declared where there is no string.h
COLUMNS = 120
FORMATTER = "19."  # the version of clang-format; others differ in what they make of the same settings
HEADER, CUDA = "kahan_opt.h", "kahan_opt_cuda.cuh"
WORDS_OF_C = set("const double enum extern float if inline int return size_t static struct typedef union unsigned "
                 "void volatile char else for while sizeof NULL".split())
TOP = {HEADER, CUDA, "tests", "bench", "docs", "build.sh", "README.md", "LICENSE", ".ci", ".clang-format",
       ".clang-tidy", ".github", ".gitignore"}
SCRATCH = os.path.join(api.ROOT, "build", "tests", "style")


class Skip(Exception):
    """A check that cannot be made here, and why."""


items_of = {}  # text -> what api.scan() made of it; of the last text only


class Tree:
    """The files of the project; broken: path -> text that takes the place of what the file has."""

    def __init__(self, broken=None):
        self.broken = broken or {}

    def read(self, path):
        if path in self.broken:
            return self.broken[path]
        with open(os.path.join(api.ROOT, path), encoding="utf-8") as f:
            return f.read()

    def items(self, path):
        text = self.read(path)
        if text not in items_of:
            items_of.clear()
            items_of[text] = api.scan(text)
        return items_of[text]


# ---- contents and banners --------------------------------------------------------------------------------------------


def contents(text):
    """The entries of CONTENTS, in order. What is in parentheses there is no entry."""
    block = re.search(r"^ *CONTENTS\b.*\n((?:.*\S.*\n)+)", text, re.M)
    entries = []
    for line in block.group(1).split("*/")[0].split("\n") if block else []:
        entries += [e for e in re.split(r" {2,}", line.strip()) if e and not e.startswith("(")]
    return entries


def places(items):
    """(line, name, main) of what CONTENTS may name: headings of the manual, and banners. main: /* ---- in capitals."""
    found, big = [], False
    for item in items:
        if item.kind != "comment" or not item.own_line:
            big = big and item.kind == "blank"
            continue
        if re.fullmatch(r"/\* =+ \*/", item.text):
            big = True
            continue
        name, _ = api.banner_name(api.banner_words(item.text))
        if api.BANNER.match(item.text):
            if name and not name.startswith(PROPER):
                found.append((item.line, name, item.text.startswith("/* ----")))
        elif big and name:
            found.append((item.line, name, False))
        else:
            lines = api.words_of(item.text)
            found += [(item.line + i, api.banner_name(line)[0], False) for i, line in enumerate(lines)
                      if api.is_heading(lines, i)]
        big = False
    return found


def check_contents(tree):
    """each entry of CONTENTS is a banner's words, and each main banner is in CONTENTS, in the order of the file"""
    entries, found = contents(tree.read(HEADER)), places(tree.items(HEADER))
    wrong, at, named = [], -1, set()
    if not entries:
        return ["no CONTENTS at the top of " + HEADER]
    for entry in entries:
        here = [k for k, place in enumerate(found) if place[1] == entry]
        after = [k for k in here if k > at]
        if after:
            at = after[0]
            named.add(at)
        elif here:
            wrong.append("CONTENTS has `%s` behind an entry that comes after it (line %d)" % (entry, found[here[0]][0]))
            named.add(here[0])
        else:
            wrong.append("CONTENTS has `%s`, which no banner says" % entry)
    for k, (line, name, main) in enumerate(found):
        if main and k not in named:
            again = any(found[j][1] == name for j in named)
            wrong.append("line %d: `%s` is %s" % (line, name, "a second time, but once in CONTENTS" if again else
                                                  "not in CONTENTS"))
    return wrong


def check_stretches(tree):
    """no more than 400 lines without a banner"""
    lines = tree.read(HEADER).rstrip("\n").split("\n")
    banners = [0] + [k + 1 for k, line in enumerate(lines) if re.match(r"\s*/\* ----", line)] + [len(lines) + 1]
    return ["lines %d to %d: %d without a banner" % (a, b, b - a) for a, b in zip(banners, banners[1:])
            if b - a > STRETCH]


# ---- public functions ------------------------------------------------------------------------------------------------


def declared_functions(tree):
    sections, _ = api.read(tree.read(HEADER), "KAHAN_OPT_H")
    text = tree.read(HEADER)
    return [d.name for s in sections for g in s.parts for d in g.declarations
            if d.kind == "function" and re.search(r"^KOPT_API_[^;{}]*\b%s\s*\(" % d.name, text, re.M)]


def defined_functions(text):
    """(line, name), also of definitions that a macro makes."""
    found, makers = [], {}
    for m in re.finditer(r"^#define (\w+)\((\w+)[^)]*\)((?:.*\\\n)*.*)", text, re.M):
        pasted = re.search(r"\bKOPT_API_[^;{}]*?\b(\w+?)##(\w+)(?:##(\w+))?\s*\(", m.group(3))
        if pasted and pasted.group(2) == m.group(2):
            makers[m.group(1)] = pasted.group(1) + "%s" + (pasted.group(3) or "")
    pattern = r"^KOPT_API_\s[^;{}#]*?\b(kopt_\w+)\s*\([^;{}]*\)\s*\{"
    for m in re.finditer(pattern, text, re.M):
        found.append((text.count("\n", 0, m.start()) + 1, m.group(1)))
    for maker in makers:
        for m in re.finditer(r"^%s\(\s*(\w+)" % maker, text, re.M):
            found.append((text.count("\n", 0, m.start()) + 1, makers[maker] % m.group(1)))
    return sorted(found)


def check_order(tree):
    """each public function is defined once, those of a room in the order of their declarations"""
    declared, text = declared_functions(tree), tree.read(HEADER)
    number = {name: k for k, name in enumerate(declared)}
    defined = [(line, name) for line, name in defined_functions(text) if name in number]
    defined = [d for k, d in enumerate(defined) if k == 0 or defined[k - 1][1] != d[1]]  # one of two by #if
    wrong = ["%s is declared, and its definition is not found" % name for name in declared
             if name not in {n for _, n in defined}]
    rooms = [k + 1 for k, line in enumerate(text.split("\n")) if line.startswith("/* ----")]
    for (before, first), (line, name) in zip(defined, defined[1:]):
        if bisect.bisect(rooms, before) == bisect.bisect(rooms, line) and number[name] < number[first]:
            wrong.append("line %d: %s is declared before %s" % (line, name, first))
    return wrong


# ---- the reference ---------------------------------------------------------------------------------------------------


def words(tree):
    """Every word of the headers that is no comment's."""
    text = tree.read(HEADER) + tree.read(CUDA)
    return set(re.findall(r"\w+", api.without_comments(text)))


def check_reference(tree):
    """docs/api.md is what the headers say, and each public name in it exists"""
    texts = {path: tree.read(path) for path, _, _ in api.HEADERS}
    text, wrong = api.page(texts=texts)
    if text != tree.read(api.PAGE):
        wrong.append("docs/api.md is not what the headers say: python3 tests/repo/api.py >docs/api.md")
    there = words(tree)
    for name in sorted(set(api.NAME.findall(tree.read(api.PAGE)))):
        if name in there or name.endswith("_") and any(w.startswith(name) for w in there):
            continue
        wrong.append("docs/api.md says %s, which does not exist" % name)
    return wrong


# ---- private names ---------------------------------------------------------------------------------------------------

symbols_of = {}  # flags -> (letter, symbol) of the object


def symbols(flags):
    """Of the header in an object with these flags."""
    if flags not in symbols_of:
        if not shutil.which("gcc") or not shutil.which("nm"):
            raise Skip("no gcc or no nm")
        os.makedirs(SCRATCH, exist_ok=True)
        source, made = os.path.join(SCRATCH, "plain.c"), os.path.join(SCRATCH, "plain.o")
        with open(source, "w", encoding="utf-8") as f:
            f.write('#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n')
        # kept: what is inlined here is a function elsewhere
        command = ["gcc", "-g0", "-O1", "-fkeep-static-functions", "-I" + api.ROOT, "-c", "-o", made, source]
        subprocess.run(command + list(flags), check=True, timeout=300)
        lines = subprocess.run(["nm", made], check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout
        symbols_of[flags] = [tuple(line.split()[-2:]) for line in lines.split("\n") if line]
    return symbols_of[flags]


def check_symbols(tree):
    """each function of a stack trace is found in the file, by its name or by the name that a macro makes it of"""
    text = api.without_comments(tree.read(HEADER))
    there, wrong = set(re.findall(r"\w+", text)), []
    made = set(re.findall(r"\b%s\((\w+)\)" % MAKER, text))
    listed = set(re.findall(r"\bLINE_\((\w+),", text))  # in lists of functions
    for flags in ((), ("-DKAHAN_OPT_VMATH",)):
        within = {re.sub(r"\.\d+$", "", s) for _, s in symbols(flags) if re.search(r"\.\d+$", s)}  # static in functions
        for letter, symbol in symbols(flags):
            symbol = re.sub(r"\..*", "", symbol) if not symbol.startswith(".") else symbol
            if letter == "U" or symbol.startswith(".L") or (letter in "bBdDrR" and symbol in within):
                continue
            if not symbol.startswith("kopt_"):
                wrong.append("%s does not begin with kopt_" % symbol)
            elif letter in "tT" and symbol not in there:
                pasted = re.fullmatch(r"kopt_(\w+)_(?:%s)_" % "|".join(ISAS), symbol)
                if not pasted or pasted.group(1) not in made | listed and pasted.group(1) + "_" not in there:
                    wrong.append("%s is not found%s" % (symbol, ", nor %s(%s), nor %s_" % (
                        MAKER, pasted.group(1), pasted.group(1)) if pasted else ""))
    return sorted(set(wrong))


def declared_at_file_scope(code):
    """The names that a declaration or definition at file scope makes. Those that a macro makes are not named."""
    code = api.squeezed(re.sub(r"^[ \t]*#(?:.*\\\n)*.*", "", code, flags=re.M))
    names = []
    head = re.match(r"((?:typedef )?(?:static )?)(struct|union|enum)\b([^{;(]*)\{", code)
    if head or code.startswith("typedef"):
        close = code.rfind("}")
        if head:
            names += re.findall(r"([A-Za-z_]\w*)\s*$", re.sub(r"\b[A-Z]\w*_\b", "", head.group(3)))
            if head.group(2) == "enum":
                names += [c.split("=")[0].strip() for c in api.split_outside(code[head.end():close], ",") if c.strip()]
        tail = code[close + 1:].rstrip("; ")
        if tail.strip() and "(" not in re.sub(r"\(\s*\*.*", "", tail):
            names.append(api.declared_name(tail))
        return [n for n in names if re.fullmatch(r"\w+", n)]
    i = 0
    while True:
        opening = re.compile(r"([A-Za-z_]\w*)?\s*([(=\[;{])").search(code, i)
        if not opening:
            return []
        name, mark = opening.group(1), opening.group(2)
        if not name:
            return []
        if mark != "(":
            return [name]
        pointer = re.match(r"\(\s*\*+\s*(?:const\b\s*)?(\w+)", code[opening.end() - 1:])
        if pointer:
            return [pointer.group(1)]
        if name != MAKER and not re.fullmatch(r"[A-Z][A-Z0-9_]*_|__attribute__|__declspec|__asm__|_Pragma", name):
            return [name]
        depth, i = 0, opening.end() - 1  # a macro with arguments
        while i < len(code):
            depth += (code[i] == "(") - (code[i] == ")")
            i += 1
            if depth == 0:
                break
        if code[i:].lstrip().startswith(("(", "[", "=", ";", "{")):
            return []  # it makes the name


def check_names(tree):
    """names at file scope begin with kopt_ or KOPT_ (public: no _ at the end), or are macros that are undefined"""
    text, items, wrong = tree.read(HEADER), tree.items(HEADER), []
    known = api.lookup([(HEADER, "", api.read(text, "KAHAN_OPT_H")[0])])
    end = text.count("\n", 0, re.search(r"^/\* IMPLEMENTATION\b", text, re.M).start()) + 1
    defined, undefined = {}, {}

    def private_of_us(name):
        return re.match(r"(?:kopt|KOPT|KAHAN_OPT)_\w*_$", name)

    def public(name, line, what):
        if re.match(r"(?:kopt|KOPT)_\w", name) and name not in known:
            wrong.append("line %d: %s %s has no _ at its end, and is not declared before the implementation" %
                         (line, what, name))

    for item in items:
        if item.kind == "directive":
            word = re.match(r"#\s*(define|undef)\s+(\w+)", item.text)
            if word:
                table = defined if word.group(1) == "define" else undefined
                table[word.group(2)] = item.line
    for inner in re.finditer(r"^[ \t]*#[ \t]*(define|undef)[ \t]+(\w+)", text, re.M):  # those inside functions, too
        line = text.count("\n", 0, inner.start()) + 1
        table = defined if inner.group(1) == "define" else undefined
        table[inner.group(2)] = max(line, table.get(inner.group(2), 0))
    for name, line in sorted(defined.items(), key=lambda pair: pair[1]):
        if private_of_us(name) or name.startswith("KAHAN_OPT_"):
            continue
        if re.match(r"(?:kopt|KOPT)_", name):
            public(name, line, "the macro")
        elif undefined.get(name, 0) < line:
            wrong.append("line %d: the macro %s is not undefined after it" % (line, name))
        elif not name.endswith("_") and not re.match(r"_[A-Z]", name) and name != MAKER:
            wrong.append("line %d: the macro %s neither begins with KOPT_ nor ends with _" % (line, name))
    for item in items:
        for name in declared_at_file_scope(item.text) if item.kind == "code" else []:
            if private_of_us(name) or name in defined and not re.match(r"(?:kopt|KOPT)_", name) or name in LIBC:
                continue
            if re.match(r"kopt_|KOPT_", name):
                if item.line > end or not api.private(name):
                    public(name, item.line, "the name")
            else:
                wrong.append("line %d: %s neither begins with kopt_ nor is a macro that is undefined" %
                             (item.line, name))
    return wrong


# ---- passes ----------------------------------------------------------------------------------------------------------

PASSES = (("gcc", ("gcc",)), ("gcc", ("gcc", "-DKAHAN_OPT_VMATH")), ("gcc", ("gcc", "-march=x86-64-v4")),
          ("clang", ("clang",)), ("clang", ("clang", "--target=wasm32", "-msimd128", "-ffreestanding")),
          ("aarch64-linux-gnu-gcc", ("aarch64-linux-gnu-gcc",)))


def check_passes(tree):
    """no macro that a pass over an instruction set defines is left for the next pass"""
    wrong, passes = [], 0
    folder = os.path.join(SCRATCH, "passes")  # of its own: the header of a check of the checks stays there
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, HEADER), "w", encoding="utf-8") as f:
        f.write(tree.read(HEADER))
    source = os.path.join(folder, "passes.c")
    with open(source, "w", encoding="utf-8") as f:
        f.write('#define KAHAN_OPT_IMPLEMENTATION\n#include "%s"\n' % HEADER)
    for program, command in PASSES:
        if not shutil.which(program):
            continue
        said = subprocess.run(list(command) + ["-E", "-dD", source], stdout=subprocess.PIPE, text=True, timeout=60,
                              stderr=subprocess.DEVNULL, check=True)
        inside, live = None, set()
        for word, name, value in re.findall(r"^#(define|undef) (\w+) ?(.*)$", said.stdout, re.M):
            if name == "KOPT_PASS_":
                wrong += ["%s: %s leaves %s" % (" ".join(command), inside, m) for m in sorted(live) if inside]
                inside, live, passes = value if word == "define" else None, set(), passes + (word == "define")
            elif word == "define" and name != "KOPT_READ_":
                live.add(name)
            else:
                live.discard(name)
    if passes == 0:
        raise Skip("no gcc and no clang")
    return wrong


def check_dead_macros(tree):
    """each private macro is read by the code of the headers, and each that a comment names is in the code"""
    texts = [tree.read(HEADER), tree.read(CUDA)]
    code = "\n".join(api.without_comments(text) for text in texts)
    defined = re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+_)\b", code, re.M)
    heads = r"^[ \t]*#[ \t]*(?:ifndef[ \t]+(\w+)\n[ \t]*#[ \t]*define[ \t]+\1|(?:define|undef)[ \t]+\w+)"
    read = set(re.findall(r"\w+", re.sub(heads, "", code, flags=re.M)))
    wrong = ["the macro %s is defined, and nothing reads it" % name for name in dict.fromkeys(defined) if
             name not in read]
    for comment in re.findall(r"/\*.*?\*/", "\n".join(texts), re.S):
        wrong += ["a comment says %s, which does not exist" % name
                  for name in re.findall(r"\b[A-Z][A-Z0-9_]+_\b", comment)
                  if name not in read and not any(word.startswith(name) for word in read)]
    return wrong


# ---- macros of system headers ----------------------------------------------------------------------------------------

SYSTEM = ("/usr/include", "/usr/lib/avr/include", "/usr/lib/gcc", "/usr/arm-none-eabi/include",
          "/usr/lib/arm-none-eabi/include", "/usr/share/mingw-w64/include")
macros_of = {}  # folder -> macro without arguments -> the header that defines it


def system_macros():
    """Those of the headers that are installed, except macros that their header undefines, and those of X11 for Windows,
    which rename functions. A macro with arguments does not touch a name that no ( follows."""
    for folder in SYSTEM:
        if folder not in macros_of:
            found = macros_of[folder] = {}
            for path in glob.glob(folder + "/**/*.h", recursive=True):
                with open(path, encoding="latin-1") as f:
                    text = "" if path.endswith("/Xw32defs.h") else f.read()
                undefined = set(re.findall(r"^[ \t]*#[ \t]*undef[ \t]+(\w+)", text, re.M))
                for name in re.findall(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z]\w*)(?![\w(])", text, re.M):
                    if name not in undefined:
                        found.setdefault(name, path)
    return {name: path for found in macros_of.values() for name, path in found.items()}


def check_macros(tree):
    """no parameter or field that a program sees is a macro of a system header (term.h: columns)"""
    there, wrong = system_macros(), []
    if "columns" not in there:
        raise Skip("no term.h (./build.sh setup installs it)")
    for path, guard, _ in api.HEADERS:
        text = re.sub(r"^[ \t]*#.*(?:\\\n.*)*", "", api.without_comments(api.public_part(tree.read(path), guard)[0]),
                      flags=re.M)
        for name in sorted(set(re.findall(r"\b[A-Za-z]\w*", text))):
            if name in there and not re.match(r"(?:kopt|KOPT|KAHAN_OPT)_|u?int(?:8|16|32|64)_t$", name) and \
                    name not in WORDS_OF_C:
                wrong.append("%s: `%s` is a macro of %s" % (path, name, there[name]))
    return wrong


# ---- columns and format ----------------------------------------------------------------------------------------------


def files(patterns):
    found = []
    for pattern in patterns:
        found += sorted(os.path.relpath(path, api.ROOT) for path in glob.glob(os.path.join(api.ROOT, pattern))
                        if os.path.isfile(path))
    return found


def long_lines(path, text):
    wrong, fenced = [], False
    for number, line in enumerate(text.split("\n"), 1):
        measured = line
        fenced = fenced != line.startswith("```")
        if path.endswith(".md") and not fenced:
            if line.startswith(("|", "    ")):
                continue
            measured = re.sub(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|https?://\S+", "", line)
        if len(measured) > COLUMNS:
            wrong.append("%s:%d: %d columns" % (path, number, len(line)))
    return wrong


def check_columns(tree):
    """no line is longer than 120 columns"""
    wrong = []
    for path in files([HEADER, CUDA, "build.sh", "README.md", "docs/*.md", "docs/*.sh", "docs/*.py", "docs/recipes/*",
                       "docs/examples/*", "docs/examples/*/*", "docs/examples/*/*/*", "docs/playground/*"] +
                      [d + "/*." + e for d in ("tests", "tests/*", "bench")
                       for e in ("c", "h", "cu", "py", "sh", "js", "txt", "list", "md")]):
        wrong += long_lines(path, tree.read(path))
    return wrong


def formatter():
    for program in ("build/python/clang_format/data/bin/clang-format", "clang-format-19", "clang-format"):
        path = os.path.join(api.ROOT, program)
        path = path if os.path.exists(path) else shutil.which(program)
        if path:
            said = subprocess.run([path, "--version"], stdout=subprocess.PIPE, text=True, timeout=60)
            if re.search(r"version %s" % re.escape(FORMATTER), said.stdout):
                return path
    raise Skip("no clang-format %s (./build.sh setup installs it)" % FORMATTER.rstrip("."))


def parts_to_format(text):
    """(lines before it, part): an implementation is cut before its banners. clang-format goes through all combinations
    of the branches of #if, which takes more than a minute for the whole header and five seconds for its parts."""
    start = text.find("/* IMPLEMENTATION */\n")
    banners = re.compile(r"(?<=\n\n)/\* ---- [A-Z]").finditer(text, start) if start >= 0 else ()
    cuts = [0] + [m.start() for m in banners] + [len(text)]
    for begin, end in zip(cuts, cuts[1:]):
        part = text[begin:end]
        yield text.count("\n", 0, begin), part if end == len(text) else part.rstrip("\n") + "\n"


def check_format(tree):
    """.clang-format holds"""
    program, wrong = formatter(), []
    paths = sorted(tree.broken) or files([HEADER, CUDA, "tests/*/*.c", "tests/*/*.h", "bench/*.c", "bench/*.h",
                                          "bench/*.cu", "docs/examples/*.c", "docs/examples/*/*.c",
                                          "docs/examples/*/*.h", "docs/playground/*.c"])
    for path in paths:
        command = [program, "--dry-run", "-Werror", "--assume-filename=" + os.path.join(api.ROOT, path)]
        for line, part in parts_to_format(tree.read(path)):
            said = subprocess.run(command, input=part, stderr=subprocess.PIPE, text=True, timeout=300)
            places_ = re.findall(r":(\d+):\d+: error:", said.stderr)
            if places_:
                wrong.append("%s: %d places, the first in line %d" % (path, len(places_), line + int(places_[0])))
            elif said.returncode:
                wrong.append("%s: %s" % (path, said.stderr.strip()[:200]))
    return wrong


# ---- constants -------------------------------------------------------------------------------------------------------


def check_doubles(tree):
    """a double that is not exact in binary32 is a KOPT_DOUBLE_, with the right bits"""
    wrong = []
    for path in (HEADER, CUDA):
        code = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', api.without_comments(tree.read(path)))
        pairs = list(re.finditer(r"\bKOPT_DOUBLE_\(\s*([\d.e-]+),\s*0x(\w{8})u,\s*0x(\w{8})u\)", code))
        for p in pairs:
            if struct.pack(">d", float(p.group(1))).hex() != (p.group(2) + p.group(3)).lower():
                wrong.append("%s: the bits of %s are others" % (path, p.group(1)))
        for m in re.finditer(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?(?![\w.])", code):
            number = float(m.group())
            exact = number < 2.0 ** 128 and struct.unpack("f", struct.pack("f", number))[0] == number
            if not exact and not any(p.start() < m.start() < p.end() for p in pairs):
                wrong.append("%s: %s" % (path, m.group()))
    return wrong


def check_version(tree):
    """the first line of the header, KOPT_VERSION, its check and docs/CHANGELOG.md have one version"""
    header = tree.read(HEADER)
    number = int(re.search(r"^#define KOPT_VERSION (\d+)", header, re.M)[1])
    said = "%d.%d" % (number // 10000, number // 100 % 100) + (".%d" % (number % 100) if number % 100 else "")
    return [what for what, found, expected in (
        ("the first line", re.match(r"/\* kahan_opt.h - v([\d.]+) ", header)[1], said),
        ("the check of two versions", re.search(r"KOPT_VERSION != (\d+)", header)[1], str(number)),
        ("CHANGELOG.md", re.search(r"^## (.*)", tree.read("docs/CHANGELOG.md"), re.M)[1], said)) if found != expected]


def check_top(tree):
    """the top level of the repository has no stray files"""
    listed = shutil.which("git") and subprocess.run(["git", "ls-files"], cwd=api.ROOT, capture_output=True,
                                                    text=True).stdout.split("\n")[:-1]
    if not listed:
        raise Skip("no git")
    return sorted({path.split("/")[0] for path in [*listed, *tree.broken]} - TOP)


CHECKS = [check_contents, check_stretches, check_order, check_reference, check_symbols, check_names, check_macros,
          check_columns, check_format, check_doubles, check_passes, check_dead_macros, check_version, check_top]


# ---- the checks themselves -------------------------------------------------------------------------------------------


def swapped_definitions(tree):
    """The header with two definitions in each other's place."""
    text, swap = tree.read(HEADER), {"kopt_norm_add": "kopt_clip_value", "kopt_clip_value": "kopt_norm_add"}
    begin = re.search(r"^/\* IMPLEMENTATION\b", text, re.M).start()
    return text[:begin] + re.sub(r"\b(kopt_norm_add|kopt_clip_value)(?=\()", lambda m: swap[m.group(1)], text[begin:])


def faults(tree):
    """(check, what is wrong, broken files): each check has to say more of these than of what is there."""
    header, page = tree.read(HEADER), tree.read(api.PAGE)
    entries, end = contents(header), header.rindex("#endif")
    guarded = header.index("\n", header.index("#define KAHAN_OPT_H\n")) + 1
    kept = [e for e in entries if header.count(e) > 1]
    banner = next(re.finditer(r"^/\* ---- [A-Z]", header, re.M)).start()

    def renamed(old, new):
        return {HEADER: re.sub(r"\b%s\b" % re.escape(old), new, header)}

    yield check_contents, "an entry without a banner", {HEADER: header.replace(kept[0], "NO SUCH WORDS", 1)}
    yield check_contents, "a banner without an entry", {HEADER: header[:banner] + "/* ---- NEW THINGS ---- */\n\n" +
                                                        header[banner:]}
    yield check_contents, "two entries in each other's place", {
        HEADER: header.replace(kept[-2], "@", 1).replace(kept[-1], kept[-2], 1).replace("@", kept[-1], 1)}
    yield check_stretches, "401 lines", {HEADER: header[:banner] + "\n" * 401 + header[banner:]}
    yield check_order, "two definitions in each other's place", {HEADER: swapped_definitions(tree)}
    yield check_order, "a declaration without a definition", {
        HEADER: header[:banner] + "/* New. */\nKOPT_API_ int kopt_new(void);\n\n" + header[banner:]}
    yield check_reference, "a page that is not current", {api.PAGE: page + "\n"}
    yield check_reference, "a name that does not exist", {api.PAGE: page + "kopt_no_such_thing\n"}
    yield check_reference, "a declaration without a contract", {
        HEADER: header[:guarded] + "\nKOPT_API_ int kopt_bare_(void);\n\nKOPT_API_ int kopt_unknown(void);\n\n" +
        header[guarded:]}
    yield check_symbols, "a function that is not in the file", renamed(
        next(s for _, s in symbols(()) if re.fullmatch(r"kopt_\w+[^_]", s)), "x")
    made = next(s for _, s in symbols(()) if re.fullmatch(r"kopt_[a-z]+_scalar_", s) and
                s not in api.without_comments(header))
    made = made.split("_")[1]
    yield check_symbols, "a function that a macro makes", {
        HEADER: re.sub(r"\b%s_\b" % made, "x_", header).replace("%s(%s)" % (MAKER, made), MAKER + "(x)")}
    for what, line in (("a function without a prefix", "static int wrong_(void) { return 0; }"),
                       ("a constant without a prefix", "enum { WRONG_ = 1 };"),
                       ("a type without a prefix", "typedef struct kopt_right_ { int x; } wrong;"),
                       ("a private function like a public one", "static int kopt_wrong(void) { return 0; }"),
                       ("a private macro like a public one", "#define KOPT_WRONG 1"),
                       ("a macro that stays", "#define STAYS_ 1")):
        yield check_names, what, {HEADER: header[:end] + line + "\n" + header[end:]}
    yield check_passes, "a macro without its #undef", {HEADER: re.sub(r"#undef LANES_\n", "", header)}
    for path, text in ((HEADER, header), (CUDA, tree.read(CUDA))):
        yield check_dead_macros, "a macro that nothing reads", {path: text + "#define DEAD_ 1\n#undef DEAD_\n"}
        yield check_dead_macros, "a macro of a comment", {path: text + "/* see NO_SUCH_MACRO_ */\n"}
    yield check_macros, "a parameter", {
        HEADER: header[:banner] + "/* New. */\nKOPT_API_ int kopt_new(int columns);\n\n" + header[banner:]}
    yield check_columns, "a line of C", {HEADER: header + "/* " + "x" * 120 + " */\n"}
    yield check_columns, "a line of text", {"README.md": tree.read("README.md") + "\n" + "x " * 61 + "\n"}
    yield check_format, "three blanks", {"tests/unit/tap.h": "int  x ;\n"}
    yield check_doubles, "a literal that is not exact in binary32", {HEADER: header + "double x = 0.1;\n"}
    yield check_version, "a version of the first line", {HEADER: re.sub(r" - v[\d.]+ ", " - v0.1 ", header, count=1)}
    yield check_version, "a version without changes", {"docs/CHANGELOG.md": "# Changes\n\n## 0.1\n"}
    yield check_top, "a file that a shell has made", {"> 1": ""}
    yield check_doubles, "wrong bits", {HEADER: header + "double x = KOPT_DOUBLE_(0.1, 0x3FB99999u, 0x99999999u);\n"}


def check_checks():
    """each of these checks sees a fault that is put in"""
    wrong, before = [], {}

    def said(check, broken):
        return [re.sub(r"\d+", "", line) for line in check(Tree(broken))]

    for check, what, broken in faults(Tree()):
        try:
            if check not in before:
                before[check] = [] if check is check_format else said(check, {})
            after = said(check, broken)
            if not set(after) - set(before[check]) and len(after) <= len(before[check]):
                wrong.append("%s does not see %s" % (check.__name__, what))
        except Skip:
            pass
    return wrong


def main(arguments):
    chosen = [int(a) for a in arguments] or range(1, len(CHECKS) + 2)
    failed = 0
    for count, number in enumerate(chosen, 1):
        check = CHECKS[number - 1] if number <= len(CHECKS) else None
        what = check.__doc__ if check else check_checks.__doc__
        try:
            wrong = check(Tree()) if check else check_checks()
        except Skip as reason:
            print("ok %d # SKIP %s" % (count, reason))
            continue
        except (subprocess.SubprocessError, OSError) as error:
            wrong = [str(error)]
        print("%s %d - %s" % ("not ok" if wrong else "ok", count, what), flush=True)
        for line in wrong:
            print("# " + line)
        failed += bool(wrong)
    print("1..%d" % len(chosen))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
