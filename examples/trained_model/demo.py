"""`make trained-model`: a job that trains SmolLM2-135M-Instruct on this machine, as `make demo` trains its own model.

Ends with code 0 if the job completed, learned what it should and was in time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.arithmetic.demo import ROOT, demonstrate
from examples.arithmetic.verdict import Lesson

HERE = Path(__file__).parent
MODEL = ROOT / ".build/models/smollm2"
LESSON = Lesson(
    about="Sums and differences of two one-digit numbers, in a sentence that ends with the answer and nothing behind "
    "it (a response has {first} tokens in the first batch, {last} in the last).",
    start_at_most=0.35,
    target=0.4,
    questions_at_least=30,
    job_seconds_at_most=3600.0,
)

if __name__ == "__main__":
    out, job = ROOT / ".build/trained-model", HERE / "job.yaml"
    sys.exit(demonstrate(__doc__ or "", out=out, job=job, model=MODEL, lesson=LESSON))
