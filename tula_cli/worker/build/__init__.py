"""The objects that a job file describes: model, data, loss, optimizer."""
