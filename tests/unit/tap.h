/* tap.h - the Test Anything Protocol, as `prove` reads it: ok(), skip(), note(), and done() as the value of main. */
#ifndef TAP_H
#define TAP_H

#include <stdarg.h>
#include <stdio.h>

#if defined(__GNUC__) /* tests look at what a call has done, not always at its result */
#pragma GCC diagnostic ignored "-Wunused-result"
#endif

static int tap_count, tap_failed;

static inline void tap_line(const char *head, const char *format, va_list arguments) {
    fputs(head, stdout);
    vprintf(format, arguments);
    putchar('\n');
    fflush(stdout);
}

static inline int ok(int good, const char *format, ...) {
    char head[32];
    va_list arguments;
    tap_failed += !good;
    snprintf(head, sizeof head, "%s %d - ", good ? "ok" : "not ok", ++tap_count);
    va_start(arguments, format);
    tap_line(head, format, arguments);
    va_end(arguments);
    return good;
}

static inline void skip(const char *reason) { printf("ok %d # SKIP %s\n", ++tap_count, reason); }

static inline void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    tap_line("# ", format, arguments);
    va_end(arguments);
}

static inline int done(void) {
    printf("1..%d\n", tap_count);
    return tap_failed != 0;
}

#endif
