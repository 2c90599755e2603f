"""What the optimizers are made of."""
