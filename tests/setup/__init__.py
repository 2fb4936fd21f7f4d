"""Makes everything the other targets need, from a bare machine: `make setup`, the first step of `demo` and `test`.

Runs before anything is installed, so it is standard library only. What it makes lies in `.build/`; what is already
there and made from the same inputs is reused. It owns no setting of the product.
"""
