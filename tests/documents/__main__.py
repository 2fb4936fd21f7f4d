"""Writes the pages, or with --check fails when one is out of date. From the root of the repository."""

import argparse
import sys
from pathlib import Path

from documents import metrics, openapi, values

PAGES = {
    Path("docs/metrics.md"): metrics.page,
    Path("docs/values.md"): values.page,
    Path("docs/openapi/rollout.json"): openapi.rollout_page,
    Path("docs/openapi/trainer.json"): openapi.trainer_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m documents", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    options = parser.parse_args()
    outdated = [file for file, page in PAGES.items() if not file.is_file() or file.read_text() != page()]
    for file in outdated:
        if options.check:
            sys.stderr.write(f"out of date: {file}. Run `make generate` and commit the result.\n")
        else:
            file.write_text(PAGES[file]())
    return 1 if outdated and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
