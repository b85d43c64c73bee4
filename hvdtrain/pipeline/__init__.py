"""One model over several ranks: each has a stage of its layers, and micro-batches go through them one after the other."""
