"""The parts of `tula compare`."""
