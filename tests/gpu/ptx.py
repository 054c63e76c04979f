"""Translates PTX, as nvcc writes it for compute_75, to C that runs with tests/gpu/cuda_fake.c: one statement each.

    python3 tests/gpu/ptx.py [--only KERNEL] [--swap KERNEL] FILE.ptx OUT.c...   kernels are spread over the C files

Registers hold bits: uint8_t for a predicate, else an unsigned integer of their width. A statement gives its operands
the type of its instruction. What this file does not know is an error. --swap exchanges the first two registers of the
first 16-byte load of global memory in a kernel: a mistake that tests must notice. KERNEL is how the name
begins, with the values of a template as they are in PTX.
"""

import re
import sys

SPECIAL = {"%tid.x": "t->tid", "%ctaid.x": "t->ctaid", "%ntid.x": "t->ntid", "%nctaid.x": "t->nctaid",
           "%laneid": "(t->tid & 31)"}
for one in ("%tid", "%ctaid"):
    SPECIAL |= {one + ".y": "0", one + ".z": "0"}
for one in ("%ntid", "%nctaid"):
    SPECIAL |= {one + ".y": "1", one + ".z": "1"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
           "hs": ">="}
NEGATED = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
HINTS = {"weak", "volatile", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "gpu", "cta", "sys", "relaxed"}
SPACES = {"global", "shared", "local", "param", "const"}


class Unknown(Exception):
    """PTX that this translator does not know."""


def bits(kind):
    """The width of a PTX type: 32 for s32."""
    return 8 if kind == "pred" else int(re.sub(r"\D", "", kind))


def c_type(kind):
    """The C type of a PTX integer type, or of the bits of another."""
    return ("int" if kind[0] == "s" else "uint") + f"{bits(kind)}_t"


def identifier(name):
    return "v_" + re.sub(r"\W", "_", name)


def operands(text):
    """Splits at the commas outside of braces, brackets and parentheses."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return parts + [part.strip()] if part.strip() else parts


def statements(text):
    """The statements, labels and braces of a body, each with its offset."""
    one = re.compile(r"\s*(?:([{}])|([$\w]+:)(?!:)|([^;{}]+(?:\{[^;]*)?);)")
    at = 0
    while text[at:].strip():
        match = one.match(text, at)
        if not match:
            raise Unknown(text[at:at + 60])
        yield next((group.strip(), match.start(k + 1)) for k, group in enumerate(match.groups()) if group)
        at = match.end()


class Function:
    """One .entry or .func."""

    def __init__(self, module, kind, name, returned, parameters, body, line):
        self.module, self.kind, self.name, self.returned = module, kind, name, returned
        self.parameters, self.lines, self.registers, self.used = [], [], {}, {}
        self.sizes, self.shared, self.shared_size, self.waits, self.counted = {}, {}, 0, False, None
        for p in operands(" ".join(parameters.split())):
            match = re.fullmatch(r"\.param(?: \.align \d+)? \.(\w+) ([\w$]+)(?:\[(\d+)\])?", p)
            if not match:
                raise Unknown(p)
            size = int(match[3] or 1) * bits(match[1]) // 8
            self.parameters.append((match[2], size))
            self.sizes[match[2]] = size
        if returned:
            self.sizes[returned] = 8
        self.blocks, self.line, begun = {}, line, 0  # of each counter: the first and the last line of its basic block
        for s, at in statements(body):
            self.line, begun = self.line + body.count("\n", begun, at), at
            try:
                self.statement(s)
            except (Unknown, KeyError, IndexError, StopIteration) as error:
                raise Unknown(f"{name}: {s!r} ({type(error).__name__}: {error})") from error

    # ---- operands ---------------------------------------------------------------------------------------------------

    def register(self, name):
        """The C variable of a register."""
        match = re.fullmatch(r"(%[A-Za-z_]+)(\d+)", name)
        kind = self.registers.get(name) or match and self.registers.get(match[1] + "<")
        if not kind:
            raise Unknown("register or symbol " + name)
        if name[0] == "%":
            self.used[identifier(name)] = kind
        return identifier(name)

    def raw(self, text):
        """The bits of an operand."""
        text = text.strip()
        if text in SPECIAL:
            return SPECIAL[text]
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
            return f"0x{text[2:]}ull"
        if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)U?", text):
            return f"0x{int(text.rstrip('U'), 0) & (1 << 64) - 1:x}ull"
        if text[0] == "!":
            return "!" + self.raw(text[1:])
        if text in self.shared:
            return f"{self.shared[text]}ull"
        if text in self.sizes or text in self.module.variables:
            return f"(uint64_t)(uintptr_t){identifier(text)}"
        return self.register(text)

    def value(self, text, kind):
        """An operand as a C value of a PTX type."""
        if kind in ("f32", "f64"):
            return f"{kind}_({self.raw(text)})"
        return self.raw(text) if kind == "pred" else f"({c_type(kind)}){self.raw(text)}"

    def set(self, register, kind, value):
        """Assigns a C value of a PTX type; signed integers extend into a wider register."""
        value = f"bits_{kind}_({value})" if kind in ("f32", "f64") else value if kind == "pred" \
            else f"({c_type(kind)})({value})"
        return f"{self.register(register)} = {value};"

    def address(self, text, space):
        """The C expression of an address: [base+offset]; a shared address is an offset."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not match:
            raise Unknown("address " + text)
        return f"{self.raw(match[1])} + {int(match[2] or 0) & (1 << 64) - 1:#x}ull", match[1], int(match[2] or 0)

    def memory(self, text, parts, size, what):
        """A C pointer to checked memory. Accesses of named parameters are checked here."""
        space = next((p for p in parts if p.split("::")[0] in SPACES), "generic").split("::")[0]
        address, base, offset = self.address(text, space)
        if base in self.sizes and space in ("param", "generic"):
            if offset < 0 or offset + size > self.sizes[base] or offset % size:
                raise Unknown("outside of a parameter")
            return f"{identifier(base)} + {offset}"
        return f"{space}_(t, {address}, {size}, {what})"

    # ---- statements -------------------------------------------------------------------------------------------------

    def emit(self, line, instructions=0, ends=False):
        """Adds a line. A basic block counts its instructions where it begins."""
        if instructions:
            if self.counted is None:
                self.counted = len(self.lines)
                self.lines.append(0)
                self.blocks[self.counted] = (self.line, self.line)
            self.lines[self.counted] += 1
            self.blocks[self.counted] = (self.blocks[self.counted][0], self.line)
        self.lines.append(line)
        if ends:
            self.counted = None

    def statement(self, s):
        if s in "{}":
            self.emit(s)
        elif s.endswith(":"):
            self.emit(identifier(s[:-1]) + ":;", ends=True)
        elif s.startswith("."):
            self.declaration(" ".join(s.split()))
        else:
            match = re.fullmatch(r"@(!?)([%\w]+)\s+(.*)", s, re.S)
            text = match[3] if match else s
            op, rest = (text.split(None, 1) + [""])[:2]
            line = self.instruction(op.split("."), operands(rest))
            if match:
                line = f"if ({match[1]}{self.register(match[2])}) {{ {line} }}"
            self.emit(line, 1, ends=op.split(".")[0] in ("bra", "ret", "exit", "call"))

    def declaration(self, s):
        if match := re.fullmatch(r"\.reg \.(\w+) (.+)", s):
            for name in operands(match[2]):
                self.registers[name.split("<")[0] + "<" * ("<" in name)] = match[1]
                if name[0] != "%":
                    self.emit(f"uint{bits(match[1])}_t {identifier(name)} = 0;")
        elif match := re.fullmatch(r"\.(shared|local) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?", s):
            size = int(match[5] or 1) * bits(match[3]) // 8
            if match[1] == "shared":
                self.shared[match[4]] = -(-self.shared_size // int(match[2])) * int(match[2])
                self.shared_size = self.shared[match[4]] + size
            else:
                self.module.variables.add(match[4])
                self.emit(f"unsigned char *const {identifier(match[4])} = frame_(t, {size});")
        elif match := re.fullmatch(r"\.param(?: \.align \d+)? \.(\w+) ([\w$]+)(?:\[(\d+)\])?", s):
            self.sizes[match[2]] = int(match[3] or 1) * bits(match[1]) // 8
            self.emit(f"_Alignas(16) unsigned char {identifier(match[2])}[{self.sizes[match[2]]}];")
        elif not re.match(r"\.(pragma|loc|file)\b", s):
            raise Unknown("directive")

    def instruction(self, parts, a):
        """One instruction: its name in parts, and its operands."""
        name, kind = parts[0], parts[-1]
        handler = getattr(self, "op_" + name, None)
        if handler:
            return handler(parts, a)
        if kind in ("f32", "f64"):
            return self.floating(parts, a)
        return self.integer(parts, a)

    def floating(self, parts, a):
        """Arithmetic: rounding to nearest only, because nothing else belongs into the kernels."""
        name, kind, options = parts[0], parts[-1], set(parts[1:-1])
        count = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "sqrt": 1, "neg": 1, "abs": 1, "min": 2, "max": 2}
        rounded = name in ("add", "sub", "mul", "div", "fma", "sqrt")
        if name not in count or len(a) != count[name] + 1 or rounded != ("rn" in options) or \
                options - {"rn", "ftz", "NaN"} or "NaN" in options and name not in ("min", "max"):
            raise Unknown("instruction")
        x = [self.raw(b) for b in a[1:]]
        if "ftz" in options:
            x = [f"flush_({b})" for b in x]
        if name in ("neg", "abs"): # of the bits: a NaN keeps its payload
            top = 1 << bits(kind) - 1
            result = f"{x[0]} ^ {top:#x}ull" if name == "neg" else f"{x[0]} & {top - 1:#x}ull"
            return self.set(a[0], "u" + kind[1:], result)
        y = [f"{kind}_({b})" for b in x]
        suffix = "f" if kind == "f32" else ""
        operator = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(name)
        if operator:
            result = f"{y[0]} {operator} {y[1]}"
        elif name in ("min", "max"):
            result = f"{name}_{kind}_({', '.join(y)}, {int('NaN' in options)})"
        else:
            result = f"{name}{suffix}({', '.join(y)})"
        result = f"bits_{kind}_({result})"
        return self.set(a[0], "u" + kind[1:], f"flush_({result})" if "ftz" in options else result)

    def integer(self, parts, a):
        """Integers, bits and predicates."""
        name, options, kind = parts[0], parts[1:-1], parts[-1]
        unsigned = "u" + str(bits(kind))
        x = [self.value(b, kind) for b in a[1:]]
        if kind == "pred":
            result = {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "!{}", "mov": "{}"}[name]
            return self.set(a[0], "pred", result.format(*(f"({b})" for b in x)))
        if options not in ([], ["lo"], ["hi"], ["wide"]) or (options != []) != (name in ("mul", "mad")):
            raise Unknown("instruction")
        if name in ("mul", "mad"):
            wide = {16: "32", 32: "64", 64: "128"}[bits(kind)]
            product = f"({'' if kind[0] == 's' else 'u'}int{wide}_t){x[0]} * {x[1]}"
            if options == ["wide"]:
                kind, added = kind[0] + wide, self.value(a[3], kind[0] + wide) if name == "mad" else None
            else:
                added = x[2] if name == "mad" else None
                product = f"({c_type(unsigned)})(({product}){f' >> {bits(kind)}' if options == ['hi'] else ''})"
            sum_kind = "u" + str(bits(kind))
            return self.set(a[0], sum_kind, f"({c_type(sum_kind)})({product})" +
                            (f" + ({c_type(sum_kind)}){added}" if added else ""))
        if name in ("add", "sub", "and", "or", "xor"):
            operator = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}[name]
            x = [self.value(b, unsigned) for b in a[1:]]
            return self.set(a[0], unsigned, f"{x[0]} {operator} {x[1]}")
        if name in ("div", "rem"):
            return self.set(a[0], kind, f"{x[0]} {'/' if name == 'div' else '%'} {x[1]}")
        if name in ("min", "max"):
            return self.set(a[0], kind, f"{x[0]} {'<' if name == 'min' else '>'} {x[1]} ? {x[0]} : {x[1]}")
        if name in ("not", "neg", "abs"):
            result = {"not": f"~{x[0]}", "neg": f"0 - ({c_type(unsigned)}){x[0]}",
                      "abs": f"{x[0]} < 0 ? 0 - ({c_type(unsigned)}){x[0]} : {x[0]}"}[name]
            return self.set(a[0], unsigned, result)
        if name in ("shl", "shr"):
            count, width = self.value(a[2], "u32"), bits(kind)
            if kind[0] == "s":
                return self.set(a[0], unsigned, f"{x[0]} >> ({count} < {width} ? {count} : {width - 1})")
            return self.set(a[0], unsigned, f"{count} < {width} ? {x[0]} {'<<' if name == 'shl' else '>>'} {count} : 0")
        if name in ("popc", "clz", "brev"):
            return self.set(a[0], "u32" if name != "brev" else kind, f"{name}{bits(kind)}_({x[0]})")
        if name in ("bfi", "bfe"):
            count = [self.value(b, "u32") for b in a[-2:]]
            fields = x[:-2] + count + ([f"{bits(kind)}, {int(kind[0] == 's')}"] if name == "bfe" else [str(bits(kind))])
            return self.set(a[0], unsigned, f"{name}_({', '.join(fields)})")
        if name == "prmt":
            return self.set(a[0], kind, f"prmt_({', '.join(x)})")
        raise Unknown("instruction")

    def op_ld(self, parts, a):
        return self.transfer(parts, a[0], a[1], "LOAD_")

    def op_st(self, parts, a):
        return self.transfer(parts, a[1], a[0], "STORE_")

    def transfer(self, parts, registers, memory, what):
        kind = parts[-1]
        vector = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
        rest = [p for p in parts[1:-1] if p.split("::")[0] not in HINTS | SPACES | {"v2", "v4", "L1", "L2"}]
        names = operands(registers[1:-1]) if registers[0] == "{" else [registers]
        if rest or len(names) != vector or what == "STORE_" and "const" in parts:
            raise Unknown("modifiers")
        size, line = bits(kind) // 8, ""
        for i, r in enumerate(names):
            place = f"m + {i * size}"
            if what == "LOAD_" and r != "_":
                line += self.set(r, kind.replace("f", "u"), f"load{bits(kind)}_({place})") + " "
            elif what == "STORE_":
                line += f"store{bits(kind)}_({place}, {self.value(r, 'u' + str(bits(kind)))}); "
        return f"{{ unsigned char *m = {self.memory(memory, parts, size * vector, what)}; {line}}}"

    def op_atom(self, parts, a):
        return self.atomic(parts, a[0], a[1], a[2:])

    def op_red(self, parts, a):
        return self.atomic(parts, None, a[0], a[1:])

    def atomic(self, parts, to, memory, a):
        kind, name = parts[-1], parts[-2]
        rest = [p for p in parts[1:-2] if p not in HINTS | SPACES]
        new = {"add": "x + y", "min": "x < y ? x : y", "max": "x > y ? x : y", "and": "x & y", "or": "x | y",
               "xor": "x ^ y", "exch": "y", "cas": "x == y ? z : x"}[name]
        if rest or kind[0] == "f" or len(a) != 1 + (name == "cas"):
            raise Unknown("modifiers")
        line = f"{c_type(kind)} x = ({c_type(kind)})load{bits(kind)}_(m), y = {self.value(a[0], kind)}; "
        if name == "cas":
            line += f"{c_type(kind)} z = {self.value(a[1], kind)}; "
        line += f"store{bits(kind)}_(m, (uint{bits(kind)}_t)({new})); " + (self.set(to, kind, "x") if to else "")
        return f"{{ unsigned char *m = {self.memory(memory, parts, bits(kind) // 8, 'ATOMIC_')}; {line} }}"

    def op_mov(self, parts, a):
        kind = parts[-1]
        if len(parts) != 2:
            raise Unknown("modifiers")
        if a[0][0] == "{":
            to, width = operands(a[0][1:-1]), bits(kind) // len(operands(a[0][1:-1]))
            return f"{{ uint{bits(kind)}_t x = {self.value(a[1], 'u' + str(bits(kind)))}; " + " ".join(
                self.set(r, f"u{width}", f"x >> {i * width}") for i, r in enumerate(to) if r != "_") + " }"
        if a[1][0] == "{":
            of = operands(a[1][1:-1])
            width = bits(kind) // len(of)
            return self.set(a[0], kind, " | ".join(
                f"(uint64_t){self.value(r, f'u{width}')} << {i * width}" for i, r in enumerate(of)))
        return self.set(a[0], "pred" if kind == "pred" else "u" + str(bits(kind)), self.raw(a[1]))

    def op_selp(self, parts, a):
        kind = "u" + str(bits(parts[-1]))
        return self.set(a[0], kind, f"{self.raw(a[3])} ? {self.value(a[1], kind)} : {self.value(a[2], kind)}")

    def op_setp(self, parts, a):
        kind, compare, options = parts[-1], parts[1], parts[2:-1]
        flush = "flush_({})" if "ftz" in options else "{}"
        x = [f"{kind}_({flush.format(self.raw(b))})" if kind[0] == "f" else self.value(b, kind) for b in a[1:3]]
        if kind[0] != "f":
            test = f"{x[0]} {COMPARE[compare]} {x[1]}"
        elif compare in ("num", "nan"):
            test = ("!" if compare == "num" else "") + f"(isnan({x[0]}) || isnan({x[1]}))"
        elif compare in ("ne", "equ"):
            test = ("!" if compare == "equ" else "") + f"({x[0]} < {x[1]} || {x[0]} > {x[1]})"
        elif compare in NEGATED:
            test = f"!({x[0]} {COMPARE[NEGATED[compare]]} {x[1]})"
        else:
            test = f"{x[0]} {COMPARE[compare.removesuffix('u')]} {x[1]}"
        combine = next((o for o in options if o in ("and", "or", "xor")), None)
        operator = {"and": "&", "or": "|", "xor": "^", None: ""}[combine]
        if set(options) - {"ftz", combine} or (len(a) == 4) != bool(combine):
            raise Unknown("modifiers")
        other = f" {operator} ({self.raw(a[3])})" if combine else ""
        to = a[0].split("|")
        line = f"{{ const int c = {test}; const uint8_t p = (c){other}, q = (!c){other}; (void)q; "
        return line + self.set(to[0], "pred", "p") + (self.set(to[1], "pred", "q") if len(to) > 1 else "") + " }"

    def op_cvt(self, parts, a):
        to, of, options = parts[-2], parts[-1], parts[1:-2]
        x = self.value(a[1], of)
        rounding = next((o for o in options if o != "ftz"), None)
        if "ftz" in options:
            x = f"f32_(flush_({self.raw(a[1])}))" if of == "f32" else x
        if len(options) > 1 + ("ftz" in options):
            raise Unknown("modifiers")
        whole = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        if (to, of, rounding) == ("f16", "f32", "rn"):
            return self.set(a[0], "u16", f"half_({x})")
        if (to, of, rounding) == ("f32", "f16", None):
            return self.set(a[0], "f32", f"single_((uint16_t){self.raw(a[1])})")
        if to[0] == "f" and of[0] == "f" and "f16" not in (to, of):
            if to == of and rounding in whole:
                result = f"{whole[rounding]}({x})"
            elif rounding == {("f32", "f64"): "rn", ("f64", "f32"): None}.get((to, of), "?"):
                result = x
            else:
                raise Unknown("conversion")
            result = self.set(a[0], to, result)
            if "ftz" in options and to == "f32":
                result += f" {self.register(a[0])} = flush_({self.register(a[0])});"
            return result
        if of in ("f32", "f64") and rounding in whole:
            return self.set(a[0], to, f"whole_({whole[rounding]}({x}), {bits(to)}, {int(to[0] == 's')})")
        if to in ("f32", "f64") and of[0] != "f" and rounding == "rn":
            return self.set(a[0], to, f"({'float' if to == 'f32' else 'double'}){x}")
        if to[0] != "f" and of[0] != "f" and not options:
            return self.set(a[0], to, x)
        raise Unknown("conversion")

    def op_cvta(self, parts, a):
        shift = "0" if "shared" not in parts else "-t->shared" if "to" in parts else "+t->shared"
        shift = "" if shift == "0" else f" {shift[0]} (uint64_t)(uintptr_t){shift[1:]}"
        return self.set(a[0], "u64", f"{self.raw(a[1])}{shift}")

    def op_lop3(self, parts, a):
        if parts != ["lop3", "b32"]:
            raise Unknown("modifiers")
        return self.set(a[0], "b32", f"lop3_({', '.join(self.value(b, 'b32') for b in a[1:])})")

    def op_shf(self, parts, a):
        count = f"shift_count_({self.value(a[3], 'u32')}, {int(parts[2] == 'clamp')})"
        pair = f"((uint64_t){self.value(a[2], 'u32')} << 32 | {self.value(a[1], 'u32')})"
        return self.set(a[0], "b32", f"{pair} << {count} >> 32" if parts[1] == "l" else f"{pair} >> {count}")

    def wait(self, what, *values):
        """A call of the runtime where threads wait for each other."""
        self.waits = True
        return f"wait_(t, {what}, {', '.join(values)})"

    def op_shfl(self, parts, a):
        if parts[1] != "sync" or parts[3] != "b32":
            raise Unknown("modifiers")
        to, x = a[0].split("|"), [self.value(b, "u32") for b in a[1:]]
        call = self.wait("SHUFFLE_" + parts[2].upper() + "_", x[3], x[0], x[1], x[2])
        return self.set(to[0], "b32", call) + (self.set(to[1], "pred", "t->valid") if len(to) > 1 else "")

    def op_vote(self, parts, a):
        if "sync" not in parts:
            raise Unknown("modifiers")
        name = next(p for p in parts if p in ("any", "all", "uni", "ballot"))
        return self.set(a[0], parts[-1], self.wait(f"VOTE_{name.upper()}_", self.value(a[2], "u32"), self.raw(a[1]),
                                                   "0", "0"))

    def op_match(self, parts, a):
        to = a[0].split("|")
        call = self.wait(f"MATCH_{parts[1].upper()}_", self.value(a[2], "u32"), self.value(a[1], parts[-1]), "0", "0")
        return self.set(to[0], "b32", call) + (self.set(to[1], "pred", "t->valid") if len(to) > 1 else "")

    def op_redux(self, parts, a):
        call = self.wait(f"REDUCE_{parts[2].upper()}_", self.value(a[2], "u32"), self.value(a[1], "u32"),
                         str(int(parts[-1][0] == "s")), "0")
        return self.set(a[0], "u32", call)

    def op_activemask(self, _, a): # one lane alone is what a GPU may answer, too
        return self.set(a[0], "b32", "1u << (t->tid & 31)")

    def op_bar(self, parts, a):
        if parts[1:] == ["warp", "sync"]:
            return self.wait("WARP_", self.value(a[0], "u32"), "0", "0", "0") + ";"
        if parts[1] == "red" and len(a) == 3 and a[1] == "0":
            call = self.wait(f"BLOCK_{parts[2].upper()}_", "0", self.raw(a[2]), "0", "0")
            return self.set(a[0], parts[-1], call)
        if parts[1] != "sync" or a != ["0"]:
            raise Unknown("barrier")
        return self.wait("BLOCK_", "0", "0", "0", "0") + ";"

    op_barrier = op_bar

    def op_membar(self, _parts, _a):
        return "fence_(t);"

    op_fence = op_membar

    def op_bra(self, _, a):
        return f"goto {identifier(a[0])};"

    def op_ret(self, _parts, _a):
        return "return;"

    op_exit = op_ret # of the whole kernel; a .func that has it is refused below

    def op_call(self, _, a):
        returned = [a.pop(0).strip("() ")] if a[0][0] == "(" else []
        arguments = operands(a[1][1:-1]) if len(a) > 1 else []
        self.waits |= self.module.functions[a[0]].waits
        return f"{{ const uint32_t top = t->local_size; {identifier(a[0])}(t" + "".join(
            ", " + identifier(x) for x in returned + arguments) + "); t->local_size = top; }"

    # ---- C ----------------------------------------------------------------------------------------------------------

    def c(self, profile):
        """The function in C. The lines of its basic blocks are appended to the profile."""
        entry = self.kind == "entry"
        formal = "" if entry else "".join(
            ", unsigned char *" + identifier(p) for p in [self.returned] * bool(self.returned) + [
                p for p, _ in self.parameters])
        text = [f"static void {identifier(self.name)}(thread_ *t{formal})\n{{"]
        if entry:
            text += [f"unsigned char *const {identifier(p)} = t->param[{i}];"
                     for i, (p, _) in enumerate(self.parameters)]
        text += [f"uint{bits(kind)}_t {name} = 0;" for name, kind in self.used.items()]
        for i, x in enumerate(self.lines):
            if isinstance(x, int):
                x, _ = f"t->instructions += {x}; profile_[{len(profile)}]++;", profile.append(self.blocks[i])
            text.append(x)
        return "\n".join(text) + "\n}\n"


class Module:
    """One PTX file."""

    def __init__(self, text):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
        self.functions, self.variables, self.arrays, self.rows = {}, set(), [], []
        head = re.compile(r"\.(entry|func)\s*(?:\(\s*\.param[^)]*\s([\w$]+)\s*\))?\s*([\w$]+)\s*"
                          r"\(([^)]*)\)[^{;]*([{;])")
        variable = re.compile(
            r"\.(?:global|const)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*([^;]*?))?\s*;")
        at = 0
        while match := re.compile(f"({head.pattern})|({variable.pattern})").search(text, at):
            at = match.end()
            if match[7]:
                self.variable(*match.groups()[7:])
            elif match[6] == "{":
                depth = 1
                while depth:
                    depth += {"{": 1, "}": -1}.get(text[at], 0)
                    at += 1
                self.functions[match[4]] = Function(self, match[2], match[4], match[3], match[5],
                                                    text[match.end():at - 1],
                                                    text.count("\n", 0, match.end()) + 1)

    def variable(self, align, kind, name, count, values):
        values = re.findall(r"[^\s{},]+", values or "")
        size = int(count or len(values) or 1)
        self.variables.add(name)
        values = [f"0x{v[2:]}" if v[:2] in ("0f", "0F", "0d", "0D") else f"{int(v, 0) & (1 << bits(kind)) - 1:#x}"
                  for v in values]
        self.arrays.append(f"_Alignas({align}) static uint{bits(kind)}_t {identifier(name)}[{size}] = "
                           f"{{{', '.join(values) or '0'}}};\n")
        self.rows.append(f"    variable_({identifier(name)}, sizeof {identifier(name)});\n")

    def c(self, kernels):
        """A C file with these kernels, all device functions, and a constructor that tells the runtime of them."""
        profile = []
        functions = [f.c(profile) for f in [g for g in self.functions.values() if g.kind == "func"] + kernels]
        text = '#include "cuda_fake.h"\n' + "".join(self.arrays) + f"static uint64_t profile_[{len(profile) or 1}];\n"
        text += "static const uint32_t profile_lines_[][2] = {" + ",".join(
            f"{{{first},{last}}}" for first, last in profile or [(0, 0)]) + "};\n" + "".join(functions)
        text += "__attribute__((constructor(101))) static void add_kernels(void)\n{\n" + "".join(self.rows)
        text += f"    profile_of_(profile_, profile_lines_, {len(profile)});\n"
        for f in kernels:
            sizes = [size for _, size in f.parameters]
            text += (f'    kernel_("{f.name}", {identifier(f.name)}, {len(sizes)}, '
                     f'(const uint32_t[]){{{", ".join(map(str, sizes or [0]))}}}, {f.shared_size}, {int(f.waits)});\n')
        return text + "}\n"


def main(arguments):
    options = {}
    while arguments and arguments[0].startswith("--"):
        options[arguments[0]], arguments = arguments[1], arguments[2:]
    with open(arguments[0], encoding="ascii") as file:
        text = file.read()
    if "--swap" in options:
        load = rf"(\.entry _Z\d+{options['--swap']}.*?ld\.global\.v4\.\w+\s*\{{)(%\w+), (%\w+)"
        text, count = re.subn(load, r"\1\3, \2", text, count=1, flags=re.S)
        if not count:
            sys.exit(f"ptx.py: no kernel {options['--swap']} with a load of 16 bytes")
    try:
        module = Module(text)
    except Unknown as error:
        sys.exit(f"ptx.py: {arguments[0]}: {error}")
    only = re.compile(rf"_Z\d+{options['--only']}" if "--only" in options else "")
    kernels = [f for f in module.functions.values() if f.kind == "entry" and only.match(f.name)]
    if not kernels:
        sys.exit("ptx.py: no kernels")
    shares = [[] for _ in arguments[1:]]
    for f in sorted(kernels, key=lambda f: -len(f.lines)): # the longest first, each to the shortest share
        min(shares, key=lambda s: sum(len(g.lines) for g in s)).append(f)
    for name, share in zip(arguments[1:], shares):
        with open(name, "w", encoding="ascii") as file:
            file.write(module.c(share))


main(sys.argv[1:])
