"""Cuts the power of the classifier of docs/examples/firmware while it trains, again and again, and boots it again.

    firmware_power.py MACHINE PROGRAM instructions COUNT SEED   at COUNT random instructions (under qemu)
    firmware_power.py MACHINE PROGRAM points STRIDE             at the points of chip.c: before, within and after each
                                                                erase and each word; every STRIDE-th of those in the
                                                                middle of a save
    firmware_power.py MACHINE PROGRAM weak                      while the last word of a save is programmed, which then
                                                                is read as good, but no longer after the next cut

PROGRAM was built with -DSAVE_EVERY=1; the environment variable SAVED is the size of what it saves. After each cut it
must resume from the last save that it reported, or from the one that it was making. In the end it must print the line
of a run that nothing interrupted. Exit status 1: it did not."""
import os
import random
import struct
import subprocess
import sys
import tempfile

RUN = "docs/examples/firmware/run.sh"
EVERY = 1  # steps from save to save
CELLS = 65536  # no less than FLASH_BYTES
RAM = 16 << 20  # of the board, all of which qemu maps to a file
WRAP = 1 << 24  # of the timer, which ticks 1.6 times in an instruction


class Board:
    def __init__(self, machine, program, folder):
        self.file = os.path.join(folder, "chip")
        self.command = ["sh", RUN, "start", machine, program]
        if machine != "host":
            self.command += ["-machine", "memory-backend=chip", "-object",
                             "memory-backend-file,id=chip,share=on,size=%d,mem-path=%s" % (RAM, self.file)]
        with open(self.file, "wb") as f:
            f.write(struct.pack("<9I", 0, 0, 0, 0, 1, 0, 0, 0, 0) + b"\xff" * CELLS)  # struct chip
            f.truncate(RAM)

    def boot(self, instructions=0, points=0, good=0):
        """The lines that it prints until the power fails or it is done, and what the chip was doing then."""
        ticks = instructions * 8 // 5
        repeats = -(-ticks // WRAP)
        with open(self.file, "r+b") as f:
            f.write(struct.pack("<4I", ticks // repeats if repeats else 0, repeats, points, good))
        run = subprocess.run(self.command, capture_output=True, text=True, timeout=100, check=False,
                             env={**os.environ, "CHIP": self.file})
        if run.returncode != 0:
            raise ValueError("status %d: %s" % (run.returncode, (run.stdout + run.stderr)[-200:]))
        with open(self.file, "rb") as f:
            f.seek(20)
            busy = struct.unpack("<I", f.read(4))[0]
        return [line for line in run.stdout.splitlines() if not line.startswith("#")], busy


def step_of(line):
    return int(line.split("step ")[1])


class Training:
    """A training that is cut short again and again. It may resume from the last save that it reported, from one that
    it has resumed from, or from the one after that. It must not go back from what it has resumed from, unless that is
    weak: then not from what it has reported."""

    def __init__(self, board, weak):
        self.board, self.weak, self.last, self.cuts = board, weak, "", [0, 0, 0]
        self.reported = self.seen = 0

    def boot(self, what, **cut):
        lines, busy = self.board.boot(**cut)
        resumed = [step_of(line) for line in lines if line.startswith("resumed: ")]
        started = [line for line in lines if not line.startswith("resumed: ")]
        if resumed or started:  # else the power failed before the chip was read
            at = resumed[0] if resumed else 0
            if not (self.reported if self.weak else self.seen) <= at <= self.seen + EVERY:
                raise ValueError("%s: resumes from step %d after step %d" % (what, at, self.seen))
            self.seen = at
        self.reported = max([self.reported] + [step_of(line) for line in lines if line.startswith("saved: ")])
        self.seen = max(self.seen, self.reported)
        self.cuts[busy] += 1
        if lines:
            self.last = lines[-1]


def cuts_of(arguments):
    """(description, keywords of boot) of each cut."""
    if arguments[0] == "instructions":
        lot = random.Random(int(arguments[2]))
        for k in range(int(arguments[1])):
            n = lot.randrange(1, 3_000_000)
            yield "cut %d, after %d instructions" % (k, n), {"instructions": n}
        return
    words = (int(os.environ["SAVED"]) + 8) // 4  # with sequence number and CRC
    save = 3 * (2 + words)  # points: of two sectors and these words
    if arguments[0] == "weak":
        for k in range(10):
            yield "%d: cut within the last word" % k, {"points": save - 1}
            yield "%d: the last word is read as good, cut in the next save" % k, {"points": 300, "good": 1}
            yield "%d: the last word is read as bad" % k, {"points": save + 1, "good": 0}
        return
    near = list(range(1, 13)) + list(range(save - 6, save + 1))  # erasing, the first words, the last words
    for point in sorted(set(near) | set(range(13, save - 6, int(arguments[1])))):
        yield "cut at point %d of a save" % point, {"points": point}
        yield "cut at point %d of the second save" % point, {"points": save + point}


def main():
    machine, program, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        try:
            expected = Board(machine, program, folder).boot()[0][-1]
            training = Training(Board(machine, program, folder), arguments == ["weak"])
            for what, cut in cuts_of(arguments):
                training.boot(what, **cut)
                if training.last == expected:
                    raise ValueError("%s: the training is already done" % what)
            training.boot("in the end")
        except (ValueError, subprocess.TimeoutExpired) as error:
            print(error)
            return 1
        if training.last != expected:
            print("without a cut: %s\nwith cuts:     %s" % (expected, training.last))
            return 1
        none, erasing, programming = training.cuts
        if erasing + programming == 0:
            print("no cut while the chip was busy")
            return 1
        print("%d cuts, %d of them while the chip erased and %d while it programmed" %
              (none + erasing + programming - 1, erasing, programming))
        return 0


sys.exit(main())
