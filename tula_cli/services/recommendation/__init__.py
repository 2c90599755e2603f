"""Components of `tula recommend`."""
