"""What a spec becomes: model, data, loss, optimizer."""
