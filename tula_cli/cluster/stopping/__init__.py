"""What is done where a job must not simply go on."""
