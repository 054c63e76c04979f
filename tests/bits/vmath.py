#!/usr/bin/env python3
"""Vector mathematics beside MPFR (python3-gmpy2), which shares nothing with the header.

    vmath.py test PROGRAM...      every program's 16-bit results, all inputs; a sample of its fp32 functions; the
                                  exceptions of the header (prints TAP)
    vmath.py full PROGRAM         the fp32 functions at 2^24 inputs each: minutes
    vmath.py exceptions           kopt_map_exceptions_ of the header: the inputs that its formulas round wrongly, with
                                  the right results
    vmath.py hashes               `golden` of tests/unit/test_vmath.c
    vmath.py coefficients         the polynomials of the header (python3-mpmath)

PROGRAM is a build of tests/unit/test_vmath.c; a name that ends in sleef is one with SLEEF."""
import array
import os
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


# ---- coefficients ----------------------------------------------------------------------------------------------------

def coefficients():
    """Least squares at 60 Chebyshev nodes (which is close to minimax) with 60 digits; the coefficients are rounded to
    fp32 one by one, from the lowest, each time fitting the rest anew. The error that is printed is that of the rounded
    polynomial, exactly evaluated, times `weight`."""
    from mpmath import mp, mpf, cos, pi, lu_solve, matrix, polyroots, exp, log, atanh, tanh, erf, erfc, atan, sin, sqrt

    mp.dps = 60

    def fp32(x):
        return mpf(struct.unpack('f', struct.pack('f', float(x)))[0])

    def fit(name, f, low, high, degree, weight):
        low, high, known = mpf(low), mpf(high), []
        nodes = [(low + high) / 2 + (high - low) / 2 * cos(pi * (2 * i + 1) / 120) for i in range(60)]
        while len(known) <= degree:
            rest = [(f(x) - sum(c * x ** i for i, c in enumerate(known))) * weight(x) for x in nodes]
            rows = [[weight(x) * x ** k for k in range(len(known), degree + 1)] for x in nodes]
            known.append(fp32(lu_solve(matrix(rows), matrix(rest))[0]))
        points = [low + (high - low) * (i + mpf(1) / 2) / 1000 for i in range(1000)]
        error = max(abs((sum(c * x ** i for i, c in enumerate(known)) - f(x)) * weight(x)) for x in points)
        print('%s, on [%s, %s], error 2^%.1f:' % (name, mp.nstr(low, 4), mp.nstr(high, 4), float(log(error, 2))))
        print('    ' + ', '.join('%.9gf' % float(c) for c in known))

    fit('exp: (e^r - 1 - r) / r^2', lambda r: (exp(r) - 1 - r) / r ** 2, -log(2) / 2 - mpf(1) / 1000,
        log(2) / 2 + mpf(1) / 1000, 5, lambda r: r ** 2)
    fit('log: (2 atanh(s) / s - 2) / z, z = s^2', lambda z: (2 * atanh(sqrt(z)) / sqrt(z) - 2) / z, 0, mpf(3) / 100, 3,
        lambda z: z * sqrt(z) / 2)
    fit('tanh: (tanh(x) / x - 1) / z, z = x^2', lambda z: (tanh(sqrt(z)) / sqrt(z) - 1) / z, 0, mpf(65) / 100, 6,
        lambda z: z)
    fit('erf: erf(x) / x - 1, z = x^2', lambda z: erf(sqrt(z)) / sqrt(z) - 1, 0, 1, 7, lambda z: 1)
    fit('erfcx: e^(y^2) erfc(y) (1 + 2 y), t = (y - 2) / (y + 2)',
        lambda t: (lambda y: exp(y * y) * erfc(y) * (1 + 2 * y))(2 * (1 + t) / (1 - t)), -1, mpf(69) / 100, 11,
        lambda t: 1)
    fit('atan: (atan(q) / q - 1) / z, z = q^2', lambda z: (atan(sqrt(z)) / sqrt(z) - 1) / z, 0, 1, 10, lambda z: z)
    fit('sinpi: 4 - sin(pi f) / f, z = f^2', lambda z: 4 - sin(pi * sqrt(z)) / sqrt(z), 0, mpf(1) / 16, 4, lambda z: 1)
    fit('cospi: (cos(pi f) - 1) / z, z = f^2', lambda z: (cos(pi * sqrt(z)) - 1) / z, 0, mpf(1) / 16, 4, lambda z: z)

    # The atan of a step: the same without the -1, by its roots: one is real, the others are two pairs.
    f = lambda z: atan(sqrt(z)) / sqrt(z)
    nodes = [(1 + cos(pi * (2 * i + 1) / 120)) / 2 for i in range(60)]
    fitted = lu_solve(matrix([[z ** k / f(z) for k in range(6)] for z in nodes]), matrix([1] * 60))
    roots = polyroots(list(fitted)[::-1], maxsteps=200, extraprec=200)
    root = fp32([r.real for r in roots if abs(r.imag) < 1e-20][0])
    pairs = [(fp32(-2 * r.real), fp32(abs(r) ** 2)) for r in roots if r.imag > 1e-20]
    product = lambda z: (root - z) * ((z + pairs[0][0]) * z + pairs[0][1]) * ((z + pairs[1][0]) * z + pairs[1][1])
    ratios = [product(z) / f(z) for z in [(i + mpf(1) / 2) / 1000 for i in range(1000)]]
    factor = fp32(2 / (max(ratios) + min(ratios)))
    error = max(abs(factor * r - 1) for r in ratios)
    print('atan of a step: %.9gf (%.9gf - z)' % (float(factor), float(root))
          + ''.join(' ((z + %.9gf) z + %.9gf)' % tuple(map(float, p)) for p in pairs)
          + ', error 2^%.1f' % float(log(error, 2)))


# ---- the reference: 200 digits of MPFR, then one rounding ------------------------------------------------------------

NAMES = ['exp', 'log', 'tanh', 'sigmoid', 'silu', 'gelu', 'gelu_tanh', 'softplus', 'tanh_slope', 'sigmoid_slope',
         'silu_slope', 'gelu_slope', 'gelu_tanh_slope']
FORMATS = {'bf16': (8, 127), 'fp16': (11, 15)}  # digits, bias


def setup():
    """In each process: numbers of 400 bits, so that also 2^-133 beside 1 is seen."""
    global g, C1, C3, HALF_ROOT, DENSITY
    import gmpy2 as g
    g.set_context(g.context(precision=400, emin=-10 ** 9, emax=10 ** 9))
    C1 = 2 * g.sqrt(2 / g.const_pi())
    C3 = C1 * g.mpfr('0.044715')
    HALF_ROOT = 1 / g.sqrt(g.mpfr(2))
    DENSITY = 1 / g.sqrt(2 * g.const_pi())


def true(name, x):
    """f(x) for a finite x."""
    if name in ('exp', 'log', 'tanh'):
        return getattr(g, name)(x)
    if name == 'softplus':
        return max(x, 0) + g.log1p(g.exp(-abs(x)))
    if name == 'tanh_slope':
        return g.sech(x) ** 2
    if name in ('gelu', 'gelu_slope'):
        s = g.erfc(-x * HALF_ROOT) / 2
        slope = x * DENSITY * g.exp(-x * x / 2)
    else:
        u, du = (C1 * x + C3 * x ** 3, C1 + 3 * C3 * x * x) if 'gelu' in name else (x, g.mpfr(1))
        s = 1 / (1 + g.exp(-u))
        slope = x * s / (1 + g.exp(u)) * du
        if name == 'sigmoid':
            return s
        if name == 'sigmoid_slope':
            return s / (1 + g.exp(x))
    if name.endswith('slope'):  # far below 0 both terms underflow, and their sum is negative
        return s + slope or g.mpfr('-0')
    return x * s


LIMITS = {  # at +inf, -inf; where the limit is 0: the sign of the side
    'exp': ('inf', '0'), 'log': ('inf', 'nan'), 'tanh': ('1', '-1'), 'sigmoid': ('1', '0'), 'silu': ('inf', '-0'),
    'gelu': ('inf', '-0'), 'gelu_tanh': ('inf', '-0'), 'softplus': ('inf', '0'), 'tanh_slope': ('0', '0'),
    'sigmoid_slope': ('0', '0'), 'silu_slope': ('1', '-0'), 'gelu_slope': ('1', '-0'), 'gelu_tanh_slope': ('1', '-0')}


def decode(word, form):
    digits, bias = form
    mantissa = digits - 1
    sign, exponent, rest = word >> 15, (word & 0x7FFF) >> mantissa, word & ((1 << mantissa) - 1)
    if exponent == 2 * bias + 1:
        return g.nan() if rest else g.inf(-1 if sign else 1)
    value = g.mpfr(rest if exponent == 0 else rest | 1 << mantissa)
    value *= g.exp2(max(exponent, 1) - bias - mantissa)
    return -value if sign else value


def encode(value, form):
    """To nearest, ties to even."""
    digits, bias = form
    mantissa = digits - 1
    sign = 0x8000 if g.is_signed(value) else 0
    infinite = (2 * bias + 1) << mantissa
    if g.is_nan(value):
        return infinite | 1 << (mantissa - 1)
    if g.is_infinite(value):
        return sign | infinite
    if g.is_zero(value):
        return sign
    exponent = max(g.get_exp(value) - 1, 1 - bias)  # value = m * 2^exponent, m < 2
    whole = abs(value) * g.exp2(mantissa - exponent)
    return sign | min(int(g.rint(whole)) + ((exponent + bias - 1) << mantissa), infinite)


def encode_double(value, form):
    """The same of a double, by integers."""
    digits, bias = form
    mantissa = digits - 1
    bits = struct.unpack('<Q', struct.pack('<d', value))[0]
    sign, exponent, rest = bits >> 48 & 0x8000, bits >> 52 & 2047, bits & (1 << 52) - 1 | 1 << 52
    if exponent == 0:
        return sign
    shift = 52 - mantissa + max(0, 1 - bias + 1023 - exponent)
    if shift > 60:
        return sign
    whole = (rest + (1 << shift - 1) - 1 + (rest >> shift & 1)) >> shift
    infinite = (2 * bias + 1) << mantissa
    return sign | min(whole + (max(exponent - 1023 + bias, 1) - 1 << mantissa), infinite)


def table(job):
    """The results of one function in one format. What the rough value cannot decide is done with 400 bits."""
    name, form = job
    setup()
    exact, rough = g.get_context(), g.context(precision=70, emin=-10 ** 9, emax=10 ** 9)
    form = FORMATS[form]
    results = []
    for word in range(65536):
        x = decode(word, form)
        if g.is_nan(x):
            results.append(encode(x, form))
            continue
        if g.is_infinite(x):
            results.append(encode(g.mpfr(LIMITS[name][g.is_signed(x)]), form))
            continue
        if g.is_zero(x) and name in ('tanh', 'silu', 'gelu', 'gelu_tanh'):
            results.append(word)
            continue
        if name == 'log' and x <= 0:
            results.append(encode(g.nan() if x else g.inf(-1), form))
            continue
        g.set_context(rough)
        value = float(true(name, x))
        g.set_context(exact)
        low, high = (encode_double(value * v, form) for v in (1 - 2.0 ** -40, 1 + 2.0 ** -40))
        results.append(low if low == high and value != 0 else encode(true(name, x), form))
    return results


def tables():
    import multiprocessing
    jobs = [(name, form) for name in NAMES for form in FORMATS]
    with multiprocessing.Pool(2) as pool:
        return jobs, pool.map(table, jobs, 1)


def dump(program, *arguments):
    """What a build of tests/unit/test_vmath.c makes of all inputs: 65,536 results for each job."""
    run = subprocess.run(program.split() + ['dump', *arguments], stdout=subprocess.PIPE, check=True)
    got = array.array('H', run.stdout)
    return [got[k:k + 65536] for k in range(0, len(got), 65536)]


def exceptions(made):
    """The table of the header, made of what MPFR says and of what a header without exceptions gives."""
    with open(os.path.join(ROOT, 'kahan_opt.h')) as file:
        text = file.read()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(os.path.join(ROOT, 'tests', 'unit'), os.path.join(folder, 'tests', 'unit'))
        with open(os.path.join(folder, 'kahan_opt.h'), 'w') as file:
            assert 'last = kopt_map_exception_start_[row + 1]' in text
            file.write(text.replace('last = kopt_map_exception_start_[row + 1]', 'last = 0'))
        program = os.path.join(folder, 'without')
        subprocess.run(os.environ.get('CC', 'cc').split() + ['-std=c99', '-O1', '-DKAHAN_OPT_NO_SIMD', '-o', program,
                       os.path.join(folder, 'tests', 'unit', 'test_vmath.c'), '-lm'], check=True)
        got = dump(program)
    start, words = [0], []
    for results, without in zip(made, got):
        words += ['0x%04X%04Xu' % (x, y) for x, (y, other) in enumerate(zip(results, without)) if y != other]
        start.append(len(words))

    def lines(head, items):
        text, line = '', head
        for item in items:
            if len(line) + len(item) + 1 > 120:
                text, line = text + line.rstrip() + '\n', '    '
            line += item + ', '
        return text + line[:-2] + '};\n'
    return (lines('static const kopt_byte_ kopt_map_exception_start_[%d] = {' % len(start), map(str, start))
            + 'static const uint32_t kopt_map_exceptions_[%d] = {\n' % len(words) + lines('    ', words)), text


def hashes():
    jobs, made = tables()
    for (name, form), results in zip(jobs, made):
        h = 0xcbf29ce484222325
        for r in results:
            h = ((h ^ (r & 255)) * 0x100000001b3) & (2 ** 64 - 1)
            h = ((h ^ (r >> 8)) * 0x100000001b3) & (2 ** 64 - 1)
        before, after = ('    {', ', ') if form == 'bf16' else ('', '}, /* %s */\n' % name)
        print('%s0x%016xu' % (before, h), end=after)


# ---- tests -----------------------------------------------------------------------------------------------------------

def test(programs):
    jobs, made = tables()
    count = 0

    def report(good, what):
        nonlocal count
        count += 1
        print('%s %d - %s' % ('ok' if good else 'not ok', count, what))
    for program in programs:
        wrong = 0
        for (name, form), results, got in zip(jobs, made, dump(program)):
            for word in range(65536):
                if got[word] != results[word]:
                    if wrong < 20:
                        print('# %s of %04x in %s is %04x, not %04x' % (name, word, form, got[word], results[word]))
                    wrong += 1
        report(not wrong, '%s: 26 tables of 65,536 results as MPFR has them, %d wrong' % (program, wrong))
        for number, (name, bound) in enumerate(BOUNDS):
            worst, x, y = accuracy(program, number, 1)
            report(worst <= bound[program.endswith('sleef')], '%s of 2^14 numbers: %.4f ulp at most' % (name, worst))
    table, header = exceptions(made)
    good = ' '.join(table.split()) in ' '.join(header.split())
    if not good:
        print('# ' + table.replace('\n', '\n# '))
    report(good, 'the exceptions of the header are what its formulas round wrongly, no more and no less')
    print('1..%d' % count)


BOUNDS = [('exp', (1, 1)), ('log', (1, 1)), ('tanh', (1, 1.01)), ('erf', (1.5, 2.1)), ('erfc', (4, 2.1)),
          ('atan2', (2, 2)), ('sinpi', (1.5, 1.5)), ('cospi', (1.5, 1.5))]  # built-in, SLEEF


def accuracy(program, number, chunks):
    """The largest error in ulp, against 80 bits of MPFR, and where."""
    import math
    import gmpy2
    gmpy2.set_context(gmpy2.context(precision=80))
    pi = gmpy2.const_pi(100)
    def sine(x, shift):
        f = math.fmod(x, 2.0)
        n = math.floor(2 * f + 0.5)
        k, f = (int(n) + shift) & 3, pi * gmpy2.mpfr(f - n / 2)
        return (-1 if k & 2 else 1) * (gmpy2.cos(f) if k & 1 else gmpy2.sin(f))
    functions = [gmpy2.exp, gmpy2.log, gmpy2.tanh, gmpy2.erf, gmpy2.erfc, None, lambda x: sine(x, 0),
                 lambda x: sine(x, 1)]
    pipe = subprocess.Popen(program.split() + ['values', str(number), str(chunks)], stdout=subprocess.PIPE)
    worst = (0.0, 0.0, 0.0)
    for _ in range(chunks):
        x, y, out = (array.array('f', pipe.stdout.read(4 << 14)) for _ in range(3))
        for i in range(1 << 14):
            if number >= 6 and math.isinf(x[i]):
                continue
            if number == 5:
                want = gmpy2.atan2(gmpy2.mpfr(y[i]), gmpy2.mpfr(x[i]))
            else:
                want = functions[number](x[i] if number > 5 else gmpy2.mpfr(x[i]))
            if gmpy2.is_nan(want) or gmpy2.is_infinite(want) or math.isinf(out[i]) or math.isnan(out[i]):
                if gmpy2.is_nan(want) and math.isnan(out[i]) or want == out[i] or \
                        abs(want) >= (2 - 2.0 ** -24) * 2.0 ** 127 and math.isinf(out[i]):
                    continue
                return (math.inf, x[i], y[i])
            exponent = max(gmpy2.get_exp(want) - 1, -126) if want else -126
            off = abs(want - out[i])
            off = float(off) * 2.0 ** (23 - exponent) if exponent > -100 else float(gmpy2.mul_2exp(off, 23 - exponent))
            if off > worst[0]:
                worst = (off, x[i], y[i])
    pipe.wait()
    return worst


def full(program, chunks=1024):
    for number, (name, _) in enumerate(BOUNDS):
        worst, x, y = accuracy(program, number, chunks)
        print('%s: %.4f ulp at %s (%s), %d inputs' % (name, worst, float(x).hex(), float(y).hex(), chunks << 14),
              flush=True)


if __name__ == '__main__':
    command, arguments = sys.argv[1] if len(sys.argv) > 1 else '', sys.argv[2:]
    if command == 'coefficients':
        coefficients()
    elif command == 'exceptions':
        print(exceptions(tables()[1])[0], end='')
    elif command == 'hashes':
        hashes()
    elif command == 'test' and arguments:
        test(arguments)
    elif command == 'full' and arguments:
        full(arguments[0], *map(int, arguments[1:]))
    else:
        sys.exit(__doc__)
