"""The drivers are the only code that calls engines and trainers. They translate answers and errors, decide nothing."""
