"""`cd tests && python3 -m setup --help`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before anything that an older Python can't read
    sys.exit("python3: %d.%d, but 3.11 or newer is needed: `make PYTHON=python3.11 ...`" % sys.version_info[:2])  # noqa: UP031

from setup.command import main

sys.exit(main(sys.argv[1:]))
