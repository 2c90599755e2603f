"""This machine: processes, devices, network, the measuring lock, and the failures of processes."""
