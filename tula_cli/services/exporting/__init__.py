"""Sends what a run has recorded to trackers: MLflow, Weights & Biases, TensorBoard, or one of the user's own."""
