"""`make bench`: runs the demo, and prints what its switches consist of and the memory of each kind of process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench.memory import peaks
from bench.switch import switches
from colocated_rl_cli.draw.figures import read_figures, rung_times, switch_seconds
from colocated_rl_cli.evidence.records import Records

OUT = Path(__file__).resolve().parents[1] / ".build/bench"
RECORDS = OUT / "records.json"
MIB = 1 << 20


def main() -> int:
    began = time.monotonic()
    RECORDS.unlink(missing_ok=True)
    with (
        subprocess.Popen([sys.executable, "-m", "examples.arithmetic.demo", "--out", OUT]) as demo,
        peaks(demo.pid) as memory,
    ):
        code = demo.wait()
    if not RECORDS.exists():
        print("bench: the demo left no records; what it said above is why")
        return code or 1
    print_figures(Records.read(RECORDS), wall_s=time.monotonic() - began)
    print(f"\n{'memory, at its peak':40}  processes  largest MiB  together")
    for kind, peak in sorted(memory.items(), key=lambda item: item[1].together):
        print(f"  {kind:40}  {peak.processes:7}  {peak.largest / MIB:11.0f}  {peak.together / MIB:8.0f}")
    return code


def print_figures(records: Records, *, wall_s: float) -> None:
    figures, climbs = read_figures(records.lines), switches(records.lines)
    print(f"\n{'rung, from the one before, 2 pods':34}  {'median ms':>9}  {'longest':>9}")
    for rung in rung_times(figures):
        print(f"  {rung.rung:32}  {1000 * rung.median_s:9.0f}  {1000 * rung.longest_s:9.0f}")
    if climbs:
        whole, added = median(one.whole_s for one in climbs), median(one.added_s for one in climbs)
        print(f"\n{'climb of a step, training included':34}  {whole:.2f} s, median of {len(climbs)}")
        print(f"{'of it beside engine and trainer':34}  {added:.2f} s, {median(one.added_share for one in climbs):.0%}")
        print(f"{'switch, training excluded':34}  {median(switch_seconds(figures)):.2f} s, median")
    print(f"{'wall time of the whole demo':34}  {wall_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
