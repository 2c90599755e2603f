"""What `tula recommend` tells beyond its own probes: other networks and GPUs, and nodes of other sizes."""
