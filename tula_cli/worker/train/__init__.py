"""The training: its loop, evaluation, checkpoints and automatic tuning."""
