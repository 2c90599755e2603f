"""The batches of a training, and how each is divided among ranks and micro-batches."""
