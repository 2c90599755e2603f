"""What the commands of cli/outputs show."""
