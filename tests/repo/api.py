"""The API reference, made from the headers' own comments: `python3 tests/repo/api.py >docs/api.md` writes it, and
`python3 tests/repo/api.py --check` compares docs/api.md with what it would write now (TAP). A comment directly before a
declaration, or before several without a blank line between them, is their contract; a public declaration without one
is an error. Names that end in _ are private."""
import bisect
import difflib
import os
import re
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = "docs/api.md"
HEADERS = [("kahan_opt.h", "KAHAN_OPT_H", ""), ("kahan_opt_cuda.cuh", "KAHAN_OPT_CUDA_CUH", "cuda-")]
OPTION = "KAHAN_OPT_VMATH"
WIDTH = 116
BANNER = re.compile(r"/\* (?:----|====)")
CAPITALS = re.compile(r"[A-Z0-9](?:[A-Z0-9/&-]|(?: (?=[A-Z0-9&/][A-Z0-9&/-]*(?![\w-]))))*(?![\w-])")
QUOTED = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
NAME = re.compile(r"\b(?:kopt|KOPT|KAHAN_OPT)_\w+\b")


class Item:
    """A comment, a directive, a declaration ('code') or a blank line of a C file, with its lines."""

    def __init__(self, kind, text, line, end, column=0, own_line=True):
        self.kind, self.text, self.line, self.end, self.column, self.own_line = kind, text, line, end, column, own_line


def skip_quoted(text, i):
    """The index behind the comment, string or character constant that begins at i; i if none does."""
    if text.startswith("/*", i):
        end = text.find("*/", i + 2)
        return len(text) if end < 0 else end + 2
    if text.startswith("//", i):
        end = text.find("\n", i)
        return len(text) if end < 0 else end
    if text[i] in "\"'":
        end = i + 1
        while end < len(text) and text[end] not in (text[i], "\n"):
            end += 2 if text[end] == "\\" else 1
        return min(end + 1, len(text))
    return i


def end_of_directive(text, i):
    """Of its text without a comment at its end: that is an item of its own."""
    while i < len(text) and text[i] != "\n":
        if text.startswith("\\\n", i):
            i += 2
        elif text.startswith("/*", i):
            after = skip_quoted(text, i)
            if text[after:after + 200].split("\n", 1)[0].strip():
                i = after  # a comment in the middle
            else:
                return i
        elif text.startswith("//", i):
            return i
        else:
            i = max(skip_quoted(text, i), i + 1)
    return i


def end_of_code(text, i):
    """Behind the ; or the } that ends a declaration or a definition. A } at the beginning of a line is the last of the
    open ones, also where #if and #else open one twice."""
    depth, body, last, i0 = 0, False, "", i
    while i < len(text):
        c = text[i]
        at_line_start = i == 0 or text[i - 1] == "\n"
        if c == "#" and i > i0 and text[text.rfind("\n", 0, i) + 1:i].strip() == "":
            i = end_of_directive(text, i)
            continue
        after = skip_quoted(text, i)
        if after > i:
            i = after
            continue
        if c in "([{":
            body = body or (c == "{" and depth == 0 and last == ")")
            depth += 1
        elif c in ")]}":
            depth = 0 if c == "}" and at_line_start else depth - 1
            if depth <= 0 and c == "}" and body:
                return i + 1
        elif c == ";" and depth <= 0:
            return i + 1
        if not c.isspace():
            last = c
        i += 1
    return i


def scan(text, first_line=1):
    """The items of a C text, at file scope."""
    items, i = [], 0
    ends = [m.start() for m in re.finditer("\n", text)]

    def line_of(at):
        return first_line + bisect.bisect_left(ends, at)

    while i < len(text):
        if text[i].isspace():
            j = i
            while j < len(text) and text[j].isspace():
                j += 1
            if text.count("\n", i, j) >= 2:
                items.append(Item("blank", "", line_of(i) + 1, line_of(j) - 1))
            i = j
            continue
        begin_of_line = text.rfind("\n", 0, i) + 1
        own_line = text[begin_of_line:i].strip() == ""
        if text.startswith("/*", i) or text.startswith("//", i):
            kind, j = "comment", skip_quoted(text, i)
            if text.startswith("/* clang-format o", i):
                i = j
                continue
        elif text[i] == "#" and own_line:
            kind, j = "directive", end_of_directive(text, i)
        else:
            kind, j = "code", end_of_code(text, i)
        items.append(Item(kind, text[i:j].rstrip(), line_of(i), line_of(j), i - begin_of_line, own_line))
        i = j
    return items


def public_part(text, guard):
    """The text between the include guard and the banner IMPLEMENTATION, and the number of its first line."""
    begin = re.search(r"^#define %s\b.*\n" % guard, text, re.M)
    end = re.search(r"^/\* (?:=+ \*/\n/\* )?IMPLEMENTATION\b", text, re.M)
    if not begin or not end or end.start() < begin.end():
        raise SystemExit("api.py: no include guard %s, or no banner IMPLEMENTATION after it" % guard)
    part = text[begin.end():end.start()].replace("API_ KOPT_RESULT_", "API_ kopt_result").replace(
        "enum KOPT_NODISCARD_ ", "enum ")
    return part, text.count("\n", 0, begin.end()) + 1


# ---- what is declared ------------------------------------------------------------------------------------------------


def without_comments(code):
    return QUOTED.sub(lambda m: " " if m.group(0).startswith("/") else m.group(0), code)


def squeezed(code):
    return re.sub(r"\s+", " ", without_comments(code)).strip()


def split_outside(text, separator):
    """At the separators outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return parts + [text[begin:]]


def declared_name(declarator):
    """float (*f)(int) -> f; *x[3] -> x; unsigned a : 3 -> a"""
    pointer = re.search(r"\(\s*\*+\s*(?:const\b\s*)?(\w+)", declarator)
    if pointer:
        return pointer.group(1)
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*|[:=(].*", "", declarator, flags=re.S))
    return names[-1] if names else ""


class Member:
    """A field or a constant, or a remark between them (code is None)."""

    def __init__(self, code, names, value, comment, line, column):
        self.code, self.names, self.value = code, names, value
        self.comment, self.line, self.column, self.comment_end = comment, line, column, line


def members(body, separator, first_line):
    """Of what is between the braces of a struct (separator ;) or an enum (,)."""
    out, i, begin, depth = [], 0, None, 0

    def line_of(at):
        return first_line + body.count("\n", 0, at)

    def column_of(at):
        return at - (body.rfind("\n", 0, at) + 1)

    def finish(at):
        nonlocal begin
        if begin is not None and squeezed(body[begin:at]):
            code = squeezed(body[begin:at])
            if separator == ",":
                name, _, value = code.partition("=")
                out.append(Member(name.strip(), [name.strip()], value.strip(), "", line_of(at), column_of(begin)))
            else:
                declarators = split_outside(code, ",")
                names = [declared_name(declarator) for declarator in declarators]
                if any(private(name) for name in names) and not all(private(name) for name in names):
                    base = re.match(r".*?(?=\**\s*%s\b)" % re.escape(names[0]), declarators[0]).group(0).strip()
                    kept = [d.strip() for d, n in zip(declarators, names) if not private(n)]
                    if not private(names[0]):
                        kept[0] = kept[0][len(base):].strip()
                    code = base + " " + ", ".join(kept)
                    names = [name for name in names if not private(name)]
                out.append(Member(code, names, "", "", line_of(at), column_of(begin)))
        begin = None

    while i < len(body):
        if body[i] == "#" and body[body.rfind("\n", 0, i) + 1:i].strip() == "":
            i = end_of_directive(body, i)
            continue
        j = skip_quoted(body, i)
        if j > i and body[i] == "/":
            comment, line, column = body[i:j], line_of(i), column_of(i)
            if begin is not None and depth == 0 and separator == "," and not body[j:].strip().startswith(","):
                finish(i)  # the last constant has no comma
            own_line = body[body.rfind("\n", 0, i) + 1:i].strip() == ""
            last = out[-1] if out else None
            if begin is not None:  # inside a declaration
                i = j
                continue
            if last and last.code is not None and not own_line and last.line == line:
                last.comment += comment
                last.comment_end = line_of(j)
            elif last and last.code is not None and last.comment and own_line and column > last.column + 2 and \
                    last.comment_end == line - 1:
                last.comment += comment  # goes over several lines, each a comment
                last.comment_end = line_of(j)
            else:
                out.append(Member(None, [], "", comment, line, column))
            i = j
            continue
        c = body[i]
        if c == separator and depth == 0:
            finish(i)
        elif not c.isspace():
            if begin is None:
                begin = i
            depth += (c in "([{") - (c in ")]}")
        i = max(j, i + 1)
    finish(i)
    return out


def private(name):
    return name.endswith("_")


class Declaration:
    """kind: function, typedef, struct, union, enum or macro."""

    def __init__(self, kind, name, code, line):
        self.kind, self.name, self.code, self.line = kind, name, code, line
        self.members, self.comment, self.value = [], "", ""

    def names(self):
        """Its own, and the constants of an enum."""
        constants = [n for m in self.members for n in m.names if not private(n)] if self.kind == "enum" else []
        return ([self.name] if self.name else []) + constants


def declaration_of(item):
    """What a piece of code declares; None: nothing that is public."""
    code = squeezed(item.text)
    head = re.match(r"(?:typedef )?(struct|union|enum)\b(?:\s+[A-Z]\w*_\b(?:\([^)]*\))?)?\s*(\w*)\s*\{", code)
    if head:
        open_brace = 0
        while item.text[open_brace] != "{":
            open_brace = max(skip_quoted(item.text, open_brace), open_brace + 1)
        close = item.text.rfind("}")
        kind = head.group(1)
        name = declared_name(item.text[close + 1:].rstrip(";")) if code.startswith("typedef") else head.group(2)
        made = Declaration(kind, name, "", item.line)
        made.members = [m for m in members(item.text[open_brace + 1:close], "," if kind == "enum" else ";",
                                           item.line + item.text.count("\n", 0, open_brace + 1))
                        if m.code is None or any(not private(n) for n in m.names)]
        if private(name) or not made.names():
            return None
        return made
    if code.startswith("typedef"):
        name = declared_name(code.rstrip(";"))
        return None if private(name) else Declaration("typedef", name, code, item.line)
    signature = re.match(r"((?:[\w*]+[\s*]+)+)(\w+)\s*\(", code)
    if not signature or "(" not in code:
        return None
    name, depth, i = signature.group(2), 0, signature.end() - 1
    while True:
        depth += (code[i] == "(") - (code[i] == ")")
        i += 1
        if depth == 0:
            break
    specifiers = r"^(?:(?:[A-Z]\w*_|static|extern|inline) )+"
    if private(name) or not re.match(specifiers, code):
        return None
    return Declaration("function", name, re.sub(specifiers, "", code[:i]) + ";", item.line)


def macro_of(item, guard):
    """Of a #define that is public. KAHAN_OPT_ macros are the user's to define."""
    define = re.match(r"#\s*define\s+(\w+)(\([^)]*\))?[ \t]*(.*)", item.text, re.S)
    if not define or private(define.group(1)) or define.group(1).startswith("KAHAN_OPT_") or define.group(1) == guard:
        return None
    name, parameters, value = define.group(1), define.group(2) or "", define.group(3).strip()
    value = re.sub(r"\s*\\\n\s*", " ", without_comments(value)).strip()
    made = Declaration("macro", name, ("#define %s%s %s" % (name, parameters, value)).strip(), item.line)
    made.value = "" if parameters else value
    if any(private(n) for n in re.findall(r"[A-Za-z_]\w*", value)):
        made.code, made.value = "#define %s%s" % (name, parameters), ""
    return made


class Section:
    def __init__(self, title, remark):
        self.title, self.remark, self.parts, self.with_option, self.manual = title, remark, [], False, False


class Group:
    """Declarations with one contract; without declarations: text between them."""

    def __init__(self, contract, with_option, line):
        self.contract, self.with_option, self.line, self.declarations = contract, with_option, line, []


def words_of(comment):
    """A comment's lines without its marks, shifted to the left."""
    lines = []
    for piece in re.findall(r"/\*.*?\*/|//[^\n]*", comment, re.S):
        piece = re.sub(r"^//", "", piece) if piece.startswith("//") else piece[2:-2]
        piece = [line.rstrip() for line in piece.expandtabs().split("\n")]
        if len(piece) > 1 and all(re.match(r" *\*( |$)", line) for line in piece[1:] if line):
            piece[1:] = [re.sub(r"^ *\* ?", "", line) for line in piece[1:]]
        piece[0] = piece[0].strip()
        indents = [len(line) - len(line.lstrip()) for line in piece[1:] if line.strip()]
        least = min(indents) if indents else 0
        lines += [piece[0]] + [line[least:] for line in piece[1:]]
    lines = [re.sub(r" *\\$", "", line) for line in lines]  # of a macro
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return lines


def banner_words(comment):
    """The words of a banner, in one line."""
    return re.sub(r"\s+", " ", re.sub(r"[-=]{3,}", " ", " ".join(words_of(comment)))).strip()


def banner_name(words):
    """The capitals that a banner begins with, and what follows them. A banner in lower case: ''."""
    name = CAPITALS.match(words)
    if not name or not re.search(r"[A-Z]{2}", name.group(0)):
        return "", words
    return name.group(0).strip(), words[name.end():].lstrip(" .:,").strip()


def is_heading(lines, i):
    """In capitals after an empty line, not further to the right than other text; what follows is in parentheses."""
    if i and lines[i - 1].strip() or lines[i] != lines[i].lstrip():
        return False
    return re.fullmatch(r"[A-Z][A-Z ]+[A-Z](?: \(.*\))?", lines[i].strip()) is not None


def read(text, guard):
    """The sections of a header, and its errors."""
    part, first_line = public_part(text, guard)
    sections, errors, conditions = [], [], []
    group = pending = None
    last = None

    def section():
        if not sections:
            sections.append(Section("", ""))
        return sections[-1]

    def free_text(comment, with_option):
        """Of no declaration: text of the section. Its headings begin sections of their own."""
        if not comment:
            return
        lines, begin = words_of(comment.text), 0
        for i in range(len(lines) + 1):
            if i < len(lines) and not is_heading(lines, i):
                continue
            if any(line.strip() for line in lines[begin:i]):
                section().parts.append(Group(lines[begin:i], with_option, comment.line))
            if i < len(lines):
                sections.append(Section(*banner_name(lines[i])))
                sections[-1].manual = True
                begin = i + 1

    for item in scan(part, first_line):
        with_option = OPTION in conditions
        if item.kind == "blank":
            free_text(pending, with_option)
            group = pending = last = None
            continue
        if item.kind == "comment" and not item.own_line:
            if last and last.line <= item.line:
                last.comment += item.text
            continue
        if item.kind == "comment":
            free_text(pending, with_option)
            group = pending = last = None
            if BANNER.match(item.text):
                title, remark = banner_name(banner_words(item.text))
                if title:
                    sections.append(Section(title, remark))
                    sections[-1].with_option = with_option
                elif remark:
                    section().parts.append(Group(["## " + remark], with_option, item.line))
            else:
                pending = item
            continue
        if item.kind == "directive":
            word = re.match(r"#\s*(\w*)\s*(.*)", item.text, re.S)
            if word.group(1) in ("if", "ifdef", "ifndef"):
                conditions.append(word.group(2).strip() if word.group(1) == "ifdef" else "")
                if re.fullmatch(r"defined\(?\s*%s\s*\)?" % OPTION, word.group(2).strip()):
                    conditions[-1] = OPTION
                group = None
            elif word.group(1) in ("else", "elif"):
                conditions[-1:] = [""]
                group = None
            elif word.group(1) == "endif":
                conditions[-1:] = []
                group = None
            if word.group(1) != "define":
                continue
        made = macro_of(item, guard) if item.kind == "directive" else declaration_of(item)
        if group is None:
            group = Group(words_of(pending.text) if pending else [], with_option, item.line)
            if made and section().manual:  # what comes before the first banner
                sections.append(Section("MACROS", ""))
            group.section = section()
            group.first = not group.section.parts
            pending = None
            groups_new = True
        else:
            groups_new = not group.declarations
        last = made
        if made:
            if groups_new:
                group.section.parts.append(group)
            group.declarations.append(made)
    for each in sections:
        for g in each.parts:
            for made in g.declarations:
                inside = any(m.comment for m in made.members)
                if not g.contract and not made.comment and not inside and not (g.first and each.remark):
                    errors.append("line %d: %s has no contract: a comment directly before it" %
                                  (made.line, made.name or made.names()[0]))
    if conditions:
        errors.append("an #if of the public part has no #endif in it")
    return sections, errors


# ---- Markdown --------------------------------------------------------------------------------------------------------

SPAN = "\x00"  # a blank that no line is broken at


class Writer:
    """known: every name that has an anchor."""

    def __init__(self, known):
        self.known = known

    def link(self, name, seen, call=""):
        if name in self.known and name not in seen:
            seen.add(name)
            return "[`%s%s`](#%s)" % (name, call, name)
        return "`%s%s`" % (name, call)

    def inline(self, text, seen, cell=False):
        """Names become links, the first time, and what looks like code becomes code."""
        pattern = re.compile(
            r"(?P<code>`[^`]+`)|(?P<page>\bdocs/(?P<file>[\w-]+\.md)(?P<anchor>#[\w-]+)?)"
            r"|(?P<name>\b(?:kopt|KOPT|KAHAN_OPT)_\w+\b)(?P<call>\((?:[^()]{0,60})\))?(?P<field>\.[a-z]\w+)?(?![\w(])"
            r"|(?P<other>(?<![\w*)\].])\*?\b[A-Za-z]\w*(?:(?:->|\.)[A-Za-z_]\w*|\[[^\]\s]*\])*"
            r"(?:\((?:[A-Za-z]\w*\[[^\]\s]*\])?\))?)")

        def escaped(plain):
            plain = re.sub(r"([\\`*_<])", r"\\\1", plain)
            return re.sub(r"\]\(", r"]\\(", plain)

        def one(m):
            if m.group("code"):
                return m.group(0)
            if m.group("page"):
                return "[%s](%s%s)" % (m.group(0), m.group("file"), m.group("anchor") or "")
            if m.group("name"):
                return self.link(m.group("name"), seen, (m.group("call") or "") + (m.group("field") or ""))
            word = m.group("other")
            # x.y is code but e.g., a.b at a full stop is not; a_b, a->b, a[i] and *a are, f() too
            dotted = re.fullmatch(r"[A-Za-z]\w+\.[\w.]+|[a-z]\.[a-z]\w+", word) and word not in ("i.e", "e.g")
            if "_" in word or "->" in word or "[" in word or "(" in word or word.startswith("*") or dotted:
                return "`%s`" % word
            return word

        out, i = [], 0
        for m in pattern.finditer(text):
            out.append(escaped(text[i:m.start()]))
            out.append(one(m))
            i = m.end()
        out.append(escaped(text[i:]))
        line = re.sub(r"`[^`]+`|\[[^][]*\]\([^)]*\)", lambda m: m.group(0).replace(" ", SPAN), "".join(out))
        return line.replace("|", "\\|").replace(SPAN, " ") if cell else line

    def paragraph(self, text, seen, indent=""):
        lines = textwrap.wrap(self.inline(text, seen), WIDTH - len(indent), break_long_words=False,
                              break_on_hyphens=False)
        lines = [re.sub(r"^(?=[-+>#] |#)|^(?=\*\s)", r"\\", line) if k or not indent else line
                 for k, line in enumerate(lines)]
        lines = [re.sub(r"^(\d+)([.)]) ", r"\1\\\2 ", line) for line in lines]
        return [(indent + line).replace(SPAN, " ") for line in lines]

    def text(self, lines, seen):
        """Lines of a comment: paragraphs, lists (- and 1.), lists of names with their meaning at one column, and
        tables and listings, which stay as they are."""
        out, i = [], 0

        def indent_of(line):
            return len(line) - len(line.lstrip())

        while i < len(lines):
            line = lines[i]
            if not line.strip():
                i += 1
                continue
            base = indent_of(line)
            if line.startswith("## "):
                out += ["", "#" + line, ""]
                i += 1
                continue
            end = next((k for k in range(i, len(lines)) if not lines[k].strip()), len(lines))
            if base >= 4 and not (i and lines[i - 1].strip()) and any(x.endswith((";", "{")) for x in lines[i:end]):
                out += ["", "```text"] + textwrap.dedent("\n".join(lines[i:end])).split("\n") + ["```"]
                i = end
                continue
            item = re.match(r"\s*(-|\d+\.)\s+", line)
            if item:
                text = [line[item.end():]]
                i += 1
                while i < len(lines) and lines[i].strip() and indent_of(lines[i]) > base:
                    text.append(lines[i].strip())
                    i += 1
                mark = item.group(1)
                body = self.paragraph(" ".join(text), seen, " " * (len(mark) + 1))
                out += ([] if out and out[-1].startswith(("-", "  ", "1", "2", "3", "4", "5", "6", "7", "8", "9"))
                        else [""])
                out += [mark + " " + body[0].lstrip()] + body[1:]
                continue
            gap = self.hanging(lines, i)
            if gap:
                out.append("")
                while i < len(lines) and lines[i].strip() and indent_of(lines[i]) == base and \
                        re.search(r"\S {2,}\S", lines[i]):
                    column = self.column_of(lines, i, gap)
                    term, text = re.split(r" {2,}", lines[i][:column].strip()), [lines[i][column:].strip()]
                    i += 1
                    while i < len(lines) and lines[i].strip() and indent_of(lines[i]) >= min(column, base + 4):
                        text.append(lines[i].strip())
                        i += 1
                    head = (self.anchored(term[0], seen) if NAME.fullmatch(term[0]) else "**%s**" % term[0])
                    head += " (%s)" % ", ".join(term[1:]) if term[1:] else ""
                    body = self.paragraph(" ".join(text), seen, "  ")
                    if len(head) + len(body[0]) + 2 > WIDTH:
                        out += ["- " + head + ":"] + body
                    else:
                        out += ["- " + head + ": " + body[0].lstrip()] + body[1:]
                continue
            if self.is_table(line, base, lines, i):
                out += ["", "```text"]
                table = []
                while i < len(lines) and lines[i].strip() and self.is_table(lines[i], 0, lines, i):
                    table.append(lines[i])
                    i += 1
                out += textwrap.dedent("\n".join(table)).split("\n") + ["```"]
                continue
            text = []
            while i < len(lines) and lines[i].strip() and not re.match(r"\s*(-|\d+\.)\s", lines[i]) and \
                    not self.is_table(lines[i], base, lines, i) and not (text and self.hanging(lines, i)):
                text.append(lines[i].strip())
                i += 1
            if not text:
                text.append(lines[i].strip())
                i += 1
            out += [""] + self.paragraph(" ".join(text), seen)
        return out[1:] if out and not out[0] else out

    @staticmethod
    def is_table(line, base, lines, i):
        """Three blanks in a row, or further to the right than the text before it."""
        indent = len(line) - len(line.lstrip())
        return re.search(r"[^\s.] {3,}\S", line) is not None or indent >= base + 4

    @staticmethod
    def hanging(lines, i):
        """NAME  text, whose next lines begin where its text does: the columns of the meaning in this block, or None."""
        columns = set()
        base = len(lines[i]) - len(lines[i].lstrip())
        if not re.search(r"\S {2,}\S", lines[i]):
            return None
        for k in range(i, len(lines)):
            if not lines[k].strip():
                break
            indent = len(lines[k]) - len(lines[k].lstrip())
            if k > i and indent > base and len(lines[k - 1]) > indent and lines[k - 1][indent - 2:indent] == "  " and \
                    lines[k - 1][indent] != " " and lines[k - 1][:indent].strip():
                columns.add(indent)
        return columns or None

    @staticmethod
    def column_of(lines, i, columns):
        """Where the meaning begins in this line."""
        for column in sorted(columns, reverse=True):
            if len(lines[i]) > column and lines[i][column - 2:column] == "  " and lines[i][column] != " ":
                return column
        return re.search(r"\S {2,}(?=\S)", lines[i]).end()

    def anchored(self, name, seen):
        seen.add(name)
        return '<a id="%s"></a>`%s`' % (name, name)


def signature(code):
    """A declaration in lines of WIDTH, broken after commas; a macro between words."""
    if len(code) <= WIDTH or "(" not in code:
        return [code]
    if code.startswith("#"):
        lines = textwrap.wrap(code, WIDTH - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return [line + " \\" for line in lines[:-1]] + lines[-1:]
    indent = " " * (code.index("(") + 1)
    lines, line = [], ""
    for part in code.replace(", ", ",\n").split("\n"):
        if line and len(line) + len(part) + 1 > WIDTH:
            lines.append(line)
            line = indent + part
        else:
            line += (" " if line.strip() else "") + part
    return lines + [line]


def cells(made, writer, seen):
    """The table of a struct's fields or an enum's constants."""
    rows, enum = [], made.kind == "enum"
    for m in made.members:
        comment = writer.inline(" ".join(" ".join(words_of(m.comment)).split()), seen, cell=True)
        if m.code is None:
            rows.append(["", comment])
        elif enum:
            name = '<a id="%s"></a>`%s`' % (m.names[0], m.names[0])
            rows.append([name + (" = %s" % m.value if m.value else ""), comment])
        else:
            rows.append(["`%s`" % m.code.replace("|", "\\|"), comment])
    if not any(row[1] for row in rows):
        return ["| %s |" % ("constant" if enum else "field"), "| --- |"] + ["| %s |" % row[0] for row in rows]
    head = ["| constant | meaning |" if enum else "| field | meaning |", "| --- | --- |"]
    return head + ["| %s | %s |" % tuple(row) for row in rows]


def heading_of(g):
    names = ", ".join("`%s%s`" % (d.name, "()" if d.kind == "function" else "") for d in g.declarations if d.name)
    if all(d.kind == "macro" for d in g.declarations):  # or KOPT_X and kopt_x() have one anchor
        return ("macros " if len(g.declarations) > 1 else "macro ") + names
    return names


def group_lines(g, writer, in_option_section):
    """A group's anchors, heading, contract and declarations."""
    own = set(n for d in g.declarations for n in d.names())
    seen = set(own)
    out = []
    if g.declarations:
        plain = [d for d in g.declarations if d.kind == "macro"]
        table = len(plain) == len(g.declarations) and len(plain) > 3
        named = [d for d in g.declarations if d.name]
        if table:
            out += ["### macros `%s` to `%s`" % (plain[0].name, plain[-1].name), ""]
        else:
            out += ["".join('<a id="%s"></a>' % d.name for d in named), ""] if named else []
            out += ["### " + (heading_of(g) if named else "constants"), ""]
        if g.with_option and not in_option_section:
            out += ["*With `%s`.*" % OPTION, ""]
        text = writer.text(g.contract, seen)
        out += text + [""] if text else []
        if table:
            out += ["| macro | value | meaning |", "| --- | --- | --- |"]
            for d in plain:
                meaning = writer.inline(" ".join(" ".join(words_of(d.comment)).split()), seen, cell=True)
                out.append('| <a id="%s"></a>`%s` | %s | %s |' %
                           (d.name, d.name, "`%s`" % d.value.replace("|", "\\|") if d.value else "", meaning))
            return out + [""]
        code = []
        for d in g.declarations:
            if d.kind in ("function", "typedef", "macro"):
                lines = signature(d.code)
                comment = " ".join(" ".join(words_of(d.comment)).split())
                if comment and len(lines) == 1 and len(lines[0]) + len(comment) + 7 <= WIDTH:
                    lines[0] += " /* %s */" % comment
                elif comment:
                    lines = textwrap.wrap("/* %s */" % comment, WIDTH, subsequent_indent="   ") + lines
                code += lines
        if code:
            out += ["```c"] + code + ["```", ""]
        for d in g.declarations:
            if d.members:
                note = " ".join(" ".join(words_of(d.comment)).split())
                if note:
                    out += writer.paragraph(note, seen) + [""]
                if len(g.declarations) > 1:
                    out += ["%s `%s`:" % (d.kind, d.name), ""]
                out += cells(d, writer, seen) + [""]
        return out
    return writer.text(g.contract, seen) + [""]


def lookup(headers):
    """Name -> kind, for all that has an anchor."""
    known = {}
    for _, _, sections in headers:
        for s in sections:
            for g in s.parts:
                for d in g.declarations:
                    for name in d.names():
                        known[name] = d.kind if name == d.name else "constant"
                if not g.declarations:
                    for line in g.contract:  # the macros of the user, where they are explained
                        option = re.match(r"(KAHAN_OPT_\w*[A-Z0-9])  ", line)
                        if option:
                            known.setdefault(option.group(1), "option")
    return known


def index(known):
    """Links by kind, each kind by name."""
    kinds = [("Functions", ("function",)), ("Types", ("struct", "union", "enum", "typedef")),
             ("Constants", ("constant",)), ("Macros", ("macro",)), ("Configuration", ("option",))]
    out = []
    for title, which in kinds:
        names = sorted((n for n in known if known[n] in which), key=str.lower)
        if names:
            links = ["[%s](#%s)" % (n, n) for n in names]
            out += ["**%s**" % title, ""]
            line = ""
            for k, link in enumerate(links):
                piece = link + ("" if k == len(links) - 1 else ",")
                if line and len(line) + len(piece) + 1 > WIDTH:
                    out.append(line)
                    line = piece
                else:
                    line += (" " if line else "") + piece
            out += [line, ""]
    return out


def slug(prefix, title):
    return prefix + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def text_of(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def page(texts=None):
    """The page's text, and the errors of the headers. texts: path -> what takes the place of what the file has."""
    headers, errors = [], []
    for path, guard, prefix in HEADERS:
        sections, wrong = read(texts[path] if texts else text_of(path), guard)
        headers.append((path, prefix, sections))
        errors += ["%s, %s" % (path, e) for e in wrong]
    known = lookup(headers)
    twice = set()
    for path, _, sections in headers:
        for s in sections:
            for g in s.parts:
                for d in g.declarations:
                    for name in d.names():
                        if name in twice:
                            errors.append("%s, line %d: %s is declared twice" % (path, d.line, name))
                        twice.add(name)
    writer = Writer(known)
    out = ["# API reference", ""]
    out += ["Made from the comments of [kahan_opt.h](../kahan_opt.h) and "
            "[kahan_opt_cuda.cuh](../kahan_opt_cuda.cuh) by", "`python3 tests/repo/api.py >docs/api.md`: "
            "edit those, not this page.", ""]
    for path, prefix, sections in headers:
        links = ["[%s](#%s)" % (s.title, slug(prefix, s.title)) for s in sections if s.title]
        out += ["**%s:**" % path] + textwrap.wrap((SPAN + "· ").join(x.replace(" ", SPAN) for x in links), WIDTH,
                                                  break_long_words=False, break_on_hyphens=False) + [""]
    out = [line.replace(SPAN, " ") for line in out]
    out += ["## Index", ""] + index(known)
    for path, prefix, sections in headers:
        out += ["# " + path, ""]
        for s in sections:
            if s.title:
                out += ['<a id="%s"></a>' % slug(prefix, s.title), "", "## " + s.title, ""]
                mark = re.match(r"\(with %s\)[:.,]?\s*" % OPTION, s.remark)
                remark = s.remark[mark.end():] if mark else s.remark
                if s.with_option:
                    out += ["*With `%s`.*" % OPTION, ""]
                if remark:
                    if "_" not in remark.split()[0]:
                        remark = remark[0].upper() + remark[1:]
                    out += writer.paragraph(remark, set()) + [""]
            for g in s.parts:
                out += group_lines(g, writer, s.with_option)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"
    return text, errors


def differences(text):
    """Lines that say how docs/api.md differs from what it should be; none: it is current."""
    there = text_of(PAGE) if os.path.exists(os.path.join(ROOT, PAGE)) else ""
    return list(difflib.unified_diff(there.splitlines(), text.splitlines(), PAGE, "the headers", lineterm="", n=0))


def main(arguments):
    if arguments not in ([], ["--check"]):
        print("usage: api.py [--check]", file=sys.stderr)
        return 2
    text, errors = page()
    if not arguments:
        for e in errors:
            print("api.py: " + e, file=sys.stderr)
        if not errors:
            sys.stdout.write(text)
        return 1 if errors else 0
    old = differences(text)
    for number, wrong, what in ((1, errors, "each public declaration has a contract"),
                                (2, old, PAGE + " is what the headers say (python3 tests/repo/api.py >%s)" % PAGE)):
        print("%s %d - %s" % ("not ok" if wrong else "ok", number, what))
        for line in wrong[:40]:
            print("# " + line)
    print("1..2")
    return 1 if errors or old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
