"""The parts of `tula recommend`."""
