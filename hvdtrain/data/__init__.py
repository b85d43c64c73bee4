"""Which samples, in what order, on which rank; and loading them ahead of the step."""
