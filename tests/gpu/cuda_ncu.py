"""One step under Nsight Compute: memory throughput, instructions, occupancy and stalls of each kernel of a mode, as
lines NAME,VALUE,UNIT, in the file that CUDA_ROWS names. ncu leaves the clocks alone.

usage: cuda_ncu.py BENCH MODE ELEMENTS     (BENCH is the program of bench/cuda.c)
"""
import csv
import os
import re
import subprocess
import sys

STALLS = ("barrier", "branch_resolve", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
          "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "selected",
          "short_scoreboard", "sleeping", "tex_throttle", "wait")
METRICS = ["dram__throughput.avg.pct_of_peak_sustained_elapsed", "dram__bytes_read.sum", "dram__bytes_write.sum",
           "sm__inst_executed.sum", "sm__inst_issued.avg.pct_of_peak_sustained_active",
           "sm__warps_active.avg.pct_of_peak_sustained_active", "gpu__time_duration.sum",
           "launch__registers_per_thread"]
METRICS += [f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio" for stall in STALLS]
# Names of metrics change between versions and GPUs; sections are always there.
CHOICES = (["--metrics", ",".join(METRICS)],
           ["--metrics", ",".join(METRICS[:8])],
           ["--section", "SpeedOfLight", "--section", "Occupancy", "--section", "WarpStateStats"])
SETTINGS = ("prologue", "setting", "factor")  # kernels that process no elements


def rows_of(text):
    """(kernel, metric, unit, value) of the long table that `ncu --csv` prints between other lines."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for record in csv.DictReader(lines):
        kernel = re.sub(r"\(.*", "", record.get("Kernel Name") or "")
        value = (record.get("Metric Value") or "").replace(",", "")
        if any(name in kernel for name in SETTINGS) or not re.fullmatch(r"-?[0-9.]+(e[-+]?\d+)?", value):
            continue
        yield kernel, record["Metric Name"].replace(",", " "), record.get("Metric Unit") or "", value


def main(bench, mode, elements):
    text = ""
    for choice in CHOICES:
        command = ["ncu", "--csv", "--clock-control", "none", *choice, bench, "step", mode, elements]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        text = run.stdout
        rows = list(rows_of(text))
        if run.returncode == 0 and rows:
            break
    else:
        print(text[-2000:])
        if "ERR_NVGPUCTRPERM" in text or "initialize the profiler" in text:
            print("SKIPPED: ncu may not read the counters here")
            return 0
        print("Bail out! ncu gives no counters")
        return 1
    with open(os.environ.get("CUDA_ROWS", os.devnull), "a", encoding="utf-8") as out:
        for kernel, metric, unit, value in rows:
            out.write(f"{kernel} | {metric},{value},{unit.replace(',', ' ')},\n")
            print(f"{kernel:40} {metric:75} {value:>16} {unit}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
