"""What is seen on the way: probes, memory, norms."""
