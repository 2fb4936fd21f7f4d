"""This package describes, signs and checks a release: `make dist`, `make sign`, `make verify-dist`."""
