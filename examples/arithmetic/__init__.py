"""The demo's job: a small model learns chain sums by GRPO through the whole system, on two CPU cores."""
