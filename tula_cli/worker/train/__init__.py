"""What is then done with it: the loop, evaluation, checkpoints, self-tuning."""
