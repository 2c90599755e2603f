"""The weights of a training, evaluated on a test set."""
