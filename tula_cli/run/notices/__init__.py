"""What of a run directory tells that something in it is new."""
