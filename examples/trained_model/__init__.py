"""A trained public model of 135 million parameters gets better at a task that it can begin to do, on two CPU cores."""
