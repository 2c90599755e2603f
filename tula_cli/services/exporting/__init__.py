"""Export of runs to experiment trackers: MLflow, Weights & Biases, TensorBoard, or a user-defined one."""
