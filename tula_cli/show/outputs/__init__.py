"""What the commands show that write what a run has found."""
