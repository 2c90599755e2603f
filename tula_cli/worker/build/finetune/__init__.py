"""What a training starts from and which of it is trained: a file's weights, frozen layers, groups of parameters."""
