#!/usr/bin/env python3
"""Vector mathematics beside MPFR (python3-gmpy2), which shares nothing with the header.

    vmath.py test PROGRAM...      every program's 16-bit tables, all inputs; a sample of its fp32 functions (prints TAP)
    vmath.py full PROGRAM         the fp32 functions at 2^24 inputs each: minutes
    vmath.py patches              the table kopt_map_patches_ of the header: every input whose result is hard to round
    vmath.py coefficients         the polynomials of the header (python3-mpmath)

PROGRAM is a build of tests/test_vmath.c."""
import sys


# ---- coefficients ------------------------------------------------------------------------------------------------------

def coefficients():
    """Least squares at 60 Chebyshev nodes (which is close to minimax) with 60 digits; the coefficients are rounded to fp32
    one by one, from the lowest, each time fitting the rest anew. The error that is printed is that of the rounded polynomial, exactly
    evaluated, times `weight`."""
    import struct
    from mpmath import mp, mpf, cos, pi, lu_solve, matrix, exp, log, atanh, tanh, erf, erfc, atan, sin, sqrt

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

    fit('exp: (e^r - 1 - r) / r^2', lambda r: (exp(r) - 1 - r) / r ** 2, -log(2) / 2 - mpf(1) / 1000, log(2) / 2 + mpf(1) / 1000, 5,
        lambda r: r ** 2)
    fit('log: (2 atanh(s) / s - 2) / z, z = s^2', lambda z: (2 * atanh(sqrt(z)) / sqrt(z) - 2) / z, 0, mpf(3) / 100, 3,
        lambda z: z * sqrt(z) / 2)
    fit('tanh: (tanh(x) / x - 1) / z, z = x^2', lambda z: (tanh(sqrt(z)) / sqrt(z) - 1) / z, 0, 1, 7, lambda z: z)
    fit('erf: erf(x) / x - 1, z = x^2', lambda z: erf(sqrt(z)) / sqrt(z) - 1, 0, 1, 7, lambda z: 1)
    fit('erfcx: e^(y^2) erfc(y) (1 + 2 y), t = (y - 2) / (y + 2)',
        lambda t: (lambda y: exp(y * y) * erfc(y) * (1 + 2 * y))(2 * (1 + t) / (1 - t)), -1, mpf(69) / 100, 11, lambda t: 1)
    fit('atan: (atan(q) / q - 1) / z, z = q^2', lambda z: (atan(sqrt(z)) / sqrt(z) - 1) / z, 0, 1, 10, lambda z: z)
    fit('sinpi: 4 - sin(pi f) / f, z = f^2', lambda z: 4 - sin(pi * sqrt(z)) / sqrt(z), 0, mpf(1) / 16, 4, lambda z: 1)
    fit('cospi: (cos(pi f) - 1) / z, z = f^2', lambda z: (cos(pi * sqrt(z)) - 1) / z, 0, mpf(1) / 16, 4, lambda z: z)


if __name__ == '__main__':
    command = sys.argv[1] if len(sys.argv) > 1 else ''
    if command == 'coefficients':
        coefficients()
    else:
        sys.exit(__doc__)
