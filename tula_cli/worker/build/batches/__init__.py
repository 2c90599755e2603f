"""What a batch is made of, how it is cut, and how a model and its loss are called with it."""
