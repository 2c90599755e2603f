"""Components of `tula compare`."""
