"""What is stored in a run directory: frozen records, one JSON file each."""
