"""Results of a test, as TAP."""
count = failed = 0


def report(good, text, more=""):
    global count, failed
    count += 1
    failed += not good
    print("%s %d %s" % ("ok" if good else "not ok", count, text if text.startswith("#") else "- " + text))
    if not good:
        print("".join("# %s\n" % line for line in str(more).splitlines()), end="", flush=True)


def done():
    """Prints how many there are. The exit status."""
    print("1..%d" % count)
    return failed != 0
