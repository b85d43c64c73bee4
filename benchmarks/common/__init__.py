"""What the benchmarks share: models, data, the sides that are compared, and the measuring. Nothing here runs by itself."""
